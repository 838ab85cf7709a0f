"""A rank's part of a checkpoint: weights, optimizer state and RNG state, in one safetensors file.

Each rank writes what it holds under Megatron's parameter names, with the flat range of the
parameter that its optimizer shard covers, so that a file says by itself what is in it. Loading
needs the layout that saved. (Why not Megatron's own distributed checkpoints: docs/decisions.md 6.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dapo_megatron.bridge.families import Place
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError


def save(
    folder: Path,
    exchange: Exchange,
    params: Mapping[str, Tensor],
    places: Sequence[Place],
    optimizer: Any,
) -> None:
    """Write `rank_<N>.safetensors`; `places` are those of the rank's model chunks, by which the
    bridge's stores find HF tensors in it."""
    tensors = {f"model/{name}": value for name, value in params.items()}
    _init_optimizer_state(optimizer)  # before the first step there is none
    tensors.update(_optimizer_tensors(optimizer, params))
    tensors["rng/cpu"] = torch.get_rng_state()
    if has_cuda():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    path = _path(folder, exchange)
    metadata = {
        "layout": json.dumps(_layout()),
        "places": json.dumps([asdict(place) for place in places]),
    }
    save_file(contiguous, path, metadata=metadata)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # before it is published under its final name


def load(folder: Path, exchange: Exchange, params: Mapping[str, Tensor], optimizer: Any) -> None:
    """Read `rank_<N>.safetensors` back. Raises CheckpointError naming file and key."""
    path = _path(folder, exchange)
    try:
        with safe_open(path, framework="pt") as file:
            saved = json.loads(file.metadata()["layout"])
            if saved != _layout():
                raise CheckpointError(
                    f"{path}: saved with the layout {saved}, this run has {_layout()}; "
                    "resume with the layout that saved"
                )
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    targets = {f"model/{name}": value for name, value in params.items()}
    _init_optimizer_state(optimizer)
    targets.update(_optimizer_tensors(optimizer, params))
    rng = {name: stored.pop(name) for name in list(stored) if name.startswith("rng/")}
    if stored.keys() != targets.keys():
        odd = sorted(stored.keys() ^ targets.keys())[0]
        raise CheckpointError(f"{path}: {odd} is not in both the checkpoint and the model")
    with torch.no_grad():
        for name, target in targets.items():
            if target.shape != stored[name].shape:
                raise CheckpointError(f"{path}: {name} has shape {tuple(stored[name].shape)}")
            target.copy_(stored[name])
    torch.set_rng_state(rng["rng/cpu"])
    if has_cuda():
        torch.cuda.set_rng_state(rng["rng/cuda"])


def _path(folder: Path, exchange: Exchange) -> Path:
    return folder / f"rank_{exchange.rank:05d}.safetensors"


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
    """Give torch's AdamW the state it would make in its first step, to be overwritten."""
    for one, _, main in _owned(optimizer):
        if not one.optimizer.state[main]:
            one.optimizer.state[main] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }
