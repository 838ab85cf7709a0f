"""The modules of each layer: Transformer Engine's, or Megatron's with our attention and norm.

Both use the router in moe.py. Transformer Engine fuses the norm before a linear layer into that
layer, supports packed sequences and context parallelism in its attention, and computes a rank's
experts in one grouped GEMM. Models with latent attention (policy/attention.py) or gated delta nets
(policy/delta.py) are always built from Megatron's own layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import Architecture
from dapo_megatron.policy.attention import (
    CausalAttention,
    GatedAttention,
    LatentAttention,
    widened,
)
from dapo_megatron.policy.delta import GatedDeltaNet
from dapo_megatron.policy.kernels import kernels
from dapo_megatron.policy.moe import BiasedRouter, ExpertLayer, Router


def block_spec(
    arch: Architecture, config: PolicyConfig, layers: Iterable[int]
) -> TransformerBlockSubmodules:
    """Return the spec of a chunk: `layers`, by their numbers in the model, and the final norm."""
    norm = _norm(arch)
    if kernels(config, arch) == "transformer_engine":
        # Imported here because the name is a placeholder if the package is not installed.
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    specs = [layer_spec(arch, config, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def layer_spec(arch: Architecture, config: PolicyConfig, number: int) -> ModuleSpec:
    """Return the spec of the layer with this number in the model."""
    num_experts = arch.num_experts if arch.has_experts(number) else None
    fused = kernels(config, arch) == "transformer_engine"
    spec = _fused(arch, num_experts) if fused else _local(arch, num_experts)
    if arch.delta:
        spec.submodules.self_attention.module = GatedAttention
    if arch.delta and arch.has_delta(number):
        spec.submodules.self_attention = ModuleSpec(GatedDeltaNet, {"sizes": arch.delta})
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
    layer.input_layernorm = layer.pre_mlp_layernorm = _norm(arch)
    attention.core_attention = CausalAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = _norm(arch)
    if arch.latent:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    return spec


def _norm(arch: Architecture) -> Any:
    return ZeroCenteredNorm if arch.delta else RMSNorm


def _experts(mlp: Any, arch: Architecture) -> ModuleSpec:
    """Return Megatron's expert layer `mlp` with our layer class and router."""
    # Megatron-core 0.16 puts the layer into a spec, 0.19 into a partial.
    submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    submodules.router = partial(Router, normalize_topk=arch.normalize_topk)
    if arch.grouped_routing:
        submodules.router = partial(
            BiasedRouter, normalize_topk=arch.normalize_topk, scoring=arch.grouped_routing
        )
    return ModuleSpec(module=ExpertLayer, submodules=submodules)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Megatron's wrapper of torch's norms rejects sequence parallelism: each rank sees only some
    tokens, and nothing would sum the weight's gradients. Here the `sequence_parallel` attribute of
    the weight makes Megatron sum them.
    """

    neutral = 1.0
    """The weight before training, which changes nothing."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), self.neutral))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCenteredNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32 or more."""

    neutral = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        wide = widened(x)
        weight = 1.0 + self.weight.to(wide.dtype)
        return torch.nn.functional.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)
