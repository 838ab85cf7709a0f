"""Optimizer state of a training checkpoint by HF name, in whatever layout it was saved: a store for
each of its fields.

A rank's file holds, of each parameter, the flat range that its distributed optimizer owned, under
`optimizer/<parameter>[<start>:<end>]/<field>`. Ranks that hold the same parameter own disjoint
ranges of it. Put together they have the parameter's shape, and the table of the model's family says
which boxes of HF tensors lie in it, as it does for weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.file import TensorFile, TensorInfo
from dapo_megatron.checkpoints.formats.megatron import (
    EXPERTS,
    file_slice_of,
    open_training,
    parse_key,
    places_of,
    slots_of,
)
from dapo_megatron.checkpoints.formats.store import FileSlice, Store, TensorSource, disjoint
from dapo_megatron.files import parse_json
from dapo_megatron.model import Place, Slot
from dapo_megatron.types import CheckpointError, Region, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Fields of AdamW, each in its parameter's shape."""
MAIN = "param"
"""The field of the optimizer's own copies of weights, for models in less precision."""
STEP = "step"
"""The field that counts updates: one number, of any one parameter."""
_RANKS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")


@dataclass(frozen=True)
class TrainingState:
    """All of a training checkpoint that does not depend on its layout."""

    weights: Store
    fields: Mapping[str, Store]
    """exp_avg, exp_avg_sq and param, the last without tensors if there were no such copies. What is
    not trained is in none."""
    step: float
    """Updates so far."""

    def exact(self, name: str) -> Store:
        """Where the HF tensor `name` has the precision in which it is trained."""
        main = self.fields[MAIN]
        return main if name in main.tensors else self.weights


def open_state(folder: Path, ignore: Collection[str] = ()) -> TrainingState:
    """Open a training checkpoint with its optimizer state. Of the data, reads numbers of updates.

    Raises CheckpointError naming a file that is missing, or file and key where ranges overlap or do
    not cover their parameter; else as `open_store`.
    """
    _check_ranks(folder)
    weights = open_training(folder, ignore)
    parameters = _parameters(weights)
    fields = {field: _field_store(weights, field, parameters) for field in (*MOMENTS, MAIN)}
    return TrainingState(weights, fields, _step(weights))


def read_range(store: Store, slot: Slot, start: int = 0, stop: int | None = None) -> Tensor:
    """Elements [start, stop) of a local parameter, laid out row by row, flat, in the store's dtype.
    Padding is 0: nothing is ever looked up there, so its moments stay what they start as."""
    stop = prod(slot.shape) if stop is None else stop
    width = prod(slot.shape[1:])
    first, last = start // width, -(-stop // width)
    dtype = store.info(slot.parts[0].name).dtype if slot.parts else torch.float32
    rows = torch.zeros(last - first, *slot.shape[1:], dtype=dtype)
    for part in slot.parts:
        top, bottom = max(first, part.rows.start), min(last, part.rows.stop)
        if top < bottom:
            origin = part.region.start[0] + top - part.first_row
            box = Region((origin, *part.region.start[1:]), (bottom - top, *part.region.shape[1:]))
            rows[top - first : bottom - first] = store.read(part.name, box)
    return rows.view(-1)[start - first * width : stop - first * width]


# ------------------------------------------------------------------------------- inside


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, stop) of a parameter are the tensor `key` of `file`."""

    start: int
    stop: int
    file: TensorSource
    key: str


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of one home: its name in the first file that has it, what is in it, and where
    its optimizer state is, by field."""

    full_name: str
    slot: Slot
    ranges: dict[str, list[_Range]]


