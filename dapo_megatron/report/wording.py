"""Formats numbers, steps and texts for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_SHOWN = 5


def number(value: float) -> str:
    """Format a number for people: 0.387, 9.8e-06, 4,537."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share in percent: 0.0123 becomes 1.23%."""
    return f"{100 * share:.3g}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"


def named(steps: Sequence[int]) -> str:
    """List steps, at most five: "step 3", "steps 3, 7", "steps 1, 2, 3, 4, 5 and 12 more"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = ", ".join(map(str, steps[:_SHOWN]))
    num_more = len(steps) - _SHOWN
    return f"steps {shown}{f' and {num_more} more' if num_more > 0 else ''}"


def times(count: int, noun: str) -> str:
    """Format a count with its noun: "1 step", "2 steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_few(values: Sequence[Any]) -> str:
    """List the first five values: "3, 7, 12, 13, 20, ..."."""
    return ", ".join(map(str, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")


def span(seconds: float) -> str:
    """Format a duration: 12 s, 4 min, 5.0 h, 2.1 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 129600 else f"{seconds / 86400:.1f} d"


def rounded(value: float | None, decimals: int = 4) -> float | None:
    """Round a value for display. Return None if it is not finite, which JSON cannot represent."""
    return round(value, decimals) if value is not None and math.isfinite(value) else None


def significant(value: float, digits: int = 4) -> float | None:
    """Round to significant digits, so that a gap of 1e-6 is not displayed as 0. Return None if the
    value is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
