"""A rank's part of a checkpoint: weights, optimizer state and RNG state, in one safetensors file.

Each rank writes what it holds under Megatron's parameter names, with the flat range of the
parameter that its optimizer shard covers, so that a file says by itself what is in it; hence it can
be read into any layout (reshard.py). (Why not Megatron's own distributed checkpoints:
docs/decisions.md 6.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from dapo_megatron.bridge.agree import agreed
from dapo_megatron.bridge.families import Architecture, Place
from dapo_megatron.bridge.stores.file import TensorFile
from dapo_megatron.policy.reshard import reshard
from dapo_megatron.policy.snapshot import RNG, Snapshot, rng_tensors, set_rng
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError

logger = logging.getLogger(__name__)


def snapshot(
    exchange: Exchange, params: Mapping[str, Tensor], places: Sequence[Place], optimizer: Any
) -> Snapshot:
    """Copy what goes into `rank_<N>.safetensors`; `places` are those of the rank's model chunks, by
    which the bridge's stores find HF tensors in it."""
    tensors = {f"model/{name}": value for name, value in params.items()}
    _init_optimizer_state(optimizer)  # before the first step there is none
    tensors.update(_optimizer_tensors(optimizer, params))
    tensors.update(rng_tensors())
    metadata = {"layout": json.dumps(_layout()), "places": _places_text(places)}
    return Snapshot(_name(exchange.rank), tensors, metadata)


def load(
    folder: Path,
    exchange: Exchange,
    params: Mapping[str, Tensor],
    places: Sequence[Place],
    optimizer: Any,
    arch: Architecture,
    ignore: Collection[str] = (),
) -> None:
    """Read a checkpoint back. Collective. Raises CheckpointError naming file and key, on all ranks.

    Where layout, precision and kernels are those that saved, each rank reads its own file, its RNG
    state included, and goes on to the last bit; else as reshard.py says. `ignore`: see open_store.
    """
    _init_optimizer_state(optimizer)
    targets = {f"model/{name}": value for name, value in params.items()}
    targets.update(_optimizer_tensors(optimizer, params))
    is_own = agreed(exchange, lambda: _is_own(folder, exchange, targets, places))
    if all(exchange.all_gather(is_own)):
        agreed(exchange, lambda: _load_own(_path(folder, exchange), targets))
    else:
        agreed(exchange, lambda: reshard(folder, targets, places, arch, ignore))
        logger.warning(
            "%s: saved in another layout, precision or by other kernels: weights and optimizer "
            "state are carried over, RNG states are not and start fresh from the seed",
            folder,
        )
    _set_group_steps(optimizer)


def _is_own(
    folder: Path, exchange: Exchange, targets: Mapping[str, Tensor], places: Sequence[Place]
) -> bool:
    """Whether this rank's file is of a rank that held what this one holds."""
    first = TensorFile(folder / _name(0))
    if first.metadata.get("layout") != json.dumps(_layout()):
        return False
    file = TensorFile(_path(folder, exchange))
    if file.metadata.get("places") != _places_text(places):
        return False
    # Keys that only the file has: of other kernels. Only we: the file is damaged.
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


def _places_text(places: Sequence[Place]) -> str:
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


def _optimizer_tensors(optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of each parameter slice this rank's optimizer owns: moments, step, float32 copy."""
    found: dict[str, Tensor] = {}
    names = {id(param): name for name, param in params.items()}
    for one, param, main in _owned(optimizer):
        name = names[id(param)]
        where = one._get_model_param_range_map(param)["param"]
        key = f"optimizer/{name}[{where.start}:{where.end}]"
        if main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
            found[f"{key}/param"] = main.data  # else it is the model's own float32 weight
        for field, value in one.optimizer.state[main].items():
            found[f"{key}/{field}"] = value
    return found


def _owned(optimizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(optimizer, model parameter, its main slice) of this rank."""
    for one in optimizer.chained_optimizers:
        for param, (group, order) in one.model_param_group_index_map.items():
            main = one.optimizer.param_groups[group]["params"][order]
            if main.numel():
                yield one, param, main


def _init_optimizer_state(optimizer: Any) -> None:
    """Give AdamW the state it would make in its first step, to be overwritten; and to each
    parameter the number of updates, where a group has it (FusedAdam, see `_set_group_steps`)."""
    for one, param, main in _owned(optimizer):
        if not one.optimizer.state[main]:
            one.optimizer.state[main] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }
        if not isinstance(one.optimizer, torch.optim.AdamW):
            group, _ = one.model_param_group_index_map[param]
            count = float(one.optimizer.param_groups[group].get("step", 0))
            one.optimizer.state[main]["step"] = torch.tensor(count)


def _set_group_steps(optimizer: Any) -> None:
    """Torch's AdamW counts updates with each parameter. Those of Transformer Engine and Apex, which
    Megatron takes where they are installed, count in each group."""
    for one, param, main in _owned(optimizer):
        if not isinstance(one.optimizer, torch.optim.AdamW):
            group, _ = one.model_param_group_index_map[param]
            count = int(one.optimizer.state[main]["step"])
            one.optimizer.param_groups[group]["step"] = count
