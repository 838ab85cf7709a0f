"""Contents of a torch_dist checkpoint, read without running anything in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.torch_dist.boxes import (
    METADATA,
    check_lengths,
    read_metadata,
)
from dapo_megatron.checkpoints.formats.torch_dist.records import (
    Record,
    StoredTensor,
    naming,
    read_object,
)
from dapo_megatron.checkpoints.formats.weights_folder import check_file_name
from dapo_megatron.model import ADAPTER
from dapo_megatron.types import CheckpointError, Region, whole

COMMON = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the same content in checkpoints of newer Megatron-core."""
_NOT_OF_THE_MODEL = ("optimizer.", "chained_", "rng.", ADAPTER)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box `region` of the tensor `key`, saved in a record."""

    key: str
    region: Region
    dtype: torch.dtype
    record: Record


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of the model in a checkpoint, their chunks, and other objects."""

    tensors: Mapping[str, TensorInfo]
    chunks: list[Chunk]
    objects: Mapping[str, Record]


def read_contents(folder: Path) -> Contents:
    """Return the contents of a checkpoint, without the optimizer's. Raises CheckpointError
    naming the file or the tensor that does not make sense."""
    path = folder / METADATA
    metadata = read_metadata(folder)
    tensors: dict[str, TensorInfo] = {}
    chunks: list[Chunk] = []
    objects: dict[str, Record] = {}
    with naming(path):
        for index, place in metadata.storage_data.items():
            check_file_name(place.relative_path, f"{path}: {index.fqn}")
            if index.offset is None:
                objects[index.fqn] = _record(place)
        for key, info in metadata.state_dict_metadata.items():
            if not isinstance(info, TensorStorageMetadata) or key.startswith(_NOT_OF_THE_MODEL):
                continue
            tensors[key] = TensorInfo(_numbers(info.size), info.properties.dtype)
            if not isinstance(info.properties.dtype, torch.dtype):
                raise ValueError(f"{key} has no dtype")
            for chunk in info.chunks:
                region = Region(_numbers(chunk.offsets), _numbers(chunk.sizes))
                if whole(tensors[key].shape).intersect(region) != region:
                    raise ValueError(f"{key} has the shape {tensors[key].shape}, not {region}")
                place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                if place.transform_descriptors:
                    raise ValueError(f"{key} is stored with {place.transform_descriptors}")
                chunks.append(Chunk(key, region, info.properties.dtype, _record(place)))
    return Contents(tensors, chunks, objects)


def read_common(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return what is not sharded (numbers of steps, settings of the optimizer, arguments), and its
    file. Raises CheckpointError naming it."""
    path, common = folder / COMMON, None
    if path.exists():
        common = read_object(path)
    elif record := read_contents(folder).objects.get(_COMMON_OBJECT):
        path = folder / record.file
        listed = read_object(path, record)
        common = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(common, dict):
        raise CheckpointError(
            f"{path}: missing, or not the common state of a checkpoint of Megatron; copy the whole "
            "checkpoint again"
        )
    return path, common


def _record(place: Any) -> Record:
    return Record(place.relative_path, *_numbers((place.offset, place.length)))


def _numbers(values: Any) -> tuple[int, ...]:
    """Return sizes or offsets. Raises ValueError for anything else, without printing it."""
    if any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise ValueError("a size or an offset is no number, or absurd")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """A tensor without the leading axes of a chunk: the entry `leading` of each of them, which are
    indices in the chunk. With `plus_one`, it is 1 + the stored values, in this dtype."""

    chunk: Chunk
    leading: tuple[int, ...]
    plus_one: torch.dtype | None = None

    @property
    def info(self) -> TensorInfo:
        """Shape and dtype without the leading axes."""
        dtype = self.plus_one or self.chunk.dtype
        return TensorInfo(self.chunk.region.shape[len(self.leading) :], dtype)


def plus_one(folder: Path, entry: ChunkEntry) -> ChunkEntry:
    """Return `entry` with 1 + its values, as Megatron computes it: in float32, or in the stored
    dtype if that holds every sum."""
    values = RecordFile(folder / entry.chunk.record.file, {"": entry}).read("")
    sums = _plus_one(values)
    is_held = torch.equal(sums.to(values.dtype).to(sums.dtype), sums)
    return replace(entry, plus_one=values.dtype if is_held else sums.dtype)


def _plus_one(values: Tensor) -> Tensor:
    return 1 + (values if values.dtype == torch.float64 else values.float())


class RecordFile:
    """A .distcp file to read, with items by any key. No file stays open."""

    def __init__(self, path: Path, items: Mapping[str, ChunkEntry]) -> None:
        """Raises CheckpointError if the file is missing or cut off."""
        self.path = path
        self.tensors = {key: item.info for key, item in items.items()}
        self._items = items
        self._opened: dict[Record, StoredTensor] = {}
        records = [item.chunk.record for item in items.values()]
        check_lengths(path.parent, records)

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """Return an item, or a box of it. Raises CheckpointError naming the file."""
        item = self._items[key]
        chunk, record = item.chunk, item.chunk.record
        if record not in self._opened:
            info = TensorInfo(chunk.region.shape, chunk.dtype)
            self._opened[record] = StoredTensor.open(self.path, record, chunk.key, info)
        box = box or whole(item.info.shape)
        ones = (1,) * len(item.leading)
        inside = Region((*item.leading, *box.start), (*ones, *box.shape))
        values = self._opened[record].read(inside).reshape(box.shape)
        return values if item.plus_one is None else _plus_one(values).to(item.plus_one)
