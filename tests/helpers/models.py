"""Make tiny HF models with random weights, for tests that compare backends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo_megatron.doctor.shrink import randomize
from tools.make_tiny_model import MAX_TOKENS, make_tokenizer

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # bias on query, key and value
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # norm on query and key; head_dim is independent
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),  # qwen3 with experts, 2 of 8 per token
    # Latent attention; a dense layer, then experts, one of them shared.
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
}

ROPE = {
    # Of the 16 frequencies of a head of 32, 3 are kept, 2 interpolated and 11 divided.
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 5.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 128,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
}
"""Values of `rope_parameters`, with factors that differ from the defaults."""

RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen2_bias": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": ROPE["llama3"], "tie_word_embeddings": True}),
    "llama_linear": ("llama", {"rope_parameters": ROPE["linear"]}),
    "mistral": ("mistral", {"head_dim": 64}),
    "qwen3_moe": ("qwen3_moe", {}),
}
"""Models for parity tests: the family and overrides for `make_random_model`."""


def make_random_model(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of `family` with the quickstart's tokenizer. Return `folder`.

    The default has two layers, 4 query heads on 2 key-value heads of 32, and an untied head.
    `overrides` go to the HF config (`tie_word_embeddings=True`, `num_hidden_layers=4`, ...). Every
    weight differs from its initial value, so that a tensor that was not loaded changes the outputs
    (doctor/shrink.py, `randomize`).
    """
    config_class, model_class = FAMILIES[family]
    tokenizer = make_tokenizer()
    # vLLM's CPU attention needs heads of 32 or more. In Qwen3, head_dim is independent of
    # hidden_size.
    sizes: dict[str, Any] = (
        {"hidden_size": 64, "head_dim": 32} if family.startswith("qwen3") else {"hidden_size": 128}
    )
    if family == "qwen3_moe":
        sizes |= EXPERTS
    if family == "deepseek_v3":
        sizes |= LATENT
    if family == "mistral":
        sizes["sliding_window"] = None
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    model = model_class(config_class(**{**settings, **sizes, **overrides}))
    randomize(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def per_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the fused expert tensors of transformers into tensors with their checkpoint names."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_fused, part = name.partition(".experts.")
        if not is_fused:
            named[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
        for number, expert in enumerate(tensor):
            for projection, value in zip(parts, expert.chunk(len(parts)), strict=True):
                named[f"{layer}.experts.{number}.{projection}.weight"] = value
    return named
