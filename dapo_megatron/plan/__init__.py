"""Forecast of a run from its config and the model's config.json: layout, compatibility of features,
memory by phase, host memory, disk, and seconds of a step.

Weights, gradients and optimizer are counted exactly (`stage.py`), activations module by module
(`activations.py`). `estimate.py` has the memory of a run, `speed.py` its time, `suggestions.py` the
changes that make it fit, and `forecast.py` the command. docs/plan.md is for users.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a memory. `how` explains the number to the user."""

    name: str
    num_bytes: int
    how: str

    @property
    def gib(self) -> float:
        """Size in GiB."""
        return self.num_bytes / GIB


def size(parts: Iterable[Part]) -> int:
    """Return the bytes of all parts."""
    return sum(part.num_bytes for part in parts)
