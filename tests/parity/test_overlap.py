"""Test that overlapping communication with computation changes no result, bitwise.

This also holds after an abandoned update, with a pass without gradients in between, and right after
an update, when weights are still being gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import StepStats
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same

LOSS = loss_with()
LENGTHS = (5, 40, 17, 9, 33, 4, 40, 12) * 2
BUCKET_ELEMENTS = 3000
"""Small enough that every model here has many buckets, some with only one parameter."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"num_hidden_layers": 4}),
    "tied": ("qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 2}),
    "latent": ("deepseek_v3", {"num_hidden_layers": 2}),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("tied", {}),
    "ep2": ("experts", {"expert_parallel": 2}),
    "dp2 recomputed": ("untied", {"recompute": "full"}),
    "cp2": ("tied", {"context_parallel": 2}),
    "dp2 of experts": ("latent", {}),
}
ALWAYS, LONG = list(LAYOUTS)[:2], list(LAYOUTS)[2:]


class Abandoned(Exception):
    """Raised by a loss when the run is asked to stop."""


def abandoning(when: int) -> Any:
    """Return a loss that raises after `when` calls."""
    calls = []

    def loss(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > when:
            raise Abandoned
        return LOSS(*args)

    return loss


def build(exchange: Ranks, model: Path, layout: dict[str, Any], *, overlap: bool) -> Any:
    from dapo_megatron.policy import data_parallel
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    data_parallel.BUCKET_ELEMENTS = BUCKET_ELEMENTS if overlap else None
    keys = {"tensor_parallel": 1, "overlap": str(overlap).lower(), **layout}
    config = tiny_config(
        model__path=model,
        train__max_tokens_per_microbatch=64,
        # Never clip: the norm is a sum of squares per rank and depends on which rank owns a bucket.
        optimizer__clip_grad=1e6,
        **{f"policy__{key}": value for key, value in keys.items()},
    )
    return MegatronPolicy(config, exchange, planner(config.policy, config.train))


@dataclass
class Observed:
    """Results that overlap must not change, and what shows that there was overlap."""

    results: list[Any]
    stats: list[StepStats]
    num_buckets: int
    num_gathering: int
    """Groups of buckets whose weights were still being gathered after the last update."""


def observe(exchange: Ranks, model: Path, layout: dict[str, Any], *, overlap: bool) -> Observed:
    batch = partial(random_batch, LENGTHS, vocab=99)
    policy = build(exchange, model, layout, overlap=overlap)
    results: list[Any] = [policy.gradients(batch(seed=0), LOSS)]
    for when in (0, 1):  # before the first backward pass, and after one
        with pytest.raises(Abandoned):
            policy.update(batch(seed=7), abandoning(when), 1e-3)
    shards, stats = policy.shards(), []
    for seed in range(3):
        stats.append(policy.update(batch(seed=seed), LOSS, 1e-3))
        if seed == 1:
            logprobs = policy.logprobs(batch(seed=seed))
            results += [logprobs.logprobs, logprobs.entropy]
    # Read the shards like a sync, without a forward pass in between.
    num_gathering = sum(
        group.param_gather_handle is not None
        for chunk in policy._chunks
        for group in chunk.bucket_groups
    )
    policy.onload()
    results.append([shard.read().clone() for shard in shards])
    results.append({name: tensor.clone() for name, tensor in policy.weights()})
    num_buckets = sum(len(buffer.buckets) for chunk in policy._chunks for buffer in chunk.buffers)
    policy.close()
    return Observed(results, stats, num_buckets, num_gathering)


def check(rank: int, models: Path, names: list[str]) -> None:
    for name in names:
        model, layout = LAYOUTS[name]
        plain, overlapped = (
            observe(Ranks(rank, 2, rank), models / model, layout, overlap=on)
            for on in (False, True)
        )
        assert same(plain.results, overlapped.results), name
        for before, after in zip(plain.stats, overlapped.stats, strict=True):
            assert before.grad_norm == pytest.approx(after.grad_norm, rel=1e-6)
            assert (before.means, before.loss) == (after.means, after.loss)
        assert plain.num_buckets < overlapped.num_buckets
        assert plain.num_gathering == 0 < overlapped.num_gathering


@pytest.mark.parametrize("names", [ALWAYS, pytest.param(LONG, marks=pytest.mark.long)])
def test_overlap_changes_no_result(names: list[str], tmp_path: Path) -> None:
    for model, (family, overrides) in MODELS.items():
        make_random_model(family, tmp_path / model, seed=1, **overrides)
    run_ranks(check, 2, tmp_path, names, timeout=900.0)
