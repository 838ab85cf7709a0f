"""Mistral, from 7B v0.2 on: without a sliding window shorter than the model's positions."""

from dapo_megatron.model.families.family import ATTENTION, DENSE_MLP, Family

MISTRAL = Family(
    model_type="mistral",
    layer=(*ATTENTION, *DENSE_MLP),
    # None in transformers; vLLM reads Llama's.
    required={"attention_bias": False, "bias": False, "qkv_bias": False},
    defaults={"sliding_window": 4096},
    has_window=True,
)
