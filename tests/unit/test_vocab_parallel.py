"""The log-prob head against log_softmax of full logits in float64: values and both gradients.

Shape letters: T tokens, H hidden size, V vocabulary entries (of one rank, where there are several).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_megatron.policy import vocab_parallel
from tests.helpers.heads import (
    Head,
    HeadResult,
    accumulated,
    assert_equal,
    make_head,
    padded,
    plain,
    tiles_of,
    with_entropy,
)
from tests.helpers.heads import fused_head as tiled
from tests.helpers.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(0, 6),
    num_entries=st.integers(1, 30),
    padding=st.integers(0, 4),
    tile=st.integers(1, 31),
    block=st.integers(1, 7),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    std=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 5),
    has_entropy=st.booleans(),
)
@example(0, 30, 4, 8, 7, 0.6, 1.0, 0, True)  # no tokens
@example(6, 1, 4, 8, 7, 0.6, 1.0, 0, True)  # one entry: its log-prob is 0
@example(6, 30, 2, 10, 3, 0.6, 1.0, 0, True)  # padding starts at a tile boundary
@example(6, 30, 2, 10, 3, 0.6, 1.0, 0, False)
def test_values_and_gradients_equal_those_of_full_logits(
    dtype: torch.dtype,
    num_tokens: int,
    num_entries: int,
    padding: int,
    tile: int,
    block: int,
    temperature: float,
    std: float,
    seed: int,
    has_entropy: bool,
) -> None:
    head = make_head(num_tokens, num_entries, std=std, seed=seed).to(dtype)
    head = replace(head, temperature=temperature)
    head = with_entropy(head, seed) if has_entropy else head
    with tiles_of(tile, block):
        outcome = tiled(padded(head, padding), num=num_entries)
    assert {outcome.logp.dtype, outcome.entropy.dtype, outcome.grad_weight.dtype} == {dtype}
    assert not outcome.grad_weight[num_entries:].any()
    outcome = replace(outcome, grad_weight=outcome.grad_weight[:num_entries])
    assert_equal(outcome, plain(head.to(torch.float64)), TOLERANCE[dtype])


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_logits_neither_overflow_nor_lose_precision(shift: float) -> None:
    head = make_head(4, 20).to(torch.float32)
    head.hidden[:, 0], head.weight[:, 0] = 1.0, shift
    head.weight[:, 1:] = head.weight[
        :, 1:
    ].bfloat16()  # few digits, so that products and sums are exact
    head.hidden[:, 1:] = (head.hidden[:, 1:] * 4).round() / 4
    head.weight[:, 1:] = (head.weight[:, 1:] * 8).round() / 8
    with tiles_of(6):
        outcome = tiled(head)
    expected = plain(head.to(torch.float64))
    torch.testing.assert_close(outcome.logp.double(), expected.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(outcome.entropy.double(), expected.entropy, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "has_entropy"), [(0, True), (5, True), (5, False)])
def test_a_gradient_added_to_main_grad_is_that_of_autograd(
    dtype: torch.dtype, num_tokens: int, has_entropy: bool
) -> None:
    """On CPU to the bit: the product of a tile is rounded before it is added."""
    head = padded(make_head(num_tokens, 30, hidden=8).to(dtype), 3)
    head = with_entropy(head) if has_entropy else head
    with tiles_of(8, 2):
        fused, separate = (accumulated(head, 30, fused=fused) for fused in (True, False))
    for name, left, right in zip(("hidden", "weight"), fused, separate, strict=True):
        assert torch.equal(left, right), name
    assert bool(fused[1][:30].any()) == (num_tokens > 0) and not fused[1][30:].any()


def test_bfloat16_rounds_logits_and_gradients_but_not_the_softmax() -> None:
    """The plain computation has the same bfloat16 logits. The gradient of a row is a sum over 300
    tokens that is rounded only once, so it is as close to float64 as bfloat16 allows."""
    head = make_head(300, 50, hidden=16, std=0.3).to(torch.bfloat16)
    head = replace(head, temperature=0.7)
    with tiles_of(8):
        outcome = tiled(head)
    assert outcome.logp.dtype == outcome.entropy.dtype == torch.float32
    assert outcome.grad_hidden.dtype == outcome.grad_weight.dtype == torch.bfloat16
    expected = plain(head, torch.float32)
    torch.testing.assert_close(outcome.logp, expected.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(outcome.entropy, expected.entropy, rtol=0.0, atol=1e-5)
    exact = plain(head.to(torch.float64))
    for name in ("grad_hidden", "grad_weight"):
        left, right = getattr(outcome, name).double(), getattr(exact, name)
        assert float((left - right).norm() / right.norm()) < 2**-8, name


# --------------------------------------------------------------------------- several ranks

NUM_RANKS = 2
# (rows per rank, real entries in total): padding on the last rank, only padding there, none.
SHARDS = [(8, 13), (8, 5), (8, 16)]


def _shard(rank: int, head: Head, rows: int, num_entries: int) -> tuple[HeadResult, int]:
    """Return this rank's outcome and its number of all-reduces."""
    whole = padded(head, NUM_RANKS * rows - num_entries)
    own_head = replace(whole, weight=whole.weight[rank * rows : (rank + 1) * rows])
    calls = []
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, tiles_of(3, 4):
        patch.setattr(dist, "all_reduce", counted)
        first = rank * rows
        outcome = tiled(
            own_head, first=first, num=min(rows, num_entries - first), group=dist.group.WORLD
        )
    return outcome, len(calls)


def _shards(rank: int, heads: list[Head]) -> list[tuple[HeadResult, int]]:
    return [
        _shard(rank, head, rows, num)
        for head, (rows, num) in zip(heads, 2 * [*SHARDS, SHARDS[0]], strict=True)
    ]


def test_tensor_parallel_ranks_agree_with_a_single_rank() -> None:
    heads = [make_head(7, num, seed=num) for _, num in SHARDS]
    heads.append(make_head(0, SHARDS[0][1]))  # an empty micro-batch
    heads = [replace(head, temperature=0.8) for head in heads]
    heads += [with_entropy(head) for head in heads]
    by_rank = run_ranks(_shards, NUM_RANKS, heads)
    for head, *parts in zip(heads, *by_rank, strict=True):
        outcomes = [outcome for outcome, _ in parts]
        num = len(head.weight)
        weight = torch.cat([outcome.grad_weight for outcome in outcomes])
        assert not weight[num:].any()
        for outcome in outcomes:
            total = replace(
                outcome,
                grad_hidden=torch.stack([outcome.grad_hidden for outcome in outcomes]).sum(0),
                grad_weight=weight[:num],
            )
            assert_equal(total, plain(head), TOLERANCE[torch.float64])
        assert [calls for _, calls in parts] == [2] * NUM_RANKS, (
            "the number of all-reduces does not depend on the tiles"
        )


# ---------------------------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any result, including views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_full_logits_are_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "TILE_BYTES", 2**19)
    with LargestTensor() as largest:
        tiled(make_head(512, 4096, hidden=2).to(torch.float32))
    assert largest.num_elements <= 2**19 // 4 == 512 * 4096 // 16
