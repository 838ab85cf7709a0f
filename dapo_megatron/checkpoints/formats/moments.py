"""Optimizer state of a training checkpoint by HF name, saved in any layout: one store per field.

A rank's file contains the flat range of each parameter that its distributed optimizer owned, as
`optimizer/<parameter>[<start>:<end>]/<field>`. Ranks with the same parameter own disjoint ranges,
which together cover the parameter. As for weights, the table of the model's family gives the boxes
of HF tensors in each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.megatron import (
    EXPERTS,
    file_slice_of,
    local_parameters_of,
    open_training,
    parse_key,
    places_of,
)
from dapo_megatron.checkpoints.formats.store import FileSlice, Store, TensorSource, disjoint
from dapo_megatron.checkpoints.formats.tensor_file import TensorFile, TensorInfo
from dapo_megatron.files import parse_json
from dapo_megatron.model import ChunkPlace, LocalParameter
from dapo_megatron.types import CheckpointError, Region, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, with the shape of the parameter."""
MAIN = "param"
"""Field of the optimizer's main weights, if the model has lower precision."""
STEP = "step"
"""Field of the number of updates, a scalar that each file stores for some parameter."""
_RANKS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")


@dataclass(frozen=True)
class TrainingState:
    """Weights and optimizer state of a training checkpoint, independent of its layout."""

    weights: Store
    fields: Mapping[str, Store]
    """Stores of exp_avg, exp_avg_sq and param. Untrained tensors are in none of them. param has no
    tensors if the optimizer had no separate main weights."""
    step: float
    """Number of updates so far."""

    def exact(self, name: str) -> Store:
        """Return the store with the HF tensor `name` in the precision in which it is trained."""
        main = self.fields[MAIN]
        return main if name in main.tensors else self.weights


def open_state(folder: Path, ignore: Collection[str] = ()) -> TrainingState:
    """Open a training checkpoint with its optimizer state. Reads headers and numbers of updates.

    Raises CheckpointError naming a missing file, or file and key if ranges overlap or do not cover
    their parameter. Also raises as `open_store` does.
    """
    _check_ranks(folder)
    weights = open_training(folder, ignore)
    parameters = _parameters(weights)
    fields = {field: _field_store(weights, field, parameters) for field in (*MOMENTS, MAIN)}
    return TrainingState(weights, fields, _step(weights))


def read_range(
    store: Store, local_parameter: LocalParameter, start: int = 0, stop: int | None = None
) -> Tensor:
    """Return the flat elements [start, stop) of a local parameter, in row-major order and in the
    store's dtype.

    Padding rows are 0: they never get a gradient, so their moments keep the initial value 0.
    """
    stop = prod(local_parameter.shape) if stop is None else stop
    width = prod(local_parameter.shape[1:])
    first, last = start // width, -(-stop // width)
    dtype = (
        store.info(local_parameter.parts[0].name).dtype if local_parameter.parts else torch.float32
    )
    rows = torch.zeros(last - first, *local_parameter.shape[1:], dtype=dtype)
    for part in local_parameter.parts:
        top, bottom = max(first, part.rows.start), min(last, part.rows.stop)
        if top < bottom:
            origin = part.region.start[0] + top - part.first_row
            box = Region((origin, *part.region.start[1:]), (bottom - top, *part.region.shape[1:]))
            rows[top - first : bottom - first] = store.read(part.name, box)
    return rows.view(-1)[start - first * width : stop - first * width]


# ------------------------------------------------------------------------------- inside


@dataclass(frozen=True, slots=True)
class _Range:
    """The tensor `key` of `file` contains the elements [start, stop) of a parameter."""

    start: int
    stop: int
    file: TensorSource
    key: str


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter: its name in the first file that has it, its HF parts, and the ranges of its
    optimizer state by field."""

    full_name: str
    local_parameter: LocalParameter
    ranges: dict[str, list[_Range]]


class _JoinedRanges:
    """Tensor source that joins flat ranges in several files into complete tensors. A read needs
    memory for the complete rows of its box."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._ranges: dict[str, Sequence[_Range]] = {}

    def add(self, key: str, shape: tuple[int, ...], ranges: Sequence[_Range]) -> None:
        """Add a tensor. Raises CheckpointError unless all ranges have the same dtype and contain
        each element exactly once."""
        dtypes = {part.file.tensors[part.key].dtype for part in ranges}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.path}: {key} has other dtypes in other files: {dtypes}")
        end, previous = 0, self.path
        for part in sorted(ranges, key=lambda part: part.start):
            if part.start < end:
                raise CheckpointError(
                    f"{part.file.path}: {part.key} overlaps its range in {previous}; the files "
                    "are from different checkpoints"
                )
            if part.start > end:
                break
            end, previous = part.stop, part.file.path
        if end != prod(shape):
            raise CheckpointError(
                f"{previous}: {key}: elements from {end:,} of {prod(shape):,} are in no file; "
                "a file is damaged or from another checkpoint"
            )
        self.tensors[key] = TensorInfo(shape, dtypes.pop())
        self._ranges[key] = ranges

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """Return a tensor or a box of it, see `TensorFile.read`."""
        info = self.tensors[key]
        box = whole(info.shape) if box is None else box
        width = prod(info.shape[1:])
        first, last = box.start[0] * width, (box.start[0] + box.shape[0]) * width
        flat = torch.empty(last - first, dtype=info.dtype)
        for part in self._ranges[key]:
            start, stop = max(first, part.start), min(last, part.stop)
            if start < stop:
                wanted = Region((start - part.start,), (stop - start,))
                flat[start - first : stop - first] = part.file.read(part.key, wanted)
        rows = flat.view(box.shape[0], *info.shape[1:])
        return rows[(slice(None), *box.slices[1:])]


