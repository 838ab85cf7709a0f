"""Megatron folders and training checkpoints.

A Megatron folder has one file per pipeline stage and tensor-parallel rank, and one per stage and
expert-parallel rank. A training checkpoint has one file per rank of the run.

In both, a file contains parameters as `model/<Megatron's name>`. Its metadata contains its position
in the model (`places`, one per model chunk). From these, the table of the model's family gives the
boxes of HF tensors in each parameter. If there are several chunks, names have the prefix
`chunk_<k>.`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, get_type_hints

import torch

from dapo_megatron.checkpoints.formats.store import (
    FilePlan,
    FileSlice,
    Store,
    StoreWriter,
    TensorSource,
    checked_tensors,
    disjoint,
    dtype_of,
)
from dapo_megatron.checkpoints.formats.tensor_file import TensorFile, TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import MEGATRON_JSON, check_file_name
from dapo_megatron.files import parse_json, read_json
from dapo_megatron.model import (
    Architecture,
    ChunkPlace,
    LocalParameter,
    ParameterPart,
    architecture,
    layout_of,
)
from dapo_megatron.types import CheckpointError, ConfigError, dtype_name

VERSION = 1
_PREFIX = "model/"
_WEIGHT = re.compile(r"^model/((?:chunk_(\d+)\.)?(.+))$")
_RANGE = re.compile(r"^optimizer/((?:chunk_(\d+)\.)?(.+))\[(\d+):(\d+)\]/(\w+)$")
WEIGHT = "model"
"""`StateKey.field` of a weight."""
EXPERTS = ".mlp.experts."
"""Part of the names of parameters that are sharded by expert parallelism only."""


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Parallel layout of a Megatron folder; `stages` is the number of layers of each stage."""

    tensor: int
    stages: tuple[int, ...]
    expert: int = 1

    def places(self) -> Iterator[tuple[str, ChunkPlace, bool]]:
        """Yield (file name, place, whether the file contains experts)."""
        for stage, first in enumerate(accumulate(self.stages[:-1], initial=0)):
            where: dict[str, Any] = {
                "first_layer": first,
                "num_layers": self.stages[stage],
                "has_embedding": stage == 0,
                "has_head": stage == len(self.stages) - 1,
            }
            for rank in range(self.tensor):
                name = f"stage_{stage:02d}_tensor_{rank:02d}.safetensors"
                yield name, ChunkPlace(rank, self.tensor, **where), False
            for rank in range(self.expert):
                name = f"stage_{stage:02d}_experts_{rank:02d}.safetensors"
                yield name, ChunkPlace(0, 1, ep_rank=rank, ep_size=self.expert, **where), True


# ------------------------------------------------------------------------------- reading


def open_megatron(folder: Path, ignore: Collection[str] = ()) -> Store:
    """Open a Megatron folder. Raises as `open_store` does."""
    about = read_json(folder / MEGATRON_JSON)
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"{folder / MEGATRON_JSON}: version {about.get('version')!r}; "
            f"this program reads version {VERSION}"
        )
    names = about.pop("files", None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{folder / MEGATRON_JSON}: has no list of files")
    for name in names:
        check_file_name(name, folder / MEGATRON_JSON)
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name}: missing, though {MEGATRON_JSON} lists it")
    return _open(folder, names, "megatron", about, ignore)


def open_training(folder: Path, ignore: Collection[str] = ()) -> Store:
    """Open a run's training checkpoint. Raises as `open_store` does."""
    if folder.name.endswith(".partial"):
        raise CheckpointError(
            f"{folder}: half written: the run that wrote it did not finish; use another checkpoint"
        )
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder / 'config.json'}: missing; checkpoints of older versions without it cannot "
            "be read"
        )
    names = sorted(path.name for path in folder.glob("rank_*.safetensors"))
    return _open(folder, names, "training", {"ranks": len(names)}, ignore)


def _open(
    folder: Path,
    names: Sequence[str],
    format: str,
    layout: Mapping[str, Any],
    ignore: Collection[str],
) -> Store:
    config = read_json(folder / "config.json")
    arch = architecture(config, ignore)
    files = {name: TensorFile(folder / name) for name in names}
    tensors: dict[str, TensorInfo] = {}
    file_slices: list[FileSlice] = []
    for file in files.values():
        for key, part in _parts(file, arch):
            info = TensorInfo(part.global_shape, file.tensors[key].dtype)
            if tensors.setdefault(part.name, info) != info:
                raise CheckpointError(
                    f"{file.path}: {key}: {part.name} is {info.dtype} here and "
                    f"{tensors[part.name].dtype} in another file"
                )
            file_slices.append(file_slice_of(part, file.path.name, key))
    tensors = checked_tensors(folder, tensors, arch)
    by_name, replicas = disjoint(folder, file_slices, tensors)
    return Store(folder, format, layout, config, arch, tensors, by_name, files, replicas)


