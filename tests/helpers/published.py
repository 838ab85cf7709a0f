"""Published models by name, in the form that tests use, and small models of each family."""

from __future__ import annotations

from typing import Any

from dapo_megatron.model import FAMILIES
from dapo_megatron.model.published import published_models

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    name: (model.num_parameters, dict(model.hf)) for name, model in published_models().items()
}
"""Name without owner -> (number of parameters, a tied head counted once; config.json)."""
LATENT = {
    "q_lora_rank": 5,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
GROUPED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}


def small_config(family: str = "qwen3_moe", **changes: Any) -> dict[str, Any]:
    """Return a published config.json of the family, with small sizes."""
    published = next(fields for _, fields in PUBLISHED.values() if fields["model_type"] == family)
    sizes = {
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    rules = FAMILIES[family]
    experts: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 4}
    experts |= GROUPED if rules.has_grouped_routing else {"num_experts": 8}
    if not rules.expert:
        experts = {}
        changes.pop("moe_intermediate_size", None)
    if rules.has_partial_rotary:
        sizes["head_dim"] = 8 if rules.has_delta else 4
    if rules.has_delta:
        sizes |= DELTA
        if rules.expert:
            del sizes["intermediate_size"]
            changes.pop("intermediate_size", None)
            sizes["shared_expert_intermediate_size"] = 8
    if rules.has_latent:
        experts |= LATENT
        del sizes["head_dim"]
        heads = changes.get("num_attention_heads", sizes["num_attention_heads"])
        sizes["num_key_value_heads"] = heads
        changes.setdefault("num_key_value_heads", heads)
    fields = {**published, **sizes, **experts, **changes}
    if rules.has_mlp_types and "mlp_layer_types" not in fields:
        num_dense, num_layers = fields["first_k_dense_replace"], fields["num_hidden_layers"]
        if isinstance(num_dense, int) and isinstance(num_layers, int):
            types = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
            fields["mlp_layer_types"] = types
    return fields
