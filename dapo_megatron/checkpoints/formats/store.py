"""Stores: weights on disk in any format, read and written by HF name and box.

A format is a table of `FileSlice`: which box of which HF tensor is where in which file. Reading,
writing, converting, resharding and comparing use only this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.model import Architecture, LocalParameter, ParameterPart, hf_tensors
from dapo_megatron.types import CheckpointError, Region, Shard, dtype_name, overlap, whole

BLOCK_BYTES = 64 * 2**20
"""Maximum size of a block that is in memory at once, in bytes. A single row may be larger."""


class TensorSource(Protocol):
    """A `TensorFile`, or an object with the same interface."""

    tensors: dict[str, TensorInfo]

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """Return the tensor, or a box of it."""


@dataclass(frozen=True, slots=True)
class FileSlice:
    """The box `region` of the HF tensor `name`, stored with the same shape in the tensor `key` of
    the file `file`, starting at index `start`."""

    name: str
    region: Region
    file: str
    key: str
    start: tuple[int, ...]

    def stored(self, box: Region) -> Region:
        """Convert `box` of the HF tensor, which is inside `region`, to a box of the stored
        tensor."""
        inside = box.within(self.region)
        start = tuple(a + b for a, b in zip(self.start, inside.start, strict=True))
        return Region(start, box.shape)


@dataclass(frozen=True)
class Store:
    """Weights on disk. No file stays open, and a read takes memory for its result only.

    `format` (hf, megatron, torch_dist, training; for optimizer state, the field) and `layout`
    describe how the weights are split into files.
    """

    folder: Path
    format: str
    layout: Mapping[str, Any]
    config: Mapping[str, Any]
    arch: Architecture
    tensors: Mapping[str, TensorInfo]
    """All tensors of the model, by HF name."""
    file_slices: Mapping[str, Sequence[FileSlice]]
    """Slices by HF name. They are disjoint and cover the tensor."""
    files: Mapping[str, TensorSource]
    dropped: Sequence[str] = field(default=(), repr=False)
    """Names of the stored tensors of layers for multi-token prediction and of encoders of images,
    which were left out."""
    companions: Path | None = None
    """Folder of config.json, tokenizer and other files of the model, if it is not `folder`."""

    @property
    def model_folder(self) -> Path:
        """Folder of config.json, tokenizer and other files of the model."""
        return self.companions or self.folder

    def read(self, name: str, box: Region | None = None) -> Tensor:
        """Return an HF tensor, or a box of it. Raises CheckpointError naming file or tensor."""
        info = self.info(name)
        box = whole(info.shape) if box is None else box
        parts = [
            (file_slice, part)
            for file_slice in self.file_slices[name]
            if (part := file_slice.region.intersect(box))
        ]
        if len(parts) == 1:
            return self.read_slice(parts[0][0], box)
        tensor = torch.empty(box.shape, dtype=info.dtype)
        for file_slice, part in parts:
            tensor[part.within(box).slices] = self.read_slice(file_slice, part)
        return tensor

    def read_slice(self, file_slice: FileSlice, box: Region) -> Tensor:
        """Return `box` of an HF tensor from one slice that holds it."""
        return self.files[file_slice.file].read(file_slice.key, file_slice.stored(box))

    def info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor. Raises CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: the tensor {name} is missing")
        return self.tensors[name]


def read_into(store: Store, shards: Sequence[Shard]) -> None:
    """Fill the shards one at a time, converting to their dtypes.

    Raises CheckpointError naming a tensor that is missing or has another shape.
    """
    for shard in shards:
        tensor_slice = shard.tensor_slice
        shape = store.info(tensor_slice.name).shape
        if shape != tensor_slice.global_shape:
            raise CheckpointError(
                f"{store.folder}: {tensor_slice.name} has shape {shape}, but "
                f"the model in config.json needs {tensor_slice.global_shape}"
            )
        shard.write(store.read(tensor_slice.name, tensor_slice.region))


def checked_tensors(
    folder: Path, stored: Mapping[str, TensorInfo], arch: Architecture
) -> dict[str, TensorInfo]:
    """Return the stored tensors in the model's order.

    Raises CheckpointError unless they are exactly the model's in config.json, with at least
    16 bits per element.
    """
    wanted = hf_tensors(arch)
    for name, shape in wanted.items():
        if name not in stored:
            raise CheckpointError(
                f"{folder}: the tensor {name} is missing, which the model in config.json has; "
                "copy or download the folder again"
            )
        info = stored[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {info.shape}, but the model in config.json needs "
                f"{shape}"
            )
        if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise CheckpointError(
                f"{folder}: {name} is {dtype_name(info.dtype)}; quantized weights cannot be read, "
                "use weights of 16 bits or more"
            )
    if extra := sorted(stored.keys() - wanted.keys()):
        raise CheckpointError(
            f"{folder}: {extra[0]} is no tensor of this model ({arch.family})"
            + (f", nor are {len(extra) - 1} more" if extra[1:] else "")
        )
    return {name: stored[name] for name in wanted}


def read_parameter(store: Store, parameter: LocalParameter) -> Tensor:
    """Return a parameter of Megatron in the store's dtype. Rows that pad the vocabulary are 0."""
    dtype = store.info(parameter.parts[0].name).dtype
    values = torch.zeros(parameter.shape, dtype=dtype)
    for part in parameter.parts:
        rows = slice(part.rows.start, part.rows.stop)
        values[rows] = store.read(part.name, part.region)
    return values


