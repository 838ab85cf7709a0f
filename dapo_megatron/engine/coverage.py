"""Whether slices make up a tensor: none of it twice, nothing left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from dapo_megatron.types import Piece, Region, SyncError

Offer = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""HF name -> (shape, dtype) of the whole tensor."""


def overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Two regions, by index, that share an element; None if there are none."""
    order = sorted(range(len(regions)), key=lambda index: regions[index].start)
    for place, index in enumerate(order):
        one = regions[index]
        for other in order[place + 1 :]:
            if one.start and regions[other].start[0] >= one.start[0] + one.shape[0]:
                break
            if one.intersect(regions[other]) is not None:
                return index, other
    return None


def check_used(offered: Offer, taken: Sequence[Sequence[Piece]]) -> None:
    """The ranks of an engine (`taken`: by rank) together take all of each offered tensor.

    Loaders narrow without a word, so this is what finds a tensor that is too large. Raises
    SyncError naming a tensor that no rank takes, or of which some of it is left over.
    """
    regions: dict[str, set[Region]] = {name: set() for name in offered}
    for pieces in taken:
        for piece in pieces:
            regions[piece.name].add(piece.region)
    for name, (shape, _) in offered.items():
        boxes = list(regions[name])
        if not boxes:
            raise SyncError(f"{name}: the engine has no such tensor")
        if overlap(boxes) is not None or sum(box.numel for box in boxes) != prod(shape):
            raise SyncError(
                f"{name}: shape {shape}, of which the engine's ranks take only "
                f"{', '.join(map(str, boxes))}"
            )
