"""Qwen2 and Qwen2.5: bias on query, key and value."""

from dapo_megatron.model.families.family import ATTENTION, DENSE_MLP, QKV_BIAS, Family

QWEN2 = Family(
    model_type="qwen2",
    layer=(*ATTENTION, *QKV_BIAS, *DENSE_MLP),
    required={"use_sliding_window": False, "qk_norm": False},
    # The biases always exist; the window fields have no effect without use_sliding_window.
    harmless=frozenset({"attention_bias", "max_window_layers", "sliding_window"}),
)
