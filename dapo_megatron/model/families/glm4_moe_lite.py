"""GLM-4.7-Flash: GLM-4.7 with latent attention. As for DeepSeek-V3, transformers computes the norms
inside attention with 1e-6 instead of `rms_norm_eps`."""

from dapo_megatron.model.families.family import (
    BIASED_MOE,
    BIASED_ROUTER,
    EXPERT,
    HARMLESS_IN_TRAINING,
    LATENT_ATTENTION,
    LATENT_REQUIRED,
    Family,
)

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    layer=(*LATENT_ATTENTION, *BIASED_MOE),
    expert=EXPERT,
    required=LATENT_REQUIRED,
    harmless=HARMLESS_IN_TRAINING,
    defaults={**BIASED_ROUTER, "norm_topk_prob": True},
    has_mlp_types=True,
)
