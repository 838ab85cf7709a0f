"""The recorded timelines (timeline/step_*.json) as figures: phases of every rank as coloured bars,
below them the requests that run on every replica while it generates.

All times are in seconds since the step began.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from plotly import graph_objects as go
from plotly.subplots import make_subplots

from dapo_megatron.files import parse_json
from dapo_megatron.report.figures import Figure, plain, slot
from dapo_megatron.report.folder import RunData, finite
from dapo_megatron.report.phases import COLORS, LABELS
from dapo_megatron.report.wording import number, percent
from dapo_megatron.types import Phase

MAX_TIMELINES = 12
"""In a report; of more the first, the last and the slowest are among those kept."""
CELLS = 240
"""Equal parts of generation of which a replica's mean number of requests is drawn."""
TAIL = 0.1
"""Share of the most requests below which the tail of a generation lies."""

ROW, LABEL, TOTAL, GAP, MAX_HEIGHT = 20, 12, 56, 24, 300
"""Pixels: a row, the lowest row with a label, the panel of all requests, the space between panels,
and all rows, each of which has at least 3."""
SPREAD = 0.05
"""Share of a step below which a difference of ranks, or time in no phase, is not reported."""

Point = tuple[float, float]
"""(seconds, requests from then on)."""


@dataclass(frozen=True)
class PhaseSeconds:
    """What a phase takes over the ranks."""

    label: str
    color: int
    mean: float
    least: float
    most: float
    slowest: int
    """Rank."""


@dataclass(frozen=True)
class Timeline:
    """A recorded step, to draw and to tell."""

    step: int
    seconds: float
    phases: list[PhaseSeconds]
    sentences: list[str]
    figure: Figure


class Span(NamedTuple):
    phase: str
    begin: float
    end: float


class Rank(NamedTuple):
    rank: int
    host: str
    spans: list[Span]


class Replica(NamedTuple):
    replica: int
    points: list[Point]


@dataclass(frozen=True)
class Recorded:
    """One file."""

    step: int
    ranks: list[Rank]
    replicas: list[Replica]

    @cached_property
    def took(self) -> dict[str, dict[int, float]]:
        """Seconds of each phase by rank."""
        took: dict[str, dict[int, float]] = {}
        for rank in self.ranks:
            for phase, begin, end in rank.spans:
                by_rank = took.setdefault(phase, {})
                by_rank[rank.rank] = by_rank.get(rank.rank, 0.0) + end - begin
        return took

    @property
    def seconds(self) -> float:
        """Length of the step, as far as it is in phases."""
        return max((span.end for rank in self.ranks for span in rank.spans), default=0.0)

    @property
    def generation(self) -> tuple[float, float] | None:
        """From the first rank's begin of generate to the last one's end."""
        spans = [span for rank in self.ranks for span in rank.spans if span.phase == Phase.GENERATE]
        times = [at for replica in self.replicas for at, _ in replica.points]
        begin = min([span.begin for span in spans] or times, default=0.0)
        end = max([span.end for span in spans] or times, default=0.0)
        return (begin, end) if end > begin else None


def timelines(run: RunData) -> list[Timeline]:
    """Timelines to draw, by step."""
    return [_shown(one) for path in _chosen(run) if (one := _read(path)) is not None]


def note(run: RunData) -> str | None:
    """Return a note if there are none, or not all."""
    files = _files(run)
    if not files and run.knob("tracking.timeline_every") == 0:
        return "This run recorded none: tracking.timeline_every is 0."
    if not files:
        return "This run recorded none (tracking.timeline_every; older versions do not have it)."
    chosen = _chosen(run)
    wrong = [path.name for path in chosen if _read(path) is None]
    sentences = []
    if wrong:
        sentences.append(f"Left out, for they cannot be read: {', '.join(wrong[:5])}.")
    if len(files) > len(chosen):
        sentences.append(f"{len(chosen)} of {len(files)} recorded steps are shown.")
    return " ".join(sentences) or None


# ---------------------------------------------------------------------------- reading


def _files(run: RunData) -> list[Path]:
    return sorted((run.path / "timeline").glob("step_*.json"))


