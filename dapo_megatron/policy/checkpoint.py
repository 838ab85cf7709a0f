"""A rank's part of a checkpoint: weights, optimizer state and RNG state, in one safetensors file.

Each rank writes its tensors under Megatron's parameter names, and optimizer state with the flat
range of the parameter that its optimizer shard covers. A file is therefore self-describing and can
be read into another layout: other parallel sizes, other stages, another precision, other kernels.
Weights and optimizer state are then looked up by HF name (checkpoints/formats/moments.py), and each
rank reads the rows that contain its ranges. No value is rounded, except for model weights with
exact main copies. RNG states belong to ranks and are not restored in another layout. They start
from the run's seed. The policy does not use them, because it has no dropout.

docs/decisions.md, number 6, explains why these are not Megatron's own distributed checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from dapo_megatron.checkpoints.formats.megatron import (
    WEIGHT,
    StateKey,
    local_parameters_of,
    parse_key,
)
from dapo_megatron.checkpoints.formats.moments import (
    MAIN,
    MOMENTS,
    STEP,
    TrainingState,
    open_state,
    read_range,
)
from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.checkpoints.formats.tensor_file import (
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    bytes_of,
)
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.model import Architecture, ChunkPlace, LocalParameter
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.policy.optimizer import init_state, set_group_steps, state_tensors
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError, dtype_name

logger = logging.getLogger(__name__)

RNG = "rng/"
_TRACKED = f"{RNG}tracked/"


def snapshot(
    exchange: Exchange, params: Mapping[str, Tensor], places: Sequence[ChunkPlace], optimizer: Any
) -> PolicySnapshot:
    """Copy the contents of `rank_<N>.safetensors` to host memory.

    `places` are those of the rank's model chunks. checkpoints/formats needs them to find HF tensors
    in the file.
    """
    tensors = {f"model/{name}": value for name, value in params.items()}
    init_state(optimizer)
    tensors.update(state_tensors(optimizer, params))
    tensors.update(rng_tensors())
    metadata = {"layout": json.dumps(_layout()), "places": _places_text(places)}
    return PolicySnapshot(_name(exchange.rank), tensors, metadata)


def load(
    folder: Path,
    exchange: Exchange,
    params: Mapping[str, Tensor],
    places: Sequence[ChunkPlace],
    optimizer: Any,
    arch: Architecture,
    ignore: Collection[str] = (),
) -> None:
    """Read a checkpoint back. Collective. Raises CheckpointError naming file and key, on all ranks.

    With the same layout, precision and kernels as in the run that saved it, each rank reads its own
    file, including its RNG state, and training continues bit by bit. Otherwise see `reshard`.
    `ignore`: see open_store.
    """
    init_state(optimizer)
    targets = {f"model/{name}": value for name, value in params.items()}
    targets.update(state_tensors(optimizer, params))
    is_own = on_all_ranks(exchange, lambda: _is_own(folder, exchange, targets, places))
    if all(exchange.all_gather(is_own, bool)):
        on_all_ranks(exchange, lambda: _load_own(_path(folder, exchange), targets))
    else:
        on_all_ranks(exchange, lambda: reshard(folder, targets, places, arch, ignore))
        logger.warning(
            "%s: saved in another layout or precision, or by other kernels. Weights and optimizer "
            "state are restored. RNG states are not: they start from the seed",
            folder,
        )
    set_group_steps(optimizer, params, targets)


def _is_own(
    folder: Path, exchange: Exchange, targets: Mapping[str, Tensor], places: Sequence[ChunkPlace]
) -> bool:
    """Return whether this rank's file was written by a rank with the same tensors."""
    first = TensorFile(folder / _name(0))
    if first.metadata.get("layout") != json.dumps(_layout()):
        return False
    file = TensorFile(_path(folder, exchange))
    if file.metadata.get("places") != _places_text(places):
        return False
    # Other kernels save other keys, so an unknown key means False. A missing key means that the
    # file is damaged, which `_load_own` reports.
    keys = {key for key in file.tensors if not key.startswith(RNG)}
    return keys <= targets.keys() and all(
        file.tensors[key].dtype == targets[key].dtype for key in keys
    )


def _load_own(path: Path, targets: Mapping[str, Tensor]) -> None:
    file = TensorFile(path)
    for name, target in targets.items():
        if name not in file.tensors:
            raise CheckpointError(f"{path}: {name} is missing")
        if (shape := file.tensors[name].shape) != target.shape:
            raise CheckpointError(f"{path}: {name} has shape {shape}, not {tuple(target.shape)}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(file.read(name))
    set_rng({key: file.read(key) for key in file.tensors if key.startswith(RNG)})


def _path(folder: Path, exchange: Exchange) -> Path:
    return folder / _name(exchange.rank)


def _name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _places_text(places: Sequence[ChunkPlace]) -> str:
    return json.dumps([asdict(place) for place in places])


def _layout() -> dict[str, int]:
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_parallel": virtual or 1,
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
    }


# ------------------------------------------------------------------ in memory


