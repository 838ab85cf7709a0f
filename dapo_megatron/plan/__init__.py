"""Forecast a run from its config and the model's config.json: layout, compatibility of features,
GPU memory by phase, host memory, disk space, and seconds per step.

`stage.py` counts weights, gradients and optimizer state, `activations.py` what passes keep.
`estimate.py` sums up the memory of a run, `speed.py` estimates its time, and `forecast.py` is the
command, with the layouts that fit. docs/plan.md is the user's guide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One item of a memory estimate. `how` explains to the user where the number comes from."""

    name: str
    num_bytes: int
    how: str

    @property
    def gib(self) -> float:
        """Size in GiB."""
        return self.num_bytes / GIB


def size(parts: Iterable[MemoryItem]) -> int:
    """Return the total bytes of `parts`."""
    return sum(part.num_bytes for part in parts)
