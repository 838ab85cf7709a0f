"""Frequencies of rotary position embedding (arXiv 2104.09864), as transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_megatron.model import Architecture, Rope


def rope_frequencies(arch: Architecture) -> Tensor:
    """Radians per position, [head_dim / 2] in float32: those that turn often within the original
    length are kept, those that turn seldom divided by the factor."""
    rope = arch.rope
    steps = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    plain = 1.0 / rope.theta**steps
    kept = _kept(rope, plain)
    return (1.0 - kept) * plain / rope.factor + kept * plain


def _kept(rope: Rope, plain: Tensor) -> Tensor:
    """Share of each frequency that is kept: from 0 to 1."""
    if rope.kind == "llama3":
        # In between, as many turns as it makes.
        turns = rope.original_max_positions * plain / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)
    if rope.kind == "yarn":
        # In between, by its place among the frequencies.
        first = max(math.floor(_place(rope, rope.fast_turns, len(plain))), 0)
        last = min(math.ceil(_place(rope, rope.slow_turns, len(plain))), 2 * len(plain) - 1)
        places = torch.arange(len(plain), dtype=torch.float32)
        return 1.0 - ((places - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return torch.zeros_like(plain)


def _place(rope: Rope, turns: float, count: int) -> float:
    """Where, among `count` frequencies, one turns so often within the original length."""
    return (
        count * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / math.log(rope.theta)
    )
