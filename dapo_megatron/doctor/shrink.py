"""A small model of the same family and features: what a layout could get wrong is still there."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model.hf_config import head_dim
from dapo_megatron.plan.layout import pipeline_problems

HEAD_DIM = 16
MIN_LAYERS = 4
"""Two pipeline stages of two chunks each."""
MIN_POSITIONS = 512
MIN_EXPERTS = 8


def shrink(hf: Mapping[str, Any], policy: PolicyConfig) -> dict[str, Any]:
    """The HF config.json `hf` with small sizes that take `policy`'s own layout and any 2 x 2.

    Kept: family, tied or untied, biases, norms on query and key, query heads per key-value head,
    rope, a head size apart from the hidden size, routing. The vocabulary is odd, so that tensor
    parallelism pads it.
    """
    tensor = lcm(policy.tensor_parallel, 2)
    old_heads = hf["num_attention_heads"]
    old_groups = hf.get("num_key_value_heads") or old_heads
    # As many as tensor-parallel ranks, or fewer where the policy has more ranks than the model has.
    groups = tensor if old_groups >= max(policy.tensor_parallel, 2) else old_groups
    heads = groups * (old_heads // old_groups)
    is_apart = head_dim(hf) * old_heads != hf["hidden_size"]
    small = {
        **hf,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * HEAD_DIM // (2 if is_apart else 1),
        "intermediate_size": 48 * tensor,
        "num_hidden_layers": _num_layers(policy, hf["num_hidden_layers"]),
        "vocab_size": 50 * tensor + 1,
        "max_position_embeddings": max(hf["max_position_embeddings"], MIN_POSITIONS),
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if is_apart or "head_dim" in hf:
        small["head_dim"] = HEAD_DIM
    for of_every_layer in ("layer_types", "max_window_layers"):
        small.pop(of_every_layer, None)
    return small | _experts(hf, policy) | _latent(hf)


def _num_layers(policy: PolicyConfig, most: int) -> int:
    """The fewest that the policy's own pipeline takes, a multiple of 4 if there is one."""
    fitting = [
        number
        for number in range(MIN_LAYERS, max(most, MIN_LAYERS) + 1)
        if not any(pipeline_problems(policy, number))
    ]
    return min(fitting, key=lambda number: (number % MIN_LAYERS, number), default=most)


def _experts(hf: Mapping[str, Any], policy: PolicyConfig) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in names if hf.get(key)), None)
    if key is None:
        return {}
    ranks = lcm(policy.expert_parallel, 2)
    return {
        key: -(-min(hf[key], MIN_EXPERTS) // ranks) * ranks,
        "num_experts_per_tok": min(hf["num_experts_per_tok"], 2),
        "moe_intermediate_size": 48,
    }


def _latent(hf: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3's attention, its first dense layers, and routing by groups of experts."""
    if not hf.get("kv_lora_rank"):
        return {}
    return {
        "q_lora_rank": 40 if hf.get("q_lora_rank") else None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": HEAD_DIM // 2,
        "v_head_dim": HEAD_DIM,
        "qk_head_dim": HEAD_DIM + HEAD_DIM // 2,
        "head_dim": HEAD_DIM // 2,  # as transformers writes it
        "first_k_dense_replace": min(hf["first_k_dense_replace"], 1),
        "n_group": min(hf["n_group"], 4),
        "topk_group": min(hf["topk_group"], 2),
    }


def write_random_model(hf: Mapping[str, Any], folder: Path, seed: int = 0) -> None:
    """An HF folder with the model that the config.json `hf` describes, its weights random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in hf.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf["model_type"], **settings))
    randomize(model.float(), seed)
    model.save_pretrained(folder)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill all parameters from `seed`, leaving torch's global generator alone.

    Every weight differs from what a fresh model or a forgotten tensor would hold: matrices of
    std 0.1, norms in [0.5, 1.5], biases away from 0. All are bfloat16 numbers, so that every
    precision starts from the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            weight.uniform_(0.2, 0.8, generator=generator)
            weight.mul_(torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1)
        else:
            weight.normal_(0.0, 0.1, generator=generator)
        weight.copy_(weight.bfloat16())
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # small, so that every expert has tokens
            bias.uniform_(-0.2, 0.2, generator=generator)
            bias.copy_(bias.bfloat16())
