"""The parameters that the decoder families share."""

from __future__ import annotations

from dapo_megatron.model.families.family import Parameter
from dapo_megatron.model.sharding import Columns, GateUp, HeadGroups, Vocabulary, Whole

EMBEDDING = Parameter("embedding.word_embeddings.weight", Vocabulary("model.embed_tokens.weight"))
FINAL_NORM = Parameter("decoder.final_layernorm.weight", Whole("model.norm.weight", ("hidden",)))
HEAD = Parameter("output_layer.weight", Vocabulary("lm_head.weight"))
TIED_HEAD = Parameter("output_layer.weight", Vocabulary("model.embed_tokens.weight"))
"""The last pipeline stage's own copy of a tied embedding."""

ATTENTION = (
    Parameter(
        "input_layernorm.weight",
        Whole("input_layernorm.weight", ("hidden",)),
        fused="self_attention.linear_qkv.layer_norm_weight",
    ),
    Parameter(
        "self_attention.linear_qkv.weight",
        HeadGroups("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    Parameter(
        "self_attention.linear_proj.weight", Columns("self_attn.o_proj.weight", "query_rows")
    ),
)

QKV_BIAS = (
    Parameter(
        "self_attention.linear_qkv.bias",
        HeadGroups(
            "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", is_bias=True
        ),
    ),
)

QK_NORM = (
    Parameter("self_attention.q_layernorm.weight", Whole("self_attn.q_norm.weight", ("head_dim",))),
    Parameter("self_attention.k_layernorm.weight", Whole("self_attn.k_norm.weight", ("head_dim",))),
)

_MLP_NORM = Whole("post_attention_layernorm.weight", ("hidden",))

DENSE_MLP = (
    Parameter("pre_mlp_layernorm.weight", _MLP_NORM, fused="mlp.linear_fc1.layer_norm_weight"),
    Parameter("mlp.linear_fc1.weight", GateUp("mlp.gate_proj.weight", "mlp.up_proj.weight", "ffn")),
    Parameter("mlp.linear_fc2.weight", Columns("mlp.down_proj.weight", "ffn")),
)

ROUTER = (
    Parameter("pre_mlp_layernorm.weight", _MLP_NORM),
    Parameter("mlp.router.weight", Whole("mlp.gate.weight", ("num_experts", "hidden"))),
)

EXPERT = (
    Parameter(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        GateUp(
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
            "expert_ffn",
        ),
        fused="mlp.experts.linear_fc1.weight{expert}",
    ),
    Parameter(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        Columns("mlp.experts.{expert}.down_proj.weight", "expert_ffn"),
        fused="mlp.experts.linear_fc2.weight{expert}",
    ),
)
