"""What a finding is, and how its figures are worded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "warn", "bad"]

LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
"""The worst first."""

_NAMED_STEPS = 5


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
        pairs = [one.partition(": ") for one in (self.knob or "").split("; ") if one]
        return [(key, way) for key, _, way in pairs]


def number(value: float) -> str:
    """As a person would write it: 0.387, 9.8e-06, 4,537."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def percent(share: float) -> str:
    """0.0123 is 1.2%."""
    return f"{100 * share:.3g}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"


def named(steps: Sequence[int]) -> str:
    """ "steps 3, 7 and 12 more"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = ", ".join(map(str, steps[:_NAMED_STEPS]))
    left = len(steps) - _NAMED_STEPS
    return f"steps {shown}{f' and {left} more' if left > 0 else ''}"


def times(count: int, what: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
