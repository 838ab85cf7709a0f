"""The optimizer: an AdamW chosen by `optimizer.kernels` inside Megatron's distributed optimizer.

Megatron-core 0.16.1 selects the first AdamW that is installed when it is imported: Transformer
Engine's, Apex's or torch's. This choice is replaced while Megatron builds the optimizer. The second
half of this file gives access to the state of AdamW and of the distributed optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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

from dapo_megatron.config import Config, OptimizerConfig
from dapo_megatron.policy import fp8
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.types import ConfigError, torch_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, with the shape of the parameter."""
MAIN = "param"
"""Main weights, if the model has lower precision."""
FUSED = {
    "transformer_engine": "transformer_engine.pytorch.optimizers",
    "apex": "apex.optimizers",
}
"""Module of each FusedAdam, in the order in which `auto` tries them."""


def kernels(config: OptimizerConfig) -> str:
    """Resolve `auto` and return `transformer_engine`, `apex` or `torch`.

    Raises ConfigError if the configured kernels are not available.
    """
    chosen: str = config.kernels
    if chosen == "auto":
        fused = [name for name in FUSED if has_cuda() and not _why_not(name)]
        chosen = fused[0] if fused else "torch"
    elif chosen != "torch" and (reason := _why_not(chosen)):
        raise ConfigError(
            f"optimizer.kernels: {chosen}: {reason}. Install it (docs/gpu_stack.md), or use auto"
        )
    return chosen


def build_optimizer(config: Config, chunks: Sequence[Any]) -> Any:
    """Build AdamW over all parameters of the chunks (policy/data_parallel.py).

    As in the published runs, weight decay applies to all parameters. Megatron's default exempts
    biases and norms, so the overrides are empty. Raises ConfigError.
    """
    name = kernels(config.optimizer)
    is_exact = config.optimizer.moments == "float32"
    assert is_exact or name == "transformer_engine", "see plan/compatibility"
    overlap = chunks[0].ddp_config.overlap_param_gather
    with _use_adam(adam(name)), _host_copies():
        settings = _settings(config, overlap=overlap)
        return get_megatron_optimizer(
            settings, list(chunks), config_overrides={}, use_gloo_process_groups=False
        )


def _settings(config: Config, *, overlap: bool) -> MegatronOptimizerConfig:
    optimizer, moments = config.optimizer, torch_dtype(config.optimizer.moments)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=config.policy.precision == "bfloat16",
        params_dtype=torch_dtype(config.policy.precision),
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
        # AdamW itself then holds the float32 copies of the weights.
        use_precision_aware_optimizer=moments == torch.bfloat16,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        # Storing only the 16 bits of each copy that the bfloat16 weight lacks would save 2 bytes
        # per weight, but weights would then be rounded differently than everywhere else.
        store_param_remainders=False,
        optimizer_cpu_offload=optimizer.cpu_offload > 0,
        optimizer_offload_fraction=optimizer.cpu_offload,
        overlap_cpu_optimizer_d2h_h2d=True,
        **fp8.optimizer_settings(config.policy),
    )
    if optimizer.cpu_offload:
        # Put the float32 copies into host memory, too. Set after construction, because the
        # constructor would check the version of Transformer Engine, which may not be installed.
        settings.use_precision_aware_optimizer = True
        settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return settings


def adam(name: str) -> type[torch.optim.Optimizer]:
    """Return the AdamW class of a name that `kernels` returned."""
    if name == "torch":
        return torch.optim.AdamW
    fused: type[torch.optim.Optimizer] = import_module(FUSED[name]).FusedAdam
    return fused


def _why_not(name: str) -> str | None:
    """Return why a fused AdamW is not available here, or None if it is."""
    if not has_cuda():
        return "needs an NVIDIA GPU"
    try:
        module = import_module(FUSED[name])
    except (ImportError, OSError) as error:
        return f"cannot be imported ({error})"
    # The package `apex` on PyPI is not NVIDIA's. NVIDIA's, built without its extensions, has a
    # FusedAdam that does not work.
    if not hasattr(module, "FusedAdam") or (name == "apex" and find_spec("amp_C") is None):
        return f"the installed {name} has no fused AdamW"
    return None


