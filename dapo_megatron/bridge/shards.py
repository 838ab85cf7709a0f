"""The words of the bridge: a region of a tensor, a piece (what a rank holds or wants), a shard (a
piece with the memory it lives in).

Tensors have their HF name and shape here, whoever holds them: policy, engine or checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a tensor: where it starts and how far it reaches, per dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True)
        )

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """The box inside both, or None."""
        start = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        stop = tuple(min(a + size_a, b + size_b) for a, size_a, b, size_b in ends)
        shape = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Region(start, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Region) -> Region:
        """This box counted from the start of `outer`, which holds it."""
        start = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        return Region(start, self.shape)


def whole(shape: Iterable[int]) -> Region:
    """The box that is all of a tensor of `shape`."""
    shape = tuple(shape)
    return Region((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the HF tensor `name`, held or wanted by some rank. Several ranks may hold the same
    box: replicas, equal to the last bit."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece in memory: `view` aliases the local parameter; its elements, in order, are those of
    the piece's region (its shape may differ)."""

    piece: Piece
    view: Tensor

    def read(self) -> Tensor:
        """The region, shaped as in the HF tensor."""
        return self.view.detach().reshape(self.piece.region.shape)

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Replace the region by `value`, shaped as in the HF tensor."""
        self.view.copy_(value.reshape(self.view.shape))


@dataclass(frozen=True, slots=True)
class QuantizedShard(Shard):
    """A piece of a parameter that keeps its values in another form, FP8 say, as a tensor class of
    its own: `dequantize` gives them, as they are computed with. `view` is the whole parameter, of
    which the piece is some `rows`."""

    rows: slice

    @torch.no_grad()
    def read(self) -> Tensor:
        """The region, shaped as in the HF tensor: a copy, of the parameter as it is now."""
        return self.view.dequantize()[self.rows].reshape(self.piece.region.shape)

    def write(self, value: Tensor) -> None:
        """Refused: a parameter is quantised as one, and piece by piece would round what is there
        again and again. Its owner has another place to write into (protocols.Policy.rewrite)."""
        raise TypeError(
            f"{self.piece.name}: a quantised parameter cannot be written piece by piece"
        )


def shard_of(piece: Piece, parameter: Tensor, rows: slice) -> Shard:
    """The shard of a parameter's `rows`, whatever form it keeps its values in."""
    if type(parameter) in (Tensor, torch.nn.Parameter):
        return Shard(piece, parameter.detach()[rows])
    # Not detached: that could be a copy of what it is at the moment.
    return QuantizedShard(piece, parameter, rows)
