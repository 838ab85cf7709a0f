"""Finding, and robust statistics of noisy series that rules use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd

TREND_LEAST_STEPS = 8  # steps; shorter series are not judged for trends
TREND_WINDOW = 0.125  # share of the steps at each end whose median represents that end
TREND_Z = 3.0  # Mann-Kendall statistic, in standard deviations, of a trend

_MOST_PAIRED = 200  # longer series are thinned, because the number of pairs is quadratic
_LEAST_IN_WINDOW, _MOST_IN_WINDOW = 3, 20
_BEFORE, _LEAST_BEFORE, _SPREADS = 20, 5, 10.0
_QUARTILES = 1.349  # distance of a normal distribution's quartiles, in standard deviations

Level = Literal["good", "note", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
"""Levels, worst first."""


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run, with its evidence."""

    level: Level
    title: str
    text: str
    """Evidence for the title: values and steps."""
    metric: str | None = None
    setting: str | None = None
    """Config keys to change, and the direction: "optimizer.lr: lower; loss.clip_high: higher"."""
    chart: str | None = None
    """Id of the chart to link to. None: the first chart that shows `metric`."""

    @property
    def settings(self) -> list[tuple[str, str]]:
        """`setting` as [(key, direction or ""), ...]."""
        pairs = [pair.partition(": ") for pair in (self.setting or "").split("; ") if pair]
        return [(key, direction) for key, _, direction in pairs]


@dataclass(frozen=True)
class Track:
    """Values of a series by rollout step, without missing values."""

    series: pd.Series

    def __len__(self) -> int:
        return len(self.series)

    @property
    def is_long(self) -> bool:
        """True if the series is long enough to judge trends."""
        return len(self) >= TREND_LEAST_STEPS

    @property
    def window(self) -> int:
        """Number of steps at each end whose median represents that end."""
        share = int(len(self) * TREND_WINDOW)
        return max(1, min(len(self) // 2, max(_LEAST_IN_WINDOW, min(_MOST_IN_WINDOW, share))))

    @cached_property
    def early(self) -> float:
        """Median of the first window, 0 for an empty track."""
        return float(self.series.iloc[: self.window].median()) if len(self) else 0.0

    @cached_property
    def late(self) -> float:
        """Median of the last window, 0 for an empty track."""
        return float(self.series.iloc[-self.window :].median()) if len(self) else 0.0

    @property
    def change(self) -> float:
        """late - early."""
        return self.late - self.early

    @property
    def growth(self) -> float:
        """late / early, or 1 if `early` is not above 0."""
        growth = self.late / self.early if self.early > 0 else 1.0
        return growth if math.isfinite(growth) else 1.0

    @cached_property
    def score(self) -> float:
        """Mann-Kendall statistic in standard deviations; positive for a rising series."""
        thinned = self.series.groupby(np.arange(len(self)) * _MOST_PAIRED // len(self)).median()
        return mann_kendall((thinned if len(self) > _MOST_PAIRED else self.series).to_numpy())

    @property
    def rises(self) -> bool:
        """True if the series rises significantly."""
        return self.is_long and self.score >= TREND_Z

    @property
    def falls(self) -> bool:
        """True if the series falls significantly."""
        return self.is_long and self.score <= -TREND_Z

    @property
    def is_apart(self) -> bool:
        """True if the interquartile ranges of the first and last window do not overlap."""
        first, last = self.series.iloc[: self.window], self.series.iloc[-self.window :]
        if self.change > 0:
            return bool(last.quantile(0.25) > first.quantile(0.75))
        return bool(last.quantile(0.75) < first.quantile(0.25))

    @cached_property
    def half(self) -> Track:
        """Second half of the track."""
        return Track(self.series.iloc[len(self) // 2 :])

    def where(self, holds: Callable[[pd.Series], pd.Series]) -> list[int]:
        """Return the steps whose values satisfy a condition."""
        return list(self.series.index[holds(self.series)])

    def spikes(self, factor: float) -> list[int]:
        """Return the steps of values that exceed both `factor` times the median of the 20 values
        before and 10 times their spread above it."""
        before = self.series.shift().rolling(_BEFORE, min_periods=_LEAST_BEFORE)
        middle = before.median()
        spread = (before.quantile(0.75) - before.quantile(0.25)) / _QUARTILES
        is_high = self.series > (middle + _SPREADS * spread)
        return list(self.series.index[is_high & (middle > 0) & (self.series > factor * middle)])


def mann_kendall(values: Any) -> float:
    """Return the Mann-Kendall trend statistic in standard deviations (Mann 1945, Kendall 1975). It
    compares all pairs of values and is 0 for a constant."""
    num, (_, ties) = len(values), np.unique(values, return_counts=True)
    pairs = np.sign(np.subtract.outer(values, values))
    score = float(np.tril(pairs).sum())
    variance = float(num * (num - 1) * (2 * num + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum())
    return (score - np.sign(score)) / math.sqrt(variance / 18) if variance > 0 else 0.0


def fall_from_best(series: pd.Series) -> tuple[int, float, float]:
    """Return (step of the highest rolling median, fall of the last one below it, noise of the
    fall).

    A rolling median covers a tenth of the series, at least 3 values. A series shorter than four
    windows gives zeros.
    """
    size = max(_LEAST_IN_WINDOW, len(series) // 10)
    if len(series) < 4 * size:
        return 0, 0.0, 0.0
    stretches = series.rolling(size).median()
    # For white noise, the median absolute change is 0.954 standard deviations, and a median is 1.25
    # times as noisy as a mean.
    noise = series.diff().abs().median() / 0.954 * 1.25 * math.sqrt(2 / size)
    return int(stretches.idxmax()), float(stretches.max() - stretches.iloc[-1]), float(noise)
