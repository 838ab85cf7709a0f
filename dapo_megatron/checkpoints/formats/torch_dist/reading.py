"""Contents of a torch_dist checkpoint, read without running anything that it says.

`.metadata` is read by boxes.py. Tensors are read with weights_only, and only the bytes that are
wanted. Other pickles (arguments of Megatron-LM) are read with placeholders for all classes.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo, read_box
from dapo_megatron.checkpoints.formats.torch_dist.boxes import (
    METADATA,
    UNREADABLE,
    FilePart,
    check_lengths,
    read_metadata,
)
from dapo_megatron.checkpoints.formats.weights_folder import check_file_name
from dapo_megatron.files import open_regular
from dapo_megatron.types import CheckpointError, Region, dtype_name, whole

_NOT_OF_THE_MODEL = ("optimizer.", "chained_", "rng.")
_ZIP_HEADER = 30
"""Bytes of a file's header in a zip archive, before its name. Lengths of name and extra field are
at 26."""


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
    """The tensors of the model in a checkpoint, their chunks, and other objects."""

    tensors: Mapping[str, TensorInfo]
    chunks: list[Chunk]
    objects: Mapping[str, Record]


def read_contents(folder: Path) -> Contents:
    """Return the contents of a checkpoint, without those of the optimizer. Raises CheckpointError
    naming the file or the tensor that does not make sense."""
    path = folder / METADATA
    metadata = read_metadata(folder)
    tensors: dict[str, TensorInfo] = {}
    chunks: list[Chunk] = []
    objects: dict[str, Record] = {}
    try:
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
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: damaged ({error}); copy it again") from error
    return Contents(tensors, chunks, objects)


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
    indices in the chunk."""

    chunk: Chunk
    leading: tuple[int, ...]

    @property
    def info(self) -> TensorInfo:
        """Shape and dtype without the leading axes."""
        return TensorInfo(self.chunk.region.shape[len(self.leading) :], self.chunk.dtype)


class RecordFile:
    """A .distcp file to read, with items by any key. No file stays open."""

    def __init__(self, path: Path, items: Mapping[str, ChunkEntry]) -> None:
        """Raises CheckpointError if the file is missing or cut off."""
        self.path = path
        self.metadata: dict[str, str] = {}
        self.tensors = {key: item.info for key, item in items.items()}
        self._items = items
        self._starts: dict[Record, int] = {}
        records = [item.chunk.record for item in items.values()]
        check_lengths(path.parent, [(path.name, each.offset, each.length) for each in records])

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """Return an item, or a box of it. Raises CheckpointError naming the file."""
        item = self._items[key]
        chunk, record = item.chunk, item.chunk.record
        if record not in self._starts:
            self._starts[record] = _start_of_elements(self.path, chunk)
        box = box or whole(item.info.shape)
        ones = (1,) * len(item.leading)
        inside = Region((*item.leading, *box.start), (*ones, *box.shape))
        info = TensorInfo(chunk.region.shape, chunk.dtype)
        return read_box(self.path, key, info, self._starts[record], inside).reshape(box.shape)


def _start_of_elements(path: Path, chunk: Chunk) -> int:
    """Return the offset of a chunk's elements in the file. Raises CheckpointError unless the record
    is a contiguous tensor of the chunk's shape and dtype."""
    record = chunk.record
    try:
        with open_regular(path) as file:
            view: Any = FilePart(file, record.offset, record.length)
            # Without memory, so that the elements are not read.
            tensor = torch.load(view, map_location="meta", weights_only=True)
            with zipfile.ZipFile(view) as archive:
                data = _entry(archive, "/data/0")
            file.seek(record.offset + data.header_offset + _ZIP_HEADER - 4)
            lengths = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: {chunk.key}: {error.strerror}") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: {chunk.key} is damaged ({error}); copy it again") from error
    is_plain = isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.storage_offset()
    if not is_plain or (tuple(tensor.shape), tensor.dtype) != (chunk.region.shape, chunk.dtype):
        raise CheckpointError(
            f"{path}: {chunk.key}{chunk.region} is no contiguous {dtype_name(chunk.dtype)} tensor "
            f"of shape {chunk.region.shape}"
        )
    size = chunk.region.numel * chunk.dtype.itemsize
    if data.compress_type != zipfile.ZIP_STORED or data.file_size < size:
        raise CheckpointError(f"{path}: {chunk.key} is compressed or cut off; save it again")
    name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    return record.offset + data.header_offset + _ZIP_HEADER + name + extra


def _entry(archive: zipfile.ZipFile, ending: str) -> zipfile.ZipInfo:
    [entry] = [entry for entry in archive.infolist() if entry.filename.endswith(ending)]
    return entry


# ---------------------------------------------------------------------------- other objects


class Placeholder:
    """An object of any class in a pickle. Its attributes are in `state`."""

    kind = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item, as of an OrderedDict."""

    def append(self, item: Any) -> None:
        """Ignore an item, as of a deque."""


def read_object(path: Path, record: Record | None = None) -> Any:
    """Return an object that torch.save wrote in a record, or in a file of its own, with a
    Placeholder for each object of a class. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            view: Any = file if record is None else FilePart(file, record.offset, record.length)
            with zipfile.ZipFile(view) as archive:
                entry = _entry(archive, "/data.pkl")
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("compressed")
                with archive.open(entry) as data:
                    return _Unpickler(data).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy it again") from error


class _Unpickler(pickle.Unpickler):
    """Makes a placeholder instead of calling what a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Placeholder,), {"kind": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """Return nothing for the memory of a tensor."""
        return None
