"""Figures of recorded timelines (timeline/step_*.json): phases of every rank as colored bars, and
below them the running requests of every replica during generation.

All times are in seconds since the start of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from dapo_megatron.files import parse_json, read_file
from dapo_megatron.report.charts import PALETTE, PHASE_COLORS
from dapo_megatron.report.figures import Figure, plain
from dapo_megatron.report.run_data import Integer, Number, RunData
from dapo_megatron.report.wording import encodable, first_few, number
from dapo_megatron.types import Phase

MAX_TIMELINES = 12
"""Maximum number of timelines in a report. The first, the last and the slowest are always kept."""
CELLS = 240
"""Number of intervals for which a replica's mean number of running requests is drawn."""

WAITING = "waiting for engines"
"""Phase of ranks that share no GPU with an engine, in place of generate."""
WAITING_COLOR = "rgba(128,128,128,0.25)"

ROW, MAX_HEIGHT = 20, 300
"""Height of a row, and maximum height of all rows, in pixels. A row has at least 3 pixels."""


class RankSpans(msgspec.Struct, frozen=True):
    """Phases of a rank: (phase, begin, end)."""

    rank: Integer
    host: str = ""
    spans: list[tuple[str, Number, Number]] = []


class ReplicaRequests(msgspec.Struct, frozen=True):
    """Running requests of a replica as a step function: (time, requests from then on)."""

    replica: Integer
    running: list[tuple[Number, Number]] = []


class TimelineFile(msgspec.Struct, frozen=True):
    """Contents of a timeline file."""

    step: Integer
    ranks: list[RankSpans] = []
    replicas: list[ReplicaRequests] = []


@dataclass(frozen=True)
class Timeline:
    """Table and figure of a recorded step."""

    step: int
    seconds: float
    phases: list[dict[str, Any]]
    """Per phase: mean, minimum and maximum seconds over the ranks, and the slowest rank."""
    figure: Figure


def timelines(run: RunData) -> tuple[list[Timeline], str]:
    """Return the timelines to show, in step order, and a note for the reader."""
    files = sorted((run.path / "timeline").glob("step_*.json"))
    if not files:
        return [], "This run recorded none (tracking.timeline_every)."
    drawn, unreadable = [], []
    for path in _selected(files, run):
        try:
            file = msgspec.convert(parse_json(read_file(path)), TimelineFile)
        except (OSError, ValueError):
            unreadable.append(path.name)
        else:
            drawn.append(_timeline(file, run.setting("engine.colocated") is not False))
    notes = []
    if unreadable:
        notes.append(f"Not shown because they cannot be read: {first_few(unreadable)}.")
    if len(files) > len(drawn) + len(unreadable):
        notes.append(f"{len(drawn)} of {len(files)} recorded steps are shown.")
    return drawn, " ".join(notes)


def _selected(files: list[Path], run: RunData) -> list[Path]:
    """Return at most MAX_TIMELINES files: of the slowest step, and others evenly spread."""
    if len(files) <= MAX_TIMELINES:
        return files
    seconds = {
        f"step_{step:06d}": value for step, value in run.series("time/step").dropna().items()
    }
    slowest = max(files, key=lambda path: seconds.get(path.stem, 0.0))
    evenly = np.linspace(0, len(files) - 1, MAX_TIMELINES - 1).round().astype(int)
    return sorted({slowest, *(files[index] for index in evenly)})


def _timeline(file: TimelineFile, is_colocated: bool) -> Timeline:
    rows = [
        (rank.rank, encodable(rank.host), encodable(phase), begin, end)
        for rank in file.ranks
        for phase, begin, end in rank.spans
    ]
    spans = pd.DataFrame(rows, columns=["rank", "host", "phase", "begin", "end"])
    spans["seconds"] = (spans["end"] - spans["begin"]).clip(lower=0)
    if not is_colocated:
        spans["phase"] = spans["phase"].replace(Phase.GENERATE, WAITING)
    by_rank = spans.groupby(["phase", "rank"], sort=False)["seconds"].sum()
    phases = [
        {
            "label": phase,
            "color": _color(phase),
            "mean": float(seconds.mean()),
            "least": float(seconds.min()),
            "most": float(seconds.max()),
            "slowest": seconds.droplevel("phase").idxmax(),
        }
        for phase, seconds in by_rank.groupby(level="phase", sort=False)
    ]
    seconds = float(spans["end"].max()) if len(spans) else 0.0
    return Timeline(file.step, seconds, phases, _figure(spans, file.replicas))


