"""Robust figures of a noisy series: medians of its ends, whether it rises, what sticks out.

Mann-Kendall counts in how many pairs of steps the later value is larger, so that no single step
and no unit matters (Mann 1945, Kendall 1975).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from dapo_megatron.report.folder import RunData
from dapo_megatron.report.thresholds import limit

_MOST_POINTS = 200
"""Longer series are thinned to medians of neighbours: pairs grow with the square."""
_LEAST_IN_WINDOW = 3
_MOST_IN_WINDOW = 20
_BEFORE = 20
_LEAST_BEFORE = 5
_SPREADS = 10.0
_DEVIATIONS_OF_SPREAD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Track:
    """The finite values of a series by rollout step, steps without one left out."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_long(self) -> bool:
        """Whether trends can be judged."""
        return len(self) >= limit("trend.least_steps")

    @property
    def window(self) -> int:
        """Steps at each end that stand for it."""
        share = int(len(self) * limit("trend.window"))
        return max(1, min(len(self) // 2, max(_LEAST_IN_WINDOW, min(_MOST_IN_WINDOW, share))))

    @property
    def early(self) -> float:
        """Median of the first window. Of an empty track 0."""
        return median(self.values[: self.window]) if self.values else 0.0

    @property
    def late(self) -> float:
        """Median of the last window. Of an empty track 0."""
        return median(self.values[-self.window :]) if self.values else 0.0

    @property
    def span(self) -> tuple[int, int]:
        """First and last step."""
        return self.steps[0], self.steps[-1]

    @property
    def late_span(self) -> tuple[int, int]:
        """First and last step of the last window."""
        return self.steps[-self.window], self.steps[-1]

    @property
    def growth(self) -> float:
        """late / early; 1 where that says nothing (early is not above 0)."""
        growth = self.late / self.early if self.early > 0 else 1.0
        return growth if math.isfinite(growth) else 1.0

    @property
    def rises(self) -> bool:
        """Whether it does, beyond chance."""
        return self.is_long and self.score >= limit("trend.z")

    @property
    def falls(self) -> bool:
        """Whether it does, beyond chance."""
        return self.is_long and self.score <= -limit("trend.z")

    @cached_property
    def score(self) -> float:
        """Mann-Kendall's statistic in standard deviations; above 0 it rises."""
        return mann_kendall(_thinned(self.values, _MOST_POINTS))

    def second_half(self) -> Track:
        """From the middle step on."""
        half = len(self) // 2
        return Track(self.steps[half:], self.values[half:])

    def spikes(self, factor: float) -> list[int]:
        """Positions of values above `factor` times the median of those before, and far outside
        their spread."""
        found = []
        for place in range(_LEAST_BEFORE, len(self)):
            before = self.values[max(0, place - _BEFORE) : place]
            middle = median(before)
            spread = _DEVIATIONS_OF_SPREAD * median([abs(one - middle) for one in before])
            value = self.values[place]
            if middle > 0 and value > factor * middle and value > middle + _SPREADS * spread:
                found.append(place)
        return found


def track(run: RunData, name: str) -> Track:
    """A metric of a run."""
    return track_of(run.metrics.steps, run.metrics.column(name))


def track_of(steps: Sequence[int], column: Sequence[float | None]) -> Track:
    """A column with its gaps left out."""
    kept = [(s, v) for s, v in zip(steps, column, strict=True) if v is not None]
    return Track(tuple(s for s, _ in kept), tuple(v for _, v in kept))


def mann_kendall(values: Sequence[float]) -> float:
    """In standard deviations; 0 for a constant or for fewer than 3 values."""
    n = len(values)
    if n < 3:
        return 0.0
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    counts: dict[float, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    ties = sum(t * (t - 1) * (2 * t + 5) for t in counts.values())
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
