"""The weights that an engine computes with, read back slice by slice for the fingerprints.

Usually vLLM keeps a parameter as its loaders filled it. On CPU it packs linear layers and empties
the parameter. Such a layer is read by multiplying the rows of an identity matrix by it. The result
is exact in any dtype, except for the sign of a zero, because only one term of each sum is not zero.
Experts on CPU are packed by permuting elements. Packing the numbers 0, 1, 2, ... gives the
permutation. Parameters in any other layout are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from dapo_megatron.engine.loads import LoadedSlice
from dapo_megatron.engine.slices import Shape
from dapo_megatron.types import TensorSlice

_ROWS = 256
"""Rows of the identity matrix per multiplication."""
_PLAIN_EXPERTS = {UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON}


@torch.no_grad()
def read_back(
    model: nn.Module, loads: Sequence[LoadedSlice]
) -> Iterator[tuple[TensorSlice, Tensor | None]]:
    """Yield each loaded slice and its value, shaped as its region, in the engine's dtype.

    vLLM keeps some parameters in a wider dtype, such as the routers of GLM-4.5. Their values are
    returned in the dtype in which they were sent, unless that would round them. The value is None
    if the layout of the parameter is unknown. Only one parameter at a time is unpacked, which
    bounds memory. Not collective.
    """
    modules = dict(model.named_modules())
    loads_by_parameter: dict[tuple[str, str], list[LoadedSlice]] = {}
    for load in loads:
        loads_by_parameter.setdefault((load.module, load.parameter), []).append(load)
    for (path, name), group in loads_by_parameter.items():
        module = modules[path]
        value = _as_loaded(module, name, group[0].parameter_shape)
        if value is not None and isinstance(module, VocabParallelEmbedding):
            value = _or_tied_head(model, module, value)
        for load in group:
            yield load.tensor_slice, None if value is None else _slice(load, value)


def _slice(load: LoadedSlice, parameter: Tensor) -> Tensor:
    box = parameter[load.target.region.slices].contiguous()
    value = load.source.unread(load.target.read(box))
    if value.dtype == load.tensor_slice.dtype:
        return value
    as_sent = value.to(load.tensor_slice.dtype)
    return as_sent if torch.equal(as_sent.to(value.dtype), value) else value


def _as_loaded(module: nn.Module, name: str, shape: Shape) -> Tensor | None:
    """Return a parameter of `module`, of `shape`, as the loaders filled it; None if unknown."""
    parameter = getattr(module, name).detach()
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        return _experts_as_loaded(method, parameter, shape)
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        is_lookup = isinstance(module, VocabParallelEmbedding) and not isinstance(
            module, ParallelLMHead
        )
        if name == "weight" and hasattr(module, "cpu_linear") and not is_lookup:
            return _through_kernel(module, parameter, shape)
    elif isinstance(method, QuantizeMethodBase):
        return None
    return parameter if tuple(parameter.shape) == shape else None


def _through_kernel(module: Any, parameter: Tensor, shape: Shape) -> Tensor:
    """Return the weight of a linear layer, [outputs, inputs], computed with its own kernel."""
    num_columns = shape[1]
    transposed = parameter.new_empty(num_columns, shape[0])
    for first in range(0, num_columns, _ROWS):
        last = min(first + _ROWS, num_columns)
        rows = parameter.new_zeros(last - first, num_columns)
        rows.diagonal(first).fill_(1)
        transposed[first:last] = module.quant_method.apply(module, rows, None)
    return transposed.T


def _or_tied_head(model: nn.Module, embedding: nn.Module, value: Tensor) -> Tensor:
    """Return the weights of a tied output head if they differ from the embedding's, else `value`,
    which are the embedding's."""
    head = getattr(model, "lm_head", None)
    if head is embedding or not isinstance(head, ParallelLMHead):
        return value
    if head.weight is not embedding.weight or not hasattr(head, "cpu_linear"):
        return value
    head_value = _through_kernel(head, value, tuple(value.shape))
    return value if torch.equal(head_value, value) else head_value


def _experts_as_loaded(
    method: UnquantizedFusedMoEMethod, parameter: Tensor, shape: Shape
) -> Tensor | None:
    experts = method.moe_kernel.fused_experts
    if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:
        return _unpacked(parameter, shape, experts.isa) if len(shape) == 3 else None
    plain = method.unquantized_backend in _PLAIN_EXPERTS and tuple(parameter.shape) == shape
    return parameter if plain else None


def _unpacked(packed: Tensor, shape: Shape, isa: str) -> Tensor | None:
    """Return experts [expert, row, column] of `shape`, unpacked from the layout of vLLM's CPU
    kernel. It pads the intermediate size with zeros and permutes each expert's elements."""
    num_experts, rows, columns = packed.shape
    order = _packing(rows, columns, packed.dtype, isa)
    if order is None:
        return None
    padded = torch.empty_like(packed)
    padded.view(num_experts, -1)[:, order] = packed.view(num_experts, -1)
    if rows == shape[1]:
        return padded[:, :, : shape[2]]
    half, padded_half = shape[1] // 2, rows // 2  # gate, then up
    return torch.cat([padded[:, :half], padded[:, padded_half : padded_half + half]], dim=1)


@cache
def _packing(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor | None:
    """Return the original index of each element of a packed expert, or None if packing is not a
    permutation."""
    numbers = torch.arange(rows * columns)
    # The bits of the numbers as elements of `dtype`, since the kernel packs only this dtype.
    digits = numbers.view(dtype).view(rows * columns, -1).T.contiguous()
    packed = [
        cpu_prepack_moe_weight(digit.view(1, rows, columns), isa).view(-1) for digit in digits
    ]
    order = torch.stack(packed, 1).view(torch.int64).view(-1)
    return order if torch.equal(order.sort().values, numbers) else None
