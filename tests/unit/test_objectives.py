"""Objectives against ten-line references in float64: value, gradient, masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.algo.objectives import OBJECTIVES
from dapo_megatron.policy.rows import SequenceSum
from dapo_megatron.protocols import LossFn
from dapo_megatron.run.loss import loss_function
from dapo_megatron.types import MicroTokens
from tests.helpers.configs import tiny_config

Values = NDArray[np.float64]
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
NUMBERS: dict[str, dict[str, Any]] = {
    "dapo": CLIP,
    "grpo": CLIP,
    "dr_grpo": CLIP,
    "gspo": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.5, "tis_cap": None},
    "cispo": {"clip_low": 0.3, "clip_high": 0.4, "dual_clip": None},
    "sapo": {"dual_clip": None, "tau_pos": 1.0, "tau_neg": 1.05},
}
"""Numbers with which some tokens are on each side of each bound."""


def objective(name: str, **numbers: Any) -> LossFn:
    loss = tiny_config().loss
    return loss_function(loss.model_copy(update={"objective": name, **NUMBERS[name], **numbers}))


# ------------------------------------------------------------------ references


def clipped(ratio: Values, advantage: Values, numbers: dict[str, Any]) -> Values:
    """Return the clipped loss with a dual clip, arXiv 2503.14476 eq. 8 and arXiv 1912.09729."""
    bounded = np.clip(ratio, 1 - numbers["clip_low"], 1 + numbers["clip_high"])
    loss = -np.minimum(ratio * advantage, bounded * advantage)
    return np.where(advantage < 0, np.minimum(loss, -numbers["dual_clip"] * advantage), loss)


def token_clip(new: Values, old: Values, advantage: Values, numbers: dict[str, Any]) -> Values:
    return clipped(np.exp(new - old), advantage, numbers)


def gspo(new: Values, old: Values, advantage: Values, numbers: dict[str, Any]) -> Values:
    ratio = np.prod(np.exp(new - old)) ** (1 / len(new))
    return clipped(np.full(len(new), ratio), advantage, numbers)


def sapo(new: Values, old: Values, advantage: Values, numbers: dict[str, Any]) -> Values:
    tau = np.where(advantage > 0, numbers["tau_pos"], numbers["tau_neg"])
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))
    return -gate * advantage


SMOOTH: dict[str, Callable[..., Values]] = {
    "dapo": token_clip,
    "grpo": token_clip,
    "dr_grpo": token_clip,
    "gspo": gspo,
    "sapo": sapo,
}
"""Loss of each token of one sequence, given its masked-in tokens. CISPO has a stopped gradient."""


def reference(name: str, new: Values, micro: Batch) -> float:
    """Return the loss by loops over sequences, from the formulas of the papers."""
    total = 0.0
    for sequence in range(micro.num_sequences):
        chosen = (micro.sequences == sequence) & micro.mask
        if not chosen.any():
            continue
        arguments = (new[chosen], micro.old[chosen], micro.advantages[chosen])
        weights = micro.weights[chosen]
        if (cap := NUMBERS[name].get("tis_cap", 2.0)) is not None:
            weights = weights * np.minimum(np.exp(arguments[1] - micro.engine[chosen]), cap)
        total += float((weights * SMOOTH[name](*arguments, NUMBERS[name])).sum())
    return total


class Batch:
    """A random micro-batch of several sequences, as numpy arrays."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        random = np.random.default_rng(seed)
        size = sum(lengths)
        self.num_sequences = len(lengths)
        self.sequences = np.repeat(np.arange(len(lengths)), lengths)
        self.old = -np.abs(random.normal(size=size))
        self.new = self.old + 0.4 * random.normal(size=size)
        self.engine = self.old + 0.5 * random.normal(size=size)
        self.advantages = random.normal(size=len(lengths))[self.sequences]
        self.weights = np.abs(random.normal(size=size))
        self.mask = random.random(size) < 0.8

    def inputs(self, outside: float = 0.0) -> tuple[Tensor, MicroTokens]:
        """Return the arguments of a loss, with the value `outside` where the mask is not set."""

        def tensor(values: Values) -> Tensor:
            return torch.from_numpy(np.where(self.mask, values, outside))

        fields = (self.old, self.advantages, self.weights, self.engine)
        sums = SequenceSum(torch.from_numpy(self.sequences), self.num_sequences)
        mask = torch.from_numpy(self.mask)
        tokens = MicroTokens(*map(tensor, fields), mask, sequence_sum=sums)
        return tensor(self.new).requires_grad_(), tokens