def disjoint(
    folder: Path, file_slices: Iterable[FileSlice], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, list[FileSlice]], list[tuple[FileSlice, FileSlice]]]:
    """Return one slice per region, by tensor, and pairs of slices with the same region.

    Raises CheckpointError naming a tensor that is not completely covered, or whose slices overlap
    without being the same region.
    """
    by_name: dict[str, dict[Region, FileSlice]] = {}
    copies = []
    for file_slice in file_slices:
        first = by_name.setdefault(file_slice.name, {}).setdefault(file_slice.region, file_slice)
        if first is not file_slice:
            copies.append((first, file_slice))
    for name, boxes in by_name.items():
        if pair := overlap(list(boxes)):
            files = " and ".join(list(boxes.values())[index].file for index in sorted(pair))
            raise CheckpointError(
                f"{folder}: {files} contain overlapping parts of {name}, so they are from "
                "different layouts"
            )
        num_stored, size = sum(region.numel for region in boxes), tensors[name].numel
        if num_stored != size:
            raise CheckpointError(
                f"{folder}: only {num_stored:,} of {size:,} elements of {name} exist; a file of "
                "another rank is missing"
            )
    return {name: list(boxes.values()) for name, boxes in by_name.items()}, copies


def describe(store: Store) -> dict[str, Any]:
    """Return format, family, layout, and each tensor's shape, dtype and files, as JSON values."""
    return {
        "folder": str(store.folder),
        "format": store.format,
        "family": store.arch.family,
        "layout": dict(store.layout),
        "files": len(store.files),
        "parameters": sum(info.numel for info in store.tensors.values()),
        "bytes": sum(info.nbytes for info in store.tensors.values()),
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": dtype_name(info.dtype),
                "bytes": info.nbytes,
                "files": sorted({file_slice.file for file_slice in store.file_slices[name]}),
            }
            for name, info in store.tensors.items()
        },
    }


def check_mtp(folder: Path, names: Sequence[str], *, drop_mtp: bool) -> None:
    """Raise CheckpointError if a folder has tensors of layers for multi-token prediction, `names`,
    and they are not to be left out."""
    if names and not drop_mtp:
        raise CheckpointError(
            f"{folder}: {names[0]} and {len(names) - 1} more tensors belong to layers for "
            "multi-token prediction, which cannot be trained. Set model.drop_mtp=true to leave "
            "them out"
        )


def dtype_of(
    key: str, parts: Sequence[ParameterPart], tensors: Mapping[str, TensorInfo]
) -> torch.dtype:
    """Return the dtype of the HF tensors in a parameter. Raises CheckpointError if they differ."""
    # If all rows of a rank are padding, the parameter has no parts.
    dtypes = {tensors[part.name].dtype for part in parts} or {next(iter(tensors.values())).dtype}
    if len(dtypes) > 1:
        names = ", ".join(f"{part.name} {tensors[part.name].dtype}" for part in parts)
        raise CheckpointError(f"{key} holds tensors of different dtypes ({names}); use --dtype")
    return dtypes.pop()


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
