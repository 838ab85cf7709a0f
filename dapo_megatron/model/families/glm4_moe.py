"""GLM-4.5, 4.6 and 4.7: partial rotary embedding, a few dense layers, then layers with routed and
shared experts and a biased router. Norms and biases of query and key depend on the checkpoint."""

from dapo_megatron.model.families.family import (
    ATTENTION,
    BIASED_MOE,
    BIASED_ROUTER,
    EXPERT,
    HARMLESS_IN_TRAINING,
    QK_NORM,
    QKV_BIAS,
    Family,
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    layer=(*ATTENTION, *QKV_BIAS, *QK_NORM, *BIASED_MOE),
    expert=EXPERT,
    harmless=HARMLESS_IN_TRAINING,
    defaults={
        **BIASED_ROUTER,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
    },
    flags={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    has_partial_rotary=True,
)
