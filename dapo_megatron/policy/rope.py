"""Rotary position embedding (arXiv 2104.09864): cosines and sines once per micro-batch.

Megatron-core 0.16.1 gives every layer the angles of positions 0, 1, 2, ... up to the longest
sequence. For packed rows each layer reads the lengths of the sequences back from the device, slices
the angles with them, and computes cosines and sines, for queries and again for keys. On a GPU the
host waits at each read. Here the decoder computes them from the positions of the micro-batch's
tokens, on the device, and all layers share them. The operations and roundings are those of
Megatron, and so of HF and vLLM.

Shape letters: L tokens of a row on this rank, B rows, R rotated columns of a head.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dapo_megatron.model import Architecture, Rope


def frequencies(arch: Architecture) -> Tensor:
    """Return the frequencies of rotary position embedding (arXiv 2104.09864), as transformers
    computes them: radians per position, [R / 2], float32. High frequencies are kept, and low ones
    are divided by the scaling factor."""
    rope = arch.rope
    steps = torch.arange(0, arch.rotary_dim, 2, dtype=torch.float32) / arch.rotary_dim
    plain = 1.0 / rope.theta**steps
    kept = _kept_share(rope, plain)
    return (1.0 - kept) * plain / rope.factor + kept * plain


def _kept_share(rope: Rope, plain: Tensor) -> Tensor:
    """Return the share of each frequency that is kept, from 0 to 1."""
    if rope.kind == "llama3":
        # Interpolate by the number of rotations within the original length.
        turns = rope.original_max_positions * plain / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)
    if rope.kind == "yarn":
        # Interpolate by the index of the frequency.
        first = max(math.floor(_index_of(rope, rope.beta_fast, len(plain))), 0)
        last = min(math.ceil(_index_of(rope, rope.beta_slow, len(plain))), 2 * len(plain) - 1)
        indices = torch.arange(len(plain), dtype=torch.float32)
        return 1.0 - ((indices - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return torch.zeros_like(plain)


def _index_of(rope: Rope, turns: float, count: int) -> float:
    """Return the index, among `count` frequencies, of the one that makes `turns` rotations within
    the original length."""
    return (
        count * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / math.log(rope.theta)
    )


def rotation(
    positions_BL: Tensor,
    frequencies: Tensor,
    config: TransformerConfig,
    *,
    scaling: float = 1.0,
) -> Tensor:
    """Return how to rotate the heads of each token, for `apply`: [L, 1, 1, 2 R], cosines and sines
    times `scaling`, in the model's precision. For Transformer Engine's kernel: [L, 1, 1, R], the
    angles in float32.

    `frequencies` are R / 2 numbers, in radians per position. All rows of a micro-batch have the
    same positions (policy/rows.py).
    """
    half = positions_BL[0].to(frequencies.dtype)[:, None] * frequencies
    angles = torch.cat((half, half), dim=-1)[:, None, None]
    if config.apply_rope_fusion:
        assert scaling == 1.0, "see plan/compatibility"
        return angles
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling).to(config.params_dtype)


def apply(
    heads: Tensor, rotation: Tensor, config: TransformerConfig, *, mscale: float = 1.0, **_: Any
) -> Tensor:
    """Rotate the first R columns of queries or keys, [L, B, heads, columns], or [L, heads, columns]
    of a packed row. Stands in for Megatron's `apply_rotary_pos_emb`."""
    assert mscale == 1.0, "rope scaling is in the frequencies"
    if heads.dim() == 3:
        return apply(heads[:, None], rotation, config)[:, 0]
    if config.apply_rope_fusion:
        fused: Tensor = rope_utils.fused_apply_rotary_pos_emb(heads, rotation)
        return fused
    cos, sin = rotation.chunk(2, dim=-1)
    rotated, unchanged = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], dim=-1)
    if config.multi_latent_attention:
        # Checkpoints with latent attention have the two columns of a rotation next to each other.
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, unchanged), dim=-1) if unchanged.shape[-1] else rotated


@cache
def use_in_megatron() -> None:
    """Make Megatron's attention rotate queries and keys here."""
    from megatron.core.transformer import attention, multi_latent_attention

    attention.apply_rotary_pos_emb = apply
    multi_latent_attention.apply_rotary_pos_emb = apply


class GivenRotation(torch.nn.Module):
    """Stands in for the rotary embedding that each latent attention layer has. Returns the rotation
    that the decoder computed for the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation: Tensor | None = None

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Return a length, which `forward` ignores."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the rotation of the micro-batch."""
        assert self.rotation is not None
        return self.rotation
