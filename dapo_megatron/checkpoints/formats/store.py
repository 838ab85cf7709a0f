"""A store: weights on disk under their HF names, whatever their format.

A format is a table: which box of which HF tensor lies where in which file (`Extent`). Reading,
writing, converting, resharding and comparing all follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.file import TensorInfo
from dapo_megatron.model import Architecture, hf_tensors
from dapo_megatron.types import CheckpointError, Region, Shard, dtype_name, whole


class TensorSource(Protocol):
    """What a store reads from: a TensorFile, or what passes for one."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """The tensor, or a box of it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The box `region` of the HF tensor `name` lies in the tensor `key` of the file `file`, from
    the index `start` on, in the same shape."""

    name: str
    region: Region
    file: str
    key: str
    start: tuple[int, ...]

    def stored(self, box: Region) -> Region:
        """`box` of the HF tensor, which is inside `region`, as a box of the stored tensor."""
        inside = box.within(self.region)
        start = tuple(a + b for a, b in zip(self.start, inside.start, strict=True))
        return Region(start, box.shape)


@dataclass(frozen=True)
class Store:
    """Weights on disk. Nothing stays open, and a read takes memory for what it returns alone.

    `folder` also has config.json, tokenizer and whatever else goes with the weights; `format` (hf,
    megatron, training) and `layout` say how the files are cut.
    """

    folder: Path
    format: str
    layout: Mapping[str, Any]
    config: Mapping[str, Any]
    arch: Architecture
    tensors: Mapping[str, TensorInfo]
    """By HF name, the whole model."""
    extents: Mapping[str, Sequence[Extent]]
    """By HF name, disjoint and complete."""
    files: Mapping[str, TensorSource]
    replicas: Sequence[tuple[Extent, Extent]] = field(default=(), repr=False)
    """Boxes that lie in a second place too: (the one in `extents`, the other)."""

    def read(self, name: str, box: Region | None = None) -> Tensor:
        """A tensor by its HF name, or a box of it. Raises CheckpointError naming file or tensor."""
        info = self.info(name)
        box = whole(info.shape) if box is None else box
        overlaps = [(one, one.region.intersect(box)) for one in self.extents[name]]
        found = [(one, overlap) for one, overlap in overlaps if overlap]
        if len(found) == 1:
            return self.read_extent(found[0][0], box)
        tensor = torch.empty(box.shape, dtype=info.dtype)
        for extent, overlap in found:
            tensor[overlap.within(box).slices] = self.read_extent(extent, overlap)
        return tensor

    def read_extent(self, extent: Extent, box: Region) -> Tensor:
        """`box` of an HF tensor from the one place that holds it."""
        return self.files[extent.file].read(extent.key, extent.stored(box))

    def extent_bytes(self, extent: Extent) -> int:
        """What reading an extent of some other store takes from this one."""
        return extent.region.numel * self.info(extent.name).dtype.itemsize

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor. Raises CheckpointError if there is none of this name."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: the tensor {name} is missing")
        return self.tensors[name]


def read_into(store: Store, shards: Sequence[Shard]) -> None:
    """Fill the shards, whatever their dtype, one slice at a time.

    Raises CheckpointError naming a tensor that is missing or misshapen.
    """
    for shard in shards:
        piece = shard.piece
        shape = store.info(piece.name).shape
        if shape != piece.global_shape:
            raise CheckpointError(
                f"{store.folder}: {piece.name} has shape {shape}, "
                f"the model in config.json needs {piece.global_shape}"
            )
        shard.write(store.read(piece.name, piece.region))


def checked_tensors(
    folder: Path, found: Mapping[str, TensorInfo], arch: Architecture
) -> dict[str, TensorInfo]:
    """The tensors in the model's order. Raises CheckpointError unless they are exactly those of
    the model in config.json."""
    wanted = hf_tensors(arch)
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(
                f"{folder}: the tensor {name} is missing, which the model in config.json has; "
                "copy or download the folder again"
            )
        if found[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {found[name].shape}, the model in config.json "
                f"needs {shape}"
            )
        if not found[name].dtype.is_floating_point or found[name].dtype.itemsize < 2:
            raise CheckpointError(
                f"{folder}: {name} is {dtype_name(found[name].dtype)}; weights of 16 bits or more "
                "are read, not quantised ones"
            )
    if extra := sorted(found.keys() - wanted.keys()):
        raise CheckpointError(
            f"{folder}: {extra[0]} is no tensor of this model ({arch.family})"
            + (f", nor are {len(extra) - 1} more" if extra[1:] else "")
        )
    return {name: found[name] for name in wanted}


def disjoint(
    folder: Path, extents: Iterable[Extent], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, list[Extent]], list[tuple[Extent, Extent]]]:
    """Extents by tensor, and those that repeat one. Raises CheckpointError naming a tensor of which
    an element is in no file, or boxes that overlap without being the same."""
    by_name: dict[str, dict[Region, Extent]] = {}
    replicas = []
    for extent in extents:
        first = by_name.setdefault(extent.name, {}).setdefault(extent.region, extent)
        if first is not extent:
            replicas.append((first, extent))
    for name, boxes in by_name.items():
        for one, other in combinations(boxes.values(), 2):
            if one.region.intersect(other.region):
                raise CheckpointError(
                    f"{folder}: {one.file} and {other.file} hold overlapping parts of {name}; "
                    "they are not of one layout"
                )
        held, size = sum(region.numel for region in boxes), tensors[name].numel
        if held != size:
            raise CheckpointError(
                f"{folder}: of {name} only {held:,} of {size:,} elements are there; "
                "a file of another rank is missing"
            )
    return {name: list(boxes.values()) for name, boxes in by_name.items()}, replicas
