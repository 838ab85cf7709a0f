"""Writing a store of any format: its files are known beforehand, and filled box by box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.file import TensorFileWriter, TensorInfo, check_room
from dapo_megatron.checkpoints.formats.folder import copy_companions
from dapo_megatron.checkpoints.formats.store import Extent, Store
from dapo_megatron.types import Region, whole

BLOCK_BYTES = 64 * 2**20
"""Whoever goes through a store holds at most so much at once (a single row may be longer)."""


@dataclass
class FilePlan:
    """A file to be: its tensors as stored, what of the HF tensors fills them, its metadata."""

    name: str
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)


class StoreWriter:
    """Writes the planned files into a folder.

    One process calls `create`; then any process writes what it has; then, when all have, one calls
    `finish`, and only from then on can the files be read.
    """

    def __init__(self, folder: Path, plans: Sequence[FilePlan]) -> None:
        self.folder = folder
        self.extents = [extent for plan in plans for extent in plan.extents]
        self._files = {
            plan.name: TensorFileWriter(folder / plan.name, plan.tensors, plan.metadata)
            for plan in plans
        }
        self._by_name: dict[str, list[Extent]] = {}
        for extent in self.extents:
            self._by_name.setdefault(extent.name, []).append(extent)
        self.nbytes = sum(file.nbytes for file in self._files.values())
        """Of all files."""

    def create(self) -> None:
        """Make the files in their final size. Raises CheckpointError if the disk has no room."""
        check_room(self.folder, self.nbytes)
        for file in self._files.values():
            file.create()

    def write(self, name: str, value: Tensor, box: Region | None = None) -> None:
        """Write an HF tensor, or a box of it, in each place that wants some of it.

        Raises CheckpointError on a full disk; whoever made the folder removes it (`publish` does).
        """
        box = whole(value.shape) if box is None else box
        for extent in self._by_name[name]:
            if overlap := extent.region.intersect(box):
                self.write_extent(extent, overlap, value[overlap.within(box).slices])

    def write_extent(self, extent: Extent, box: Region, value: Tensor) -> None:
        """Write `box` of an HF tensor in one of its places, in the dtype of that place."""
        file = self._files[extent.file]
        dtype = file.tensors[extent.key].dtype
        file.write(extent.key, value.detach().to(dtype), extent.stored(box))

    def finish(self, source: Path, dtype: torch.dtype | None = None) -> None:
        """Make the files valid, and copy what is no weights from `source`: config.json (with its
        dtype set to `dtype`, if given), tokenizer, chat template, generation config."""
        for file in self._files.values():
            file.finish()
        copy_companions(source, self.folder, dtype)


def fill(target: StoreWriter, source: Store, progress: Callable[[int], object]) -> None:
    """Write all of `source`, block by block. `progress` is told the bytes of each as read."""
    # In the order of the source: ranks that share a tensor take turns while it is in the cache.
    order = {name: number for number, name in enumerate(source.tensors)}
    for extent in sorted(target.extents, key=lambda one: (order[one.name], one.region.start)):
        info = source.info(extent.name)
        for box in blocks(extent.region, info.dtype.itemsize):
            value = source.read(extent.name, box)
            target.write_extent(extent, box, value)
            progress(value.nbytes)


def blocks(region: Region, itemsize: int, max_bytes: int = BLOCK_BYTES) -> Iterator[Region]:
    """Cut a box along its first dimension into boxes of at most `max_bytes`, or of one row."""
    if not region.shape:
        yield region
        return
    row_bytes = region.numel // region.shape[0] * itemsize
    step = max(1, max_bytes // max(row_bytes, 1))
    for first in range(0, region.shape[0], step):
        rows = min(step, region.shape[0] - first)
        yield Region((region.start[0] + first, *region.start[1:]), (rows, *region.shape[1:]))
