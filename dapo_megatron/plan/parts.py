"""Parts of a memory."""

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
