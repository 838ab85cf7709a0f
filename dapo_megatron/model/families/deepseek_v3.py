"""DeepSeek-V3 and R1, Moonlight and Kimi-K2: latent attention, a few dense layers, then layers with
routed and shared experts and a biased router.

transformers computes the norms inside attention with 1e-6, whatever `rms_norm_eps` is (1e-5 in
Moonlight). vLLM and Megatron use one value for all norms, so policy and engine agree.
"""

from dapo_megatron.model.families.family import (
    BIASED_MOE,
    EXPERT,
    HARMLESS_IN_TRAINING,
    LATENT_ATTENTION,
    LATENT_REQUIRED,
    Family,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    layer=(*LATENT_ATTENTION, *BIASED_MOE),
    expert=EXPERT,
    required=LATENT_REQUIRED,
    harmless=HARMLESS_IN_TRAINING | {"auto_map", "ep_size", "aux_loss_alpha", "seq_aux"},
    defaults={"norm_topk_prob": True},
)
