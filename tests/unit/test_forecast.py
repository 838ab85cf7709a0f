"""The forecast of the keep rate, and the number of prompts it requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rollout.forecast import KeepRate


def test_older_observations_count_less() -> None:
    rate = KeepRate(prior=0.5, prior_weight=1)
    for kept in (False, True):
        for _ in range(100):
            rate.observe(kept)
        rate.forget()
    assert rate.mean > 0.6  # the newer half has twice the weight


@given(
    st.integers(1, 600), st.floats(0.01, 1.0), st.floats(1.0, 600.0), st.integers(0, 5000),
    st.floats(0.0, 1.0),
)  # fmt: skip
def test_prompts_are_between_the_number_of_groups_and_twice_the_mean(
    num_groups: int, prior: float, weight: float, decided: int, share: float
) -> None:
    rate = KeepRate(prior, weight, kept=decided * share, decided=decided)
    prompts = rate.prompts_for(num_groups)
    assert num_groups <= prompts <= max(num_groups, 2 * num_groups / rate.mean + 1)
    assert rate.prompts_for(num_groups + 1) >= prompts
    assert rate.prompts_for(0) == 0


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num_groups", [8, 512])
def test_prompts_are_enough_in_about_95_percent_of_steps(keep: float, num_groups: int) -> None:
    rng = random.Random(0)
    rate = KeepRate(0.5, 4)
    for _ in range(20_000):
        rate.observe(rng.random() < keep)
    prompts = rate.prompts_for(num_groups)
    num_kept = [sum(rng.random() < keep for _ in range(prompts)) for _ in range(400)]
    enough = sum(number >= num_groups for number in num_kept) / len(num_kept)
    assert 0.9 <= enough <= 0.995  # 0.95 by the normal approximation
