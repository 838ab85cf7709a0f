"""Records of a .distcp file: what one call of `torch.save` wrote into a part of it.

Tensors are read with weights_only, and only the bytes that are wanted. Other pickles (arguments of
Megatron-LM) are read with placeholders for all classes.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo, read_box
from dapo_megatron.files import open_regular
from dapo_megatron.types import CheckpointError, Region, dtype_name

_ZIP_HEADER = 30
"""Bytes of a file's header in a zip archive, before its name. Lengths of name and extra field are
at 26."""


UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, EOFError, AttributeError, ImportError),
    *(IndexError, KeyError, MemoryError, RuntimeError, TypeError, ValueError, AssertionError),
    OverflowError,
)
"""Exceptions of reading a damaged file."""


@contextmanager
def naming(place: Path | str) -> Iterator[None]:
    """Convert what reading a damaged file raises into CheckpointError. `place` is the file, or the
    file and a tensor in it."""
    try:
        yield
    except OSError as error:
        path = error.filename or place
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"{place}: cannot be read ({error}); if it is damaged, copy it again"
        ) from error


@dataclass(frozen=True, slots=True, order=True)
class Record:
    """`length` bytes of a file from `offset`: what one call of torch.save wrote."""

    file: str
    offset: int
    length: int


class FilePart(io.RawIOBase):
    """A part of a file, as a separate file. (torch's `_create_file_view` has another end than
    zipfile expects.)"""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("seek before the start")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        num_read: int = self._file.readinto(memoryview(buffer)[:size])  # type: ignore[attr-defined]
        self._at += num_read
        return num_read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor in a record. Any box of it can be read."""

    path: Path
    key: str
    info: TensorInfo
    start: int
    """Offset of its elements in the file, in bytes."""

    @classmethod
    def open(cls, path: Path, record: Record, key: str, info: TensorInfo) -> StoredTensor:
        """Find the elements of the tensor `key` in a record. Raises CheckpointError unless it is a
        contiguous tensor of this shape and dtype."""
        with naming(f"{path}: {key}"), open_regular(path) as file:
            view: Any = FilePart(file, record.offset, record.length)
            # Without memory, so that the elements are not read.
            tensor = torch.load(view, map_location="meta", weights_only=True)
            with zipfile.ZipFile(view) as archive:
                data = _entry(archive, "/data/0")
            file.seek(record.offset + data.header_offset + _ZIP_HEADER - 4)
            lengths = file.read(4)
        is_plain = (
            isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.storage_offset()
        )
        if not is_plain or (tuple(tensor.shape), tensor.dtype) != (info.shape, info.dtype):
            raise CheckpointError(
                f"{path}: {key} is no contiguous {dtype_name(info.dtype)} tensor of shape "
                f"{info.shape}"
            )
        if data.compress_type != zipfile.ZIP_STORED or data.file_size < info.nbytes:
            raise CheckpointError(f"{path}: {key} is compressed or cut off; save it again")
        name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        start = record.offset + data.header_offset + _ZIP_HEADER + name + extra
        return cls(path, key, info, start)

    def read(self, box: Region) -> Tensor:
        """Return a box, reading only the bytes needed. Raises CheckpointError naming the file."""
        return read_box(self.path, self.key, self.info, self.start, box)


def _entry(archive: zipfile.ZipFile, ending: str) -> zipfile.ZipInfo:
    [entry] = [entry for entry in archive.infolist() if entry.filename.endswith(ending)]
    return entry


# ---------------------------------------------------------------------------- other objects


class Placeholder:
    """An object of any class in a pickle. Its attributes are in `state`."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments of its class."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item, as of an OrderedDict."""

    def append(self, item: Any) -> None:
        """Ignore an item, as of a deque."""


def read_object(path: Path, record: Record | None = None) -> Any:
    """Return an object that torch.save wrote in a record, or in a separate file, with a
    Placeholder for each object of a class. Raises CheckpointError."""
    with naming(path), open_regular(path) as file:
        view: Any = file if record is None else FilePart(file, record.offset, record.length)
        with zipfile.ZipFile(view) as archive:
            entry = _entry(archive, "/data.pkl")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("compressed")
            with archive.open(entry) as data:
                return _Unpickler(data).load()


class _Unpickler(pickle.Unpickler):
    """Makes a placeholder instead of calling what a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Placeholder,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Return nothing for the memory of a tensor."""
        return None