def _read(path: Path) -> Recorded | None:
    """None for what is not a timeline; parts that are damaged are left out."""
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=2 * MAX_TIMELINES)
def _parsed(path: Path, time_ns: int) -> Recorded | None:
    """Parse a file as it was at `time_ns`, once for a report that is written again and again."""
    value = parse_json(path.read_bytes())
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    ranks = [
        Rank(entry["rank"], str(entry.get("host", "")), list(_spans(entry.get("spans"))))
        for entry in _list(value.get("ranks"))
        if isinstance(entry, dict) and isinstance(entry.get("rank"), int)
    ]
    replicas = [
        Replica(entry["replica"], sorted(_points(entry.get("running")), key=itemgetter(0)))
        for entry in _list(value.get("replicas"))
        if isinstance(entry, dict) and isinstance(entry.get("replica"), int)
    ]
    return Recorded(value["step"], ranks, replicas)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _spans(values: Any) -> Iterator[Span]:
    for entry in _list(values):
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str):
            begin, end = finite(entry[1]), finite(entry[2])
            if begin is not None and end is not None and end >= begin:
                yield Span(entry[0], begin, end)


def _points(values: Any) -> Iterator[Point]:
    for entry in _list(values):
        if isinstance(entry, list) and len(entry) == 2:
            at, count = finite(entry[0]), finite(entry[1])
            if at is not None and count is not None:
                yield at, max(0.0, count)


# ---------------------------------------------------------------------------- choosing


def _chosen(run: RunData) -> list[Path]:
    """At most MAX_TIMELINES files: the slowest step's, and others evenly from first to last."""
    files = _files(run)
    if len(files) <= MAX_TIMELINES:
        return files
    seconds = dict(zip(run.metrics.steps, run.metrics.column("time/step"), strict=True))
    slowest = max(range(len(files)), key=lambda place: seconds.get(_step(files[place])) or 0.0)
    last = MAX_TIMELINES - 2
    evenly = {round(i * (len(files) - 1) / last) for i in range(last + 1)}
    return [files[place] for place in sorted({slowest, *evenly})]