@contextlib.contextmanager
def _use_adam(optimizer: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Make Megatron use this AdamW class inside the context."""
    names: list[tuple[Any, str, Any]] = [
        (megatron, "Adam", optimizer),
        (megatron, "USING_PYTORCH_OPTIMIZER", optimizer is torch.optim.AdamW),
        (distrib_optimizer, "Adam", optimizer),
    ]
    originals = [getattr(module, name) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(names, originals, strict=True):
            setattr(module, name, value)


def _host_copies() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if has_cuda() else _HostCopies()


class _HostCopies(TorchFunctionMode):
    """Makes Megatron's HybridDeviceOptimizer split parameters on a CPU as it does on a GPU.

    Inside this mode `is_cuda` is True for all tensors, except for results of `cpu()` and copies of
    these, which stand for host copies.
    """

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
class Owned:
    """Part of a parameter that this rank's optimizer updates: flat elements start ... stop - 1."""

    param: Tensor
    start: int
    stop: int
    adam: torch.optim.Optimizer
    group: dict[str, Any]
    key: Tensor
    """The tensor under which `adam` keeps its state."""
    copy: Tensor | None
    """The float32 copy of the weight, or None if the model's weight is used directly."""

    @property
    def state(self) -> dict[str, Any]:
        """State that `adam` keeps for this part."""
        state: dict[str, Any] = self.adam.state[self.key]
        return state

    @property
    def counts_in_group(self) -> bool:
        """Whether `adam` counts updates per group (Transformer Engine, Apex) instead of per
        parameter (torch)."""
        return not isinstance(self.adam, torch.optim.AdamW)


def optimizers_of(optimizer: Any) -> Iterator[Any]:
    """Yield Megatron's optimizers (dense weights, experts) that have parameters on this rank."""
    return (part for part in optimizer.chained_optimizers if part.optimizer is not None)


def owned_parts(optimizer: Any) -> Iterator[Owned]:
    """Yield the parts of all parameters that this rank's optimizer updates."""
    for part in optimizers_of(optimizer):
        adams, inner_of = [part.optimizer], {}
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            adams, inner_of = part.optimizer.sub_optimizers, part.optimizer.param_to_inner_param
        adam_of_key = {
            id(key): (adam, group)
            for adam in adams
            for group in adam.param_groups
            for key in group["params"]
        }
        for param, (number, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[number]["params"][order]
            if main.numel():
                key = inner_of.get(main, main)
                adam, group = adam_of_key[id(key)]
                span = part._get_model_param_range_map(param)["param"]
                copy = main if getattr(param, "main_param", None) is main else None
                if key is not main:
                    copy = key
                copy = adam.state[key].get("master_param", copy)
                yield Owned(param, span.start, span.end, adam, group, key, copy)


def init_state(optimizer: Any) -> None:
    """Create the state that AdamW would create in its first step, unless it exists."""
    for owned in owned_parts(optimizer):
        if any(field not in owned.state for field in MOMENTS):
            _init_state_of(owned)
    for part in optimizers_of(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def _init_state_of(owned: Owned) -> None:
    if hasattr(owned.adam, "initialize_state"):  # Transformer Engine; moments may be in bfloat16
        owned.adam.initialize_state(owned.key, store_param_remainders=False)
        return
    for field in MOMENTS:
        owned.state[field] = torch.zeros_like(owned.key)
    if not owned.counts_in_group:
        # torch's fused AdamW needs its step counter on the device of the parameter.
        device = owned.key.device if owned.group.get("fused") else None
        owned.state["step"] = torch.tensor(0.0, device=device)


def num_updates(optimizer: Any) -> float:
    """Return the number of updates so far; 0 if this rank's optimizer updates nothing."""
    owned = next(owned_parts(optimizer), None)
    if owned is None:
        return 0.0
    return float(owned.group.get("step", 0) if owned.counts_in_group else owned.state["step"])


def set_num_updates(optimizer: Any, number: float) -> None:
    """Set the number of updates so far."""
    for owned in owned_parts(optimizer):
        if owned.counts_in_group:
            owned.group["step"] = int(number)
        else:
            owned.state["step"].fill_(number)


@torch.no_grad()
def copy_to_main(optimizer: Any, values: Callable[[Tensor], Tensor]) -> None:
    """Set the optimizer's float32 copies of weights, if any, from `values(parameter)`."""
    for owned in owned_parts(optimizer):
        if owned.copy is not None:
            owned.copy.copy_(values(owned.param).reshape(-1)[owned.start : owned.stop])


def device_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield the optimizer's parameters and state (float32 copies, moments, step counters), without
    those that optimizer.cpu_offload keeps in host memory."""
    for part in optimizers_of(optimizer):
        device_adam = part.optimizer
        if isinstance(device_adam, HybridDeviceOptimizer):
            device_adam = device_adam.gpu_optimizer
        if device_adam is None:
            continue
        for group in device_adam.param_groups:
            yield from group["params"]
        for state in device_adam.state.values():
            yield from filter(torch.is_tensor, state.values())
