"""Figures of a check: a measured value, its target, and whether the target is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "short", "not judged", "failed", "skipped"]
WORST: tuple[Verdict, ...] = ("failed", "short", "ok", "not judged", "skipped")


@dataclass(frozen=True)
class Figure:
    """A measured value. `target` is in words, and empty if there is none."""

    name: str
    value: float
    unit: str = ""
    target: str = ""
    verdict: Verdict = "ok"


def reported(name: str, value: float, unit: str = "") -> Figure:
    """Return a figure without a target."""
    return Figure(name, float(value), unit)


def at_most(
    name: str, value: float, limit: float, unit: str = "", *, binding: bool = True
) -> Figure:
    """Return a figure that should not exceed a limit. It is not judged if the limit is stated for
    other hardware or models (`binding` false)."""
    return Figure(name, float(value), unit, f"<= {limit:g}", _verdict(value <= limit, binding))


def at_least(
    name: str, value: float, limit: float, unit: str = "", *, binding: bool = True
) -> Figure:
    """Return a figure that should not be below a limit. See `at_most`."""
    return Figure(name, float(value), unit, f">= {limit:g}", _verdict(value >= limit, binding))


def _verdict(is_met: bool, binding: bool) -> Verdict:
    if not binding:
        return "not judged"
    return "ok" if is_met else "short"


def holds(name: str, is_so: bool) -> Figure:
    """Return a figure for a condition that must hold."""
    return Figure(name, float(is_so), "", "yes", "ok" if is_so else "short")


def merged(ranks: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return rank 0's figures. Where the verdict of another rank is worse, return that rank's.

    All ranks compute the same figures in the same order. A rank that failed has fewer of them.
    """
    first, *others = ranks
    return [
        min(
            (figure, *(other[index] for other in others if index < len(other))),
            key=lambda figure: WORST.index(figure.verdict),
        )
        for index, figure in enumerate(first)
    ]
