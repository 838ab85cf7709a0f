"""Corrections for mismatch: loss weights, statistics, and their way into a mini-batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo.correction import (
    Correction,
    CorrectionStatistics,
    correct,
    merge,
    token_weights,
)
from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.data.batch import split
from dapo_megatron.rollout.metrics import correction_metrics
from dapo_megatron.types import TokenBatch
from tests.helpers.batches import hold, random_batch

CORRECTIONS: dict[str, dict[str, Any]] = {
    "sequence_tis": {"sequence_tis_cap": 1.5},
    "icepop": {"token_band": (0.6, 1.6)},
    "truncated band": {"token_band": (0.6, 1.6), "outside_band": "truncate"},
    "sequence_mean": {"sequence_mean": (0.8, 1.2)},
    "sequence_product": {"sequence_product": (0.5, 2.0)},
    "worst_token": {"worst_token": (0.4, 2.5)},
    "all": {
        "sequence_tis_cap": 1.5,
        "sequence_mean": (0.8, 1.2),
        "sequence_product": (0.4, 2.5),
        "worst_token": (0.3, 3.0),
    },
}


def expected_weights(ratio: Any, numbers: dict[str, Any]) -> Any:
    """Return the weights of one sequence, in float64, from the definitions."""
    weights = np.ones_like(ratio)
    product = np.prod(ratio)
    if cap := numbers.get("sequence_tis_cap"):
        weights = weights * min(product, cap)
    if band := numbers.get("token_band"):
        is_inside = (band[0] <= ratio) & (ratio <= band[1])
        clipped = np.clip(ratio, *band)
        weights = np.where(is_inside, ratio, clipped if "outside_band" in numbers else 0.0)
    outside = False
    for name, values in (
        ("sequence_mean", [product ** (1 / len(ratio))]),
        ("sequence_product", [product]),
        ("worst_token", ratio),
    ):
        if bounds := numbers.get(name):
            outside |= any(value < bounds[0] or value > bounds[1] for value in values)
    return weights * (not outside)


@settings(max_examples=60)
@pytest.mark.parametrize("name", CORRECTIONS)
@given(length=st.integers(1, 12), scale=st.floats(0.01, 1.5), seed=st.integers(0, 10**6))
def test_weights_are_those_of_the_definition(
    name: str, length: int, scale: float, seed: int
) -> None:
    log_ratio = scale * np.random.default_rng(seed).normal(size=length)
    weights, _ = token_weights(torch.from_numpy(log_ratio), Correction(**CORRECTIONS[name]))
    expected = expected_weights(np.exp(log_ratio), CORRECTIONS[name])
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12, atol=0)


def mismatched_batch(scale: float = 0.3, lengths: tuple[int, ...] = (9, 4, 3, 12, 7)) -> TokenBatch:
    """Return a batch whose engine log-probs differ from the policy's, with a prompt of 2 tokens."""
    batch = random_batch(lengths, vocab=50)
    noise = scale * torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(1))
    return replace(
        batch, engine_logprobs=torch.where(batch.loss_mask, batch.engine_logprobs + noise, 0.0)
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_batch_is_corrected_by_sequence(name: str) -> None:
    batch = mismatched_batch()
    batch.weights.fill_(0.5)
    batch.loss_mask[13:16] = False  # the third sequence has no loss token
    corrected, _ = correct(batch, Correction(**CORRECTIONS[name]))
    assert batch.old_logprobs is not None
    end = 0
    for length in batch.lengths.tolist():
        start, end = end, end + length
        mask = batch.loss_mask[start:end]
        own = corrected.weights[start:end]
        assert (own[~mask] == 0.5).all()
        if mask.any():
            old, engine = (
                values[start:end][mask].double().numpy()
                for values in (batch.old_logprobs, batch.engine_logprobs)
            )
            expected = expected_weights(np.exp(old - engine), CORRECTIONS[name])
            np.testing.assert_allclose(own[mask].numpy(), 0.5 * expected, rtol=1e-6)
    assert (batch.weights == 0.5).all()  # the argument is unchanged


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["sequence_mean", "sequence_product", "worst_token"])
def test_a_sequence_with_a_value_that_is_not_finite_is_masked(name: str, bad: float) -> None:
    log_ratio = torch.tensor([0.0, bad], dtype=torch.float64)
    for weight in ({}, {"token_band": (0.5, 2.0)}, {"sequence_tis_cap": 2.0}):
        weights, applied = token_weights(log_ratio, Correction(**{name: (0.5, 2.0)}, **weight))
        assert weights.tolist() == [0.0, 0.0]
        assert applied[name] == 1


