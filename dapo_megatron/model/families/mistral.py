"""Mistral from 7B v0.2 on. A sliding window must be null or at least max_position_embeddings."""

from dapo_megatron.model.families.family import ATTENTION, DENSE_MLP, Family

MISTRAL = Family(
    model_type="mistral",
    layer=(*ATTENTION, *DENSE_MLP),
    # Mistral has no biases in transformers, but vLLM reads Llama's bias fields.
    required={"attention_bias": False, "bias": False, "qkv_bias": False},
    defaults={"sliding_window": 4096},
    has_window=True,
)
