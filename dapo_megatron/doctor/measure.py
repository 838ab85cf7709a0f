"""The mini-batch that every layout trains on, and how far the results of two layouts differ.

Shape letters: T tokens (all sequences end to end), S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dapo_megatron.algo.loss import Aggregation, aggregation_weights
from dapo_megatron.protocols import LossFn
from dapo_megatron.types import TokenBatch

if TYPE_CHECKING:
    from dapo_megatron.policy.policy import MegatronPolicy

LEARNING_RATE = 1e-4
NUM_UPDATES = 3
LENGTHS = (120, 17, 3, 300, 60, 9, 5, 200, 33, 90)
"""Prompt and response, in tokens: from 3 to 300, 1 : 100."""
PROMPT = 2
"""Tokens of each prompt."""
NO_LOSS = 5
"""Index of a sequence without loss tokens, as a truncated one can be."""
GROUP = 2
"""Sequences per prompt."""
NOISE = 0.3
"""Standard deviation of old log-probs about the model's; the usual clip is at 0.2."""


def random_minibatch(vocab: int, aggregation: Aggregation, seed: int = 0) -> TokenBatch:
    """Return random tokens and advantages, weights by `aggregation`, without old log-probs."""
    generator = torch.Generator().manual_seed(seed)
    lengths_S = torch.tensor(LENGTHS)
    group_ids_S = torch.arange(len(LENGTHS)) // GROUP
    number_T = torch.arange(len(LENGTHS)).repeat_interleave(lengths_S)
    start_T = (lengths_S.cumsum(0) - lengths_S)[number_T]
    mask_T = (torch.arange(len(number_T)) - start_T >= PROMPT) & (number_T != NO_LOSS)
    advantages_S = torch.randn(len(LENGTHS), generator=generator)
    return TokenBatch(
        tokens=torch.randint(0, vocab, number_T.shape, generator=generator),
        lengths=lengths_S,
        loss_mask=mask_T,
        advantages=torch.where(mask_T, advantages_S[number_T], 0.0),
        weights=aggregation_weights(
            aggregation, mask=mask_T, lengths=lengths_S, group_ids=group_ids_S
        ),
        engine_logprobs=torch.zeros(number_T.shape),
        group_ids=group_ids_S,
    )


def with_old_logprobs(mini: TokenBatch, logprobs_T: Tensor, seed: int = 1) -> TokenBatch:
    """Add old log-probs near `logprobs_T`, the model's own, so that some ratios are clipped above,
    some below and most not; and the engine's close to them."""
    generator = torch.Generator().manual_seed(seed)

    def near(center_T: Tensor, distance: float) -> Tensor:
        noise_T = distance * torch.randn(center_T.shape, generator=generator)
        return torch.where(mini.loss_mask, center_T + noise_T, 0.0).float()

    old_T = near(logprobs_T.float(), NOISE)
    return replace(mini, old_logprobs=old_T, engine_logprobs=near(old_T, NOISE / 10))


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probs of the mini-batch [T], as before an update; its loss and whole gradient by HF name;
    then of three updates the loss and gradient norm before each, and the weights after the last
    with how far they moved. Tensors are float64."""

    logprobs: Tensor
    loss: float
    gradients: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    moved: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of two `Measured`, relative to the second. `gradient`, `weights` and `moved` are
    |a - b| / |b| (Euclidean) of the tensor where that is largest.

    tensor    HF name of the tensor that `gradient` is of
    logprobs  absolute, in nats, of the token where it is largest
    loss      absolute, of the first
    losses    absolute, the largest of three updates: it also sees copies of a weight that have
              drifted apart on some rank
    grad_norm relative, the largest of three updates: AdamW itself would not see its scale
    moved     |a - b| / how far b moved in three updates
    """

    gradient: float
    tensor: str
    logprobs: float
    loss: float
    losses: float
    grad_norm: float
    weights: float
    moved: float


def measure(policy: MegatronPolicy, mini: TokenBatch, loss: LossFn) -> Measured:
    """Take one gradient of the mini-batch, then three updates on it. Collective."""
    before = _kept(policy.weights())
    logprobs = policy.logprobs(mini).logprobs.double()
    value, gradients = policy.gradients(mini, loss)
    stats = [policy.update(mini, loss, LEARNING_RATE) for _ in range(NUM_UPDATES)]
    weights = _kept(policy.weights())
    return Measured(
        logprobs=logprobs,
        loss=value,
        gradients=_kept(gradients.items()),
        losses=[update.loss for update in stats],
        grad_norms=[update.grad_norm for update in stats],
        weights=weights,
        moved={name: weight - before[name] for name, weight in weights.items()},
    )


def _kept(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy tensors, whose memory the policy may use again."""
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in tensors}


def compare(seen: Measured, wanted: Measured) -> Differences:
    """Return how far `seen` is from `wanted`."""
    gradients = distances(seen.gradients, wanted.gradients)
    weights = distances(seen.weights, wanted.weights)
    moved = distances(seen.moved, wanted.moved)
    tensor = max(gradients, key=lambda name: gradients[name])
    return Differences(
        gradient=gradients[tensor],
        tensor=tensor,
        logprobs=float((seen.logprobs - wanted.logprobs).abs().max()),
        loss=abs(seen.loss - wanted.loss),
        losses=max(abs(a - b) for a, b in zip(seen.losses, wanted.losses, strict=True)),
        grad_norm=max(
            abs(a - b) / b for a, b in zip(seen.grad_norms, wanted.grad_norms, strict=True)
        ),
        weights=max(weights.values()),
        moved=max(moved.values()),
    )


def distances(seen: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |seen - wanted| / |wanted| of each tensor; where `wanted` is 0 (an expert that no
    token took), 0 or inf. A tensor that only one of them has is inf, and so is one with a nan."""
    result = {}
    for name in seen.keys() | wanted.keys():
        if name not in seen or name not in wanted or seen[name].shape != wanted[name].shape:
            result[name] = float("inf")
            continue
        difference = float((seen[name] - wanted[name]).norm())
        length = float(wanted[name].norm())
        if difference == 0.0:
            result[name] = 0.0
        elif difference < float("inf") and length > 0.0:
            result[name] = difference / length
        else:
            result[name] = float("inf")
    return result
