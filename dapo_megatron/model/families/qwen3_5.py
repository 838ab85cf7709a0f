"""Text models of Qwen3.5, 3.6 and 3.8: gated delta nets, attention with an output gate in every
fourth layer; dense, or with experts and a gated shared expert in every layer."""

from typing import Any

from dapo_megatron.model.families.family import (
    DENSE_MLP,
    EXPERT,
    GATED_SHARED_EXPERT,
    HYBRID_ATTENTION,
    ROUTER,
    Family,
)

_REQUIRED: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
# Layers for speculative decoding, which training does not use (model.drop_mtp).
_HARMLESS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "output_gate_type": "silu",
}

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    layer=(*HYBRID_ATTENTION, *DENSE_MLP),
    required=_REQUIRED,
    harmless=_HARMLESS,
    defaults=_DEFAULTS,
    has_partial_rotary=True,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    layer=(*HYBRID_ATTENTION, *ROUTER, *GATED_SHARED_EXPERT),
    expert=EXPERT,
    required={**_REQUIRED, "decoder_sparse_step": 1},
    # Used by HF's training only. Here policy.moe_aux_loss balances experts.
    harmless=_HARMLESS | {"router_aux_loss_coef", "output_router_logits"},
    # No layer is dense.
    defaults={**_DEFAULTS, "norm_topk_prob": True, "intermediate_size": 1},
    has_partial_rotary=True,
)
