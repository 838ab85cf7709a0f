"""DeepSeek-V3 and R1: latent attention, a few dense layers, then layers with routed and shared
experts and a biased router.

Multi-token prediction layers, which published checkpoints have after the others, are not supported:
opening a checkpoint with their tensors raises an error that names one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dapo_megatron.model.architecture import Architecture
from dapo_megatron.model.families.family import DENSE_MLP, EXPERT, ROUTER, Family, Parameter
from dapo_megatron.model.sharding import (
    ColumnParallel,
    MergedColumnParallel,
    Replicated,
    RowParallel,
)


def _has_query_rank(arch: Architecture, _layer: int) -> bool:
    return arch.latent is not None and arch.latent.q_lora_rank > 0


def _has_whole_query(arch: Architecture, layer: int) -> bool:
    return not _has_query_rank(arch, layer)


def _is_dense(arch: Architecture, layer: int) -> bool:
    return not arch.has_experts(layer)


def _where(
    only: Callable[[Architecture, int], bool], *parameters: Parameter
) -> tuple[Parameter, ...]:
    return tuple(replace(parameter, only=only) for parameter in parameters)


LATENT_ATTENTION = (
    Parameter("input_layernorm.weight", Replicated("input_layernorm.weight", ("hidden_size",))),
    *_where(
        _has_whole_query,
        Parameter(
            "self_attention.linear_q_proj.weight",
            ColumnParallel("self_attn.q_proj.weight", "latent.qk_head_dim", "hidden_size"),
        ),
    ),
    *_where(
        _has_query_rank,
        Parameter(
            "self_attention.linear_q_down_proj.weight",
            Replicated("self_attn.q_a_proj.weight", ("latent.q_lora_rank", "hidden_size")),
        ),
        Parameter(
            "self_attention.q_layernorm.weight",
            Replicated("self_attn.q_a_layernorm.weight", ("latent.q_lora_rank",)),
        ),
        Parameter(
            "self_attention.linear_q_up_proj.weight",
            ColumnParallel("self_attn.q_b_proj.weight", "latent.qk_head_dim", "latent.q_lora_rank"),
        ),
    ),
    Parameter(
        "self_attention.linear_kv_down_proj.weight",
        Replicated("self_attn.kv_a_proj_with_mqa.weight", ("latent.down_rows", "hidden_size")),
    ),
    Parameter(
        "self_attention.kv_layernorm.weight",
        Replicated("self_attn.kv_a_layernorm.weight", ("latent.kv_lora_rank",)),
    ),
    Parameter(
        "self_attention.linear_kv_up_proj.weight",
        ColumnParallel("self_attn.kv_b_proj.weight", "latent.up_dim", "latent.kv_lora_rank"),
    ),
    Parameter(
        "self_attention.linear_proj.weight", RowParallel("self_attn.o_proj.weight", "value_columns")
    ),
)

SHARED_EXPERT = (
    Parameter(
        "mlp.shared_experts.linear_fc1.weight",
        MergedColumnParallel(
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight",
            "shared_intermediate_size",
        ),
    ),
    Parameter(
        "mlp.shared_experts.linear_fc2.weight",
        RowParallel("mlp.shared_experts.down_proj.weight", "shared_intermediate_size"),
    ),
)

BIAS = Parameter(
    "mlp.router.expert_bias", Replicated("mlp.gate.e_score_correction_bias", ("num_experts",))
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    layer=(
        *LATENT_ATTENTION,
        *_where(_is_dense, *DENSE_MLP),
        *_where(Architecture.has_experts, *ROUTER, BIAS, *SHARED_EXPERT),
    ),
    expert=EXPERT,
    required={
        "attention_bias": False,
        "pretraining_tp": 1,
        "moe_layer_freq": 1,
        # Rope rotates pairs of adjacent columns; Megatron and vLLM assume this.
        "rope_interleave": True,
        # transformers uses this value for the norms inside attention and ignores config.json there.
        # vLLM and Megatron use one value for all norms.
        "rms_norm_eps": 1e-6,
    },
    harmless=frozenset(
        {
            "auto_map",
            "ep_size",
            # Layers for speculative decoding, which training does not use.
            "num_nextn_predict_layers",
            # Used by HF's training only. Here policy.moe_aux_loss balances experts.
            "aux_loss_alpha",
            "seq_aux",
            "output_router_logits",
        }
    ),
)
