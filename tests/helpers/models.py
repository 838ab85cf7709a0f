"""Make tiny HF models with random weights, for tests that compare backends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo_megatron.doctor.shrink import randomize
from dapo_megatron.model import FAMILIES as FAMILY_RULES
from tools.make_tiny_model import MAX_TOKENS, make_tokenizer

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # bias on query, key and value
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # norm on query and key; head_dim is independent
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),  # qwen3 with experts, 2 of 8 per token
    # Latent attention; a dense layer, then experts, one of them shared.
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    # Half of each head rotates; a dense layer, then experts, one of them shared.
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    # GLM-4.5 with latent attention.
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    # Gated delta nets, and gated attention in every fourth layer, of whose heads half rotate.
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}

DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}

BIASED_MOE = {
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
}

LATENT = {
    **BIASED_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
}

GLM4_MOE = {
    **BIASED_MOE,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": True,
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
    # Two are kept, two interpolated and 12 divided. Cosines and sines are multiplied by 1.16.
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 5.0,
        "beta_fast": 8,
        "original_max_position_embeddings": 128,
    },
}
"""Values of `rope_parameters`, with factors that differ from the defaults."""

KIMI_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
"""Rope of Kimi-K2 with a shorter length."""

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
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_tied": ("qwen3_5_text", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": ROPE["yarn"]}),
}
"""Models for parity tests: the family and overrides for `make_random_model`."""


def make_random_model(
    family: str, folder: Path, seed: int = 0, *, has_mtp: bool = False, **overrides: Any
) -> Path:
    """Write a random model of `family` with the quickstart's tokenizer. Return `folder`.

    The default has two layers (four with gated delta nets), 4 query heads on 2 key-value heads of
    32, and an untied head.
    `overrides` go to the HF config (`tie_word_embeddings=True`, `num_hidden_layers=4`, ...). Every
    weight differs from its initial value, so that a tensor that was not loaded changes the outputs
    (doctor/shrink.py, `randomize`). With `has_mtp` it has a layer for multi-token prediction.
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
    if FAMILY_RULES[family].has_delta:
        sizes |= DELTA
    if family == "qwen3_5_moe_text":
        sizes |= {**EXPERTS, "shared_expert_intermediate_size": 32}
    if family == "deepseek_v3":
        sizes |= LATENT
    if family == "glm4_moe":
        sizes |= GLM4_MOE
    if family == "glm4_moe_lite":
        sizes |= {**LATENT, "rms_norm_eps": 1e-5}
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
    settings |= sizes | overrides
    if FAMILY_RULES[family].has_mlp_types:
        num_dense = settings["first_k_dense_replace"]
        num_sparse = settings["num_hidden_layers"] - num_dense
        settings["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * num_sparse
    model = model_class(config_class(**settings))
    randomize(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if has_mtp:
        add_mtp(folder)
    return folder


def add_mtp(folder: Path) -> list[str]:
    """Add a layer for multi-token prediction to a checkpoint of one file. Return the names of its
    tensors, which are those of DeepSeek-V3 and GLM-4.5."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, own = f"model.layers.{number - 1}.", f"model.layers.{number}."
    added = {
        own + name.removeprefix(last): tensor + 1
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    added[own + "eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
    added |= {f"{own}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")}
    added[own + "shared_head.norm.weight"] = torch.ones(hidden)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        added[own + name] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors | added, folder / "model.safetensors", {"format": "pt"})
    return sorted(added)


def as_released(folder: Path, target: Path) -> Path:
    """Write a Qwen3.5 of one file as models for images and text are published: text_config, other
    names, stacked experts, a layer for multi-token prediction, an encoder of images. Return
    `target`."""
    target.mkdir()
    for path in folder.glob("[!m]*"):  # all but the weights
        shutil.copy(path, target)
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = text["model_type"].removesuffix("_text")
    name = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    vision = {"model_type": kind, "depth": 1, "hidden_size": 32, "num_heads": 2}
    config = {
        "architectures": [name],
        "model_type": kind,
        "image_token_id": 90,
        "text_config": text | {"mtp_num_hidden_layers": 1},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": vision | {"intermediate_size": 32, "out_hidden_size": 64},
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(text["num_hidden_layers"] if "num_experts" in text else 0):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, tensors[f"{prefix}.down_proj"] = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], 1)
    tensors = {
        key.replace("model.", "model.language_model.", 1)
        if key.startswith("model.")
        else key: value
        for key, value in tensors.items()
    }
    tensors |= {
        "mtp.fc.weight": torch.ones(4, 8),
        "model.visual.patch_embed.proj.weight": torch.ones(4, 4),
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def load_hf(folder: Path) -> PreTrainedModel:
    """Load a model in float32, with `rms_norm_eps` in all norms, as Megatron and vLLM compute them.
    transformers uses 1e-6 inside latent attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


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
