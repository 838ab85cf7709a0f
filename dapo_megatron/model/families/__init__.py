"""Model families, one file each: the parameters of a layer and the fields of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dapo_megatron.model.families.deepseek_v3 import DEEPSEEK_V3
from dapo_megatron.model.families.family import Family
from dapo_megatron.model.families.glm4_moe import GLM4_MOE
from dapo_megatron.model.families.glm4_moe_lite import GLM4_MOE_LITE
from dapo_megatron.model.families.llama import LLAMA
from dapo_megatron.model.families.mistral import MISTRAL
from dapo_megatron.model.families.qwen2 import QWEN2
from dapo_megatron.model.families.qwen3 import QWEN3
from dapo_megatron.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from dapo_megatron.model.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3),
            *(GLM4_MOE, GLM4_MOE_LITE, QWEN3_5, QWEN3_5_MOE),
        )
    }
)
"""Families by `model_type` in config.json."""
ALIASES: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Other values of `model_type`, and the families that they mean."""
WITH_IMAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    }
)
"""Values of `model_type` of models for images and text: the family of the text model, whose fields
are in `text_config`, and its class in transformers and vLLM."""
