"""The optimizer: whose AdamW it is, and Megatron's distributed optimizer around it.

Megatron-core 0.16.1 takes the first that is installed when it is imported: Transformer Engine's,
Apex's, torch's. Here `optimizer.kernels` decides; Megatron is told while it makes the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import optimizer as megatron
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from torch.overrides import TorchFunctionMode

from dapo_megatron.config import Config, OptimizerConfig
from dapo_megatron.policy import fp8
from dapo_megatron.policy.device import device, has_cuda
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
        return get_megatron_optimizer(settings, list(chunks), config_overrides={})


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


def compare(
    numbers: OptimizerConfig,
    name: str,
    *,
    num_elements: int = 2**20,
    num_steps: int = 20,
    seed: int = 0,
) -> float:
    """How far from torch's AdamW in float64 the AdamW `name` gets on the same random gradients,
    weights in float32, on the policy's device: the largest difference of a weight, over the
    largest distance that any weight moved. Of moments in `numbers.moments`. (Small learning rates
    show what float32 weights cannot hold, of any AdamW.)"""
    generator = torch.Generator().manual_seed(seed)
    start = torch.empty(num_elements).normal_(0.0, 0.02, generator=generator)
    weights = [start.to(device(), copy=True), start.double()]
    for weight in weights:
        weight.requires_grad_()
    optimizers = [
        _alone(adam(name), numbers, weights[0]),
        _alone(adam("torch"), numbers, weights[1]),
    ]
    for _ in range(num_steps):
        gradient = torch.empty(num_elements).normal_(0.0, 1e-3, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.to(weight)
            optimizer.step()
    seen, wanted = (weight.detach().double().cpu() for weight in weights)
    return float((seen - wanted).abs().max() / (wanted - start).abs().max())


def _alone(
    optimizer: type[torch.optim.Optimizer], numbers: OptimizerConfig, weight: torch.Tensor
) -> torch.optim.Optimizer:
    """With the arguments that Megatron gives it."""
    arguments: dict[str, Any] = {
        "lr": numbers.lr,
        "weight_decay": numbers.weight_decay,
        "betas": (numbers.beta1, numbers.beta2),
        "eps": numbers.eps,
    }
    if optimizer is not torch.optim.AdamW:
        arguments["adam_w_mode"] = True
        if numbers.moments == "bfloat16":
            arguments |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)
    return optimizer([weight], **arguments)


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
