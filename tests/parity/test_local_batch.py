"""Test on four ranks that a batch of which each rank holds only its own sequences gives the same
log-probs, gradients and statistics as one that every rank holds whole. In float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.owners import DataParallelRanks, owners
from dapo_megatron.types import LogProbs, SyncError
from tests.helpers.batches import hold, random_batch
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same

LENGTHS = (5, 60, 17, 9, 33, 4, 40, 12, 3)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp2_dp2": ("dense", {"policy__context_parallel": 2}),
    "tp2_ep2": (
        "experts",
        {
            "policy__tensor_parallel": 2,
            "policy__sequence_parallel": "true",
            "policy__expert_parallel": 2,
        },
    ),
}
SKEWED = (1, 0, 0, 0, 0, 0, 0, 0, 0)
"""Owners of which one needs far more micro-batches than the other."""
ALL_ONE = (1,) * len(LENGTHS)
"""Owners of which one has no sequence at all."""


def check(rank: int, folders: dict[str, Path]) -> None:
    for model, overrides in LAYOUTS.values():
        check_layout(Ranks(rank, 4, rank), str(folders[model]), overrides)


def check_layout(exchange: Ranks, folder: str, overrides: dict[str, Any]) -> None:
    policy, plan = build_policy(exchange, folder, overrides)
    index = policy.data_parallel_index
    assert sorted(set(exchange.all_gather(index, int))) == [0, 1]
    batch, loss = random_batch(LENGTHS, vocab=99), loss_with()
    whole = policy.logprobs(batch)
    planned = owners(LENGTHS, 1, plan, DataParallelRanks.join(exchange, index, plan, 1).size)
    for owner_S in (planned, SKEWED, ALL_ONE):
        check_close(policy.logprobs(hold(batch, owner_S, index)), whole, owned(owner_S, index))

    local = hold(batch, planned, index)
    assert same(policy.gradients(local, loss), policy.gradients(batch, loss))
    with pytest.raises(SyncError, match="abandoned"):
        policy.update(batch, loss, 1.0, check=abandon)
    checked: list[LogProbs] = []
    stats = [policy.update(each, loss, 0.0, check=checked.append) for each in (batch, local)]
    assert stats[0] == stats[1]
    # An update is checked with the log-probs of its loss tokens. The weights are still those of the
    # start: one update was abandoned, and the others had a learning rate of 0.
    everywhere = torch.ones_like(batch.loss_mask)
    for values, is_held in zip(checked, (everywhere, owned(planned, index)), strict=True):
        mask = batch.loss_mask
        expected = (torch.where(mask, each, 0.0) for each in (whole.logprobs, whole.entropy))
        check_close(values, LogProbs(*expected), is_held)
    given = policy.update(replace(batch, old_logprobs=whole.logprobs), loss, 0.0)
    for each, is_held in ((batch, everywhere), (local, owned(planned, index))):
        # Without old log-probs, those of the update itself are used, and all tokens have some.
        own = policy.update(replace(each, old_logprobs=None), loss, 0.0, check=checked.append)
        check_close(checked[-1], whole, is_held)
        assert own.loss == pytest.approx(given.loss, abs=1e-12)
        assert own.grad_norm == pytest.approx(given.grad_norm, rel=1e-6)
        assert own.means == pytest.approx(given.means, abs=1e-12)
        assert own.means["approx_kl"] == 0.0
    with pytest.raises(ValueError, match=r"sequence \d+: .* does not hold its tokens"):
        policy.update(hold(batch, planned, 1 - index), loss, 0.0)
    policy.close()


def owned(owner_S: Sequence[int], index: int) -> Tensor:
    """Return whether each token of the whole batch is of a sequence of this index."""
    return torch.tensor(owner_S).repeat_interleave(torch.tensor(LENGTHS)) == index


def check_close(actual: LogProbs, whole: LogProbs, is_held: Tensor) -> None:
    for name in ("logprobs", "entropy"):
        expected = getattr(whole, name)[is_held]
        torch.testing.assert_close(getattr(actual, name), expected, rtol=1e-9, atol=1e-12)


def abandon(_: LogProbs) -> None:
    raise SyncError("abandoned")


def test_a_batch_that_is_spread_over_ranks_gives_the_results_of_the_whole_one(
    tmp_path: Path,
) -> None:
    folders = {
        name: make_random_model(family, tmp_path / name, **overrides)
        for name, (family, overrides) in MODELS.items()
    }
    run_ranks(check, 4, folders)
