"""FP8 in the policy's linear layers, and weights that are kept only in FP8.

`policy.fp8` is translated to settings of Megatron-core, of its data-parallel wrapper and of its
optimizer.

Megatron's schedules mark the first micro-batch of each run (schedules.py, forward_step;
MegatronModule.set_is_first_microbatch). At this mark Transformer Engine's layers quantize their
bfloat16 weights again. So every pass of log-probs and every update uses FP8 copies of the current
weights, and no code here has to refresh them.

Scales of `current` and `blockwise` are computed from the tensor itself, so a pass without gradients
and an update give the same log-probs. Scales of `delayed` are computed from earlier micro-batches:
they change after each micro-batch with gradients, do not change after one without, and are 1 at
the start (Transformer Engine 2.20, FP8GlobalStateManager.autocast_exit). So the old log-probs and
the first micro-batch of an update have the same scales, and later micro-batches have others. The
first pass of log-probs, also after a resume, is preceded by two passes that find scales, and the
first scale of gradients is the number of tokens (policy/step.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from dapo_megatron.config import PolicyConfig

# Megatron's name of each recipe, and its format. With one scale per tensor, gradients need the
# range of e5m2 (hybrid). With a scale per block, they can use e4m3, which is more precise.
_RECIPES = {
    "delayed": ("delayed", "hybrid"),
    "current": ("tensorwise", "hybrid"),
    "blockwise": ("blockwise", "e4m3"),
}
_DELAYED = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
"""Transformer Engine's defaults. Megatron's default keeps only the last maximum, so an update would
be scaled by the last micro-batch of the log-prob pass."""


def model_settings(config: PolicyConfig) -> dict[str, Any]:
    """Return arguments for TransformerConfig.

    Attention stays in bfloat16. Megatron's grouped layer (TEGroupedMLP) pads the tokens of experts
    to the multiple that FP8 needs, so the router must not.
    """
    fp8 = config.fp8
    if fp8 is None:
        return {}
    recipe, number_format = _RECIPES[fp8.recipe]
    return {
        "fp8": number_format,
        "fp8_recipe": recipe,
        "fp8_param": fp8.parameters,
        "first_last_layers_bf16": bool(fp8.bf16_first_layers or fp8.bf16_last_layers),
        "num_layers_at_start_in_bf16": fp8.bf16_first_layers,
        "num_layers_at_end_in_bf16": fp8.bf16_last_layers,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        "moe_router_padding_for_quantization": False,
        **(_DELAYED if fp8.recipe == "delayed" else {}),
    }


def ddp_settings(config: PolicyConfig) -> dict[str, Any]:
    """Return arguments for DistributedDataParallelConfig."""
    return {"fp8_param_gather": True} if _has_parameters(config) else {}


def optimizer_settings(config: PolicyConfig) -> dict[str, Any]:
    """Return arguments for Megatron's OptimizerConfig. Its recipe is for quantized parameters,
    so it is only set if parameters are in FP8."""
    if config.fp8 is None or not _has_parameters(config):
        return {}
    return {"fp8_recipe": _RECIPES[config.fp8.recipe][0]}


def _has_parameters(config: PolicyConfig) -> bool:
    return config.fp8 is not None and config.fp8.parameters


# ------------------------------------------------------------------ weights only in FP8


def is_quantized(parameter: Tensor) -> bool:
    """Return whether a parameter keeps its values in FP8."""
    return bool(is_float8tensor(parameter))


class HighPrecisionValues:
    """Writable values of parameters: the parameter itself, or bfloat16 values on the host if the
    parameter is quantized. `round` then writes these into the parameter.

    Before the optimizer is built, these are the values that the parameter was created from. The
    distributed optimizer makes its float32 copies from them (distrib_optimizer.py,
    _build_model_and_main_param_groups). Afterwards they are dequantized copies.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, parameter: Any) -> Tensor:
        """Return the values of a parameter, the same tensor at every call."""
        if not is_quantized(parameter):
            value: Tensor = parameter
            return value
        if id(parameter) not in self._values:
            value = parameter.get_high_precision_init_val()
            if value is None:  # the optimizer has freed them
                value = parameter.dequantize().cpu()
            self._values[id(parameter)] = parameter, value
        return self._values[id(parameter)][1]

    @torch.no_grad()
    def round(self) -> None:
        """Quantize the values that were written into the parameters."""
        for parameter, value in self._values.values():
            parameter.copy_(value)


def quantize_from_main(optimizer: Any, chunks: Iterable[Any]) -> None:
    """Set quantized parameters from the optimizer's float32 copies, as an update does. Collective.

    Call after a training checkpoint is loaded: values that were rounded to FP8, saved in bfloat16
    and rounded to FP8 again may differ. Does nothing if no parameter is quantized.
    """
    chunks = list(chunks)
    if not any(is_quantized(parameter) for chunk in chunks for parameter in chunk.parameters()):
        return
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def drop_cached_weights(models: Iterable[torch.nn.Module]) -> None:
    """Free copies of weights that Transformer Engine makes again when needed.

    These are the FP8 copies of bfloat16 weights that it keeps between micro-batches (up to 2 bytes
    per weight), and the transposed copies of weights kept only in FP8 (1 byte per weight).
    """
    for model in models:
        for module in model.modules():
            workspaces = getattr(module, "_fp8_workspaces", None)
            if workspaces:
                workspaces.clear()
        for parameter in filter(is_quantized, model.parameters()):
            parameter.update_usage(rowwise_usage=True, columnwise_usage=False)  # type: ignore[attr-defined]


def tensors_of(parameter: Any) -> Iterable[Tensor]:
    """Return the tensors inside a quantized parameter: values, scales, any transposed copy."""
    return filter(torch.is_tensor, parameter.get_metadata().values())


# ------------------------------------------------------------------ delayed scaling


def update_scales() -> None:
    """Update the scales of `delayed` from the maxima since the last update. Collective.

    Transformer Engine does this itself after each micro-batch with gradients. Maxima are also
    recorded without gradients (module/base.py, prepare_forward). A pass with gradients must not be
    used to find scales: without recomputation it keeps all activations, and with recomputation it
    leaves scales in a queue from which the next backward pass would read them
    (fp8_tensors_recompute_buffer).
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


def set_gradient_scales(num_tokens: int) -> None:
    """Set the first scales of gradients of `delayed`, after a forward pass.

    The loss is divided by the number of tokens, perhaps a million. With Transformer Engine's first
    scale of 1, gradients would be below the smallest FP8 value, thus 0. A scale is found from what
    arrives at a layer, so this would go on for several micro-batches: behind a layer whose gradient
    is 0, the next one finds none.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for key, scales in FP8GlobalStateManager.quantization_state.global_scale_buffer.items():
        is_forward, _ = FP8GlobalStateManager.split_key_in_buffer(key)
        for scale in () if is_forward else scales:
            scale.fill_(num_tokens)
