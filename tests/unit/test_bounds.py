"""Bounds of the gap on canary sequences, and the figure that each error names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dapo_megatron.bridge.bounds import DERIVED, CanaryBounds, CanaryGap, canary_bounds, canary_gap
from tests.helpers.configs import tiny_config

POLICY = torch.full((4, 26), -1.0)
BOUNDS = CanaryBounds(
    max=10.0,
    mean=0.1,
    quantile=1.0,
    basis="bfloat16",
    derived=frozenset({"sync.canary_mean_gap", "sync.canary_quantile_gap"}),
)


def engine(*gaps: tuple[int, int, float]) -> list[list[float]]:
    """Return log-probs that differ from POLICY by (sequence, token, gap)."""
    logprobs = POLICY.clone()
    for sequence, token, gap in gaps:
        logprobs[sequence, token] += gap
    return logprobs[:, 1:].tolist()


def gap_of(*gaps: tuple[int, int, float]) -> CanaryGap:
    return canary_gap(POLICY.flatten(), engine(*gaps))


def test_the_gap_has_its_maximum_mean_and_quantile() -> None:
    gap = gap_of((1, 15, -3.0), (2, 1, 1.0))
    assert (gap.max, gap.sequence, gap.token, gap.num_tokens) == (3.0, 1, 15, 100)
    assert gap.mean == pytest.approx(0.04)
    assert gap.quantile == pytest.approx(1.0)  # one token of 100 is above it
    assert gap_of((1, 15, -3.0)).quantile == 0.0


def test_nan_counts_as_infinity() -> None:
    gap = gap_of((0, 3, math.nan))
    assert (gap.max, gap.mean, gap.sequence, gap.token) == (math.inf, math.inf, 0, 3)
    assert "sync.max_gap is 10" in str(BOUNDS.excess({0: gap}))


def test_a_gap_within_its_bounds_has_no_excess() -> None:
    gaps = [gap_of(), gap_of((1, 15, 9.0), (2, 1, 0.9))]
    assert BOUNDS.excess(dict(enumerate(gaps))) is None
    assert all(map(BOUNDS.allow, gaps))


def test_an_excess_names_figure_bound_worst_token_and_ranks() -> None:
    healthy = gap_of()
    assert BOUNDS.excess({0: healthy, 5: gap_of((1, 15, 11.0))}) == (
        "11 (sequence 1, token 15), engine 5; sync.max_gap is 10"
    )
    spread = gap_of(*((sequence, 7, 3.0) for sequence in range(4)))
    assert BOUNDS.excess({0: spread, 1: healthy, 2: spread}) == (
        "0.12 (on the mean of 100 tokens; by 3 at sequence 0, token 7), engine 0, 2; "
        "sync.canary_mean_gap is 0.1, derived from bfloat16"
    )
    skewed = gap_of((1, 15, 4.0), (3, 2, 2.0))
    assert BOUNDS.excess({0: healthy, 1: skewed}) == (
        "2 (on more than 1% of 100 tokens; by 4 at sequence 1, token 15), engine 1; "
        "sync.canary_quantile_gap is 1, derived from bfloat16"
    )
    exceeding = gap_of((1, 15, 11.0)), spread, skewed, gap_of((0, 3, math.nan))
    assert not any(map(BOUNDS.allow, exceeding))


FP8 = {"policy__precision": "bfloat16", "engine__quantization": "fp8"}


@pytest.mark.parametrize(
    "overrides, has_experts, basis",
    [
        ({}, False, "float32"),
        ({}, True, "float32 with experts"),
        ({"policy__precision": "bfloat16"}, False, "bfloat16"),
        ({"policy__precision": "bfloat16"}, True, "bfloat16 with experts"),
        (FP8, False, "fp8"),
        (FP8, True, "fp8 with experts"),
    ],
)
def test_bounds_follow_from_the_precisions(
    overrides: dict[str, Any], has_experts: bool, basis: str
) -> None:
    bounds = canary_bounds(tiny_config(**overrides), has_experts=has_experts)
    assert (bounds.mean, bounds.quantile) == DERIVED[basis]
    assert bounds.basis == basis
    assert bounds.max == 1e-4


def test_bounds_in_the_config_are_taken_and_not_called_derived() -> None:
    config = tiny_config(sync__canary_mean_gap=0.5, policy__precision="bfloat16")
    bounds = canary_bounds(config, has_experts=False)
    assert bounds.mean == 0.5 and bounds.derived == {"sync.canary_quantile_gap"}
    gap = gap_of(*((sequence, token, 0.9) for sequence in range(4) for token in range(1, 26)))
    assert str(bounds.excess({0: gap})).endswith("sync.max_gap is 0.0001")
