"""Qwen3: norm on query and key, and an explicit `head_dim`."""

from dapo_megatron.model.families.family import ATTENTION, DENSE_MLP, QK_NORM, Family

QWEN3 = Family(
    model_type="qwen3",
    layer=(*ATTENTION, *QK_NORM, *DENSE_MLP),
    required={"attention_bias": False, "use_sliding_window": False},
    # No effect without use_sliding_window.
    harmless=frozenset({"max_window_layers", "sliding_window"}),
    defaults={"head_dim": 128},
)
