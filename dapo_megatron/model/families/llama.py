"""Llama 2 and 3.x, and other models published with this model_type (SmolLM2, TinyLlama, ...)."""

from dapo_megatron.model.families.family import ATTENTION, DENSE_MLP, Family

LLAMA = Family(
    model_type="llama",
    layer=(*ATTENTION, *DENSE_MLP),
    required={
        "attention_bias": False,
        # Other names that vLLM reads for biases in attention.
        "bias": False,
        "qkv_bias": False,
        "rope_interleaved": False,
    },
    harmless=frozenset({"is_llama_config"}),
    defaults={"num_key_value_heads": None},
)
