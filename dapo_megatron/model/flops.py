"""Floating-point operations of a model, counted from its sizes (a multiplication and an addition
are two), and how many a device can do.

Counted are the matrix products and causal attention, exactly; norms, rope, softmax and gates, about
one in a hundred of a real model, are not. What is computed again to save memory
(policy.recompute) is not counted either: it is work of the device, not of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapo_megatron.model import Architecture

BACKWARD = 2
"""Of a matrix product: a gradient of each of its two inputs, as dear as the product itself."""

PEAKS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800 PCIe": 756e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Dense bfloat16 operations a second, by a part of the name that CUDA gives the device; the first
that is in it counts. NVIDIA's data sheets, which state twice as many for sparse matrices."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a device; None for one that is not in the table.

    Example: peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    """
    words = device_name.replace("-", " ").split()
    parts = (part for part in PEAKS if set(part.split()) <= set(words))
    return next((PEAKS[part] for part in parts), None)


def model_flops(
    arch: Architecture,
    lengths: Sequence[int],
    *,
    backward: bool,
    num_scored: int | None = None,
) -> float:
    """Operations for sequences of `lengths` tokens, forward, or forward and `backward`.

    `num_scored` tokens go through the output head; None: all.
    """
    num_tokens = sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    scored = num_tokens if num_scored is None else num_scored
    forward = num_tokens * token_flops(arch) + pairs * pair_flops(arch) + scored * head_flops(arch)
    return float(forward * (1 + BACKWARD if backward else 1))


def token_flops(arch: Architecture) -> int:
    """Forward, of a token in all layers, without what grows with the length of its sequence."""
    layers = range(arch.num_layers)
    return 2 * sum(_attention_weights(arch) + _mlp_weights(arch, layer) for layer in layers)


def pair_flops(arch: Architecture) -> int:
    """Forward, of a query and a key it sees, in all layers: their product, and the value's."""
    query = arch.latent.qk_head_dim if arch.latent else arch.head_dim
    return 2 * arch.num_layers * (arch.num_heads * query + arch.value_columns)


def head_flops(arch: Architecture) -> int:
    """Forward, of a token in the output head."""
    return 2 * arch.hidden_size * arch.vocab_size


def _attention_weights(arch: Architecture) -> int:
    """Of the projections around attention."""
    output = arch.value_columns * arch.hidden_size
    if arch.latent is None:
        return arch.hidden_size * (arch.query_rows + 2 * arch.group_rows) + output
    latent, queries = arch.latent, arch.num_heads * arch.latent.qk_head_dim
    rank = latent.q_lora_rank
    query = rank * (arch.hidden_size + queries) if rank else arch.hidden_size * queries
    key_value = (
        arch.hidden_size * latent.down_rows + latent.kv_lora_rank * arch.num_heads * latent.up_dim
    )
    return query + key_value + output


def _mlp_weights(arch: Architecture, layer: int) -> int:
    """That one token goes through."""
    if not arch.has_experts(layer):
        return 3 * arch.hidden_size * arch.intermediate_size
    columns = arch.experts_per_token * arch.moe_intermediate_size + arch.shared_intermediate_size
    return arch.hidden_size * (arch.num_experts + 3 * columns)