def _check_ranks(folder: Path) -> None:
    """Raise CheckpointError naming the first missing file of a rank."""
    names = {path.name for path in folder.glob("rank_*.safetensors")}
    if not names:
        raise CheckpointError(f"{folder}: no training checkpoint (no rank_00000.safetensors)")
    path = folder / min(names)
    try:
        layout = parse_json(TensorFile(path).metadata["layout"])
        num_ranks = prod(layout[axis] for axis in _RANKS)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read its `layout` ({error!r})") from None
    for rank in range(num_ranks):
        if (name := f"rank_{rank:05d}.safetensors") not in names:
            raise CheckpointError(
                f"{folder / name}: missing; {num_ranks} ranks saved this checkpoint"
            )


def _parameters(weights: Store) -> list[_Parameter]:
    """Return the parameters with optimizer state, each once."""
    parameters: dict[tuple[ChunkPlace, str], _Parameter] = {}
    for file in weights.files.values():
        places = places_of(file, weights.arch)
        local_parameters = [local_parameters_of(weights.arch, place) for place in places]
        for key, info in file.tensors.items():
            about = parse_key(key)
            if about is None or about.stop is None or about.field == STEP:
                continue
            if about.chunk >= len(places) or about.name not in local_parameters[about.chunk]:
                raise CheckpointError(f"{file.path}: {key} is no parameter of this rank")
            if info.shape != (about.stop - about.start,):
                raise CheckpointError(f"{file.path}: {key} has shape {info.shape}")
            new = _Parameter(about.full_name, local_parameters[about.chunk][about.name], {})
            owner = _parameter_place(places[about.chunk], about.name), about.name
            ranges = parameters.setdefault(owner, new).ranges.setdefault(about.field, [])
            ranges.append(_Range(about.start, about.stop, file, key))
    return list(parameters.values())


def _parameter_place(place: ChunkPlace, name: str) -> ChunkPlace:
    """Return `place` without the dimension that does not shard the parameter (tensor-parallel rank
    for experts, expert-parallel rank for others).

    Ranks with the same result hold the same parameter and share its optimizer state.
    """
    if EXPERTS in name:
        return replace(place, tp_rank=0, tp_size=1)
    return replace(place, ep_rank=0, ep_size=1)


def _field_store(weights: Store, field: str, parameters: Sequence[_Parameter]) -> Store:
    files: dict[str, _JoinedRanges] = {}
    tensors: dict[str, TensorInfo] = {}
    file_slices: list[FileSlice] = []
    for parameter in parameters:
        if field not in parameter.ranges:
            continue
        path = parameter.ranges[field][0].file.path
        key = f"optimizer/{parameter.full_name}/{field}"
        file = files.setdefault(path.name, _JoinedRanges(path))
        file.add(key, parameter.local_parameter.shape, parameter.ranges[field])
        for part in parameter.local_parameter.parts:
            info = TensorInfo(part.global_shape, file.tensors[key].dtype)
            if tensors.setdefault(part.name, info) != info:
                raise CheckpointError(f"{path}: {key} has another dtype than in other files")
            file_slices.append(file_slice_of(part, path.name, key))
    by_name, replicas = disjoint(weights.folder, file_slices, tensors)
    ordered = {name: tensors[name] for name in weights.tensors if name in tensors}
    return replace(
        weights, tensors=ordered, file_slices=by_name, files=files, replicas=replicas, format=field
    )


def _step(weights: Store) -> float:
    """Return the number of updates. Raises CheckpointError if it differs between files or is in no
    file."""
    steps = {path: step for file in weights.files.values() for path, step in _first_step(file)}
    if not steps:
        raise CheckpointError(f"{weights.folder}: no file has optimizer state")
    first, *others = steps
    for path in others:
        if steps[path] != steps[first]:
            raise CheckpointError(
                f"{path}: of update {steps[path]:g}, but {first} is of update {steps[first]:g}; "
                "the files are from different checkpoints"
            )
    return steps[first]


def _first_step(file: TensorSource) -> Iterator[tuple[Path, float]]:
    for key in file.tensors:
        about = parse_key(key)
        if about is not None and about.field == STEP:
            yield file.path, float(file.read(key))
            return
