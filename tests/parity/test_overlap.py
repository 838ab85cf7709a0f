"""Test that overlapping communication with computation changes no result, bitwise.

This also holds after an abandoned update, with a pass without gradients in between, and right after
an update, when weights are still being gathered.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import StepStats
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

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


def observe(exchange: Ranks, model: Path, layout: dict[str, Any], *, overlap: bool) -> Any:
    batch = partial(random_batch, LENGTHS, vocab=99)
    policy = build(exchange, model, layout, overlap=overlap)
    results: list[Any] = [policy.gradients(batch(seed=0), LOSS)]
    for when in (0, 1):  # before the first backward pass, and after one
        with pytest.raises(Abandoned):
            policy.update(batch(seed=7), abandoning(when), 1e-3)
    shards = policy.shards()
    for seed in range(3):
        results.append(policy.update(batch(seed=seed), LOSS, 1e-3))
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
    local = [shard.read().clone() for shard in shards]
    whole = {name: tensor.clone() for name, tensor in policy.weights()}
    num_buckets = sum(len(buffer.buckets) for chunk in policy._chunks for buffer in chunk.buffers)
    policy.close()
    return [*results, local, whole, num_buckets, num_gathering]


def run(rank: int, world_size: int, models: Path, names: list[str]) -> Any:
    exchange, by_layout = Ranks(rank, world_size, rank), {}
    for name in names:
        model, layout = LAYOUTS[name]
        by_layout[name] = [
            observe(exchange, models / model, layout, overlap=on) for on in (False, True)
        ]
    return by_layout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (family, overrides) in MODELS.items():
        make_random_model(family, root / name, seed=1, **overrides)
    return root


@pytest.mark.parametrize("layouts", [ALWAYS, pytest.param(LONG, marks=pytest.mark.long)])
def test_overlap_changes_no_result(layouts: list[str], models: Path) -> None:
    ranks = run_ranks(run, 2, 2, models, layouts, timeout=900.0)
    for layout in layouts:
        check(layout, ranks)


def check(layout: str, ranks: list[dict[str, Any]]) -> None:
    for plain, overlapped in (rank[layout] for rank in ranks):
        for before, after in zip(plain[:-2], overlapped[:-2], strict=True):
            assert same(before, after), layout
        assert overlapped[-2] > plain[-2]
        assert plain[-1] == 0 < overlapped[-1], "no weight was still being gathered"


def same(a: Any, b: Any) -> bool:
    """Compare tensors and numbers in nested containers bitwise, and gradient norms to rounding."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return all(same(left, right) for left, right in zip(a, b, strict=True))
    if isinstance(a, StepStats):
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
        return a.means == b.means and a.loss == b.loss
    return bool(a == b)
