"""FLOPs of a model, compared with torch's count for the HF model and with 6 x parameters."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dapo_megatron.model import Architecture, architecture
from dapo_megatron.model.flops import head_flops, model_flops, pair_flops, peak_flops, token_flops
from tests.helpers.models import FAMILIES, make_random_model
from tests.helpers.published import PUBLISHED

LENGTHS = (48, 80)
SMALL = st.lists(st.integers(1, 500), min_size=1, max_size=6)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flops_equal_the_count_of_torch(tmp_path: Path, family: str, backward: bool) -> None:
    folder = make_random_model(family, tmp_path, num_hidden_layers=4)
    # torch does not count fused kernels. In eager mode, attention is two full matrix products, and
    # each expert has separate ones.
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    counted = 0
    for length in LENGTHS:
        with FlopCounterMode(display=False) as counter:
            logits = model(torch.randint(4, 90, (1, length))).logits
            if backward:
                logits.sum().backward()
        counted += counter.get_total_flops()
    arch = architecture(model.config.to_dict())
    if arch.delta and backward:
        return  # torch counts the backward pass of a convolution as if it mixed channels
    unseen = sum(length * (length - 1) // 2 for length in LENGTHS)
    estimated = model_flops(arch, LENGTHS, backward=backward)
    passes = 3 if backward else 1
    estimated += unseen * pair_flops(arch) * passes
    if arch.delta:
        estimated += _chunks(arch) * passes
    assert counted == pytest.approx(estimated, rel=0.01)


def _chunks(arch: Architecture) -> int:
    """Return the FLOPs of the gated delta rule in chunks of 64 tokens, which transformers pads,
    less those of its recurrence. torch counts no triangular systems."""
    assert arch.delta
    sizes = arch.delta.key_dim, arch.delta.value_dim
    padded = sum(-(-length // 64) * 64 for length in LENGTHS)
    in_chunks = padded * (64 * (2 * sizes[0] + sizes[1]) + 3 * prod(sizes))
    layers = arch.num_layers - len(arch.attention_layers)
    return 2 * layers * arch.delta.value_heads * (in_chunks - sum(LENGTHS) * 3 * prod(sizes))


@given(SMALL, SMALL)
def test_flops_of_sequences_add_up(first: list[int], second: list[int]) -> None:
    arch = architecture(PUBLISHED["Qwen3-30B-A3B"][1])
    both = model_flops(arch, first + second, backward=False)
    assert both == sum(model_flops(arch, part, backward=False) for part in (first, second))
    assert model_flops(arch, first, backward=True) == 3 * model_flops(arch, first, backward=False)


@pytest.mark.parametrize(
    ("name", "num_active"),
    [
        ("Qwen3-30B-A3B", 3.3e9),
        ("DeepSeek-V3", 37e9),
        ("Kimi-K2-Base", 32e9),
        ("Qwen3.5-35B-A3B", 3.5e9),
    ],
)
def test_only_active_experts_count(name: str, num_active: float) -> None:
    """Model cards say how many parameters act on a token."""
    arch = architecture(PUBLISHED[name][1])
    active = (token_flops(arch) + head_flops(arch)) / 2 + arch.vocab_size * arch.hidden_size
    assert active == pytest.approx(num_active, rel=0.03)


def test_peak_flops_by_device_name() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("Tesla T4") is None
