"""Finding, and robust statistics of the noisy series that findings rest on.

Mann-Kendall counts in how many pairs of steps the later value is larger, so that no single step
and no unit matters (Mann 1945, Kendall 1975).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Literal

from dapo_megatron.report.folder import RunData

TREND_LEAST_STEPS = 8  # steps; shorter series are not judged for trends
TREND_WINDOW = 0.125  # share of the steps at each end whose median stands for it
TREND_Z = 3.0  # Mann-Kendall statistic, in standard deviations, of a trend

_MOST_POINTS = 200
"""Longer series are thinned to medians of neighbours: pairs grow with the square."""
_LEAST_IN_WINDOW = 3
_MOST_IN_WINDOW = 20
_BEFORE = 20
_LEAST_BEFORE = 5
_SPREADS = 10.0
_DEVIATIONS_OF_SPREAD = 1.4826  # of a normal distribution

Column = Sequence[float | None]
"""Values of a metric by step."""
Level = Literal["good", "note", "warn", "bad"]

LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """One thing to know of a run, with its evidence."""

    level: Level
    title: str
    """One line, in plain words."""
    text: str
    """The figures and steps it rests on."""
    metric: str | None = None
    steps: tuple[int, int] | None = None
    """First and last rollout step it is about."""
    knob: str | None = None
    """Config keys to look at, and which way: "optimizer.lr: lower; loss.clip_high: higher"."""
    chart: str | None = None
    """Id of the chart to jump to; None: the first that shows `metric`."""

    @property
    def knobs(self) -> list[tuple[str, str]]:
        """`knob` as (key, which way or "")."""
        pairs = [pair.partition(": ") for pair in (self.knob or "").split("; ") if pair]
        return [(key, way) for key, _, way in pairs]


@dataclass(frozen=True)
class Track:
    """Finite values of a series by rollout step. Steps without a value are left out."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_long(self) -> bool:
        """True if trends can be judged."""
        return len(self) >= TREND_LEAST_STEPS

    @property
    def window(self) -> int:
        """Steps at each end that stand for it."""
        share = int(len(self) * TREND_WINDOW)
        return max(1, min(len(self) // 2, max(_LEAST_IN_WINDOW, min(_MOST_IN_WINDOW, share))))

    @cached_property
    def early(self) -> float:
        """Median of the first window, 0 for an empty track."""
        return median(self.values[: self.window]) if self.values else 0.0

    @cached_property
    def late(self) -> float:
        """Median of the last window, 0 for an empty track."""
        return median(self.values[-self.window :]) if self.values else 0.0

    @property
    def change(self) -> float:
        """late - early."""
        return self.late - self.early

    @property
    def growth(self) -> float:
        """late / early; 1 where that says nothing (early is not above 0)."""
        growth = self.late / self.early if self.early > 0 else 1.0
        return growth if math.isfinite(growth) else 1.0

    @property
    def rises(self) -> bool:
        """True if it rises beyond chance."""
        return self.is_long and self.score >= TREND_Z

    @property
    def falls(self) -> bool:
        """True if it falls beyond chance."""
        return self.is_long and self.score <= -TREND_Z

    @cached_property
    def score(self) -> float:
        """Mann-Kendall's statistic in standard deviations; above 0 it rises."""
        return mann_kendall(_thinned(self.values, _MOST_POINTS))

    @property
    def stands_apart(self) -> bool:
        """True if it rises, and nearly all of its end lies above nearly all of its start."""
        first = sorted(self.values[: self.window])
        last = sorted(self.values[-self.window :])
        return self.rises and last[len(last) // 4] > first[-1 - len(first) // 4]

    @cached_property
    def half(self) -> Track:
        """The second half: the track from the middle step on."""
        middle = len(self) // 2
        return Track(self.steps[middle:], self.values[middle:])

    def where(self, holds: Callable[[float], bool]) -> list[int]:
        """Return the steps whose value fulfils a condition."""
        return [s for s, v in zip(self.steps, self.values, strict=True) if holds(v)]

    def spikes(self, factor: float) -> list[int]:
        """Return the steps of values above `factor` times the median of those before, and far
        outside their spread."""
        spikes = []
        for place in range(_LEAST_BEFORE, len(self)):
            before = self.values[max(0, place - _BEFORE) : place]
            middle = median(before)
            spread = _DEVIATIONS_OF_SPREAD * median([abs(value - middle) for value in before])
            value = self.values[place]
            if middle > 0 and value > factor * middle and value > middle + _SPREADS * spread:
                spikes.append(self.steps[place])
        return spikes


def track(run: RunData, name: str) -> Track:
    """Return a metric of a run."""
    return track_of(run.metrics.steps, run.metrics.column(name))


def track_of(steps: Sequence[int], column: Column) -> Track:
    """Return a column with its gaps left out."""
    kept = [(s, v) for s, v in zip(steps, column, strict=True) if v is not None]
    return Track(tuple(s for s, _ in kept), tuple(v for _, v in kept))


def mann_kendall(values: Sequence[float]) -> float:
    """Statistic in standard deviations; 0 for a constant or for fewer than 3 values."""
    n = len(values)
    if n < 3:
        return 0.0
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0 or score == 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance)


def fall_from_best(values: Sequence[float]) -> tuple[int, float, float]:
    """(position of the best stretch, how far the last stretch is below it, noise of that
    difference): stretches are medians of a tenth of the series, of at least 3 values."""
    size = max(_LEAST_IN_WINDOW, len(values) // 10)
    starts = range(0, len(values) - size + 1, size)
    if len(starts) < 4:
        return 0, 0.0, 0.0
    stretches = [median(values[start : start + size]) for start in starts]
    best = max(range(len(stretches)), key=stretches.__getitem__)
    # Half of the changes of white noise are within 0.954 of its deviations, and a median is 1.25
    # times as noisy as a mean.
    deviation = median([abs(b - a) for a, b in pairwise(values)]) / 0.954
    noise = deviation * 1.25 * math.sqrt(2 / size)
    return best * size, stretches[best] - median(values[-size:]), noise


def _thinned(values: Sequence[float], most: int) -> Sequence[float]:
    if len(values) <= most:
        return values
    edges = [len(values) * i // most for i in range(most + 1)]
    return [median(values[a:b]) for a, b in pairwise(edges)]
