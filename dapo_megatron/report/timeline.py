"""Figures of recorded timelines (timeline/step_*.json): phases of every rank as colored bars, and
below them the running requests of every replica during generation.

All times are in seconds since the start of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from dapo_megatron.files import parse_json, read_file
from dapo_megatron.report.curves import PALETTE
from dapo_megatron.report.figures import Figure, plain, to_json
from dapo_megatron.report.phases import COLORS, LABELS
from dapo_megatron.report.run_data import RunData, finite
from dapo_megatron.report.wording import number
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

Point = tuple[float, float]
"""(seconds, requests from then on)."""


@dataclass(frozen=True)
class Timeline:
    """Table and figure of a recorded step."""

    step: int
    seconds: float
    phases: list[dict[str, Any]]
    """Per phase: mean, minimum and maximum seconds over the ranks, and the slowest rank."""
    figure: Figure


@dataclass(frozen=True)
class TimelineFile:
    """Contents of a timeline file."""

    step: int
    spans: pd.DataFrame
    """A row per span: rank, host, phase, begin, end, seconds."""
    replicas: dict[int, list[Point]]
    """Replica -> its running requests as a step function."""


def timelines(run: RunData) -> list[Timeline]:
    """Return the timelines to show, in step order."""
    files = [file for path in _selected(run) if (file := _read(path)) is not None]
    if run.setting("engine.colocated") is False:
        for file in files:
            file.spans["phase"] = file.spans["phase"].replace(Phase.GENERATE, WAITING)
    return [_timeline(file) for file in files]


def note(run: RunData) -> str | None:
    """Return a note if no timelines are shown, or not all; else None."""
    files, selected = _files(run), _selected(run)
    if not files:
        return (
            "This run recorded none (tracking.timeline_every; older versions do not record them)."
        )
    sentences = []
    if unreadable := [path.name for path in selected if _read(path) is None]:
        sentences.append(f"Not shown because they cannot be read: {', '.join(unreadable[:5])}.")
    if len(files) > len(selected):
        sentences.append(f"{len(selected)} of {len(files)} recorded steps are shown.")
    return " ".join(sentences) or None


# ---------------------------------------------------------------------------- reading


def _files(run: RunData) -> list[Path]:
    return sorted((run.path / "timeline").glob("step_*.json"))


def _selected(run: RunData) -> list[Path]:
    """Return at most MAX_TIMELINES files: that of the slowest step, and others evenly spread."""
    files = _files(run)
    if len(files) <= MAX_TIMELINES:
        return files
    seconds = run.metrics.series("time/step").fillna(0)
    by_name = {f"step_{step:06d}": value for step, value in seconds.items()}
    slowest = max(files, key=lambda path: by_name.get(path.stem, 0.0))
    evenly = np.linspace(0, len(files) - 1, MAX_TIMELINES - 1).round().astype(int)
    return sorted({slowest, *(files[index] for index in evenly)})


def _read(path: Path) -> TimelineFile | None:
    """Read a timeline file; None if it is not a timeline. Invalid parts are skipped."""
    try:
        value = parse_json(read_file(path))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    rows = [
        (entry["rank"], str(entry.get("host", "")), *span)
        for entry in _entries(value.get("ranks"), "rank")
        for span in _spans(entry.get("spans"))
    ]
    replicas = {
        entry["replica"]: sorted(_points(entry.get("running")), key=lambda point: point[0])
        for entry in _entries(value.get("replicas"), "replica")
    }
    return TimelineFile(value["step"], _frame(rows), replicas)


def _frame(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["rank", "host", "phase", "begin", "end"])
    return frame.assign(seconds=frame["end"] - frame["begin"])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _entries(values: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects in `values` that have a number in field `name`."""
    entries = [entry for entry in _list(values) if isinstance(entry, dict)]
    return [entry for entry in entries if finite(entry.get(name)) is not None]


def _spans(values: Any) -> Iterator[tuple[str, float, float]]:
    for entry in _list(values):
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str):
            begin, end = finite(entry[1]), finite(entry[2])
            if begin is not None and end is not None and end >= begin:
                yield entry[0], begin, end


def _points(values: Any) -> Iterator[Point]:
    for entry in _list(values):
        if isinstance(entry, list) and len(entry) == 2:
            at, count = finite(entry[0]), finite(entry[1])
            if at is not None and count is not None:
                yield at, max(0.0, count)


# ---------------------------------------------------------------------------- drawing