def _color(phase: str) -> str:
    return WAITING_COLOR if phase == WAITING else PHASE_COLORS.get(phase, PALETTE[7])


def _figure(spans: pd.DataFrame, replicas: list[ReplicaRequests]) -> Figure:
    """Draw a row of phases per rank, and below them a row of running requests per replica."""
    names = [f"rank {rank}" for rank in dict.fromkeys(spans["rank"])]
    replicas = [replica for replica in replicas if replica.running]
    heights = [_height(len(names)), _height(len(replicas)) if replicas else 0]
    split = 1 - heights[0] / sum(heights)
    traces = [_bars(str(phase), rows) for phase, rows in spans.groupby("phase", sort=False)]
    # Plotly draws categories from the bottom: reverse them, so that rank 0 is at the top.
    rows = {"categoryorder": "array", "categoryarray": names[::-1], "fixedrange": True}
    layout: Figure = {
        "xaxis": {"title": {"text": "seconds"}, "anchor": "y2" if replicas else "y"},
        "yaxis": {**rows, "domain": [split + 0.06 * bool(replicas), 1]},
        "barmode": "overlay",
        "bargap": 0.12,
        "hovermode": "closest",
        "height": 90 + sum(heights),
        "margin": {"l": 92, "r": 14, "t": 40, "b": 42},
    }
    if replicas:
        traces.append(_requests(spans, replicas))
        layout["yaxis2"] = {"domain": [0, split - 0.06], "fixedrange": True}
    return {"data": traces, "layout": layout}


def _height(num_rows: int) -> int:
    return max(1, num_rows) * max(3, min(ROW, MAX_HEIGHT // max(1, num_rows)))


def _bars(phase: str, spans: pd.DataFrame) -> Figure:
    label = plain(phase)
    hovertext = [
        f"rank {span.rank} on {plain(span.host)}: {label}, {number(span.seconds)} s "
        f"({number(span.begin)} to {number(span.end)})"
        for span in spans.itertuples()
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "hovertext": hovertext,
        "hoverinfo": "text",
        "base": spans["begin"].round(4).tolist(),
        "x": spans["seconds"].round(4).tolist(),
        "y": [f"rank {rank}" for rank in spans["rank"]],
        "marker": {"color": _color(phase)},
    }


def _requests(spans: pd.DataFrame, replicas: list[ReplicaRequests]) -> Figure:
    """Return a strip per replica, darker where more requests run."""
    times = [at for replica in replicas for at, _ in replica.running]
    generate = spans.loc[spans["phase"] == Phase.GENERATE, ["begin", "end"]]
    times += generate.to_numpy().ravel().tolist()
    begin, end = min(times), max(times)
    width = max((end - begin) / CELLS, 1e-9)
    return {
        "type": "heatmap",
        "yaxis": "y2",
        "z": [cells(sorted(replica.running), begin, end) for replica in replicas],
        "y": [f"replica {replica.replica}" for replica in replicas],
        "x0": round(begin + width / 2, 4),
        "dx": width,
        "zmin": 0,
        "colorscale": [[0, "rgba(128,128,128,0.15)"], [1, PHASE_COLORS[Phase.GENERATE]]],
        "showscale": False,
        "hovertemplate": "%{y}: %{z} requests running at %{x:.4~g} s<extra></extra>",
    }


def cells(
    points: list[tuple[float, float]], begin: float, end: float, count: int = CELLS
) -> list[float]:
    """Return the means of a step function over `count` equal parts of begin to end. It is 0
    before its first point and from its last point on."""
    if end <= begin or len(points) < 2:
        return [0.0] * count
    areas = [value * (until - at) for (at, value), (until, _) in pairwise(points)]
    edges = np.linspace(begin, end, count + 1)
    integral = np.interp(edges, [at for at, _ in points], [0.0, *np.cumsum(areas)])
    means = np.diff(integral) / ((end - begin) / count)
    return [round(float(mean), 1) for mean in means]