batches = st.builds(
    Batch,
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(0, 10**6),
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dapo_megatron.policy.step.parallel_state.get_context_parallel_world_size", lambda: 1
    )


def exact_gradient(name: str, batch: Batch) -> Values:
    """Return the gradient by the derivative of each formula, worked out by hand."""
    result = np.zeros_like(batch.new)
    numbers = NUMBERS[name]
    for sequence in range(batch.num_sequences):
        chosen = (batch.sequences == sequence) & batch.mask
        if not chosen.any():
            continue
        log_ratio, advantage = (batch.new - batch.old)[chosen], batch.advantages[chosen]
        ratio = np.exp(np.full_like(log_ratio, log_ratio.mean()) if name == "gspo" else log_ratio)
        low, high = 1 - numbers.get("clip_low", 0), 1 + numbers.get("clip_high", 0)
        is_active = np.where(
            advantage > 0, ratio <= high, (ratio >= low) & (ratio <= (numbers["dual_clip"] or 0))
        )
        slope = -advantage * ratio * is_active
        if name == "cispo":
            slope = -advantage * np.clip(ratio, low, high)
        if name == "sapo":
            tau = np.where(advantage > 0, numbers["tau_pos"], numbers["tau_neg"])
            slope = -advantage * ratio / np.cosh(tau * (ratio - 1) / 2) ** 2
        weights = batch.weights[chosen]
        if name != "gspo":
            weights = weights * np.minimum(np.exp((batch.old - batch.engine)[chosen]), 2.0)
        result[chosen] = (weights * slope).mean() if name == "gspo" else weights * slope
    return result


@settings(max_examples=25)
@pytest.mark.parametrize("name", OBJECTIVES)
@given(batch=batches, outside=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@example(Batch([0], 0), 0.0)  # every rank must enter the backward pass, or collectives would hang
def test_value_and_gradient_are_those_of_the_formula_and_ignore_tokens_outside_the_mask(
    name: str, batch: Batch, outside: float
) -> None:
    logprobs, tokens = batch.inputs(outside)
    output = objective(name)(logprobs, tokens)
    output.total.backward()
    assert logprobs.grad is not None
    gradient = exact_gradient(name, batch)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, rtol=1e-12, atol=1e-12)
    # CISPO has the value of a weighted log-likelihood.
    value = np.where(batch.mask, batch.new, 0.0) @ gradient
    if name in SMOOTH:
        value = reference(name, batch.new, batch)
    assert float(output.total.detach()) == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert all(total.isfinite() for total in output.sums.values())


def test_the_statistics_of_the_objectives() -> None:
    logprobs, tokens = Batch([6, 3, 5], 1).inputs()
    names = {name: set(objective(name)(logprobs, tokens).sums) for name in OBJECTIVES}
    token_clip_names = {"clip_fraction_high", "clip_fraction_low", "dual_clip_fraction"}
    tis = {"tis_weight", "tis_capped_fraction"}
    both = {"approx_kl"}
    assert names == {
        **dict.fromkeys(("dapo", "grpo", "dr_grpo"), token_clip_names | both | tis),
        "gspo": token_clip_names | both,
        "cispo": {"clip_fraction_high", "clip_fraction_low"} | both | tis,
        "sapo": {"gate"} | both | tis,
    }
    ones = torch.ones(2, dtype=torch.float64)
    same = MicroTokens(-ones, ones, ones, -ones, ones.bool())
    assert float(objective("sapo")(-ones, same).sums["gate"]) == 2.0  # no token is gated