def _parts(file: TensorFile, arch: Architecture) -> Iterator[tuple[str, ParameterPart]]:
    """Yield (key, part of an HF tensor that it contains) for all parameters of a file."""
    local_parameters = [local_parameters_of(arch, place) for place in places_of(file, arch)]
    for key, info in file.tensors.items():
        about = parse_key(key)
        if about is None or about.field != WEIGHT:
            continue  # optimizer and RNG states
        if about.chunk >= len(local_parameters) or about.name not in local_parameters[about.chunk]:
            raise CheckpointError(f"{file.path}: {key} is no parameter of {arch.family}")
        local_parameter = local_parameters[about.chunk][about.name]
        if info.shape != local_parameter.shape:
            raise CheckpointError(
                f"{file.path}: {key} has shape {info.shape}, but "
                f"{arch.family} needs {local_parameter.shape}"
            )
        yield from ((key, part) for part in local_parameter.parts)


@dataclass(frozen=True, slots=True)
class StateKey:
    """A parsed key of a file: `field` of the elements [start, stop) of a parameter, in row-major
    order.

    A weight is complete and has `stop` None. `full_name` is the name with its chunk prefix.
    """

    full_name: str
    chunk: int
    name: str
    field: str
    start: int = 0
    stop: int | None = None


def parse_key(key: str) -> StateKey | None:
    """Parse a key. Return None if it is not of a weight or of optimizer state."""
    if match := _WEIGHT.match(key):
        return StateKey(match[1], int(match[2] or 0), match[3], WEIGHT)
    if match := _RANGE.match(key):
        return StateKey(
            match[1], int(match[2] or 0), match[3], match[6], int(match[4]), int(match[5])
        )
    return None


def local_parameters_of(arch: Architecture, place: ChunkPlace) -> dict[str, LocalParameter]:
    """Return a model chunk's parameters by name, without chunk prefix. Contains both the names of
    Megatron's own layers and those of Transformer Engine's."""
    return layout_of(arch, place) | layout_of(arch, place, fused=True)


def places_of(file: TensorSource, arch: Architecture) -> list[ChunkPlace]:
    """Return the position in the model of each chunk of a file. Raises CheckpointError naming the
    file."""
    text = file.metadata.get("places")
    if text is None:
        raise CheckpointError(
            f"{file.path}: has no `places` in its metadata, so its part of the model is unknown; "
            "it was written by an older version"
        )
    try:
        places = [ChunkPlace(**fields) for fields in parse_json(text)]
        for place in places:
            _check_place(place, arch)
        return places
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path}: cannot read its `places` ({error})") from None


def _check_place(place: ChunkPlace, arch: Architecture) -> None:
    """Raise ValueError if no rank of the model can have this place."""
    kinds = get_type_hints(ChunkPlace)
    for field, value in asdict(place).items():
        if type(value) is not kinds[field] or value < 0:
            raise ValueError(f"{field} is {value!r}")
    if place.tp_rank >= place.tp_size or place.ep_rank >= place.ep_size:
        raise ValueError("a parallel rank is not below its world size")
    if place.first_layer + place.num_layers > arch.num_layers:
        raise ValueError(f"the model has {arch.num_layers} layers")


def file_slice_of(part: ParameterPart, file: str, key: str) -> FileSlice:
    """Return the file slice of a part of the parameter `key`."""
    start = (part.first_row, *(0 for _ in part.region.shape[1:]))
    return FileSlice(part.name, part.region, file, key, start)


# ------------------------------------------------------------------------------- writing


class MegatronWriter(StoreWriter):
    """Writes a Megatron folder in the given layout.

    Raises ConfigError if the model does not fit the layout, or CheckpointError if HF tensors that
    are merged into one parameter have different dtypes.
    """

    def __init__(
        self,
        folder: Path,
        arch: Architecture,
        layout: MegatronLayout,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        plans = [plan for plan in _plan_files(arch, layout, tensors) if plan.tensors]
        super().__init__(folder, plans)
        dtypes = {dtype_name(info.dtype) for info in tensors.values()}
        self._about = {
            "version": VERSION,
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": len(layout.stages),
            "expert_parallel": layout.expert,
            "layers_per_stage": list(layout.stages),
            "dtype": ", ".join(sorted(dtypes)),
            "files": [plan.name for plan in plans],
        }

    def finish(self, source: Path, dtype: torch.dtype | None = None) -> None:
        super().finish(source, dtype)
        text = json.dumps(self._about, indent=2)
        (self.folder / MEGATRON_JSON).write_text(text + "\n", encoding="utf-8")


def _plan_files(
    arch: Architecture, layout: MegatronLayout, tensors: Mapping[str, TensorInfo]
) -> Iterator[FilePlan]:
    if sum(layout.stages) != arch.num_layers:
        raise ConfigError(
            f"stages of {layout.stages} layers do not add up to {arch.num_layers} layers"
        )
    for file, place, of_experts in layout.places():
        plan = FilePlan(file, metadata={"format": "pt", "places": json.dumps([asdict(place)])})
        for name, local_parameter in layout_of(arch, place).items():
            if (EXPERTS in name) != of_experts:
                continue
            key = _PREFIX + name
            plan.tensors[key] = TensorInfo(
                local_parameter.shape, dtype_of(key, local_parameter.parts, tensors)
            )
            plan.file_slices += [file_slice_of(part, file, key) for part in local_parameter.parts]
        yield plan
