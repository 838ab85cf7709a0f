"""Qwen3-MoE: Qwen3 with experts in every layer."""

from dapo_megatron.model.families.family import ATTENTION, EXPERT, QK_NORM, ROUTER, Family

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    layer=(*ATTENTION, *QK_NORM, *ROUTER),
    expert=EXPERT,
    required={
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Some published Qwen3-MoE models have these fields, always with these values.
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    harmless=frozenset(
        {
            # No effect without use_sliding_window.
            "max_window_layers",
            "sliding_window",
            # Used by HF's training only. Here policy.moe_aux_loss balances experts.
            "router_aux_loss_coef",
            "output_router_logits",
        }
    ),
)
