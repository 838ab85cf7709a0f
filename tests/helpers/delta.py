"""Megatron-core's own gated delta net on a CPU. It uses flash-linear-attention for the recurrence,
which it also has in torch, and to normalize queries and keys."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from dapo_megatron.model import Delta
from dapo_megatron.policy.specs import ZeroCenteredNorm

FUSED = "self_attention.in_proj.layer_norm_"
"""Prefix of the norm before it, which Megatron builds as a part of `in_proj` only."""


class MegatronDeltaNet(gated_delta_net.GatedDeltaNet):
    """Megatron's layer, with the arguments of policy.delta.GatedDeltaNet."""

    def __init__(
        self, config: Any, layer_number: int, *, sizes: Delta, pg_collection: Any, **_: Any
    ) -> None:
        config.deterministic_mode = True
        config.linear_attention_freq = sizes.interval  # so layers are not stacked
        config.linear_num_key_heads, config.linear_key_head_dim = sizes.key_heads, sizes.key_dim
        config.linear_num_value_heads = sizes.value_heads
        config.linear_value_head_dim = sizes.value_dim
        config.linear_conv_kernel_dim = sizes.kernel
        parts = gated_delta_net.GatedDeltaNetSubmodules(
            ColumnParallelLinear, ZeroCenteredNorm, RowParallelLinear
        )
        with patch.object(gated_delta_net, "HAVE_FLA", True):
            super().__init__(config, parts, layer_number, pg_collection=pg_collection)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(gated_delta_net, "l2norm", _l2norm, create=True):
            return super().forward(*args, **kwargs)


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def with_delta_net(layer: ModuleSpec, sizes: Delta) -> ModuleSpec:
    """Return the spec of a layer with Megatron's gated delta net instead of attention."""
    layer = copy.deepcopy(layer)
    layer.submodules.self_attention = ModuleSpec(MegatronDeltaNet, {"sizes": sizes})
    keys = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {**keys, "input_layernorm.": FUSED}
    return layer
