"""Reading and writing boxes of the tensors of one safetensors file, in any order.

The format (safetensors documentation, "Format") has three parts: the length of the header in 8
bytes, little-endian; the header, which is JSON {key: {dtype, shape, data_offsets}} with offsets
from the end of the header; the data in row-major order.

Files are not memory-mapped, because mapped pages count as resident memory of the process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dapo_megatron.files import open_regular, parse_json
from dapo_megatron.types import CheckpointError, Region, whole

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtype by its name in the format."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.numel * self.dtype.itemsize


class TensorFile:
    """A safetensors file to read. Only the header is kept in memory, and no file stays open."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CheckpointError if the file is missing, truncated, not completely
        written, or not a safetensors file."""
        self.path = path
        header, self._data_start, file_bytes = _read_header(path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict):
            raise CheckpointError(f"{path}: not a safetensors file (its metadata is no object)")
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        ranges = []
        for key, entry in header.items():
            info, start, stop = _parse(path, key, entry)
            self.tensors[key] = info
            self._offsets[key] = self._data_start + start
            ranges.append((start, stop, key))
        end = self._data_start + _end_of(path, sorted(ranges))
        if file_bytes != end:
            fault = "cut off" if file_bytes < end else "too long"
            raise CheckpointError(
                f"{path}: {fault}: by its header it needs {end:,} bytes, but the file has "
                f"{file_bytes:,}; copy or download it again"
            )

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """Return a tensor, or a box of it, reading only the bytes needed. Raises CheckpointError
        naming the file."""
        info = self.tensors[key]
        return read_box(self.path, key, info, self._offsets[key], box or whole(info.shape))

    def split(self, key: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Replace a tensor by those that follow each other in it, with these names and shapes."""
        info, offset = self.tensors.pop(key), self._offsets.pop(key)
        for name, shape in shapes.items():
            self.tensors[name] = part = TensorInfo(shape, info.dtype)
            self._offsets[name] = offset
            offset += part.nbytes


