"""Test on four ranks that a batch of which each rank holds only its own sequences gives the same
log-probs, gradients and statistics as one that every rank holds whole. In float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.owners import DataParallelRanks, owners
from dapo_megatron.types import LogProbs, StepStats, SyncError
from tests.helpers.batches import hold, random_batch
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks

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


@dataclass
class Observed:
    """Results of one rank, of the whole batch and of its own sequences."""

    index: int
    whole: LogProbs
    local: dict[str, tuple[list[int], LogProbs]]
    """By name: owners of the sequences, and log-probs of the rank's own ones."""
    gradients: list[tuple[float, dict[str, Tensor]]]
    """Loss and gradients, first of the whole batch, then of the local one."""
    stats: list[StepStats]
    checked: list[LogProbs]
    """Log-probs that `check` of these updates got, by batch."""


def observe(rank: int, folders: dict[str, str]) -> dict[str, Observed]:
    """Return the observations of this rank in each layout."""
    return {
        name: _observe(Ranks(rank, 4, rank), folders[model], overrides)
        for name, (model, overrides) in LAYOUTS.items()
    }


def _observe(exchange: Ranks, folder: str, overrides: dict[str, Any]) -> Observed:
    policy, plan = build_policy(exchange, folder, overrides)
    index = policy.data_parallel_index
    batch, loss = random_batch(LENGTHS, vocab=99), loss_with()
    planned = owners(LENGTHS, 1, plan, DataParallelRanks.join(exchange, index, plan, 1).size)
    local = {
        name: (list(owners), policy.logprobs(hold(batch, owners, index)))
        for name, owners in (("planned", planned), ("skewed", SKEWED), ("all_one", ALL_ONE))
    }
    batches = (batch, hold(batch, planned, index))
    gradients = [policy.gradients(each, loss) for each in batches]
    with pytest.raises(SyncError, match="abandoned"):
        policy.update(batch, loss, 1.0, check=abandon)
    checked: list[LogProbs] = []
    stats = [policy.update(each, loss, 0.0, check=checked.append) for each in batches]
    with pytest.raises(ValueError, match=r"sequence \d+: .* does not hold its tokens"):
        policy.update(hold(batch, planned, 1 - index), loss, 0.0)
    whole = policy.logprobs(batch)
    policy.close()
    return Observed(index, whole, local, gradients, stats, checked)


def abandon(_: LogProbs) -> None:
    raise SyncError("abandoned")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Observed]]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: str(make_random_model(family, Path(root) / name, **overrides))
        for name, (family, overrides) in MODELS.items()
    }
    return run_ranks(observe, 4, folders)


@pytest.mark.parametrize("owners", ["planned", "skewed", "all_one"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_log_probs_are_those_of_the_whole_batch(
    layout: str, owners: str, observed: list[dict[str, Observed]]
) -> None:
    for rank in (results[layout] for results in observed):
        owner_S, own = rank.local[owners]
        is_own = torch.tensor(owner_S).repeat_interleave(torch.tensor(LENGTHS)) == rank.index
        for name in ("logprobs", "entropy"):
            expected = getattr(rank.whole, name)[is_own]
            torch.testing.assert_close(getattr(own, name), expected, rtol=1e-9, atol=1e-12)
    assert sorted({results[layout].index for results in observed}) == [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_on_local_batches_equal_those_on_the_whole_batch(
    layout: str, observed: list[dict[str, Observed]]
) -> None:
    for rank in (results[layout] for results in observed):
        (whole_loss, whole), (local_loss, local) = rank.gradients
        assert local_loss == whole_loss
        assert all(torch.equal(local[name], gradient) for name, gradient in whole.items())
        assert rank.stats[0] == rank.stats[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_is_checked_with_the_log_probs_of_its_loss_tokens(
    layout: str, observed: list[dict[str, Observed]]
) -> None:
    """The weights of `whole` are those before these updates: one was abandoned, and the others had
    a learning rate of 0."""
    for rank in (results[layout] for results in observed):
        batch = random_batch(LENGTHS, vocab=99)
        local = hold(batch, rank.local["planned"][0], rank.index)
        whole, own = rank.checked
        for checked, mini in ((whole, batch), (own, local)):
            is_own = torch.ones_like(batch.loss_mask)
            if mini.owners is not None:
                is_own = (mini.owners == rank.index).repeat_interleave(torch.tensor(LENGTHS))
            for name in ("logprobs", "entropy"):
                values = getattr(rank.whole, name)[is_own]
                expected = torch.where(mini.loss_mask, values, 0.0)
                torch.testing.assert_close(getattr(checked, name), expected, rtol=1e-9, atol=1e-12)
