"""The optimizer: an AdamW chosen by `optimizer.kernels`, Megatron's distributed optimizer around
it, and access to the state of both.

On import Megatron-core 0.16.1 takes the first AdamW that is installed: Transformer Engine's, Apex's
or torch's. Its choice is replaced while it makes the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import optimizer as megatron
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dapo_megatron.checkpoints.formats.moments import MAIN, MOMENTS, STEP
from dapo_megatron.config import Config, OptimizerConfig
from dapo_megatron.policy import fp8
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.types import ConfigError, torch_dtype

FUSED = {
    "transformer_engine": "transformer_engine.pytorch.optimizers",
    "apex": "apex.optimizers",
}
"""Where each has its FusedAdam, in the order in which `auto` looks for them."""


def kernels(config: OptimizerConfig) -> str:
    """`transformer_engine`, `apex` or `torch`: what `auto` means here. Raises ConfigError."""
    chosen: str = config.kernels
    if chosen == "auto":
        fused = [name for name in FUSED if has_cuda() and not _why_not(name)]
        chosen = fused[0] if fused else "torch"
    elif chosen != "torch" and (reason := _why_not(chosen)):
        raise ConfigError(
            f"optimizer.kernels: {chosen}: {reason}; install it (docs/gpu_stack.md), or use auto"
        )
    return chosen


def build_optimizer(config: Config, chunks: Sequence[Any]) -> Any:
    """AdamW over all parameters of the chunks (policy/data_parallel.py). Like the published runs,
    weight decay spares none (Megatron's default would spare biases and norms), hence the empty
    overrides. Raises ConfigError."""
    name = kernels(config.optimizer)
    is_exact = config.optimizer.moments == "float32"
    assert is_exact or name == "transformer_engine", "see plan/compatibility"
    overlap = chunks[0].ddp_config.overlap_param_gather
    with _told(adam(name)), _host_copies():
        settings = _settings(config, overlap=overlap)
        return get_megatron_optimizer(
            settings, list(chunks), config_overrides={}, use_gloo_process_groups=False
        )


def _settings(config: Config, *, overlap: bool) -> MegatronOptimizerConfig:
    numbers, moments = config.optimizer, torch_dtype(config.optimizer.moments)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=numbers.lr,
        weight_decay=numbers.weight_decay,
        adam_beta1=numbers.beta1,
        adam_beta2=numbers.beta2,
        adam_eps=numbers.eps,
        clip_grad=numbers.clip_grad,
        bf16=config.policy.precision == "bfloat16",
        params_dtype=torch_dtype(config.policy.precision),
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
        # AdamW itself then holds the float32 copies of the weights.
        use_precision_aware_optimizer=moments == torch.bfloat16,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        # A copy less the 16 bits that the weight has would save 2 bytes per weight; weights would
        # then be rounded in another way than everywhere else.
        store_param_remainders=False,
        optimizer_cpu_offload=numbers.cpu_offload > 0,
        optimizer_offload_fraction=numbers.cpu_offload,
        overlap_cpu_optimizer_d2h_h2d=True,
        **fp8.optimizer_settings(config.policy),
    )
    if numbers.cpu_offload:
        # So that these copies, too, are in host memory. Told afterwards: at once, Megatron would
        # ask for the version of Transformer Engine, which need not be there.
        settings.use_precision_aware_optimizer = True
        settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return settings


def adam(name: str) -> type[torch.optim.Optimizer]:
    """The class behind a name that `kernels` gives."""
    if name == "torch":
        return torch.optim.AdamW
    fused: type[torch.optim.Optimizer] = import_module(FUSED[name]).FusedAdam
    return fused


def _why_not(name: str) -> str | None:
    """Why a fused AdamW cannot be had here, or None."""
    if not has_cuda():
        return "needs an NVIDIA GPU"
    try:
        module = import_module(FUSED[name])
    except (ImportError, OSError) as error:
        return f"cannot be imported ({error})"
    # What PyPI calls apex is a stranger's; NVIDIA's without its extensions has the name alone.
    if not hasattr(module, "FusedAdam") or (name == "apex" and find_spec("amp_C") is None):
        return f"the installed {name} has no fused AdamW"
    return None


@contextlib.contextmanager
def _told(optimizer: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Megatron's names for the AdamW it uses stand for this one."""
    names: list[tuple[Any, str, Any]] = [
        (megatron, "Adam", optimizer),
        (megatron, "USING_PYTORCH_OPTIMIZER", optimizer is torch.optim.AdamW),
        (distrib_optimizer, "Adam", optimizer),
    ]
    kept = [getattr(where, name) for where, name, _ in names]
    for where, name, value in names:
        setattr(where, name, value)
    try:
        yield
    finally:
        for (where, name, _), value in zip(names, kept, strict=True):
            setattr(where, name, value)


def _host_copies() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if has_cuda() else _HostCopies()


class _HostCopies(TorchFunctionMode):
    """On a CPU, Megatron's HybridDeviceOptimizer is to split parameters as on a GPU: all are there,
    but for the copies that it makes by `cpu()`, and copies of those."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not hasattr(args[0], "is_host_copy")
        result = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        makes_copy = func in (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)
        if func is torch.Tensor.cpu or (makes_copy and hasattr(args[0], "is_host_copy")):
            result.is_host_copy = True
        return result


# ------------------------------------------------------------------ state


@dataclass(frozen=True, slots=True)
class _Owned:
    """The part of a parameter that this rank's optimizer updates."""

    param: Tensor
    start: int
    stop: int
    adam: torch.optim.Optimizer
    group: dict[str, Any]
    key: Tensor
    """The parameter of `adam`, under which it keeps its state."""
    copy: Tensor | None
    """Float32 copy of the weight, where the model's is not float32."""

    @property
    def counts_in_group(self) -> bool:
        """Whether updates are counted per group (Transformer Engine, Apex) and not per parameter
        (torch)."""
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


def state_tensors(optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return moments, step and float32 copy of each parameter slice that this rank's optimizer
    owns, under the keys of a checkpoint file."""
    tensors: dict[str, Tensor] = {}
    names = {id(param): name for name, param in params.items()}
    for owned in _owned(optimizer):
        key = _key(owned, names)
        state = owned.adam.state[owned.key]
        if owned.copy is not None:
            tensors[f"{key}/{MAIN}"] = owned.copy.data
        tensors.update({f"{key}/{field}": state[field] for field in MOMENTS})
        counted = torch.tensor(float(owned.group.get("step", 0)))
        tensors[f"{key}/{STEP}"] = counted if owned.counts_in_group else state["step"]
    return tensors


def init_state(optimizer: Any) -> None:
    """Give AdamW the state that it would make in its first step, unless it has one."""
    for owned in _owned(optimizer):
        state = owned.adam.state[owned.key]
        if any(field not in state for field in MOMENTS):
            _init_state_of(owned)
    for one in optimizer.chained_optimizers:
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            one.optimizer._sync_sub_optimizers_state_to_hdo()


def _init_state_of(owned: _Owned) -> None:
    if hasattr(owned.adam, "initialize_state"):  # Transformer Engine's: moments may be in bfloat16
        owned.adam.initialize_state(owned.key, store_param_remainders=False)
        return
    for field in MOMENTS:
        owned.adam.state[owned.key][field] = torch.zeros_like(owned.key)
    if not owned.counts_in_group:
        # The fused AdamW wants its counter where the parameter is.
        where = owned.key.device if owned.group.get("fused") else None
        owned.adam.state[owned.key]["step"] = torch.tensor(0.0, device=where)


def set_group_steps(
    optimizer: Any, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Set the number of updates from `state_tensors` that were read, where groups count it."""
    names = {id(param): name for name, param in params.items()}
    for owned in _owned(optimizer):
        if owned.counts_in_group:
            owned.group["step"] = int(tensors[f"{_key(owned, names)}/{STEP}"])


def _key(owned: _Owned, names: Mapping[int, str]) -> str:
    return f"optimizer/{names[id(owned.param)]}[{owned.start}:{owned.stop}]"


@torch.no_grad()
def copy_to_main(optimizer: Any, values: Callable[[Tensor], Tensor]) -> None:
    """Set the optimizer's float32 copies, if it has any, from `values(parameter)`."""
    for owned in _owned(optimizer):
        if owned.copy is not None:
            owned.copy.copy_(values(owned.param).reshape(-1)[owned.start : owned.stop])


def device_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield float32 copies of weights, moments and counters of what is updated on the device."""
    for one in optimizer.chained_optimizers:
        inner = one.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            inner = inner.gpu_optimizer
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from filter(torch.is_tensor, state.values())
