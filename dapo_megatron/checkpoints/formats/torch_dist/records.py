"""Records of a .distcp file. Each is what torch.save writes for one tensor or object: a zip archive
with a pickle that describes it, and the uncompressed elements."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.tensor_file import (
    TensorFileWriter,
    TensorInfo,
    cannot_write,
    drain,
    read_box,
)
from dapo_megatron.checkpoints.formats.torch_dist.metadata import Chunk, Record
from dapo_megatron.checkpoints.formats.torch_dist.pickles import (
    MAX_INTEGER,
    Inert,
    kind_of,
    load_pickle,
    shorten,
)
from dapo_megatron.files import open_regular
from dapo_megatron.types import CheckpointError, Region, dtype_name, whole

_MAX_PICKLE_BYTES = 256 * 2**20
_MAX_DIRECTORY_BYTES = 16 * 2**20
"""Maximum length of an archive's list of files, of 100 bytes each."""
_MAX_NAME = 100
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


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
        check_length(path, [(item.chunk.key, item.chunk.record) for item in items.values()])

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


def check_length(path: Path, records: list[tuple[str, Record]]) -> None:
    """Raise CheckpointError unless the file is long enough for its records."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: missing, though .metadata lists it for {records[0][0]}; copy the whole "
            "checkpoint again"
        )
    size = path.stat().st_size
    end = max(record.offset + record.length for _, record in records)
    if size < end:
        raise CheckpointError(
            f"{path}: cut off: by .metadata it needs {end:,} bytes, but the file has {size:,}; "
            "copy it again"
        )


def read_object(path: Path, key: str, record: Record | None = None) -> Any:
    """Return an object that torch.save wrote, with `Inert` objects in place of its classes.

    Without a record it is the whole file. Raises CheckpointError naming file and object.
    """
    where = f"{path}: {key}"
    record = record or Record(path.name, 0, path.stat().st_size)
    with _Archive(path, record, where) as archive:
        return archive.description()


def _start_of_elements(path: Path, chunk: Chunk) -> int:
    """Return the offset of a chunk's elements in the file.

    Raises CheckpointError unless the record is a contiguous tensor of the chunk's shape and dtype.
    """
    where = f"{path}: {chunk.key}{chunk.region}"
    with _Archive(path, chunk.record, where) as archive:
        value = archive.description()
        while kind_of(value) == "_rebuild_parameter" and value.args:
            value = value.args[0]
        try:
            (_, kind, name, _, size), first, shape, strides = value.args[:4]
            wanted, dtype = chunk.region.shape, _STORAGES.get(kind.__name__)
            is_tensor = kind_of(value) == "_rebuild_tensor_v2" and isinstance(value, Inert)
            numbers = (size, first, *shape, *strides)
            is_sound = all(type(number) is int and 0 <= number <= MAX_INTEGER for number in numbers)
            is_sound = is_sound and len(strides) == len(shape)
            is_sound = is_sound and type(name) is str and len(name) <= _MAX_NAME
        except (AttributeError, TypeError, ValueError):
            is_tensor = False
        if not is_tensor or not is_sound:
            raise CheckpointError(f"{where}: is no tensor; the file is damaged, copy it again")
        if tuple(shape) != wanted or dtype is not chunk.dtype:
            raise CheckpointError(
                f"{where}: is {dtype_name(dtype) if dtype else kind.__name__} "
                f"{shorten(tuple(shape))} in the file, but {dtype_name(chunk.dtype)} {wanted} in "
                ".metadata; file and metadata are from different checkpoints"
            )
        is_contiguous = tuple(
            stride for stride, length in zip(strides, shape, strict=True) if length > 1
        ) == tuple(prod(shape[axis + 1 :]) for axis, length in enumerate(shape) if length > 1)
        if not is_contiguous or first + prod(shape) > size:
            raise CheckpointError(f"{where}: its elements are not contiguous, which is not read")
        start = archive.start_of(f"data/{name}", size * chunk.dtype.itemsize)
        return start + int(first) * chunk.dtype.itemsize


class _Archive:
    """A record, opened. Raises CheckpointError that begins with `where`."""

    def __init__(self, path: Path, record: Record, where: str) -> None:
        self._where = where
        self._record = record
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from None
        window = _Window(self._file, record, _MAX_DIRECTORY_BYTES)
        try:
            self._zip = zipfile.ZipFile(window)
        except Exception as error:  # noqa: BLE001 - damaged archives raise many errors
            self._file.close()
            raise self._damaged(error) from None
        window.max_bytes = _MAX_PICKLE_BYTES
        self._names = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _damaged(self, error: object) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: damaged: not what torch.save writes ({error}); copy the file again"
        )

    def description(self) -> Any:
        """Return the pickle, with `Inert` objects in place of its classes."""
        order = self._read("byteorder", optional=b"little")
        if order != b"little":
            raise CheckpointError(
                f"{self._where}: has the byte order {order!r:.20}; only little endian is read"
            )
        return load_pickle(self._read("data.pkl"), self._where)

    def _read(self, name: str, optional: bytes | None = None) -> bytes:
        if name not in self._names and optional is not None:
            return optional
        entry = self._entry(name)
        if entry.file_size > _MAX_PICKLE_BYTES:
            raise self._damaged(f"{name} has {entry.file_size:,} bytes")
        try:
            return self._zip.read(entry)
        except Exception as error:  # noqa: BLE001 - damaged archives raise many errors
            raise self._damaged(error) from None

    def _entry(self, name: str) -> zipfile.ZipInfo:
        if name not in self._names:
            raise self._damaged(f"{name} is missing")
        if self._names[name].compress_type != zipfile.ZIP_STORED:
            raise self._damaged(f"{name} is compressed")
        return self._names[name]

    def start_of(self, name: str, nbytes: int) -> int:
        """Return the offset of an entry's data in the file."""
        entry = self._entry(name)
        self._file.seek(self._record.offset + entry.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
            raise self._damaged(f"{name} has no header")
        name_length, extra_length = map(int, _LOCAL_HEADER.unpack(header)[-2:])
        start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if entry.file_size != nbytes or start + nbytes > self._record.length:
            raise self._damaged(f"{name} has {entry.file_size:,} bytes instead of {nbytes:,}")
        return self._record.offset + start


class _Window(io.RawIOBase):
    """The bytes of a record, read like a separate file. One read returns at most `max_bytes`."""

    def __init__(self, file: Any, record: Record, max_bytes: int) -> None:
        self._file, self._record = file, record
        self.max_bytes = max_bytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._record.length}[whence]
        if base + offset < 0:
            raise ValueError("a seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(self._record.length - self._at, 0)
        wanted = rest if size is None or size < 0 else min(size, rest)
        if wanted > self.max_bytes:
            raise ValueError(f"a part has {wanted:,} bytes")
        self._file.seek(self._record.offset + self._at)
        data: bytes = self._file.read(wanted)
        self._at += len(data)
        return data


# ------------------------------------------------------------------------------- writing


class RecordFileWriter(TensorFileWriter):
    """Writer of a .distcp file. `num_leading` says how many axes of length 1 precede those of a
    tensor in its record. A record of None is at the end.

    The file is of use only with a `.metadata` that lists its records.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], num_leading: Mapping[str, int]
    ) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self.records: dict[str, Record] = {}
        """Record of each tensor."""
        self._starts: dict[str, int] = {}
        self._envelopes: list[tuple[int, _Envelope]] = []
        end = 0
        for key, info in tensors.items():
            envelope = _envelope((*(1,) * num_leading[key], *info.shape), info.dtype)
            self._envelopes.append((end, envelope))
            self._starts[key] = end + envelope.start
            self.records[key] = Record(path.name, end, envelope.length)
            end += envelope.length
        self._none = io.BytesIO()
        torch.save([None], self._none)
        self.none = Record(path.name, end, len(self._none.getvalue()))
        """Record of the object [None]."""
        self.nbytes = end + self.none.length

    def create(self) -> None:
        """Create the file in its final size, with zeros in place of elements."""
        try:
            with self.path.open("wb", buffering=0) as file:
                file.truncate(self.nbytes)
                for offset, envelope in self._envelopes:
                    for start, data in envelope.parts:
                        drain(file.fileno(), memoryview(data), offset + start)
                drain(file.fileno(), self._none.getbuffer(), self.none.offset)
        except OSError as error:
            raise cannot_write(self.path, self.nbytes, error) from None

    def finish(self) -> None:
        """Sync all data to disk."""
        try:
            with self.path.open("r+b", buffering=0) as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, self.nbytes, error) from None


@dataclass(frozen=True, slots=True)
class _Envelope:
    """Bytes that torch.save writes around the elements of a tensor, as (offset, bytes), with the
    offset of the elements and the length of the whole."""

    parts: tuple[tuple[int, bytes], ...]
    start: int
    length: int


@lru_cache(maxsize=4096)
def _envelope(shape: tuple[int, ...], dtype: torch.dtype) -> _Envelope:
    sink = _Sink()
    # The memory of an empty tensor is not touched, so it takes none.
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], sink))
    nbytes = prod(shape) * dtype.itemsize
    ends = [offset + len(data) for offset, data in sink.parts]
    [start] = [end for end, (next_start, _) in zip(ends, sink.parts[1:]) if next_start > end]
    assert sink.parts[ends.index(start) + 1][0] == start + nbytes
    return _Envelope(tuple(sink.parts), start, ends[-1])


class _Sink(io.RawIOBase):
    """A file that keeps what is written, and at which offset."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset if whence == os.SEEK_SET else self._at + offset
        return self._at

    def write(self, data: Any) -> int:
        self.parts.append((self._at, bytes(data)))
        self._at += len(self.parts[-1][1])
        return len(self.parts[-1][1])
