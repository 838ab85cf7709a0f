"""Floating-point operations (FLOPs) of a model, from its sizes, and peak rates of devices.

A multiplication and an addition count as two. Matrix products and causal attention are counted
exactly, gated delta nets as the recurrence, not as the chunks in which it is computed. Norms, rope,
softmax and activations are not counted; they are about 1% of a real model.
Activation recomputation (policy.recompute) is not counted, as is usual for model FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapo_megatron.model import Architecture

BACKWARD = 2
"""Cost of the backward pass of a matrix product relative to the forward pass: one product for the
gradient of each input."""

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
"""Peak dense bfloat16 FLOPs per second, by words in the device name from CUDA. The first match
counts. From NVIDIA's data sheets, which state twice the rate for sparse matrices."""


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak dense bfloat16 FLOPs per second, or None if it is not in the table.

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
    """Return the FLOPs for sequences of `lengths` tokens: forward, or with `backward`, both passes.

    `num_scored` is the number of tokens that go through the output head; None means all.
    """
    num_tokens = sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    scored = num_tokens if num_scored is None else num_scored
    forward = num_tokens * token_flops(arch) + pairs * pair_flops(arch) + scored * head_flops(arch)
    return float(forward * (1 + BACKWARD if backward else 1))


def token_flops(arch: Architecture) -> int:
    """Return the forward FLOPs of one token in all layers, without attention scores and values."""
    layers = range(arch.num_layers)
    return 2 * sum(_mixer(arch, layer) + _mlp_weights(arch, layer) for layer in layers)


def pair_flops(arch: Architecture) -> int:
    """Return the forward FLOPs of one query-key pair in all layers: attention score and value."""
    query = arch.latent.qk_head_dim if arch.latent else arch.head_dim
    return 2 * len(arch.attention_layers) * (arch.num_heads * query + arch.value_columns)


def head_flops(arch: Architecture) -> int:
    """Return the forward FLOPs of one token in the output head."""
    return 2 * arch.hidden_size * arch.vocab_size


def _mixer(arch: Architecture, layer: int) -> int:
    """Return the multiplications of one token in a layer's attention projections, or in its gated
    delta net."""
    if arch.delta and arch.has_delta(layer):
        delta = arch.delta
        rows = 2 * delta.key_rows + 2 * delta.value_rows + 2 * delta.value_heads
        convolution = delta.kernel * (2 * delta.key_rows + delta.value_rows)
        # The state is read with the key and with the query, and written.
        recurrence = 3 * delta.key_dim * delta.value_rows
        return arch.hidden_size * (rows + delta.value_rows) + convolution + recurrence
    output = arch.value_columns * arch.hidden_size
    if arch.latent is None:
        queries = arch.query_rows * (2 if arch.delta else 1)  # each with a gate
        return arch.hidden_size * (queries + 2 * arch.group_rows) + output
    latent, queries = arch.latent, arch.num_heads * arch.latent.qk_head_dim
    rank = latent.q_lora_rank
    query = rank * (arch.hidden_size + queries) if rank else arch.hidden_size * queries
    key_value = (
        arch.hidden_size * latent.down_rows + latent.kv_lora_rank * arch.num_heads * latent.up_dim
    )
    return query + key_value + output


def _mlp_weights(arch: Architecture, layer: int) -> int:
    """Return the number of a layer's MLP and router weights that one token uses."""
    if not arch.has_experts(layer):
        return 3 * arch.hidden_size * arch.intermediate_size
    columns = arch.experts_per_token * arch.moe_intermediate_size + arch.shared_intermediate_size
    gate = 1 if arch.delta and arch.shared_intermediate_size else 0
    return arch.hidden_size * (arch.num_experts + 3 * columns + gate)
