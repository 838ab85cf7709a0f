"""Whether vLLM has quantised a layer anew.

What it holds of such a layer cannot be compared with what was sent, bit by bit, and a step of
training is smaller than the rounding: an engine that went on with old numbers would look healthy
for long. So before each update every number of a quantised layer is made not a number, and
afterwards none may be left.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from dapo_megatron.types import SyncError

_PLAIN = UnquantizedFusedMoEMethod | UnquantizedLinearMethod | UnquantizedEmbeddingMethod
_NONE = 0xFF
"""No number, in any kind of FP8."""


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    """Make every number of quantised layers not a number."""
    for _, value in _numbers(model):
        if value.itemsize == 1:
            value.view(torch.uint8).fill_(_NONE)
        else:
            value.fill_(torch.nan)


@torch.no_grad()
def check_none_left(model: nn.Module) -> None:
    """Raises SyncError naming a parameter of which some is as `spoil` left it."""
    for name, value in _numbers(model):
        none = value.view(torch.uint8) == _NONE if value.itemsize == 1 else value.isnan()
        if bool(none.any()):
            raise SyncError(
                f"{name}: not quantised anew from the weights given to the engine, or these are "
                "not numbers"
            )


def _numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of quantised layers, by name."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, _PLAIN):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point():
                    yield f"{path}.{name}", parameter.data