class PolicySnapshot:
    """Copies of a rank's tensors in host memory. Any thread may write them, at any time."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        # In the order of the file (wide elements first), so that the file's checksum can be
        # computed from memory.
        order = sorted(tensors, key=lambda key: -tensors[key].element_size())
        self._tensors = {key: _host_copy(tensors[key]) for key in order}
        self._infos = {
            key: TensorInfo(tuple(value.shape), value.dtype) for key, value in self._tensors.items()
        }
        self._name = name
        self._metadata = metadata
        self.num_bytes = self._writer(Path()).nbytes
        """Bytes of the file."""
        self.checksums: dict[str, str] = {}
        """File name -> SHA-256 of the header and the tensors in memory, once the file is written.
        A disk that corrupts data is thus detected."""

    def write(self, folder: Path) -> None:
        """Write the file and sync it to disk. Writing and hashing release the GIL, so other threads
        keep running. Raises CheckpointError or OSError."""
        writer = self._writer(folder)
        writer.create()
        for key, value in self._tensors.items():
            writer.write(key, value)
        writer.finish()
        header_bytes = self.num_bytes - sum(info.nbytes for info in self._infos.values())
        with writer.path.open("rb") as file:
            digest = hashlib.sha256(file.read(header_bytes))
        for value in self._tensors.values():
            digest.update(bytes_of(value))
        self.checksums[self._name] = digest.hexdigest()

    def _writer(self, folder: Path) -> TensorFileWriter:
        return TensorFileWriter(folder / self._name, self._infos, self._metadata)


def _host_copy(value: Tensor) -> Tensor:
    """Return a contiguous copy in host memory, even if the tensor is in host memory already."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of all generators that the policy may use: torch's, and on a GPU those that
    Megatron keeps per kind of layer.

    Prompts are shuffled and completions sampled with separate seeds. Python's and numpy's global
    generators are not used.
    """
    tensors = {f"{RNG}cpu": torch.get_rng_state()}
    if has_cuda():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tensors[f"{RNG}cuda"] = torch.cuda.get_rng_state()
        for name, state in get_cuda_rng_tracker().get_states().items():
            tensors[_TRACKED + name] = state
    return tensors


def set_rng(tensors: Mapping[str, Tensor]) -> None:
    """Restore the states that `rng_tensors` returned."""
    torch.set_rng_state(tensors[f"{RNG}cpu"])
    if has_cuda():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(tensors[f"{RNG}cuda"])
        tracked = {key: state for key, state in tensors.items() if key.startswith(_TRACKED)}
        if tracked:  # older versions saved none
            get_cuda_rng_tracker().set_states(
                {key.removeprefix(_TRACKED): state for key, state in tracked.items()}
            )


# ------------------------------------------------------------------ another layout


def reshard(
    folder: Path,
    targets: Mapping[str, Tensor],
    places: Sequence[ChunkPlace],
    arch: Architecture,
    ignore: Collection[str],
) -> None:
    """Fill this rank's tensors from a checkpoint in any layout.

    `targets` are by key of the rank's own checkpoint file, `places` those of its model chunks. All
    tensors are looked up before any is read. Raises CheckpointError naming file and key or tensor,
    or why the checkpoint does not fit.
    """
    state = open_state(folder, ignore)
    _check_model(state.weights, arch)
    local_parameters = [local_parameters_of(arch, place) for place in places]
    reads = [_reader(state, key, target, local_parameters) for key, target in targets.items()]
    with torch.no_grad():
        for target, read in zip(targets.values(), reads, strict=True):
            target.copy_(read().view(target.shape))


def _reader(
    state: TrainingState,
    key: str,
    target: Tensor,
    local_parameters: Sequence[Mapping[str, LocalParameter]],
) -> Callable[[], Tensor]:
    """Return a function that reads one target tensor. Raises CheckpointError if it is missing or
    would be rounded."""
    state_key = parse_key(key)
    assert state_key is not None
    if state_key.field == STEP:
        return lambda: torch.tensor(state.step)
    local_parameter = local_parameters[state_key.chunk][state_key.name]
    for part in local_parameter.parts:
        source = _source(state, state_key, part.name, target.dtype)
        if part.name not in source.tensors:
            raise CheckpointError(
                f"{source.folder}: no file has optimizer state ({state_key.field}) of {part.name}"
            )
        stored = source.tensors[part.name].dtype
        is_rounded = state_key.field == WEIGHT and target.dtype.itemsize < 4
        if not is_rounded and torch.promote_types(stored, target.dtype) != target.dtype:
            option = "optimizer.moments" if state_key.field in MOMENTS else "policy.precision"
            raise CheckpointError(
                f"{source.folder}: {part.name} ({state_key.field}) was saved in "
                f"{dtype_name(stored)} and would be rounded to {dtype_name(target.dtype)}. Resume "
                f"with the {option} of the run that saved it, or start a new run with its weights "
                "as model.path"
            )
    name = (
        local_parameter.parts[0].name
        if local_parameter.parts
        else next(iter(state.weights.tensors))
    )
    source = _source(state, state_key, name, target.dtype)
    return lambda: read_range(source, local_parameter, state_key.start, state_key.stop)


def _source(state: TrainingState, state_key: StateKey, name: str, dtype: torch.dtype) -> Store:
    """Return the store of the HF tensor `name`. It is the same for all tensors of a parameter."""
    if state_key.field == WEIGHT and state.weights.tensors[name].dtype == dtype:
        return state.weights
    return state.exact(name) if state_key.field in (WEIGHT, MAIN) else state.fields[state_key.field]


def _check_model(store: Store, arch: Architecture) -> None:
    wanted, saved = asdict(arch), asdict(store.arch)
    if other := [name for name in wanted if wanted[name] != saved[name]]:
        raise CheckpointError(
            f"{store.folder}: is of another model than model.path: "
            + ", ".join(f"{name} {saved[name]}, not {wanted[name]}" for name in other)
        )
