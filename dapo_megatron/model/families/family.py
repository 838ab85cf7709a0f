"""Declaration of a model family, and the parameters that the decoder families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.model.architecture import Architecture
from dapo_megatron.model.sharding import (
    ColumnParallel,
    QKVParallel,
    Replicated,
    RowParallel,
    ShardSpec,
    VocabParallel,
)


def _in_all(_arch: Architecture, _layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a layer. `name` is its name in Megatron's own layers, and `fused` its name in
    Transformer Engine's layers if that differs. In both, `{expert}` is the expert's index on its
    rank; in HF names it is the index in the layer. `only(arch, layer)` returns whether a layer, by
    its index in the model, has the parameter."""

    name: str
    spec: ShardSpec
    fused: str | None = None
    only: Callable[[Architecture, int], bool] = _in_all

    def local_name(self, fused: bool) -> str:
        """Return the name without the prefix of the layer."""
        return self.fused if fused and self.fused else self.name


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders: the parameters of its layers and of each expert in them, and the fields
    of its config.json.

    Parameters and fields common to all families are below and in hf_config.py.

    required    fields that must have this value or be absent
    harmless    fields that do not change what the model computes
    defaults    HF's values of absent fields, if they differ between families
    flags       fields that decide whether layers have a feature: the feature's name in
                `Architecture` -> field. Without an entry, all checkpoints of the family have the
                features whose parameters are in `layer`
    has_window  all layers attend to the last `sliding_window` tokens only, unless it is null
    has_partial_rotary
                only a part of each head rotates (`partial_rotary_factor`)
    has_mlp_types
                transformers reads `mlp_layer_types`, and vLLM `first_k_dense_replace`
    """

    model_type: str
    layer: tuple[Parameter, ...]
    expert: tuple[Parameter, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    has_window: bool = False
    has_partial_rotary: bool = False
    has_mlp_types: bool = False

    def has(self, name: str) -> bool:
        """Return whether some layer has the parameter `name`."""
        return any(parameter.name == name for parameter in self.layer)

    @property
    def has_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.has("self_attention.linear_kv_up_proj.weight")

    @property
    def has_delta(self) -> bool:
        """Whether most layers have a gated delta net instead of attention."""
        return self.has("self_attention.A_log")

    @property
    def has_grouped_routing(self) -> bool:
        """Whether routers have a bias instead of an auxiliary loss."""
        return self.has("mlp.router.expert_bias")


def _where(
    only: Callable[[Architecture, int], bool], *parameters: Parameter
) -> tuple[Parameter, ...]:
    """Return the parameters of layers for which `only(arch, layer)` is true."""
    return tuple(replace(parameter, only=only) for parameter in parameters)


def _has_qkv_bias(arch: Architecture, _layer: int) -> bool:
    return arch.qkv_bias


def _has_qk_norm(arch: Architecture, _layer: int) -> bool:
    return arch.qk_norm


def _has_query_rank(arch: Architecture, _layer: int) -> bool:
    return arch.latent is not None and arch.latent.q_lora_rank > 0


def _has_whole_query(arch: Architecture, layer: int) -> bool:
    return not _has_query_rank(arch, layer)


def _has_attention(arch: Architecture, layer: int) -> bool:
    return not arch.has_delta(layer)


def _is_dense(arch: Architecture, layer: int) -> bool:
    return not arch.has_experts(layer)


EMBEDDING = Parameter(
    "embedding.word_embeddings.weight", VocabParallel("model.embed_tokens.weight")
)
FINAL_NORM = Parameter(
    "decoder.final_layernorm.weight", Replicated("model.norm.weight", ("hidden_size",))
)
HEAD = Parameter("output_layer.weight", VocabParallel("lm_head.weight"))
TIED_HEAD = Parameter("output_layer.weight", VocabParallel("model.embed_tokens.weight"))
"""Copy of a tied embedding on the last pipeline stage."""

ATTENTION = (
    Parameter(
        "input_layernorm.weight",
        Replicated("input_layernorm.weight", ("hidden_size",)),
        fused="self_attention.linear_qkv.layer_norm_weight",
    ),
    Parameter(
        "self_attention.linear_qkv.weight",
        QKVParallel(
            "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
        ),
    ),
    Parameter(
        "self_attention.linear_proj.weight", RowParallel("self_attn.o_proj.weight", "query_rows")
    ),
)

QKV_BIAS = _where(
    _has_qkv_bias,
    Parameter(
        "self_attention.linear_qkv.bias",
        QKVParallel(
            "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", is_bias=True
        ),
    ),
)

_QK_NORMS = (
    Parameter(
        "self_attention.q_layernorm.weight", Replicated("self_attn.q_norm.weight", ("head_dim",))
    ),
    Parameter(
        "self_attention.k_layernorm.weight", Replicated("self_attn.k_norm.weight", ("head_dim",))
    ),
)
QK_NORM = _where(_has_qk_norm, *_QK_NORMS)

_IN_QKV, _CONVOLUTION = "linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"
_KEYS, _VALUES = ("delta.key_heads", "delta.key_dim"), ("delta.value_heads", "delta.value_dim")

HYBRID_ATTENTION = (
    Parameter("input_layernorm.weight", Replicated("input_layernorm.weight", ("hidden_size",))),
    *_where(
        _has_attention,
        Parameter(
            "self_attention.linear_qkv.weight",
            QKVParallel(
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
                is_gated=True,
            ),
        ),
        *_QK_NORMS,
        Parameter(
            "self_attention.linear_proj.weight",
            RowParallel("self_attn.o_proj.weight", "query_rows"),
        ),
    ),
    *_where(
        Architecture.has_delta,
        Parameter(
            "self_attention.in_proj.weight",
            ColumnParallel(
                (
                    *((_IN_QKV, *heads) for heads in (_KEYS, _KEYS, _VALUES)),
                    ("linear_attn.in_proj_z.weight", *_VALUES),
                    ("linear_attn.in_proj_b.weight", "delta.value_heads", 1),
                    ("linear_attn.in_proj_a.weight", "delta.value_heads", 1),
                ),
                ("hidden_size",),
            ),
        ),
        Parameter(
            "self_attention.conv1d.weight",
            ColumnParallel(
                tuple((_CONVOLUTION, *heads) for heads in (_KEYS, _KEYS, _VALUES)),
                (1, "delta.kernel"),
            ),
        ),
        Parameter(
            "self_attention.A_log",
            ColumnParallel((("linear_attn.A_log", "delta.value_heads", 1),)),
        ),
        Parameter(
            "self_attention.dt_bias",
            ColumnParallel((("linear_attn.dt_bias", "delta.value_heads", 1),)),
        ),
        Parameter(
            "self_attention.out_norm.weight",
            Replicated("linear_attn.norm.weight", ("delta.value_dim",)),
        ),
        Parameter(
            "self_attention.out_proj.weight",
            RowParallel("linear_attn.out_proj.weight", "delta.value_rows"),
        ),
    ),
)
"""Gated delta nets, and attention with an output gate in every `delta.interval`-th layer."""

LATENT_REQUIRED: dict[str, Any] = {
    "attention_bias": False,
    "pretraining_tp": 1,
    "moe_layer_freq": 1,
    # Rope rotates pairs of adjacent columns; Megatron and vLLM assume this.
    "rope_interleave": True,
}
"""`Family.required` of families with latent attention."""


def _by_heads(name: str, rows: str, inputs: str) -> ColumnParallel:
    """Return a weight with `rows` for each attention head."""
    return ColumnParallel(((name, "num_heads", rows),), (inputs,))


LATENT_ATTENTION = (
    Parameter("input_layernorm.weight", Replicated("input_layernorm.weight", ("hidden_size",))),
    *_where(
        _has_whole_query,
        Parameter(
            "self_attention.linear_q_proj.weight",
            _by_heads("self_attn.q_proj.weight", "latent.qk_head_dim", "hidden_size"),
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
            _by_heads("self_attn.q_b_proj.weight", "latent.qk_head_dim", "latent.q_lora_rank"),
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
        _by_heads("self_attn.kv_b_proj.weight", "latent.up_dim", "latent.kv_lora_rank"),
    ),
    Parameter(
        "self_attention.linear_proj.weight", RowParallel("self_attn.o_proj.weight", "value_columns")
    ),
)


def _gate_and_up(mlp: str, rows: str) -> ColumnParallel:
    """Return the gate and up projections of the MLP that HF calls `mlp`."""
    names = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    return ColumnParallel(tuple((name, rows, 1) for name in names), ("hidden_size",))


_MLP_NORM = Replicated("post_attention_layernorm.weight", ("hidden_size",))

DENSE_MLP = (
    Parameter("pre_mlp_layernorm.weight", _MLP_NORM, fused="mlp.linear_fc1.layer_norm_weight"),
    Parameter(
        "mlp.linear_fc1.weight",
        _gate_and_up("mlp", "intermediate_size"),
    ),
    Parameter("mlp.linear_fc2.weight", RowParallel("mlp.down_proj.weight", "intermediate_size")),
)

ROUTER = (
    Parameter("pre_mlp_layernorm.weight", _MLP_NORM),
    Parameter("mlp.router.weight", Replicated("mlp.gate.weight", ("num_experts", "hidden_size"))),
)

EXPERT = (
    Parameter(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        _gate_and_up("mlp.experts.{expert}", "moe_intermediate_size"),
        fused="mlp.experts.linear_fc1.weight{expert}",
    ),
    Parameter(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        RowParallel("mlp.experts.{expert}.down_proj.weight", "moe_intermediate_size"),
        fused="mlp.experts.linear_fc2.weight{expert}",
    ),
)


def _shared_expert(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of shared experts, which HF calls `name`."""
    return (
        Parameter(
            "mlp.shared_experts.linear_fc1.weight",
            _gate_and_up(name, "shared_intermediate_size"),
        ),
        Parameter(
            "mlp.shared_experts.linear_fc2.weight",
            RowParallel(f"{name}.down_proj.weight", "shared_intermediate_size"),
        ),
    )


GATED_SHARED_EXPERT = (
    Parameter(
        "mlp.shared_experts.gate_weight",
        Replicated("mlp.shared_expert_gate.weight", (1, "hidden_size")),
    ),
    *_shared_expert("mlp.shared_expert"),
)

BIASED_MOE = (
    *_where(_is_dense, *DENSE_MLP),
    *_where(
        Architecture.has_experts,
        *ROUTER,
        Parameter(
            "mlp.router.expert_bias",
            Replicated("mlp.gate.e_score_correction_bias", ("num_experts",)),
        ),
        *_shared_expert("mlp.shared_experts"),
    ),
)
"""MLP of families with some dense layers first, then layers with routed and shared experts and a
biased router."""

BIASED_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Fields of the router of `BIASED_MOE`. transformers ignores them. vLLM uses another router without
them, but only for DeepSeek-V3."""

HARMLESS_IN_TRAINING = frozenset(
    {
        # Layers for speculative decoding, which training does not use (model.drop_mtp).
        "num_nextn_predict_layers",
        # Used by HF's training only. Here policy.moe_aux_loss balances experts.
        "output_router_logits",
    }
)
"""Fields of `BIASED_MOE` families that do not change what the model computes."""
