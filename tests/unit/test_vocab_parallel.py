"""The log-prob head against log_softmax of whole logits in float64: values and both gradients.

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
from dapo_megatron.policy.vocab_parallel import linear_logprobs
from tests.helpers.heads import (
    Head,
    HeadResult,
    assert_equal,
    make_head,
    ours,
    padded,
    plain,
    tiles_of,
)
from tests.helpers.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@settings(deadline=None, max_examples=150)  # cores are shared
@given(
    num_tokens=st.integers(0, 6),
    num_entries=st.integers(1, 30),
    padding=st.integers(0, 4),
    tile=st.integers(1, 31),
    block=st.integers(1, 7),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    std=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 5),
)
@example(0, 30, 4, 8, 7, 0.6, 1.0, 0)  # no token
@example(6, 1, 4, 8, 7, 0.6, 1.0, 0)  # one entry: its log-prob is 0
@example(6, 30, 2, 10, 3, 0.6, 1.0, 0)  # padding begins where a tile would
def test_values_and_gradients(
    dtype: torch.dtype,
    num_tokens: int,
    num_entries: int,
    padding: int,
    tile: int,
    block: int,
    temperature: float,
    std: float,
    seed: int,
) -> None:
    head = make_head(num_tokens, num_entries, std=std, seed=seed).to(dtype)
    head = replace(head, temperature=temperature)
    with tiles_of(tile, block):
        found = ours(padded(head, padding), num=num_entries)
    assert {found.logp.dtype, found.entropy.dtype, found.grad_weight.dtype} == {dtype}
    assert not found.grad_weight[num_entries:].any()
    found = replace(found, grad_weight=found.grad_weight[:num_entries])
    assert_equal(found, plain(head.to(torch.float64)), TOLERANCE[dtype])


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_logits_neither_overflow_nor_lose_their_differences(shift: float) -> None:
    head = make_head(4, 20).to(torch.float32)
    head.hidden[:, 0], head.weight[:, 0] = 1.0, shift
    head.weight[:, 1:] = head.weight[:, 1:].bfloat16()  # few digits: products and sums are exact
    head.hidden[:, 1:] = (head.hidden[:, 1:] * 4).round() / 4
    head.weight[:, 1:] = (head.weight[:, 1:] * 8).round() / 8
    with tiles_of(6):
        found = ours(head)
    wanted = plain(head.to(torch.float64))
    torch.testing.assert_close(found.logp.double(), wanted.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), wanted.entropy, rtol=0.0, atol=1e-5)


def test_without_gradient_the_values_are_the_same_bits() -> None:
    head = make_head(5, 40).to(torch.float32)
    with torch.no_grad():
        logp, entropy = linear_logprobs(
            head.hidden,
            head.weight,
            head.targets,
            temperature=1.0,
            first_entry=0,
            num_entries=40,
            group=None,
        )
    found = ours(head)
    assert torch.equal(logp, found.logp) and torch.equal(entropy, found.entropy)


def test_bfloat16_rounds_logits_and_gradients_but_not_the_softmax() -> None:
    """The plain computation has the same logits, in bfloat16. A gradient of a row is a sum over
    300 tokens; rounded once it is as close to float64 as bfloat16 can hold."""
    head = make_head(300, 50, hidden=16, std=0.3).to(torch.bfloat16)
    head = replace(head, temperature=0.7)
    with tiles_of(8):
        found = ours(head)
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    assert found.grad_hidden.dtype == found.grad_weight.dtype == torch.bfloat16
    wanted = plain(head, torch.float32)
    torch.testing.assert_close(found.logp, wanted.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(found.entropy, wanted.entropy, rtol=0.0, atol=1e-5)
    exact = plain(head.to(torch.float64))
    for name in ("grad_hidden", "grad_weight"):
        left, right = getattr(found, name).double(), getattr(exact, name)
        assert float((left - right).norm() / right.norm()) < 2**-8, name


# --------------------------------------------------------------------------- several ranks

NUM_RANKS = 2
# (rows of each rank, real entries of all): the last rank's padding; nothing but padding; none.
SHARDS = [(8, 13), (8, 5), (8, 16)]


def _shard(rank: int, head: Head, rows: int, num_entries: int) -> tuple[HeadResult, int]:
    """This rank's outcome, and how many reductions it took."""
    whole = padded(head, NUM_RANKS * rows - num_entries)
    mine = replace(whole, weight=whole.weight[rank * rows : (rank + 1) * rows])
    calls = []
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, tiles_of(3, 4):
        patch.setattr(dist, "all_reduce", counted)
        first = rank * rows
        found = ours(mine, first=first, num=min(rows, num_entries - first), group=dist.group.WORLD)
    return found, len(calls)


def _shards(rank: int, heads: list[Head]) -> list[tuple[HeadResult, int]]:
    return [
        _shard(rank, head, rows, num)
        for head, (rows, num) in zip(heads, [*SHARDS, SHARDS[0]], strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tensor_parallel_ranks_agree_with_one(dtype: torch.dtype) -> None:
    heads = [make_head(7, num, seed=num).to(dtype) for _, num in SHARDS]
    heads.append(make_head(0, SHARDS[0][1]).to(dtype))  # an empty micro-batch
    heads = [replace(head, temperature=0.8) for head in heads]
    by_rank = run_ranks(_shards, NUM_RANKS, heads, timeout=120.0)
    for head, *parts in zip(heads, *by_rank, strict=True):
        outcomes = [found for found, _ in parts]
        num = len(head.weight)
        weight = torch.cat([found.grad_weight for found in outcomes])
        assert not weight[num:].any()
        for found in outcomes:
            total = replace(
                found,
                grad_hidden=torch.stack([one.grad_hidden for one in outcomes]).sum(0),
                grad_weight=weight[:num],
            )
            assert_equal(total, plain(head.to(torch.float64)), TOLERANCE[dtype])
        assert [calls for _, calls in parts] == [2] * NUM_RANKS, "reductions, whatever the tiles"


# ---------------------------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """Records the most elements any operation gave, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_are_never_whole(dtype: torch.dtype) -> None:
    head = make_head(4096, 32_768, hidden=2).to(dtype)
    with LargestTensor() as largest:
        ours(head)
    tile = vocab_parallel.TILE_BYTES // 4
    assert largest.num_elements <= tile <= 4096 * 32_768 // 8


def test_the_recorder_sees_whole_logits_forward_and_backward() -> None:
    head = make_head(32, 64)
    with LargestTensor() as largest:
        plain(head)
    assert largest.num_elements == 32 * 64