def _step(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else 0


# ---------------------------------------------------------------------------- drawing


def _shown(one: Recorded) -> Timeline:
    phases = [
        PhaseSeconds(
            LABELS.get(phase, phase),
            COLORS.get(phase, COLORS["rest"]),
            mean=fmean(by_rank.values()),
            least=min(by_rank.values()),
            most=max(by_rank.values()),
            slowest=max(by_rank, key=by_rank.__getitem__),
        )
        for phase, by_rank in one.took.items()
    ]
    sentences = [*_longest(one), *_tail(one), *_first_dry(one), *_straggler(one)]
    return Timeline(one.step, one.seconds, phases, sentences, _figure(one, sentences))


def _figure(one: Recorded, sentences: Sequence[str]) -> Figure:
    """Draw a row per rank; below, the requests of all replicas together and of each."""
    window = one.generation if one.replicas else None
    ranks = [f"rank {rank.rank}" for rank in one.ranks]
    replicas = [f"replica {replica.replica}" for replica in one.replicas if window]
    heights = [_height(ranks)] + [TOTAL] * bool(replicas)
    heights += [_height(replicas)] * (len(replicas) > 1)
    height, num = sum(heights) + GAP * (len(heights) - 1), len(heights)
    spacing = GAP / height if num > 1 else 0
    figure = make_subplots(num, shared_xaxes=True, row_heights=heights, vertical_spacing=spacing)
    for phase in one.took:
        figure.add_trace(_bars(one, phase), row=1, col=1)
    figure.update_yaxes(_rows(ranks, [rank.host for rank in one.ranks]), row=1, col=1)
    end = max(one.seconds, window[1] if window else 0.0, 1e-3)
    if window:
        for row, trace in enumerate(_requests(one, replicas, *window), 2):
            figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(title_text="requests", nticks=3, row=2, col=1)
        if num > 2:
            figure.update_yaxes(_rows(replicas), row=3, col=1)
        figure.update_layout(updatemenus=[_zooms({"whole step": (0, end), "generation": window})])
    figure.update_xaxes(range=[0, end], showgrid=True)
    figure.update_xaxes(title_text="seconds", row=num, col=1)
    figure.update_yaxes(fixedrange=True)
    figure.update_layout(barmode="overlay", bargap=0.12, showlegend=False, template=None)
    margin = {"l": 92, "t": 40, "b": 42}
    figure.update_layout(height=40 + height + 42, margin=margin, hovermode="closest")
    label = f"Timeline of step {one.step}. {' '.join(sentences)}"
    return {**figure.to_plotly_json(), "label": label}


def _height(names: Sequence[str]) -> int:
    return max(1, len(names)) * max(3, min(ROW, MAX_HEIGHT // max(1, len(names))))


def _rows(names: Sequence[str], hosts: Sequence[str] = ()) -> dict[str, Any]:
    """Axis of rows. Of rows too low for a label, the first of each host has one."""
    labels = dict(enumerate(names))
    if len(names) * LABEL > _height(names):
        labels = {at: name for at, name in labels.items() if at % LABEL == 0}
        if any(hosts):
            firsts = {host: at for at, host in reversed([*enumerate(hosts)])}
            labels = {at: plain(host) for host, at in firsts.items()}
    ticks = {"tickvals": [*labels], "ticktext": [*labels.values()]}
    return {"range": [len(names) - 0.5, -0.5], "showgrid": False, **ticks}


def _bars(one: Recorded, phase: str) -> go.Bar:
    rows = [(row, span) for row, rank in enumerate(one.ranks) for span in rank.spans]
    rows = [(row, span) for row, span in rows if span.phase == phase]
    color, label = slot(COLORS.get(phase, COLORS["rest"])), plain(LABELS.get(phase, phase))
    hovertext = [
        f"rank {one.ranks[row].rank} on {plain(one.ranks[row].host)}: {label}, "
        f"{number(span.end - span.begin)} s ({number(span.begin)} to {number(span.end)})"
        for row, span in rows
    ]
    return go.Bar(
        orientation="h",
        name=label,
        hovertext=hovertext,
        hoverinfo="text",
        base=[round(span.begin, 4) for _, span in rows],
        x=[round(span.end - span.begin, 4) for _, span in rows],
        y=[row for row, _ in rows],
        marker={"color": color, "line": {"color": color, "width": 0.5}},
    )


def _requests(one: Recorded, names: Sequence[str], begin: float, end: float) -> list[Any]:
    """Requests of all replicas together as an area, and those of each, if there are several, as a
    strip of heat."""
    rows = [cells(replica.points, begin, end) for replica in one.replicas]
    width = (end - begin) / CELLS
    total = [round(sum(column), 1) for column in zip(*rows, strict=True)]
    area = go.Scatter(
        x=[round(begin + cell * width, 4) for cell in range(CELLS + 1)],
        y=[*total, total[-1]],
        fill="tozeroy",
        mode="lines",
        line={"color": slot(0), "width": 1, "shape": "hv"},
        hovertemplate="%{y} requests running at %{x} s<extra></extra>",
    )
    heat = go.Heatmap(
        z=rows,
        y=names,
        x0=round(begin + width / 2, 4),
        dx=width,
        zmin=0,
        colorscale=[[0, "var(--line)"], [1, slot(0)]],
        showscale=False,
        hovertemplate="%{y}: %{z} requests running at %{x:.4~g} s<extra></extra>",
    )
    return [area, heat] if len(rows) > 1 else [area]


def _zooms(ranges: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    buttons = [
        {"label": label, "method": "relayout", "args": [{"xaxis.range": [*ends]}]}
        for label, ends in ranges.items()
    ]
    colors = {"showactive": False, "bgcolor": "var(--panel)", "bordercolor": "var(--line)"}
    place = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 6}}
    return {"type": "buttons", "direction": "right", "buttons": buttons, **place, **colors}


def cells(points: Sequence[Point], begin: float, end: float, count: int = CELLS) -> list[float]:
    """Mean of a step function over `count` equal parts of begin..end; 0 before its first point and
    from its last one on, where it is no longer watched."""
    sums = [0.0] * count
    width = (end - begin) / count
    if width <= 0:
        return sums
    for (at, value), (until, _) in itertools.pairwise(points):
        low, high = max(at, begin), min(until, end)
        if high <= low or value <= 0:
            continue
        first = min(int((low - begin) / width), count - 1)
        last = min(int((high - begin) / width), count - 1)
        for cell in range(first, last + 1):
            left, right = begin + cell * width, begin + (cell + 1) * width
            sums[cell] += value * max(0.0, min(high, right) - max(low, left))
    return [round(total / width, 1) for total in sums]


# ---------------------------------------------------------------------------- in words


def _longest(one: Recorded) -> Iterator[str]:
    means = {phase: fmean(by_rank.values()) for phase, by_rank in one.took.items()}
    if not means or one.seconds <= 0:
        return
    phase = max(means, key=means.__getitem__)
    rest = one.seconds - sum(means.values())
    outside = f"; ranks are in no phase for {number(rest)} s" if rest > SPREAD * one.seconds else ""
    yield (
        f"{phase} takes {number(means[phase])} of {number(one.seconds)} s "
        f"({percent(means[phase] / one.seconds)}){outside}."
    )


def _tail(one: Recorded) -> Iterator[str]:
    begin, end = one.generation or (0.0, 0.0)
    most, seconds = tail([replica.points for replica in one.replicas], begin, end)
    if most > 0:
        whole = end - begin
        yield (
            f"For {percent(seconds / whole)} of generate ({number(seconds)} of {number(whole)} s) "
            f"fewer than a tenth of the most requests ({most:,.0f}) were running."
        )


def tail(
    replicas: Sequence[Sequence[Point]], begin: float, end: float, share: float = TAIL
) -> tuple[float, float]:
    """(most requests that ran at once over all replicas, seconds of begin..end with fewer than
    `share` of that after it was first reached: what comes before is the begin, not the tail)."""
    changes = sorted(_changes(replicas))
    running, most, at_most = 0.0, 0.0, begin
    for at, change in changes:
        running += change
        if begin <= at < end and running > most + 1e-9:
            most, at_most = running, at
    below, running, before = 0.0, 0.0, begin
    for at, change in [*changes, (end, 0.0)]:
        now = min(max(at, begin), end)
        if running < share * most:
            below += max(0.0, now - max(before, at_most))
        before = now
        running += change
    return most, below


def _changes(replicas: Iterable[Sequence[Point]]) -> Iterator[Point]:
    for points in replicas:
        before = 0.0
        for place, (at, value) in enumerate(points):
            now = value if place < len(points) - 1 else 0.0  # its last point is where it ends
            if now != before:
                yield at, now - before
            before = now


def _first_dry(one: Recorded) -> Iterator[str]:
    """Replicas that run out of work long before the last one does."""
    window = one.generation
    ends = [(_last_busy(replica.points), replica.replica) for replica in one.replicas]
    if window is None or len(ends) < 2:
        return
    (first, which), (last, latest) = min(ends), max(ends)
    if last - first >= TAIL * (window[1] - window[0]):
        yield (
            f"Replica {which} has nothing to run from {number(first - window[0])} s on, "
            f"replica {latest} works until {number(last - window[0])} s."
        )


def _last_busy(points: Sequence[Point]) -> float:
    busy = [until for (_, value), (until, _) in itertools.pairwise(points) if value > 0]
    return busy[-1] if busy else (points[0][0] if points else 0.0)


def _straggler(one: Recorded) -> Iterator[str]:
    """The phase that ranks take most differently long."""
    if not one.took:
        return
    apart = {phase: max(rs.values()) - min(rs.values()) for phase, rs in one.took.items()}
    phase = max(apart, key=apart.__getitem__)
    by_rank = one.took[phase]
    slow = max(by_rank, key=by_rank.__getitem__)
    host = next(rank.host for rank in one.ranks if rank.rank == slow)
    if apart[phase] >= SPREAD * one.seconds > 0:
        yield (
            f"Ranks differ most in {phase}: by {number(apart[phase])} s; rank {slow} ({host}) "
            f"takes longest, {number(by_rank[slow])} s."
        )
