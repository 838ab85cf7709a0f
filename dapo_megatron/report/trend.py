"""Start and end of noisy series, for findings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from dapo_megatron.report.wording import number, percent

LEAST_STEPS = 8
"""Shorter series have no trend."""


@dataclass(frozen=True)
class Trend:
    """Start and end of a noisy series: medians over its first and its last eighth."""

    early: float
    late: float
    is_clear: bool
    """True if the middle halves of the values at the start and at the end do not overlap."""

    @property
    def change(self) -> float:
        """late - early."""
        return self.late - self.early

    @property
    def growth(self) -> float:
        """late / early, 1 if `early` is not above 0."""
        growth = self.late / self.early if self.early > 0 else 1.0
        return growth if math.isfinite(growth) else 1.0

    @property
    def rises(self) -> bool:
        """True if the series is clearly higher at the end."""
        return self.is_clear and self.change > 0

    @property
    def falls(self) -> bool:
        """True if the series is clearly lower at the end."""
        return self.is_clear and self.change < 0

    def __str__(self) -> str:
        return f"{number(self.early)} → {number(self.late)}"

    @property
    def percent(self) -> str:
        """The trend of a share, as text."""
        return f"{percent(self.early)} → {percent(self.late)}"


def trend(values: pd.Series) -> Trend | None:
    """Return the trend of a series; None if it has fewer than LEAST_STEPS values."""
    values = values.dropna()
    if len(values) < LEAST_STEPS:
        return None
    size = min(20, max(4, len(values) // 8))
    first, last = values.iloc[:size], values.iloc[-size:]
    low, high = (first, last) if last.median() > first.median() else (last, first)
    is_clear = bool(high.quantile(0.25) > low.quantile(0.75))
    return Trend(float(first.median()), float(last.median()), is_clear)


def last_part(values: pd.Series, share: float = 0.5) -> pd.Series:
    """Return the last `share` of the recorded values."""
    values = values.dropna()
    return values.iloc[int(len(values) * (1 - share)) :]


def spikes(values: pd.Series, factor: float) -> list[int]:
    """Return the steps of values above `factor` times the median of the 20 values before."""
    usual = values.shift().rolling(20, min_periods=5).median()
    return list(values.index[(usual > 0) & (values > factor * usual)])
