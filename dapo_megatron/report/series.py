"""A run's curves in the form the page draws: thinned, rounded, without what never occurs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from dapo_megatron.report.folder import Evaluation

MAX_POINTS = 2000
"""Of a curve; longer ones are thinned."""

Column = Sequence[float | None]


def stride_of(num_steps: int) -> int:
    """Steps per drawn point."""
    return max(1, -(-num_steps // MAX_POINTS))


def thin_steps(steps: Sequence[int], stride: int) -> list[int]:
    """The last step of each bucket."""
    return [steps[min(at + stride, len(steps)) - 1] for at in range(0, len(steps), stride)]


def thin(name: str, column: Column, stride: int) -> list[float | None]:
    """A value for each bucket of `stride` steps: the mean, or of a maximum (gap_max, tokens/max)
    the maximum, lest a peak be lost. Six digits."""
    reduce = max if re.search(r"(\b|_)max$", name) else fmean
    points: list[float | None] = []
    for at in range(0, len(column), stride):
        values = [value for value in column[at : at + stride] if value is not None]
        points.append(short(reduce(values)) if values else None)
    return points


def short(value: float) -> float:
    """Six digits: more than a screen shows, and half the bytes."""
    return float(f"{value:.6g}")


def evaluation_curves(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """[{set, figure, points: [[step, value, low, high], ...]}]. Of pass@1, pass@2, pass@4 the one
    of the most samples, which has an interval; counts (`ungraded`) are left out."""
    largest: dict[tuple[str, str], int] = {}
    for one in evaluations:
        kind, _, samples = one.figure.partition("@")
        if samples.isdigit():
            largest[one.set, kind] = max(int(samples), largest.get((one.set, kind), 0))
    curves: dict[tuple[str, str], list[list[float | None]]] = {}
    for one in evaluations:
        kind, _, samples = one.figure.partition("@")
        if samples.isdigit() and int(samples) == largest[one.set, kind]:
            interval = (one.value, one.low, one.high)
            values = [None if value is None else short(value) for value in interval]
            curves.setdefault((one.set, one.figure), []).append([one.step, *values])
    return [
        {"set": of_set, "figure": figure, "points": points}
        for (of_set, figure), points in curves.items()
    ]
