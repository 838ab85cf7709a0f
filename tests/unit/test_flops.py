"""Operations of a model against what torch counts in its HF twin, and against 6 x parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dapo_megatron.model import architecture
from dapo_megatron.model.flops import head_flops, model_flops, pair_flops, peak_flops, token_flops
from tests.helpers.models import FAMILIES, make_random_model
from tests.helpers.published import PUBLISHED

LENGTHS = (48, 80)
SMALL = st.lists(st.integers(1, 500), min_size=1, max_size=6)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_torch_counts_as_many(tmp_path: Path, family: str, backward: bool) -> None:
    folder = make_random_model(family, tmp_path, num_hidden_layers=3)
    # Eager: attention is two products of whole matrices, and each expert products of its own, which
    # torch counts; it does not count its fused ones.
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
    unseen = sum(length * (length - 1) // 2 for length in LENGTHS)
    ours = model_flops(arch, LENGTHS, backward=backward)
    ours += unseen * pair_flops(arch) * (3 if backward else 1)
    assert counted == pytest.approx(ours, rel=0.01)


def test_six_per_parameter() -> None:
    """The rule of thumb (arXiv 2001.08361, section 2.1), for a model whose embedding is apart."""
    count, hf = PUBLISHED["Qwen2.5-32B"]
    arch = architecture(hf)
    embedding = arch.vocab_size * arch.hidden_size
    short = model_flops(arch, [1] * 1000, backward=True)
    assert short == pytest.approx(6 * 1000 * (count - embedding), rel=0.001)


@given(SMALL, SMALL)
def test_sequences_add_up(some: list[int], others: list[int]) -> None:
    arch = architecture(PUBLISHED["Qwen3-30B-A3B"][1])
    both = model_flops(arch, some + others, backward=False)
    assert both == sum(model_flops(arch, part, backward=False) for part in (some, others))
    assert model_flops(arch, some, backward=True) == 3 * model_flops(arch, some, backward=False)


def test_only_scored_tokens_meet_the_head() -> None:
    arch = architecture(PUBLISHED["Qwen3-8B"][1])
    whole, none = (model_flops(arch, [7], backward=False, num_scored=n) for n in (None, 0))
    assert whole - none == 7 * head_flops(arch)
    assert none == 7 * token_flops(arch) + 28 * pair_flops(arch)


def test_active_experts_alone_count() -> None:
    """Published as 30B-A3B: about 3.3e9 parameters act on a token (model card)."""
    arch = architecture(PUBLISHED["Qwen3-30B-A3B"][1])
    active = (token_flops(arch) + head_flops(arch)) / 2 + arch.vocab_size * arch.hidden_size
    assert active == pytest.approx(3.3e9, rel=0.03)


def test_devices_by_name() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("Tesla T4") is None
