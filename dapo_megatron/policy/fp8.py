"""FP8 in the policy's linear layers: `policy.fp8` in the words of Megatron-core, of its wrapper for
data parallelism and of its optimizer; and weights that are kept in FP8 alone.

Who quantises when: Megatron's schedules mark the first micro-batch of each of their runs
(schedules.py, forward_step; MegatronModule.set_is_first_microbatch), at which Transformer Engine's
layers quantise their bfloat16 weights anew. So the FP8 copies are those of the current weights in
every pass of log-probs and in every update, and nothing of ours has to say so.

Scales of `current` and `blockwise` follow from the tensor itself: a pass without gradients and an
update give the same log-probs. Those of `delayed` follow from what was seen before: they change
with each micro-batch that has gradients, stay in those that have none, and are 1 before the first
of them (Transformer Engine 2.20, FP8GlobalStateManager.autocast_exit). So the old log-probs and
an update's first micro-batch see the same scales, its later ones do not; and the first pass of
log-probs, after a resume too, is preceded by two that find scales (policy/step.py). In a run that
is the one over the fixed sequences of the first sync: random tokens (bridge/verify.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from dapo_megatron.config import PolicyConfig

# Megatron's name of a recipe, and the format that goes with it: e5m2 has the range that gradients
# need under one scale per tensor; a scale per block leaves them e4m3 and its precision.
_RECIPES = {
    "delayed": ("delayed", "hybrid"),
    "current": ("tensorwise", "hybrid"),
    "blockwise": ("blockwise", "e4m3"),
}
_DELAYED = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
"""Transformer Engine's own defaults. Megatron's, the last maximum alone, would scale the update by
what the pass of log-probs happened to see last."""


def model_settings(config: PolicyConfig) -> dict[str, Any]:
    """For TransformerConfig. Attention stays in bfloat16; experts' tokens are padded to what FP8
    needs by Megatron's grouped layer itself (TEGroupedMLP), so routing stays as it is."""
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
    """For DistributedDataParallelConfig."""
    return {"fp8_param_gather": True} if _has_parameters(config) else {}


def optimizer_settings(config: PolicyConfig) -> dict[str, Any]:
    """For Megatron's OptimizerConfig, which asks how *parameters* are quantised, and nothing where
    they are not."""
    if config.fp8 is None or not _has_parameters(config):
        return {}
    return {"fp8_recipe": _RECIPES[config.fp8.recipe][0]}


def _has_parameters(config: PolicyConfig) -> bool:
    return config.fp8 is not None and config.fp8.parameters


# ------------------------------------------------------------------ weights in FP8 alone


def is_quantized(parameter: Tensor) -> bool:
    """Whether its values are kept in FP8."""
    return bool(is_float8tensor(parameter))


class Unrounded:
    """Where to write the values of parameters: into the parameter itself; of a quantised one, into
    bfloat16 values on the host, which `round` then brings in.

    Before the optimizer is made those are the ones that the parameter was made from, and from which
    the distributed optimizer makes its float32 copies (distrib_optimizer.py,
    _build_model_and_main_param_groups); afterwards, copies of what it has.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, parameter: Any) -> Tensor:
        """The values of one, the same tensor each time."""
        if not is_quantized(parameter):
            value: Tensor = parameter
            return value
        if id(parameter) not in self._values:
            value = parameter.get_high_precision_init_val()
            if value is None:  # the optimizer has taken it
                value = parameter.dequantize().cpu()
            self._values[id(parameter)] = parameter, value
        return self._values[id(parameter)][1]

    @torch.no_grad()
    def round(self) -> None:
        """Quantise what has been written."""
        for parameter, value in self._values.values():
            parameter.copy_(value)


def quantize_from_main(optimizer: Any, chunks: Iterable[Any]) -> None:
    """Once a training checkpoint is loaded: quantised parameters from the optimizer's float32
    copies, as after an update. Values that were rounded to FP8 once, saved in bfloat16 and rounded
    again need not be the same. Collective; of no effect where nothing is quantised."""
    chunks = list(chunks)
    if not any(is_quantized(parameter) for chunk in chunks for parameter in chunk.parameters()):
        return
    for one in optimizer.chained_optimizers:
        one._copy_main_params_to_model_params()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def drop_cached_weights(models: Iterable[torch.nn.Module]) -> None:
    """Free what Transformer Engine makes anew when it is needed: the FP8 copies (up to 2 bytes per
    weight) that it keeps of bfloat16 weights from one micro-batch to the next, and the transposed
    copies (1 byte per weight) of weights that are in FP8 alone."""
    for model in models:
        for module in model.modules():
            workspaces = getattr(module, "_fp8_workspaces", None)
            if workspaces:
                workspaces.clear()
        for parameter in filter(is_quantized, model.parameters()):
            parameter.update_usage(rowwise_usage=True, columnwise_usage=False)  # type: ignore[attr-defined]


def tensors_of(parameter: Any) -> Iterable[Tensor]:
    """What a quantised parameter is made of: numbers, scales, a transposed copy if there is one."""
    return filter(torch.is_tensor, parameter.get_metadata().values())


# ------------------------------------------------------------------ delayed scaling


def update_scales() -> None:
    """Scales of `delayed` from what passes have seen since the last time. Collective.

    Transformer Engine does so itself after each micro-batch that has gradients. Without, maxima are
    noted all the same (module/base.py, prepare_forward). To find scales in a pass with gradients is
    no way: one without recomputation keeps all activations, and one with it leaves scales in a
    queue, that the next backward pass would take for its own (fp8_tensors_recompute_buffer)."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
