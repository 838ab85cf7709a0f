"""A shard: the slice of one HF tensor that one rank holds, as a writeable view of its parameter.

The same description serves both directions: reading an HF checkpoint writes through the views,
writing one (or feeding an engine) reads through them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dapo_megatron.types import SyncError


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


@dataclass(frozen=True, slots=True)
class Shard:
    """One slice of the HF tensor `name`.

    `view` aliases the local parameter; its elements, in order, are those of `region`. `is_owner`
    is False for a copy that another rank also holds and answers for.
    """

    name: str
    global_shape: tuple[int, ...]
    region: Region
    view: Tensor
    is_owner: bool

    def read(self) -> Tensor:
        """The slice, shaped as in the HF tensor."""
        return self.view.detach().reshape(self.region.shape)

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Replace the slice by `value`, shaped as in the HF tensor."""
        self.view.copy_(value.reshape(self.view.shape))


def check_coverage(pieces: Iterable[tuple[str, tuple[int, ...], Region]]) -> None:
    """Every element of every tensor held exactly once, or SyncError naming the tensor.

    `pieces` are (HF name, global shape, region) of the owned shards of all ranks.
    """
    by_name: dict[str, list[Region]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, global_shape, region in pieces:
        if shapes.setdefault(name, global_shape) != global_shape:
            raise SyncError(f"{name}: ranks disagree on its shape: {shapes[name]}, {global_shape}")
        by_name.setdefault(name, []).append(region)
    for name, regions in by_name.items():
        held = (
            torch.zeros(shapes[name], dtype=torch.int8, device="cpu") if len(regions) > 1 else None
        )
        if held is None:
            exact = regions[0].shape == shapes[name]
        else:
            for region in regions:
                held[region.slices] += 1
            exact = bool((held == 1).all())
        if not exact:
            raise SyncError(f"{name}: the ranks' slices do not cover {shapes[name]} exactly once")
