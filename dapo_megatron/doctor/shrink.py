"""Shrink a model, keeping its family and all features that a layout could compute incorrectly."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path

import torch

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import Architecture, Latent, to_hf_config
from dapo_megatron.plan.layout import pipeline_problems
from dapo_megatron.plan.rows import round_up

HEAD_DIM = 16
MIN_LAYERS = 4
"""Enough for two pipeline stages of two chunks each."""
MIN_POSITIONS = 512
MIN_EXPERTS = 8
FFN = 48


def shrink(arch: Architecture, policy: PolicyConfig) -> Architecture:
    """Return `arch` with small sizes that allow the layout of `policy` and any 2 x 2 layout.

    Kept are the family, tied or untied embeddings, biases, norms of queries and keys, query heads
    per key-value head, value heads per key head of gated delta nets, rope, a head size independent
    of the hidden size, and routing. The
    vocabulary size is odd, so that tensor parallelism must pad it.
    """
    tensor = lcm(policy.tensor_parallel, 2)
    # As many key-value heads as tensor-parallel ranks, or fewer if ranks share heads in the model.
    is_shared = arch.num_kv_heads < max(policy.tensor_parallel, 2)
    groups = arch.num_kv_heads if is_shared else tensor
    heads = groups * (arch.num_heads // arch.num_kv_heads)
    is_independent = arch.latent is None and arch.query_rows != arch.hidden_size
    small = replace(
        arch,
        num_layers=_num_layers(policy, arch.num_layers),
        hidden_size=heads * HEAD_DIM // (2 if is_independent else 1),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=HEAD_DIM,
        intermediate_size=FFN * tensor,
        vocab_size=50 * tensor + 1,
        max_positions=max(arch.max_positions, MIN_POSITIONS),
    )
    return _shrink_delta(_shrink_latent(_shrink_experts(small, policy)), tensor)


def _num_layers(policy: PolicyConfig, most: int) -> int:
    """Return the smallest number of layers that the policy's pipeline can use, preferably a
    multiple of 4."""
    fitting = [
        number
        for number in range(MIN_LAYERS, max(most, MIN_LAYERS) + 1)
        if not any(pipeline_problems(policy, number))
    ]
    return min(fitting, key=lambda number: (number % MIN_LAYERS, number), default=most)


def _shrink_experts(arch: Architecture, policy: PolicyConfig) -> Architecture:
    if not arch.num_experts:
        return arch
    grouped_routing = arch.grouped_routing
    if grouped_routing:
        groups, per_token = min(grouped_routing.n_group, 4), min(grouped_routing.topk_group, 2)
        grouped_routing = replace(grouped_routing, n_group=groups, topk_group=per_token)
    shared = -(-arch.shared_intermediate_size // arch.moe_intermediate_size)
    return replace(
        arch,
        num_experts=round_up(min(arch.num_experts, MIN_EXPERTS), lcm(policy.expert_parallel, 2)),
        experts_per_token=min(arch.experts_per_token, 2),
        moe_intermediate_size=FFN,
        shared_intermediate_size=shared * FFN,
        num_dense_layers=min(arch.num_dense_layers, 1),
        grouped_routing=grouped_routing,
    )


def _shrink_latent(arch: Architecture) -> Architecture:
    if arch.latent is None:
        return arch
    latent = Latent(
        q_lora_rank=40 if arch.latent.q_lora_rank else 0,
        kv_lora_rank=32,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=HEAD_DIM // 2,
        v_head_dim=HEAD_DIM,
    )
    return replace(arch, latent=latent, head_dim=latent.qk_rope_head_dim)


def _shrink_delta(arch: Architecture, tensor: int) -> Architecture:
    if arch.delta is None:
        return arch
    repeats = arch.delta.value_heads // arch.delta.key_heads
    heads = {"key_heads": tensor, "value_heads": tensor * repeats}
    delta = replace(arch.delta, **heads, key_dim=HEAD_DIM, value_dim=HEAD_DIM)
    return replace(arch, delta=delta)


def write_random_model(arch: Architecture, folder: Path) -> None:
    """Write an HF folder with a randomly initialized model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    fields = to_hf_config(arch) | tokens | {"dtype": "float32"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    randomize(model.float(), seed=0)
    model.save_pretrained(folder)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill all parameters with random values from `seed`, without using torch's global generator.

    The values differ from the defaults of a new model, so that a forgotten tensor is detected:
    matrices of std 0.1, norms within 0.5 of their default, biases away from 0, heads of gated delta
    nets that forget within a token and such that remember hundreds. All values are rounded to
    bfloat16, so that every precision starts from the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    has_delta = any(name.endswith("A_log") for name, _ in model.named_parameters())
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            default = 0.0 if has_delta and "linear_attn" not in name else 1.0
            weight.uniform_(default - 0.5, default + 0.5, generator=generator)
        elif name.endswith("A_log"):
            weight.uniform_(-5.0, 1.0, generator=generator)
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
