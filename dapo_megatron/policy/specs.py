"""The modules each layer is built of: Transformer Engine's, or Megatron's own with our attention
and norm; experts with our router in both.

Transformer Engine fuses the norm before a linear layer into it, attends over packed sequences and
context-parallel ranks itself, and computes a rank's experts in one grouped matrix product. Latent
attention is built of Megatron's own layers alone (policy/latent.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import Architecture
from dapo_megatron.policy.attention import CausalAttention
from dapo_megatron.policy.kernels import kernels
from dapo_megatron.policy.latent import LatentAttention
from dapo_megatron.policy.moe import BiasedRouter, ExpertLayer, Router
from dapo_megatron.policy.norm import RMSNorm


def block_spec(
    arch: Architecture, config: PolicyConfig, layers: Iterable[int]
) -> TransformerBlockSubmodules:
    """The given layers, by their numbers in the model, and the norm after the last layer of all."""
    norm: Any = RMSNorm
    if kernels(config, arch) == "transformer_engine":
        # Without the package its names are there, of stand-ins.
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    specs = [layer_spec(arch, config, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def layer_spec(arch: Architecture, config: PolicyConfig, number: int) -> ModuleSpec:
    """A layer, by its number in the model."""
    num_experts = arch.num_experts if arch.has_experts(number) else None
    fused = kernels(config, arch) == "transformer_engine"
    spec = _fused(arch, num_experts) if fused else _local(arch, num_experts)
    if num_experts:
        spec.submodules.mlp = _experts(spec.submodules.mlp, arch)
    return spec


def _fused(arch: Architecture, num_experts: int | None) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=True, qk_layernorm=arch.qk_norm
    )


def _local(arch: Architecture, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=arch.qk_norm,
        multi_latent_attention=arch.latent is not None,
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = CausalAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if arch.latent:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    return spec


def _experts(theirs: Any, arch: Architecture) -> ModuleSpec:
    # Megatron-core 0.16 has its layer in a spec, 0.19 in a partial.
    parts = theirs.keywords["submodules"] if isinstance(theirs, partial) else theirs.submodules
    parts.router = partial(Router, normalize_topk=arch.normalize_topk)
    if arch.scoring:
        parts.router = partial(
            BiasedRouter, normalize_topk=arch.normalize_topk, scoring=arch.scoring
        )
    return ModuleSpec(module=ExpertLayer, submodules=parts)
