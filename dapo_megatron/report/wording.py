"""Formats numbers, steps, durations and texts for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_SHOWN = 5


def encodable(text: str) -> str:
    """Replace lone surrogates, which neither UTF-8 nor a table can hold. Invalid bytes of a
    tokenizer or a damaged file may leave them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def number(value: float) -> str:
    """Format a number for people: 0.387, 9.8e-06, 4,537."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share in percent: 0.0123 becomes 1.23%."""
    return f"{100 * share:.3g}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"


def named(steps: Sequence[int]) -> str:
    """List steps, at most five: "step 3", "steps 3, 7", "steps 1, 2, 3, 4, 5, ..."."""
    return f"step{'' if len(steps) == 1 else 's'} {first_few(steps)}"


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


def significant(value: float | None, digits: int = 4) -> float | None:
    """Round to significant digits, so that 1e-6 is not displayed as 0. Return None for a value that
    is not finite, because JSON cannot represent it."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
