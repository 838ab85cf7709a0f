"""Boxes of whole tensors in Megatron's format `torch_dist`, by torch's distributed checkpointing.

Each rank writes its boxes to `__<rank>_0.distcp` without asking others. Rank 0 then writes
`.metadata`, which records where each box is. So nothing is pickled between ranks, and planning
costs nothing. A rank reads whatever boxes it wants.

`.metadata` is a pickle. `read_metadata` reads only those that name nothing but the classes of
such a file, and tensors are read with weights_only. So a folder of others cannot run code. (It can
make this process use much memory.) `torch.distributed.checkpoint.load` and Megatron-core run what
a folder says.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.torch_dist.records import Record, StoredTensor, naming
from dapo_megatron.checkpoints.formats.weights_folder import check_file_name
from dapo_megatron.types import CheckpointError, Region, dtype_name

METADATA = ".metadata"
Shape = tuple[int, ...]
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron-core also saves the plan of each rank.
    "torch.distributed.checkpoint.planner": {
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    "torch.serialization": {"_get_layout"},
    "torch": {
        *("Size", "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8"),
        "strided",
    },
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}
"""Names that a `.metadata` may have, by module."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the tensor `key`, and this rank's memory of it.

    shape          of the whole tensor
    other_key      is read if `key` is not stored
    may_round      whether it may be read in lower precision than it is stored
    may_be_padded  whether others store more rows, which pad the vocabulary
    """

    key: str
    offset: Shape
    shape: Shape
    values: Tensor
    other_key: str = ""
    may_round: bool = False
    may_be_padded: bool = False

    @property
    def sizes(self) -> Shape:
        """Shape of the box."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the values."""
        return self.values.dtype


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Place of a box in a file; of an object with an empty `offset` and no `dtype`."""

    key: str
    offset: Shape
    sizes: Shape
    shape: Shape
    dtype: torch.dtype | None
    file: str
    start: int
    num_bytes: int


# ---------------------------------------------------------------------------- writing


def write_boxes(
    folder: Path, rank: int, boxes: Iterable[Box], objects: Mapping[str, bytes]
) -> tuple[list[StoredBox], dict[str, str]]:
    """Write the boxes in host memory of one rank, one at a time, and objects that only Megatron
    reads. Return their places, and the SHA-256 of what was written by file. Raises OSError."""
    path = folder / f"__{rank}_0.distcp"
    stored = []
    with path.open("wb") as file:
        stream = _HashedStream(file)
        for key, value in objects.items():
            start = stream.tell()
            stream.write(value)
            stored.append(StoredBox(key, (), (), (), None, path.name, start, len(value)))
        for box in boxes:
            start = stream.tell()
            _save(box.values.detach(), stream)
            place = path.name, start, stream.tell() - start
            stored.append(StoredBox(box.key, box.offset, box.sizes, box.shape, box.dtype, *place))
            del box  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
    return stored, {path.name: stream.digest.hexdigest()}


def _save(values: Tensor, stream: _HashedStream) -> None:
    # torch.save would write the whole memory that the values are a part of.
    is_part = values.untyped_storage().nbytes() != values.nbytes
    try:
        torch.save(values.clone() if is_part else values, cast(IO[bytes], stream))
    except RuntimeError as error:  # torch.save replaces the error of a full disk
        raise (stream.error or error) from error


def write_metadata(folder: Path, stored: Iterable[StoredBox]) -> None:
    """Write `.metadata` for the boxes of all ranks. Raises OSError, and CheckpointError naming a
    tensor with elements that are missing or were written twice."""
    by_key: dict[str, list[StoredBox]] = {}
    results = []
    for box in stored:
        by_key.setdefault(box.key, []).append(box)
        offset = None if box.dtype is None else torch.Size(box.offset)
        place = _StorageInfo(box.file, box.start, box.num_bytes)
        results.append(WriteResult(MetadataIndex(box.key, offset), box.num_bytes, place))
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for key, boxes in by_key.items():
        first = boxes[0]
        if first.dtype is None:
            tensors[key] = BytesStorageMetadata()
            continue
        num_written = sum(prod(box.sizes) for box in boxes)
        if num_written != prod(first.shape) or {box.dtype for box in boxes} != {first.dtype}:
            raise CheckpointError(
                f"{folder}: {num_written:,} of {prod(first.shape):,} elements of {key} were written"
            )
        chunks = [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes)) for box in boxes
        ]
        properties = TensorProperties(dtype=first.dtype)
        tensors[key] = TensorStorageMetadata(properties, torch.Size(first.shape), chunks)
    FileSystemWriter(folder).finish(Metadata(tensors), [results])


class _HashedStream(io.RawIOBase):
    """Computes the SHA-256 of what is written, so that a disk that corrupts data is noticed."""

    def __init__(self, file: Any) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise

    def fileno(self) -> int:
        return int(self._file.fileno())


# ---------------------------------------------------------------------------- reading


def read_metadata(folder: Path) -> Metadata:
    """Return the contents of `.metadata`. Raises CheckpointError, also if it names anything but the
    classes of such a file."""
    path = folder / METADATA
    with naming(path), path.open("rb") as file:
        metadata = _SafeUnpickler(file).load()
        is_list = isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, dict)
    if not is_list:
        raise CheckpointError(f"{path}: is no list of tensors")
    return cast(Metadata, metadata)


class Reading:
    """Reads of boxes of a checkpoint. Everything is checked before anything is read."""

    def __init__(self, folder: Path, boxes: Iterable[Box]) -> None:
        """Look the boxes up. Raises CheckpointError naming a tensor that is missing, has another
        shape or would be rounded although it may not, or a file that is missing or cut off."""
        self._folder, metadata = folder, read_metadata(folder)
        self._reads: list[tuple[Record, str, TensorInfo, Region, Tensor]] = []
        with naming(folder / METADATA):
            for box in boxes:
                key, info = _source(folder, box, metadata.state_dict_metadata)
                wanted = ChunkStorageMetadata(torch.Size(box.offset), box.values.shape)
                items = create_read_items_for_chunk_list(key, info, [wanted])
                if sum(prod(item.lengths) for item in items) != box.values.numel():
                    raise CheckpointError(f"{folder}: elements of {key} are missing")
                for item in items:
                    place = metadata.storage_data[item.storage_index]
                    chunk = info.chunks[cast(int, item.storage_index.index)]
                    stored = TensorInfo(tuple(chunk.sizes), info.properties.dtype)
                    part = Region(tuple(item.storage_offsets), tuple(item.lengths))
                    target = _part(box.values, item.dest_offsets, item.lengths)
                    record = Record(place.relative_path, place.offset, place.length)
                    self._reads.append((record, key, stored, part, target))
            check_lengths(folder, {record for record, *_ in self._reads})

    @torch.no_grad()
    def run(self) -> None:
        """Read the boxes into their memory, in the order of the files. Raises CheckpointError
        naming a damaged file."""
        opened: dict[Record, StoredTensor] = {}  # many experts are in one record
        for record, key, stored, part, target in sorted(self._reads, key=itemgetter(0)):
            if record not in opened:
                path = self._folder / record.file
                opened[record] = StoredTensor.open(path, record, key, stored)
            target.copy_(opened[record].read(part))


def _part(tensor: Tensor, offset: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """Return a view of a box inside a tensor."""
    for dim, (start, length) in enumerate(zip(offset, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def check_lengths(folder: Path, records: Iterable[Record]) -> None:
    """Raise CheckpointError naming a file that is missing or cut off."""
    needed: dict[str, int] = {}
    for record in records:
        needed[record.file] = max(needed.get(record.file, 0), record.offset + record.length)
    for name, num_bytes in needed.items():
        check_file_name(name, folder / METADATA)
        if not (folder / name).exists() or (folder / name).stat().st_size < num_bytes:
            raise CheckpointError(
                f"{folder / name}: missing or cut off: {num_bytes:,} bytes are needed; copy the "
                "checkpoint again"
            )


def _source(folder: Path, box: Box, stored: Mapping[str, Any]) -> tuple[str, TensorStorageMetadata]:
    """Return the stored tensor with the values of a box. Raises CheckpointError."""
    key = box.key if box.key in stored or not box.other_key else box.other_key
    info = stored.get(key)
    if not isinstance(info, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: {key} is missing")
    rows = (box.shape[0],) if box.may_be_padded and info.size[0] >= box.shape[0] else ()
    if (*rows, *info.size[len(rows) :]) != box.shape:
        raise CheckpointError(f"{folder}: {key} has shape {tuple(info.size)}, not {box.shape}")
    saved, dtype = info.properties.dtype, box.dtype
    if not box.may_round and torch.promote_types(saved, dtype) != dtype:
        raise CheckpointError(
            f"{folder}: {key} was saved in {dtype_name(saved)} and would be rounded to "
            f"{dtype_name(dtype)}. Resume with the policy.precision and optimizer.moments of "
            "the run that saved it, or start a new run with its weights as model.path"
        )
    return key, info


class _SafeUnpickler(pickle.Unpickler):
    """Finds allowed names only, and does not let a pickle change a class."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, and reading it would run that")
        if module == "pathlib":
            return _no_path  # where it was saved
        named = super().find_class(module, name)
        if isinstance(named, type):
            self._classes.setdefault(named, dict(vars(named)))
        return named

    def load(self) -> Any:
        try:
            value = super().load()
        finally:
            changed = [named for named, saved in self._classes.items() if _restore(named, saved)]
        if changed:
            raise pickle.UnpicklingError("it changes a class")
        return value


def _no_path(*parts: Any) -> None:
    return None


def _restore(named: type, attributes: Mapping[str, Any]) -> bool:
    """Undo what a pickle did to a class. Return whether it did anything."""
    current = dict(vars(named))
    changed = {name for name in current if current[name] is not attributes.get(name, current)}
    for name in changed & attributes.keys():
        setattr(named, name, attributes[name])
    for name in changed - attributes.keys():
        delattr(named, name)
    return bool(changed)
