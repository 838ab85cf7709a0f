"""Gated delta nets (Qwen3.5) in vLLM on CPU, in any precision and without torchvision.

vLLM's kernels for them support only bfloat16 on CPU, and no heads of 32 (vLLM 0.32,
mamba/ops/cpu/gdn_attention.py). Here transformers' functions in torch take their place: all tokens
that are decoded in one call, and a call per prefilled sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.model.families import WITH_IMAGES

_OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
_TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


@cache
def support_delta_nets() -> None:
    """Register the classes of text models, and replace the kernels."""
    from transformers.utils import logging
    from vllm import ModelRegistry, _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # It would advise to install torchvision, and kernels for GPUs.
    logging.set_verbosity_error()
    with importable_torchvision():
        from vllm.model_executor.models import qwen3_5
    for _, name in WITH_IMAGES.values():
        # By its name alone, vLLM would import the class in another process.
        ModelRegistry.register_model(name, getattr(qwen3_5, name))
    _delta_net.__annotations__ |= {"layer_name": LayerNameType}
    gdn_attention.cpu_gdn_attention_core = _delta_net
    # In bfloat16 vLLM would pack the weights of convolutions for its own kernels.
    del _custom_ops.causal_conv1d_weight_pack


@contextmanager
def importable_torchvision() -> Iterator[None]:
    """Let imports of torchvision succeed, whose functions only images need. There is no build of it
    for torch without CUDA."""
    import transformers.image_utils  # noqa: F401  # looks for torchvision when it is imported

    if find_spec("torchvision") is not None:
        yield
        return
    for name in _TORCHVISION:
        sys.modules[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
    module.functional = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in _TORCHVISION:
            del sys.modules[name]


def _delta_net(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: Any,
) -> None:
    """Compute a layer's convolution and recurrence, in the place of `cpu_gdn_attention_core`.
    Tokens that are decoded come first."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a profiling run, without a cache
        return
    step = context.attn_metadata[layer.prefix]
    decay = torch.nn.functional.softplus(a.float() + layer.dt_bias.float())
    rates = -layer.A_log.float().exp() * decay, b.float().sigmoid()
    num = step.num_decodes
    if num:
        _decode(layer, step, mixed_qkv[:num], rates, core_attn_out)
    if step.num_prefills:
        _prefill(layer, step, mixed_qkv[num:], rates, core_attn_out)


def _decode(layer: Any, step: Any, mixed_qkv: Tensor, rates: Any, output: Tensor) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu

    num, weight = step.num_decodes, layer.conv1d.weight.squeeze(1)
    slots = step.non_spec_state_indices_tensor[:num]
    tokens, states = _caches(layer)
    convolved = causal_conv1d_update_cpu(
        mixed_qkv, tokens, weight, None, "silu", conv_state_indices=slots
    )
    out, states[slots.long()] = torch_recurrent_gated_delta_rule(
        *(x[:num, None] for x in (*_heads(layer, convolved), *rates)),
        initial_state=states[slots.long()],
        **_OPTIONS,
    )
    output[:num] = out[:, 0]


def _prefill(layer: Any, step: Any, mixed_qkv: Tensor, rates: Any, output: Tensor) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    first, weight = step.num_decodes, layer.conv1d.weight.squeeze(1)
    slots = step.non_spec_state_indices_tensor[first:]
    starts = step.non_spec_query_start_loc[first:] - first
    goes_on = step.has_initial_state[first:]
    tokens, states = _caches(layer)
    convolved = causal_conv1d_fn_cpu(mixed_qkv.T, weight, None, tokens, starts, slots, goes_on).T
    bounds = starts.tolist()
    for number, slot in enumerate(slots.tolist()[: step.num_prefills]):
        rows = slice(bounds[number], bounds[number + 1])
        of_rates = (x[first:][rows] for x in rates)
        out, states[slot] = torch_chunk_gated_delta_rule(
            *(x[None] for x in (*_heads(layer, convolved[rows]), *of_rates)),
            initial_state=states[slot][None] if goes_on[number] else None,
            **_OPTIONS,
        )
        output[first:][rows] = out[0]


def _caches(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the last tokens of each sequence, [slots, channels, tokens], and its states, [slots,
    heads, keys, values]."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    tokens, states = layer.kv_cache
    return tokens if is_conv_state_dim_first() else tokens.transpose(1, 2), states.transpose(2, 3)


def _heads(layer: Any, convolved: Tensor) -> Iterator[Tensor]:
    """Yield query, key and value of every token and value head."""
    *keys, value = (part[0] for part in layer.rearrange_mixed_qkv(convolved))
    for x in keys:
        yield x.repeat_interleave(value.shape[1] // x.shape[1], 1)
    yield value
