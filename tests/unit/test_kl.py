"""KL penalty and entropy bonus against references of a few lines in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.algo import kl
from dapo_megatron.algo.kl import KL, KLStatistics
from dapo_megatron.config import LossConfig
from dapo_megatron.data.batch import assemble, of_all, penalize, sampled_mask
from dapo_megatron.run.loss import loss_function, objective
from dapo_megatron.types import LossOutput, MicroTokens, TokenBatch
from tests.helpers.batches import described, hold, tokens_of
from tests.helpers.configs import tiny_config
from tests.unit.test_batch import RIGHT, WRONG, completion, group, overlong

Values = NDArray[np.float64]
LIMIT = 2.0
ESTIMATORS = ("k1", "k2", "k3")


def estimate(estimator: str, logp: Values, reference: Values) -> Values:
    """Return the estimates of Schulman's note, with r = reference / policy."""
    ratio = np.exp(np.clip(reference - logp, -LIMIT, LIMIT))
    return {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[
        estimator
    ]


def slope(estimator: str, logp: Values, reference: Values) -> Values:
    """Return the derivative by `logp`."""
    difference = logp - reference
    slopes = {"k1": 1.0 + 0 * difference, "k2": difference, "k3": 1 - np.exp(-difference)}
    return np.where(np.abs(difference) < LIMIT, slopes[estimator], 0.0)


class Micro:
    """A random micro-batch, as numpy arrays. Some log-ratios are above LIMIT."""

    def __init__(self, size: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.new, self.old, self.engine, self.reference = -np.abs(random.normal(size=(4, size)))
        self.reference *= 3.0
        self.advantages, self.weights = random.normal(size=size), random.random(size)
        self.entropy = random.random(size)
        self.mask = random.random(size) < 0.8

    def loss(self, function: Any) -> tuple[float, Values, Values, LossOutput]:
        """Return the loss, its gradients to log-probs and entropies, and the output. Values outside
        the mask are nan."""

        def tensor(values: Values) -> Tensor:
            return torch.from_numpy(np.where(self.mask, values, math.nan))

        logprobs, entropy = (tensor(v).requires_grad_() for v in (self.new, self.entropy))
        tokens = MicroTokens(
            old_logprobs=tensor(self.old),
            advantages=tensor(self.advantages),
            weights=tensor(self.weights),
            engine_logprobs=tensor(self.engine),
            mask=torch.from_numpy(self.mask),
            reference_logprobs=tensor(self.reference),
            entropy=entropy,
        )
        output = function(logprobs, tokens)
        output.total.backward()
        assert logprobs.grad is not None
        of_entropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
        return float(output.total.detach()), logprobs.grad.numpy(), of_entropy.numpy(), output


micros = st.builds(Micro, st.integers(1, 12), st.integers(0, 10**6))


def loss_config(**overrides: Any) -> LossConfig:
    return tiny_config(**{f"loss__{key}": value for key, value in overrides.items()}).loss


def with_kl(estimator: str, **overrides: Any) -> LossConfig:
    kl_keys = {"kl__coefficient": 0.3, "kl__estimator": estimator, "log_ratio_limit": LIMIT}
    return loss_config(**kl_keys, **overrides)


@settings(max_examples=25)
@pytest.mark.parametrize("name", ["dapo", "cispo", "sapo"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(micro=micros)
def test_penalty_and_bonus_are_added_to_the_loss_of_any_objective(
    estimator: str, name: str, micro: Micro
) -> None:
    numbers: dict[str, Any] = {"objective": name}
    if name != "dapo":
        numbers |= {"dual_clip": "null", "aggregation": "sequence"}
    plain = objective(with_kl(estimator, **numbers))
    both = loss_function(with_kl(estimator, **numbers, entropy_coefficient=0.7))
    base, base_gradient, _, _ = micro.loss(plain)
    value, gradient, of_entropy, output = micro.loss(both)

    weights = np.where(micro.mask, micro.weights, 0.0)
    penalty = 0.3 * (weights * estimate(estimator, micro.new, micro.reference)).sum()
    bonus = 0.7 * (weights * micro.entropy).sum()
    close = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(value, base + penalty - bonus, **close)
    expected = base_gradient + 0.3 * weights * slope(estimator, micro.new, micro.reference)
    np.testing.assert_allclose(gradient, expected, **close)
    np.testing.assert_allclose(of_entropy, -0.7 * weights, **close)
    np.testing.assert_allclose(float(output.sums["kl_penalty"]), penalty, **close)
    np.testing.assert_allclose(float(output.sums["entropy_bonus"]), bonus, **close)
    assert not any(value.requires_grad for value in output.sums.values())


# ------------------------------------------------------------------ of a step

GROUPS = [
    group(3, completion(0, 4, RIGHT), completion(1, 2, WRONG), completion(4, 1, RIGHT)),
    group(9, completion(0, 3, WRONG), completion(1, 5, RIGHT), num_prompt_tokens=5),
    group(11, completion(2, 7, WRONG), completion(3, 7, RIGHT)),
]
SEQUENCES = described(GROUPS, overlong())
NUMBERS = KL(coefficient=0.3, estimator="k2", log_ratio_limit=LIMIT)
OWNERS = (1, 0, 1, 1, 0, 2, 0)


def step_batch() -> TokenBatch:
    """Return the batch of GROUPS, with random log-probs, also on prompts."""
    batch = assemble(SEQUENCES, tokens_of(GROUPS, overlong()))
    old, reference = -3 * torch.rand(2, batch.tokens.numel(), generator=torch.manual_seed(0))
    old[-1], reference[-1] = -1.0, -1.0 - LIMIT  # not clamped
    return replace(batch, old_logprobs=old, reference_logprobs=reference)


def held(batch: TokenBatch, index: int) -> TokenBatch:
    """Return what data-parallel `index` holds."""
    assert batch.reference_logprobs is not None
    is_held = torch.tensor([o == index for o in OWNERS]).repeat_interleave(batch.lengths)
    return replace(hold(batch, OWNERS, index), reference_logprobs=batch.reference_logprobs[is_held])


def test_statistics_are_over_the_loss_tokens_of_all_parts() -> None:
    batch = step_batch()
    parts = []
    for part in (held(batch, index) for index in range(3)):
        assert part.reference_logprobs is not None
        parts.append(kl.statistics(part, part.reference_logprobs, NUMBERS))
    actual = kl.merge(parts)
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None
    old = batch.old_logprobs[batch.loss_mask].double().numpy()
    reference = batch.reference_logprobs[batch.loss_mask].double().numpy()
    assert actual.total == pytest.approx(estimate("k2", old, reference).sum(), rel=1e-12)
    assert actual.num_clamped == (np.abs(old - reference) > LIMIT).sum() > 0
    assert actual.num_tokens == len(old)
    assert kl.merge([]) == KLStatistics(0.0, 0, 0)


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_penalties_are_subtracted_from_rewards_before_advantages(divide_by_std: bool) -> None:
    batch = step_batch()
    parts = [held(batch, index) for index in range(3)]
    owned = [kl.penalties(part, sampled_mask(part, SEQUENCES), NUMBERS) for part in parts]
    penalties = of_all(parts[0], owned)
    arguments: dict[str, Any] = {"eps": 0.5, "divide_by_std": divide_by_std}

    # The same by a loop over the sequences.
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None
    rewards, expected = {}, []
    ends = batch.lengths.cumsum(0).tolist()
    for sequence, end in zip(SEQUENCES, ends, strict=True):
        response = slice(end - sequence.response_tokens, end)
        old = batch.old_logprobs[response].double().numpy()
        reference = batch.reference_logprobs[response].double().numpy()
        expected.append(0.3 * estimate("k2", old, reference).sum())
        rewards.setdefault(sequence.ticket, []).append(sequence.reward - expected[-1])
    assert penalties == of_all(batch, [penalties]) == pytest.approx(expected, rel=1e-12)
    advantages = [
        (reward - np.mean(values)) / (np.std(values, ddof=1) + 0.5 if divide_by_std else 1.0)
        for values in rewards.values()
        for reward in values
    ]

    penalized = penalize(batch, SEQUENCES, penalties, **arguments)
    for sequence, advantage, end in zip(SEQUENCES, advantages, ends, strict=True):
        values = penalized.advantages[end - sequence.num_tokens : end]
        assert not values[: sequence.prompt_tokens].any()
        assert values[sequence.prompt_tokens :].tolist() == pytest.approx(
            [advantage] * sequence.response_tokens, rel=1e-5
        )
    # Each data-parallel index computes the advantages of the sequences that it holds.
    for index, part in enumerate(parts):
        own = penalize(part, SEQUENCES, penalties, **arguments).advantages
        assert torch.equal(own, held(penalized, index).advantages)
