"""Llama 2 and 3.x, and what publishes itself as one (SmolLM2, TinyLlama, ...)."""

from dapo_megatron.model.families.family import ATTENTION, DENSE_MLP, Family

LLAMA = Family(
    model_type="llama",
    layer=(*ATTENTION, *DENSE_MLP),
    required={
        "attention_bias": False,
        # vLLM's other names for biases in attention.
        "bias": False,
        "qkv_bias": False,
        "rope_interleaved": False,
    },
    harmless=frozenset({"is_llama_config"}),
    defaults={"num_key_value_heads": None},
)