class TensorFileWriter:
    """Writer of a safetensors file with keys, shapes and dtypes that are known in advance.

    One process calls `create`. Then many processes may call `write` concurrently on the same file.
    At last one process calls `finish`. Until then the header length is 0, so no reader accepts the
    incomplete file.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self.tensors = dict(tensors)
        offset, entries = 0, dict[str, Any]()
        # Tensors with the largest elements first, so that all are aligned to their element size.
        for key, info in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            stop = offset + info.nbytes
            entries[key] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, stop],
            }
            offset = stop
        text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":"))
        header = text.encode()
        self._header = header + b" " * (-len(header) % _LENGTH_BYTES)
        self._data_start = _LENGTH_BYTES + len(self._header)
        self._starts = {
            key: self._data_start + entry["data_offsets"][0] for key, entry in entries.items()
        }
        self.nbytes = self._data_start + offset
        """Size of the file in bytes."""

    def create(self) -> None:
        """Create the file in its final size, with zeros except for the header."""
        try:
            with self.path.open("wb") as file:
                file.truncate(self.nbytes)
                file.seek(_LENGTH_BYTES)
                file.write(self._header)
        except OSError as error:
            raise cannot_write(self.path, self.nbytes, error) from None

    def write(self, key: str, value: Tensor, box: Region | None = None) -> None:
        """Write a tensor, or a box of it. Raises ValueError if its dtype or shape does not match,
        CheckpointError if the file cannot be written."""
        info = self.tensors[key]
        box = whole(info.shape) if box is None else box
        if value.dtype != info.dtype or tuple(value.shape) != box.shape:
            raise ValueError(f"{key}: {value.dtype} {tuple(value.shape)} is not {info} {box}")
        source = bytes_of(value.detach().to("cpu").contiguous())
        size, done = info.dtype.itemsize, 0
        try:
            with self.path.open("r+b", buffering=0) as file:
                for start, count in _runs(info.shape, box):
                    part = source[done : done + count * size]
                    drain(file.fileno(), part, self._starts[key] + start * size)
                    done += count * size
        except OSError as error:
            raise cannot_write(self.path, self.nbytes, error) from None

    def finish(self) -> None:
        """Sync all data to disk, then write the header length, which makes the file valid."""
        length = memoryview(len(self._header).to_bytes(_LENGTH_BYTES, "little"))
        try:
            with self.path.open("r+b", buffering=0) as file:
                os.fsync(file.fileno())
                drain(file.fileno(), length, 0)
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, self.nbytes, error) from None


def cannot_write(path: Path, nbytes: int, error: OSError) -> CheckpointError:
    """Return the error of a file of `nbytes` that cannot be written."""
    if error.errno not in _NO_ROOM:
        return CheckpointError(f"{path}: cannot be written ({error.strerror})")
    free = shutil.disk_usage(path.parent).free
    return CheckpointError(
        f"{path}: no room ({error.strerror}): the file needs {nbytes:,} bytes, "
        f"{free:,} are free there"
    )


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError unless the disk of `folder` has room for `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{folder}: no room: {num_bytes:,} bytes are needed, {free:,} are free"
        )


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return (header, offset of the data, size of the file), in bytes. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if file_bytes and length == 0:
                raise CheckpointError(
                    f"{path}: half written: the program that wrote it did not finish"
                )
            if not 0 < length <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise CheckpointError(
                    f"{path}: cut off inside the header, or not a safetensors file "
                    f"({file_bytes:,} bytes); copy or download it again"
                )
            header = parse_json(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is no object)")
    return header, _LENGTH_BYTES + length, file_bytes


def _parse(path: Path, key: str, entry: Any) -> tuple[TensorInfo, int, int]:
    try:
        info = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        start, stop = entry["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in (*info.shape, start, stop)):
            raise ValueError("sizes and offsets must be integers >= 0")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {key}: cannot read the header's entry {entry} ({error})"
        ) from None
    if stop - start != info.nbytes:
        raise CheckpointError(
            f"{path}: {key}: {info.nbytes:,} bytes by its shape, {stop - start:,} by its offsets"
        )
    return info, start, stop


def _end_of(path: Path, ranges: list[tuple[int, int, str]]) -> int:
    """Return the end of the last of the sorted (start, stop, key).

    Raises CheckpointError for overlaps and gaps, which the safetensors library refuses too.
    """
    end = 0
    for start, stop, key in ranges:
        if start != end:
            fault = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: {key} {fault}; the file is damaged, download it again")
        end = stop
    return end


def read_box(path: Path, key: str, info: TensorInfo, offset: int, box: Region) -> Tensor:
    """Return a box of the row-major tensor `key` whose data start at `offset`, reading only the
    bytes needed. Raises CheckpointError naming the file."""
    tensor = torch.empty(box.shape, dtype=info.dtype)
    target = bytes_of(tensor)
    size, done = info.dtype.itemsize, 0
    try:
        with open_regular(path, buffering=0) as file:
            for start, count in _runs(info.shape, box):
                into = target[done : done + count * size]
                _fill(path, file.fileno(), into, offset + start * size, key)
                done += count * size
    except OSError as error:
        raise CheckpointError(f"{path}: {key} cannot be read ({error.strerror})") from None
    return tensor


def _fill(path: Path, handle: int, target: memoryview, offset: int, key: str) -> None:
    done = 0
    while done < len(target):  # preadv may return fewer bytes than requested
        count = os.preadv(handle, [target[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path}: cut off inside {key}; copy it again")
        done += count


def _runs(shape: tuple[int, ...], box: Region) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of each contiguous run of memory that the box
    covers in a row-major tensor of `shape`, in order."""
    depth = len(shape)
    while depth and box.shape[depth - 1] == shape[depth - 1]:
        depth -= 1
    depth = max(depth - 1, 0)  # dimensions from here on form one contiguous run
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    count = prod(box.shape[depth:])
    for index in product(*map(range, box.shape[:depth])):
        yield first + sum(i * stride for i, stride in zip(index, strides)), count


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return memoryview(cast(bytearray, tensor.reshape(-1).view(torch.uint8).numpy()))


def drain(handle: int, source: memoryview, offset: int) -> None:
    """Write all of `source` at `offset` of an open file. Raises OSError."""
    done = 0
    while done < len(source):
        done += os.pwrite(handle, source[done:], offset + done)