class _Joined:
    """Tensors that lie in flat ranges in several files, to be read as those of one file. Memory:
    the rows of a box."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._ranges: dict[str, Sequence[_Range]] = {}

    def add(self, key: str, shape: tuple[int, ...], ranges: Sequence[_Range]) -> None:
        """Raises CheckpointError unless the ranges are of one dtype, and each element in one."""
        dtypes = {one.file.tensors[one.key].dtype for one in ranges}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.path}: {key} has other dtypes in other files: {dtypes}")
        end, before = 0, self.path
        for one in sorted(ranges, key=lambda one: one.start):
            if one.start < end:
                raise CheckpointError(
                    f"{one.file.path}: {one.key} overlaps what {before} has of it; "
                    "the files are not of one checkpoint"
                )
            if one.start > end:
                break
            end, before = one.stop, one.file.path
        if end != prod(shape):
            raise CheckpointError(
                f"{before}: {key}: what follows element {end:,} of {prod(shape):,} is in no file; "
                "a file is damaged, or of another checkpoint"
            )
        self.tensors[key] = TensorInfo(shape, dtypes.pop())
        self._ranges[key] = ranges

    def read(self, key: str, box: Region | None = None) -> Tensor:
        """As TensorFile.read."""
        info = self.tensors[key]
        box = whole(info.shape) if box is None else box
        width = prod(info.shape[1:])
        first, last = box.start[0] * width, (box.start[0] + box.shape[0]) * width
        flat = torch.empty(last - first, dtype=info.dtype)
        for one in self._ranges[key]:
            start, stop = max(first, one.start), min(last, one.stop)
            if start < stop:
                wanted = Region((start - one.start,), (stop - start,))
                flat[start - first : stop - first] = one.file.read(one.key, wanted)
        rows = flat.view(box.shape[0], *info.shape[1:])
        return rows[(slice(None), *box.slices[1:])]


def _check_ranks(folder: Path) -> None:
    """Raise CheckpointError naming a rank's file that is not there."""
    found = {path.name for path in folder.glob("rank_*.safetensors")}
    if not found:
        raise CheckpointError(f"{folder}: no training checkpoint (no rank_00000.safetensors)")
    path = folder / min(found)
    try:
        layout = parse_json(TensorFile(path).metadata["layout"])
        num_ranks = prod(layout[axis] for axis in _RANKS)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read its `layout` ({error!r})") from None
    for rank in range(num_ranks):
        if (name := f"rank_{rank:05d}.safetensors") not in found:
            raise CheckpointError(
                f"{folder / name}: missing; {num_ranks} ranks saved this checkpoint"
            )


def _parameters(weights: Store) -> list[_Parameter]:
    """What has optimizer state, each parameter once."""
    found: dict[tuple[Place, str], _Parameter] = {}
    for file in weights.files.values():
        places = places_of(file, weights.arch)
        slots = [slots_of(weights.arch, place) for place in places]
        for key, info in file.tensors.items():
            about = parse_key(key)
            if about is None or about.stop is None or about.field == STEP:
                continue
            if about.chunk >= len(places) or about.name not in slots[about.chunk]:
                raise CheckpointError(f"{file.path}: {key} is no parameter of this rank")
            if info.shape != (about.stop - about.start,):
                raise CheckpointError(f"{file.path}: {key} has shape {info.shape}")
            new = _Parameter(about.full_name, slots[about.chunk][about.name], {})
            home = _home(places[about.chunk], about.name), about.name
            ranges = found.setdefault(home, new).ranges.setdefault(about.field, [])
            ranges.append(_Range(about.start, about.stop, file, key))
    return list(found.values())


def _home(place: Place, name: str) -> Place:
    """A place as far as it matters to a parameter: ranks that have it in common hold the same
    parameter, and share its optimizer state."""
    if EXPERTS in name:
        return replace(place, tp_rank=0, tp_size=1)
    return replace(place, ep_rank=0, ep_size=1)


def _field_store(weights: Store, field: str, parameters: Sequence[_Parameter]) -> Store:
    files: dict[str, _Joined] = {}
    tensors: dict[str, TensorInfo] = {}
    file_slices: list[FileSlice] = []
    for parameter in parameters:
        if field not in parameter.ranges:
            continue
        path = parameter.ranges[field][0].file.path
        key = f"optimizer/{parameter.full_name}/{field}"
        file = files.setdefault(path.name, _Joined(path))
        file.add(key, parameter.slot.shape, parameter.ranges[field])
        for part in parameter.slot.parts:
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
    """Of the first parameter of each file; all must have the same."""
    steps = {path: step for file in weights.files.values() for path, step in _first_step(file)}
    if not steps:
        raise CheckpointError(f"{weights.folder}: no file has optimizer state")
    first, *others = steps
    for path in others:
        if steps[path] != steps[first]:
            raise CheckpointError(
                f"{path}: of update {steps[path]:g}, {first} of update {steps[first]:g}; "
                "the files are not of one checkpoint"
            )
    return steps[first]


def _first_step(file: TensorSource) -> Iterator[tuple[Path, float]]:
    for key in file.tensors:
        about = parse_key(key)
        if about is not None and about.field == STEP:
            yield file.path, float(file.read(key))
            return
