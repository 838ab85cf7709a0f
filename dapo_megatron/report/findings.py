"""What is to be said of a run's health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dapo_megatron.report.folder import RunData

Level = Literal["good", "note", "warn", "bad"]


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
    """Config keys to look at, and which way."""
    chart: str | None = None
    """Id of the chart to jump to; None: the first that shows `metric`."""


def findings(run: RunData) -> list[Finding]:
    """The worst first."""
    return []
