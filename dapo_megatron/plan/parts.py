"""What memory is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a memory. `how`: the numbers it is made of, for people."""

    name: str
    num_bytes: int
    how: str

    @property
    def gib(self) -> float:
        """Its size in GiB."""
        return self.num_bytes / GIB


def size(parts: Iterable[Part]) -> int:
    """Bytes of all of them."""
    return sum(part.num_bytes for part in parts)
