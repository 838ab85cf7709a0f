"""Recorded timelines (timeline/step_*.json) as figures: phases of every rank as coloured bars,
below them the requests that run on every replica while it generates.

All times are in seconds since the step began.
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

from dapo_megatron.files import parse_json
from dapo_megatron.report.curves import PALETTE
from dapo_megatron.report.figures import Figure, plain, to_json
from dapo_megatron.report.folder import RunData, finite
from dapo_megatron.report.phases import COLORS, LABELS
from dapo_megatron.report.wording import number
from dapo_megatron.types import Phase

MAX_TIMELINES = 12
"""In a report. Of more, the first, the last and the slowest are among those kept."""
CELLS = 240
"""Equal parts of a step for which a replica's mean number of requests is drawn."""

ROW, MAX_HEIGHT = 20, 300
"""Pixels: a row, and all rows, each of which has at least 3."""

Point = tuple[float, float]
"""(seconds, requests from then on)."""


@dataclass(frozen=True)
class Timeline:
    """A recorded step."""

    step: int
    seconds: float
    phases: list[dict[str, Any]]
    """Mean, shortest and longest seconds of each phase over the ranks, and the slowest rank."""
    figure: Figure


@dataclass(frozen=True)
class Recorded:
    """Contents of one file."""

    step: int
    spans: pd.DataFrame
    """A row per span: rank, host, phase, begin, end."""
    replicas: dict[int, list[Point]]


def timelines(run: RunData) -> list[Timeline]:
    """Return the timelines to draw, by step."""
    read = (_read(path) for path in _chosen(run))
    return [_timeline(recorded) for recorded in read if recorded is not None]


def note(run: RunData) -> str | None:
    """Return a note if there are none, or not all."""
    files, chosen = _files(run), _chosen(run)
    if not files:
        return "This run recorded none (tracking.timeline_every; older versions do not have it)."
    sentences = []
    if wrong := [path.name for path in chosen if _read(path) is None]:
        sentences.append(f"Left out because they cannot be read: {', '.join(wrong[:5])}.")
    if len(files) > len(chosen):
        sentences.append(f"{len(chosen)} of {len(files)} recorded steps are shown.")
    return " ".join(sentences) or None


# ---------------------------------------------------------------------------- reading


def _files(run: RunData) -> list[Path]:
    return sorted((run.path / "timeline").glob("step_*.json"))


def _chosen(run: RunData) -> list[Path]:
    """Return at most MAX_TIMELINES files: the slowest step's, and others evenly."""
    files = _files(run)
    if len(files) <= MAX_TIMELINES:
        return files
    seconds = run.metrics.series("time/step").fillna(0)
    by_name = {f"step_{step:06d}": value for step, value in seconds.items()}
    slowest = max(files, key=lambda path: by_name.get(path.stem, 0.0))
    evenly = np.linspace(0, len(files) - 1, MAX_TIMELINES - 1).round().astype(int)
    return sorted({slowest, *(files[place] for place in evenly)})


def _read(path: Path) -> Recorded | None:
    """Return None for what is not a timeline. Damaged parts are left out."""
    try:
        value = parse_json(path.read_bytes())
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
        entry["replica"]: sorted(_points(entry.get("running")))
        for entry in _entries(value.get("replicas"), "replica")
    }
    frame = pd.DataFrame(rows, columns=["rank", "host", "phase", "begin", "end"])
    return Recorded(value["step"], frame.assign(seconds=frame["end"] - frame["begin"]), replicas)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _entries(values: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects whose `name` is a number."""
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


def _timeline(recorded: Recorded) -> Timeline:
    spans = recorded.spans
    taken = spans.groupby(["phase", "rank"], sort=False)["seconds"].sum()
    phases = [
        {
            "label": LABELS.get(phase, phase),
            "color": _color(phase),
            "mean": float(by_rank.mean()),
            "least": float(by_rank.min()),
            "most": float(by_rank.max()),
            "slowest": by_rank.droplevel("phase").idxmax(),
        }
        for phase, by_rank in taken.groupby(level="phase", sort=False)
    ]
    seconds = float(spans["end"].max()) if len(spans) else 0.0
    return Timeline(recorded.step, seconds, phases, _figure(recorded))


def _color(phase: str) -> str:
    return PALETTE[COLORS.get(phase, COLORS["rest"])]


def _figure(recorded: Recorded) -> Figure:
    """Draw a row per rank, and below them a row of requests per replica."""
    spans = recorded.spans
    names = [f"rank {rank}" for rank in dict.fromkeys(spans["rank"])]
    replicas = {replica: points for replica, points in recorded.replicas.items() if points}
    heights = [_height(len(names))] + [_height(len(replicas))] * bool(replicas)
    figure = make_subplots(
        len(heights), shared_xaxes=True, row_heights=heights, vertical_spacing=0.12
    )
    for phase, rows in spans.groupby("phase", sort=False):
        figure.add_trace(_bars(str(phase), rows), row=1, col=1)
    # Ranks are categories, rank 0 at the top.
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], row=1, col=1)
    if replicas:
        figure.add_trace(_requests(recorded.spans, replicas), row=2, col=1)
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
    """Return a strip per replica, the darker the more requests it runs."""
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
    """Return the mean of a step function over `count` equal parts of begin..end. It is 0 before its
    first point and from its last one on."""
    if end <= begin or len(points) < 2:
        return [0.0] * count
    times = [at for at, _ in points]
    areas = [value * (until - at) for (at, value), (until, _) in pairwise(points)]
    edges = np.linspace(begin, end, count + 1)
    integral = np.interp(edges, times, [0.0, *np.cumsum(areas)])
    means = np.diff(integral) / ((end - begin) / count)
    return [round(float(mean), 1) for mean in means]
