"""The recorded timelines (timeline/step_*.json) as page/timeline.js draws them: phases of every
rank as coloured spans, below them the requests that run on every replica while it generates.

A timeline for the page:
    step, seconds (of the step)
    phases      [{name, label, color: slot, mean, least, most, slowest: rank}], those that occur,
                with what they take over the ranks
    ranks       [{rank, host, spans: [[place in phases, begin, end], ...]}]
    engines     null | {begin, end, most, replicas: [{replica, cells: [mean requests, ...]}]};
                cells are equal parts of begin..end, `most` is the highest cell
    sentences   what it shows, in words
All times in seconds since the step began.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dapo_megatron.files import parse_json
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

SPREAD = 0.05
"""Share of a step below which a difference of ranks, or time in no phase, is not reported."""

Point = tuple[float, float]
"""(seconds, requests from then on)."""


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


def timelines(run: RunData) -> list[dict[str, Any]]:
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
    """At most MAX_TIMELINES files: that of the slowest step, and the others evenly, from the first
    to the last."""
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


def _shown(one: Recorded) -> dict[str, Any]:
    places = {phase: place for place, phase in enumerate(one.took)}
    return {
        "step": one.step,
        "seconds": round(one.seconds, 4),
        "phases": [
            {
                "name": phase,
                "label": LABELS.get(phase, phase),
                "color": COLORS.get(phase, COLORS["rest"]),
                "mean": round(fmean(by_rank.values()), 4),
                "least": round(min(by_rank.values()), 4),
                "most": round(max(by_rank.values()), 4),
                "slowest": max(by_rank, key=by_rank.__getitem__),
            }
            for phase, by_rank in one.took.items()
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "host": rank.host,
                "spans": [
                    [places[phase], round(begin, 4), round(end, 4)]
                    for phase, begin, end in rank.spans
                ],
            }
            for rank in one.ranks
        ],
        "engines": _engines(one),
        "sentences": [*_longest(one), *_tail(one), *_first_dry(one), *_straggler(one)],
    }


def _engines(one: Recorded) -> dict[str, Any] | None:
    window = one.generation
    if window is None or not one.replicas:
        return None
    rows = [cells(replica.points, *window) for replica in one.replicas]
    return {
        "begin": round(window[0], 4),
        "end": round(window[1], 4),
        "most": max(map(max, rows)),
        "replicas": [
            {"replica": replica.replica, "cells": row}
            for replica, row in zip(one.replicas, rows, strict=True)
        ],
    }


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
