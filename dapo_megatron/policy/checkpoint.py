"""A rank's part of a checkpoint: weights, optimizer state and RNG state, in one safetensors file.

Each rank writes what it holds under Megatron's parameter names, with the flat range of the
parameter that its optimizer shard covers, so that a file says by itself what is in it; hence it can
be read into any layout (reshard.py). (Why not Megatron's own distributed checkpoints:
docs/decisions.md 6.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from dapo_megatron.checkpoints.formats.file import TensorFile
from dapo_megatron.checkpoints.formats.moments import MAIN, MOMENTS, STEP
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.model import Architecture, Place
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
    is_own = on_all_ranks(exchange, lambda: _is_own(folder, exchange, targets, places))
    if all(exchange.all_gather(is_own, bool)):
        on_all_ranks(exchange, lambda: _load_own(_path(folder, exchange), targets))
    else:
        on_all_ranks(exchange, lambda: reshard(folder, targets, places, arch, ignore))
        logger.warning(
            "%s: saved in another layout, precision or by other kernels: weights and optimizer "
            "state are carried over, RNG states are not and start fresh from the seed",
            folder,
        )
    _set_group_steps(optimizer, params, targets)


@torch.no_grad()
def copy_to_main(optimizer: Any, values: Callable[[Tensor], Tensor]) -> None:
    """The optimizer's float32 copies, where it has any, from what `values` gives for a whole
    parameter."""
    for one in _owned(optimizer):
        if one.copy is not None:
            one.copy.copy_(values(one.param).reshape(-1)[one.start : one.stop])


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


@dataclass(frozen=True, slots=True)
class _Owned:
    """The part of a parameter that this rank's optimizer updates."""

    param: Tensor
    start: int
    stop: int
    adam: torch.optim.Optimizer
    group: dict[str, Any]
    key: Tensor
    """What `adam` has as its parameter and its state is kept under."""
    copy: Tensor | None
    """In float32, where the model's weight is not."""

    @property
    def counts_in_group(self) -> bool:
        """Torch's AdamW counts updates with each parameter. Those of Transformer Engine and Apex
        count in each group."""
        return not isinstance(self.adam, torch.optim.AdamW)


def _owned(optimizer: Any) -> Iterator[_Owned]:
    for one in optimizer.chained_optimizers:
        adams, inner = [one.optimizer], {}
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            adams, inner = one.optimizer.sub_optimizers, one.optimizer.param_to_inner_param
        homes = {
            id(key): (adam, group)
            for adam in adams
            for group in adam.param_groups
            for key in group["params"]
        }
        for param, (number, order) in one.model_param_group_index_map.items():
            main = one.optimizer.param_groups[number]["params"][order]
            if main.numel():
                key = inner.get(main, main)
                adam, group = homes[id(key)]
                where = one._get_model_param_range_map(param)["param"]
                copy = main if getattr(param, "main_param", None) is main else None
                if key is not main:
                    copy = key
                copy = adam.state[key].get("master_param", copy)
                yield _Owned(param, where.start, where.end, adam, group, key, copy)


def _optimizer_tensors(optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of each parameter slice this rank's optimizer owns: moments, step, float32 copy."""
    found: dict[str, Tensor] = {}
    names = {id(param): name for name, param in params.items()}
    for one in _owned(optimizer):
        key = _key(one, names)
        state = one.adam.state[one.key]
        if one.copy is not None:
            found[f"{key}/{MAIN}"] = one.copy.data
        found.update({f"{key}/{field}": state[field] for field in MOMENTS})
        counted = torch.tensor(float(one.group.get("step", 0)))
        found[f"{key}/{STEP}"] = counted if one.counts_in_group else state["step"]
    return found


def _init_optimizer_state(optimizer: Any) -> None:
    """Give AdamW the state it would make in its first step, to be overwritten."""
    for one in _owned(optimizer):
        state = one.adam.state[one.key]
        if any(field not in state for field in MOMENTS):
            _init_state(one)
    for one in optimizer.chained_optimizers:
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            one.optimizer._sync_sub_optimizers_state_to_hdo()


def _init_state(one: _Owned) -> None:
    if hasattr(one.adam, "initialize_state"):  # Transformer Engine's: moments may be in bfloat16
        one.adam.initialize_state(one.key, store_param_remainders=False)
        return
    for field in MOMENTS:
        one.adam.state[one.key][field] = torch.zeros_like(one.key)
    if not one.counts_in_group:
        # The fused one wants its counter where the parameter is.
        where = one.key.device if one.group.get("fused") else None
        one.adam.state[one.key]["step"] = torch.tensor(0.0, device=where)


def _set_group_steps(
    optimizer: Any, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """The number of updates that was read, where it is counted in groups."""
    names = {id(param): name for name, param in params.items()}
    for one in _owned(optimizer):
        if one.counts_in_group:
            one.group["step"] = int(tensors[f"{_key(one, names)}/{STEP}"])


def _key(one: _Owned, names: Mapping[int, str]) -> str:
    return f"optimizer/{names[id(one.param)]}[{one.start}:{one.stop}]"
