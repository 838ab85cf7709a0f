"""Declaration of a model family, and the parameters that the decoder families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.model.architecture import Architecture
from dapo_megatron.model.sharding import (
    MergedColumnParallel,
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

    Parameters and fields common to all families are below and in hf_fields.py.

    required    fields that must have this value or be absent
    harmless    fields that do not change what the model computes
    defaults    HF's values of absent fields, if they differ between families
    has_window  all layers attend to the last `sliding_window` tokens only, unless it is null
    """

    model_type: str
    layer: tuple[Parameter, ...]
    expert: tuple[Parameter, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: bool = False

    def __post_init__(self) -> None:
        """Refuse a requirement that the policy would ignore."""
        if self.required.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"family {self.model_type}: partial_rotary_factor = "
                f"{self.required['partial_rotary_factor']} is required, but the policy rotates "
                "whole heads. Add the number of rotated columns to Rope (model/architecture.py), "
                "and use it in _rope_frequencies (policy/model.py)"
            )

    def has(self, name: str) -> bool:
        """Return whether some layer has the parameter `name`."""
        return any(parameter.name == name for parameter in self.layer)

    @property
    def has_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.has("self_attention.linear_kv_up_proj.weight")

    @property
    def has_grouped_routing(self) -> bool:
        """Whether routers have a bias instead of an auxiliary loss."""
        return self.has("mlp.router.expert_bias")


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

QKV_BIAS = (
    Parameter(
        "self_attention.linear_qkv.bias",
        QKVParallel(
            "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", is_bias=True
        ),
    ),
)

QK_NORM = (
    Parameter(
        "self_attention.q_layernorm.weight", Replicated("self_attn.q_norm.weight", ("head_dim",))
    ),
    Parameter(
        "self_attention.k_layernorm.weight", Replicated("self_attn.k_norm.weight", ("head_dim",))
    ),
)

_MLP_NORM = Replicated("post_attention_layernorm.weight", ("hidden_size",))

DENSE_MLP = (
    Parameter("pre_mlp_layernorm.weight", _MLP_NORM, fused="mlp.linear_fc1.layer_norm_weight"),
    Parameter(
        "mlp.linear_fc1.weight",
        MergedColumnParallel("mlp.gate_proj.weight", "mlp.up_proj.weight", "intermediate_size"),
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
        MergedColumnParallel(
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
            "moe_intermediate_size",
        ),
        fused="mlp.experts.linear_fc1.weight{expert}",
    ),
    Parameter(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        RowParallel("mlp.experts.{expert}.down_proj.weight", "moe_intermediate_size"),
        fused="mlp.experts.linear_fc2.weight{expert}",
    ),
)