def test_masking_leaves_the_denominator_and_the_other_tokens_alone() -> None:
    batch = mismatched_batch()
    numbers = Correction(sequence_mean=(0.9, 1.1))
    corrected, statistics = correct(batch, numbers)
    assert 0 < statistics.counts["masked_sequences"] < 5
    for aggregation in ("token", "prompt", "sequence"):
        [before], [after] = (split(each, 1, aggregation) for each in (batch, corrected))
        assert after.num_loss_tokens == before.num_loss_tokens
        is_masked = corrected.weights == 0
        assert torch.equal(after.weights[~is_masked], before.weights[~is_masked])
        assert not after.weights[is_masked].any()


@settings(max_examples=20)
@pytest.mark.parametrize("name", CORRECTIONS)
@given(owners=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_statistics_of_data_parallel_indices_merge_to_those_of_the_batch(
    name: str, owners: list[int]
) -> None:
    batch = mismatched_batch()
    numbers = Correction(**CORRECTIONS[name], tis_cap=2.0 if name == "worst_token" else None)
    whole, expected = correct(batch, numbers)
    parts = []
    for index in range(3):
        held = hold(batch, owners, index)
        own, statistics = correct(held, numbers)
        is_held = torch.tensor([owner == index for owner in owners])
        assert torch.equal(own.weights, whole.weights[is_held.repeat_interleave(batch.lengths)])
        parts.append(decode(encode(statistics), CorrectionStatistics, "rank 0"))
    merged = merge(parts)
    assert {key: merged.counts.get(key, 0) for key in expected.counts} == expected.counts
    assert merged.bins == expected.bins
    assert merged.weights == pytest.approx(expected.weights)
    assert merged.squares == pytest.approx(expected.squares)
    assert correction_metrics(merged, numbers.names) == pytest.approx(
        correction_metrics(expected, numbers.names)
    )


def test_metrics_of_a_known_batch() -> None:
    """Ratios of three sequences: (2, 2), (1, 0.5), (1, 1, 1, 1). The first has a product of 4."""
    batch = random_batch((4, 4, 6), vocab=50)
    ratios = torch.tensor([1, 1, 2, 2, 1, 1, 1, 0.5, *[1] * 6])
    batch = replace(batch, engine_logprobs=batch.old_logprobs - ratios.log())
    numbers = Correction(
        sequence_product=(0.4, 3.0), worst_token=(0.4, 3.0), sequence_mean=(0.1, 1.1),
        token_band=(0.6, 3.0),
    )  # fmt: skip
    metrics = correction_metrics(correct(batch, numbers)[1], numbers.names)
    weights = [0, 0, 1, 0, 1, 1, 1, 1]
    squares = sum(weight**2 for weight in weights)
    exact = {
        "correction/masked_tokens": 3 / 8,
        "correction/outside/token_band": 1 / 8,
        "correction/masked_sequences": 1 / 3,
        "correction/outside/sequence_product": 1 / 3,
        "correction/outside/sequence_mean": 1 / 3,
        "correction/outside/worst_token": 0.0,
        "correction/effective_sample_share": sum(weights) ** 2 / (8 * squares),
    }
    quantiles = {  # to the width of a bin, 5% of the log-ratio
        "correction/token_ratio_p01": 0.5,
        "correction/token_ratio_p99": 2.0,
        "correction/sequence_mean_ratio_p01": 0.5**0.5,
        "correction/sequence_mean_ratio_p99": 2.0,
        "correction/sequence_product_ratio_p01": 0.5,
        "correction/sequence_product_ratio_p99": 4.0,
    }
    assert metrics.keys() == exact.keys() | quantiles.keys()
    assert {name: metrics[name] for name in exact} == pytest.approx(exact)
    for name, ratio in quantiles.items():
        assert math.log(metrics[name]) == pytest.approx(math.log(ratio), rel=0.05), name


@settings(max_examples=50)
@given(
    scale=st.sampled_from([1e-7, 1e-4, 1e-2, 1.0]),
    share=st.sampled_from([0.01, 0.5, 0.99]),
    seed=st.integers(0, 1000),
)
def test_quantiles_are_exact_to_the_width_of_a_bin(scale: float, share: float, seed: int) -> None:
    batch = mismatched_batch(0.0, lengths=(40, 80))
    noise = scale * np.random.default_rng(seed).normal(size=120)
    old = torch.from_numpy(noise)
    batch = replace(batch, old_logprobs=old, engine_logprobs=torch.zeros(120).double())
    _, statistics = correct(batch, Correction())
    values = np.sort(noise[batch.loss_mask.numpy()])
    exact = values[math.ceil(share * len(values)) - 1]
    actual = math.log(statistics.quantile("token", share))
    assert actual == pytest.approx(exact, rel=0.05, abs=1.1e-6)
