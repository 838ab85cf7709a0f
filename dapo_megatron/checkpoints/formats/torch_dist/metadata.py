"""The file `.metadata` of a torch_dist checkpoint: which file holds which chunk of which tensor."""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.torch_dist.pickles import (
    MAX_INTEGER,
    Inert,
    kind_of,
    load_pickle,
    shorten,
)
from dapo_megatron.checkpoints.formats.weights_folder import check_file_name
from dapo_megatron.files import read_file
from dapo_megatron.types import CheckpointError, Region, whole

METADATA = ".metadata"
_MAX_BYTES = 2**30
_MAX_AXES = 16
_OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True, slots=True)
class Record:
    """`length` bytes of a file from `offset`: what one call of torch.save wrote."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box `region` of the tensor `key`, saved in a record."""

    key: str
    region: Region
    dtype: torch.dtype
    record: Record


@dataclass(frozen=True, slots=True)
class Contents:
    """Content of `.metadata`: the tensors of the model, their chunks, and other objects."""

    tensors: Mapping[str, TensorInfo]
    chunks: list[Chunk]
    objects: Mapping[str, Record]


def read_metadata(folder: Path) -> Contents:
    """Read `.metadata`, without the tensors of the optimizer.

    Raises CheckpointError naming the file or the tensor that does not make sense.
    """
    path = folder / METADATA
    try:
        data = read_file(path, _MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CheckpointError(f"{path}: damaged: {error.strerror}; copy it again") from None
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    content = load_pickle(data, str(path))
    try:
        listed = _field(content, "Metadata", "state_dict_metadata", dict)
        storage = _field(content, "Metadata", "storage_data", dict)
        records = dict(_record(path, *item) for item in storage.items())
        tensors: dict[str, TensorInfo] = {}
        chunks: list[Chunk] = []
        for key, entry in listed.items():
            if not isinstance(key, str):
                raise _MalformedError(f"the name of a tensor is {shorten(key)}")
            if kind_of(entry) == "TensorStorageMetadata" and not _OPTIMIZER.match(key):
                tensors[key] = _info(key, entry)
                chunks += _chunks(path, key, entry, tensors[key], records)
    except _MalformedError as error:
        raise CheckpointError(f"{path}: damaged: {error}; copy it again") from None
    objects = {key: record for (key, start), record in records.items() if start is None}
    return Contents(tensors, chunks, objects)


class _MalformedError(Exception):
    """A value of `.metadata` is not what it must be."""


def _field(value: Any, kind: str, name: str, wanted: type) -> Any:
    """Return an attribute of an object that was pickled from the class `kind`."""
    if not isinstance(value, Inert) or kind_of(value) != kind:
        raise _MalformedError(f"a {kind_of(value)} where a {kind} must be")
    result = value.get(name)
    if not isinstance(result, wanted) or isinstance(result, bool):
        raise _MalformedError(f"{name} of a {kind} is {shorten(result)}")
    return result


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _sizes(key: str, value: Any, kind: str, name: str) -> tuple[int, ...]:
    sizes: tuple[int, ...] = _field(value, kind, name, tuple)
    if len(sizes) > _MAX_AXES or not all(map(_is_length, sizes)):
        raise _MalformedError(f"{key}: {name} of a {kind} is {shorten(sizes)}")
    return sizes


def _record(path: Path, index: Any, info: Any) -> tuple[tuple[str, Any], Record]:
    """Return ((key, start of the chunk or None), record)."""
    key = _field(index, "MetadataIndex", "fqn", str)
    start = index.get("offset")
    if start is not None:
        start = _sizes(key, index, "MetadataIndex", "offset")
    name = _field(info, "_StorageInfo", "relative_path", str)
    check_file_name(name, f"{path}: {key}")
    numbers = [_field(info, "_StorageInfo", field, int) for field in ("offset", "length")]
    if not all(map(_is_length, numbers)):
        offset, length = map(shorten, numbers)
        raise _MalformedError(f"{key} is at {offset} in {name}, with {length} bytes")
    if transforms := info.get("transform_descriptors"):
        raise CheckpointError(
            f"{path}: {key} is stored with {shorten(transforms)}, which cannot be read; save the "
            "checkpoint without it"
        )
    return (key, start), Record(name, *numbers)


def _info(key: str, entry: Inert) -> TensorInfo:
    properties = _field(entry, "TensorStorageMetadata", "properties", Inert)
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise _MalformedError(f"a tensor has the dtype {shorten(dtype)}")
    return TensorInfo(_sizes(key, entry, "TensorStorageMetadata", "size"), dtype)


def _chunks(
    path: Path,
    key: str,
    entry: Inert,
    info: TensorInfo,
    records: Mapping[tuple[str, Any], Record],
) -> Iterable[Chunk]:
    for chunk in _field(entry, "TensorStorageMetadata", "chunks", list):
        start = _sizes(key, chunk, "ChunkStorageMetadata", "offsets")
        region = Region(start, _sizes(key, chunk, "ChunkStorageMetadata", "sizes"))
        is_inside = (
            len(start) == len(region.shape) == len(info.shape)
            and whole(info.shape).intersect(region) == region
        )
        if not is_inside:
            raise _MalformedError(f"{key} has the shape {info.shape}, but a chunk at {region}")
        record = records.get((key, start))
        if record is None:
            raise _MalformedError(f"no file is named for {key}{region}")
        if record.length < region.numel * info.dtype.itemsize:
            raise _MalformedError(f"{key}{region} is in only {record.length:,} bytes")
        yield Chunk(key, region, info.dtype, record)


def write_metadata(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    chunks: Iterable[Chunk],
    objects: Mapping[str, Record],
) -> None:
    """Write `.metadata` with torch's own classes."""
    # Imported here because it takes a second, and reading does not need it.
    from torch.distributed.checkpoint import metadata as saved
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def info_of(record: Record) -> _StorageInfo:
        return _StorageInfo(record.file, record.offset, record.length)

    entries: dict[str, Any] = {
        key: saved.TensorStorageMetadata(
            saved.TensorProperties(info.dtype), torch.Size(info.shape), []
        )
        for key, info in tensors.items()
    }
    storage: dict[saved.MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        start, shape = torch.Size(chunk.region.start), torch.Size(chunk.region.shape)
        entries[chunk.key].chunks.append(saved.ChunkStorageMetadata(start, shape))
        storage[saved.MetadataIndex(chunk.key, start)] = info_of(chunk.record)
    for key, record in objects.items():
        entries[key] = saved.BytesStorageMetadata()
        storage[saved.MetadataIndex(key)] = info_of(record)
    content = saved.Metadata(entries, storage_data=storage, version="1.0.0")
    (folder / METADATA).write_bytes(pickle.dumps(content))
