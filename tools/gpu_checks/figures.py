"""A figure of a check, what it should be, and whether it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "short", "not judged", "failed", "skipped"]
WORST: tuple[Verdict, ...] = ("failed", "short", "ok", "not judged", "skipped")


@dataclass(frozen=True)
class Figure:
    """`target` in words; empty if there is none."""

    name: str
    value: float
    unit: str = ""
    target: str = ""
    verdict: Verdict = "ok"


def told(name: str, value: float, unit: str = "") -> Figure:
    """A figure without a target."""
    return Figure(name, float(value), unit)


def at_most(
    name: str, value: float, limit: float, unit: str = "", *, binding: bool = True
) -> Figure:
    """One that should not pass a limit; on other hardware or models than those of the limit
    (`binding` false) it is told beside it, and not judged."""
    return Figure(name, float(value), unit, f"<= {limit:g}", _verdict(value <= limit, binding))


def at_least(
    name: str, value: float, limit: float, unit: str = "", *, binding: bool = True
) -> Figure:
    """See `at_most`."""
    return Figure(name, float(value), unit, f">= {limit:g}", _verdict(value >= limit, binding))


def _verdict(is_met: bool, binding: bool) -> Verdict:
    if not binding:
        return "not judged"
    return "ok" if is_met else "short"


def holds(name: str, is_so: bool) -> Figure:
    """Something that must be so."""
    return Figure(name, float(is_so), "", "yes", "ok" if is_so else "short")