def _timeline(file: TimelineFile) -> Timeline:
    spans = file.spans
    rank_seconds = spans.groupby(["phase", "rank"], sort=False)["seconds"].sum()
    phases = [
        {
            "label": LABELS.get(phase, phase),
            "color": _color(phase),
            "mean": float(by_rank.mean()),
            "least": float(by_rank.min()),
            "most": float(by_rank.max()),
            "slowest": by_rank.droplevel("phase").idxmax(),
        }
        for phase, by_rank in rank_seconds.groupby(level="phase", sort=False)
    ]
    seconds = float(spans["end"].max()) if len(spans) else 0.0
    return Timeline(file.step, seconds, phases, _figure(file))


def _color(phase: str) -> str:
    if phase == WAITING:
        return WAITING_COLOR
    return PALETTE[COLORS.get(phase, COLORS["rest"])]


def _figure(file: TimelineFile) -> Figure:
    """Draw a row of phases per rank, and below them a row of running requests per replica."""
    spans = file.spans
    names = [f"rank {rank}" for rank in dict.fromkeys(spans["rank"])]
    replicas = {replica: points for replica, points in file.replicas.items() if points}
    heights = [_height(len(names))] + [_height(len(replicas))] * bool(replicas)
    figure = make_subplots(
        len(heights), shared_xaxes=True, row_heights=heights, vertical_spacing=0.12
    )
    for phase, rows in spans.groupby("phase", sort=False):
        figure.add_trace(_bars(str(phase), rows), row=1, col=1)
    # Plotly draws categories from the bottom: reverse them, so that rank 0 is at the top.
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], row=1, col=1)
    if replicas:
        figure.add_trace(_requests(spans, replicas), row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=len(heights), col=1)
    figure.update_yaxes(fixedrange=True)
    figure.update_layout(barmode="overlay", bargap=0.12, hovermode="closest", template=None)
    figure.update_layout(height=90 + sum(heights), margin={"l": 92, "t": 40, "b": 42})
    return to_json(figure)


def _height(num_rows: int) -> int:
    return max(1, num_rows) * max(3, min(ROW, MAX_HEIGHT // max(1, num_rows)))


def _bars(phase: str, spans: pd.DataFrame) -> go.Bar:
    label = plain(LABELS.get(phase, phase))
    hovertext = [
        f"rank {span.rank} on {plain(span.host)}: {label}, {number(span.seconds)} s "
        f"({number(span.begin)} to {number(span.end)})"
        for span in spans.itertuples()
    ]
    return go.Bar(
        orientation="h",
        name=label,
        hovertext=hovertext,
        hoverinfo="text",
        base=spans["begin"].round(4).tolist(),
        x=spans["seconds"].round(4).tolist(),
        y=[f"rank {rank}" for rank in spans["rank"]],
        marker_color=_color(phase),
    )


def _requests(spans: pd.DataFrame, replicas: dict[int, list[Point]]) -> go.Heatmap:
    """Return a strip per replica, darker where more requests run."""
    times = [at for points in replicas.values() for at, _ in points]
    times += (
        spans.loc[spans["phase"] == Phase.GENERATE, ["begin", "end"]].to_numpy().ravel().tolist()
    )
    begin, end = min(times), max(times)
    width = max((end - begin) / CELLS, 1e-9)
    return go.Heatmap(
        z=[cells(points, begin, end) for points in replicas.values()],
        y=[f"replica {replica}" for replica in replicas],
        x0=round(begin + width / 2, 4),
        dx=width,
        zmin=0,
        colorscale=[[0, "rgba(128,128,128,0.15)"], [1, PALETTE[COLORS[Phase.GENERATE]]]],
        showscale=False,
        hovertemplate="%{y}: %{z} requests running at %{x:.4~g} s<extra></extra>",
    )


def cells(points: list[Point], begin: float, end: float, count: int = CELLS) -> list[float]:
    """Return the means of a step function over `count` equal parts of begin to end. It is 0
    before its first point and from its last point on."""
    if end <= begin or len(points) < 2:
        return [0.0] * count
    times = [at for at, _ in points]
    areas = [value * (until - at) for (at, value), (until, _) in pairwise(points)]
    edges = np.linspace(begin, end, count + 1)
    integral = np.interp(edges, times, [0.0, *np.cumsum(areas)])
    means = np.diff(integral) / ((end - begin) / count)
    return [round(float(mean), 1) for mean in means]
