"""Build the mini-batch of `doctor layouts`, measure a policy on it, and compare two results.

Shapes: T is the number of tokens of all sequences, concatenated; S is the number of sequences.
"""

from __future__ import annotations

import math
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
"""Tokens of each sequence, prompt and response."""
PROMPT = 2
"""Tokens of each prompt."""
OBSERVED = {0: (40, 60), 3: (100, 200)}
"""Sequence -> first and end of its tokens that an environment wrote. Context-parallel ranks share
the second span."""
NO_LOSS = 5
"""Index of a sequence without loss tokens, like a truncated one with overlong.filter."""
GROUP = 2
"""Sequences per prompt."""
NOISE = 0.3
"""Standard deviation of old log-probs around the model's. The usual clip is at 0.2."""


def random_minibatch(
    vocab: int, aggregation: Aggregation, *, divisor: int | None = None
) -> TokenBatch:
    """Return a mini-batch of random tokens and advantages, with weights for `aggregation` (and its
    `divisor`) and without old log-probs."""
    generator = torch.Generator().manual_seed(0)
    lengths_S = torch.tensor(LENGTHS)
    group_ids_S = torch.arange(len(LENGTHS)) // GROUP
    number_T = torch.arange(len(LENGTHS)).repeat_interleave(lengths_S)
    start_T = (lengths_S.cumsum(0) - lengths_S)[number_T]
    position_T = torch.arange(len(number_T)) - start_T
    mask_T = (position_T >= PROMPT) & (number_T != NO_LOSS)
    for number, (first, end) in OBSERVED.items():
        mask_T &= (number_T != number) | (position_T < first) | (position_T >= end)
    advantages_S = torch.randn(len(LENGTHS), generator=generator)
    return TokenBatch(
        lengths=lengths_S,
        loss_tokens=number_T[mask_T].bincount(minlength=len(LENGTHS)),
        group_ids=group_ids_S,
        tokens=torch.randint(0, vocab, number_T.shape, generator=generator).int(),
        loss_mask=mask_T,
        advantages=torch.where(mask_T, advantages_S[number_T], 0.0),
        weights=aggregation_weights(
            aggregation,
            mask=mask_T,
            lengths=lengths_S,
            group_ids=group_ids_S,
            divisor=divisor,
        ),
        engine_logprobs=torch.zeros(number_T.shape),
    )


def with_old_logprobs(mini: TokenBatch, logprobs_T: Tensor) -> TokenBatch:
    """Add old log-probs near `logprobs_T`, the log-probs of the model, so that some ratios are
    clipped above, some below and most not at all. Add engine log-probs close to the old ones, and
    log-probs of a reference and a teacher, which are as far away."""
    generator = torch.Generator().manual_seed(1)

    def with_noise(center_T: Tensor, std: float) -> Tensor:
        noise_T = std * torch.randn(center_T.shape, generator=generator)
        return torch.where(mini.loss_mask, center_T + noise_T, 0.0).float()

    old_T = with_noise(logprobs_T.float(), NOISE)
    engine_T = with_noise(old_T, NOISE / 10)
    return replace(
        mini,
        old_logprobs=old_T,
        engine_logprobs=engine_T,
        reference_logprobs=with_noise(old_T, NOISE),
        teacher_logprobs=with_noise(old_T, NOISE),
    )


def with_top_tokens(mini: TokenBatch, k: int, vocab: int) -> TokenBatch:
    """Add any `k` tokens as the most likely ones of a teacher at each place."""
    generator = torch.Generator().manual_seed(2)
    num_tokens = mini.tokens.numel()
    ids_Tk = torch.rand(num_tokens, vocab, generator=generator).topk(k).indices
    logits = torch.randn(num_tokens, k + 1, generator=generator)
    return replace(mini, top_ids=ids_Tk.int(), teacher_top_logprobs=logits.log_softmax(1)[:, :-1])


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a policy on the mini-batch, before and after three updates. Tensors are float64;
    dicts are keyed by HF name. `gradients` and `values` have one entry per loss: the config's own,
    named "", and the other ones."""

    logprobs: Tensor
    """Log-probs [T] before the updates."""
    values: dict[str, float]
    """Value of each loss before the updates."""
    gradients: dict[str, Tensor]
    """Whole gradients of each loss before the updates; "LOSS: NAME" for the other losses."""
    losses: list[float]
    """Loss of each update."""
    grad_norms: list[float]
    """Gradient norm of each update."""
    weights: dict[str, Tensor]
    """Weights after the updates."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, and the mini-batch with its weights and old log-probs."""

    loss: LossFn
    mini: TokenBatch


def measure(policy: MegatronPolicy, objectives: Mapping[str, Objective]) -> Measured:
    """Compute the gradient of each objective, then run three updates with the one named "".
    Collective."""
    loss, mini = objectives[""].loss, objectives[""].mini
    logprobs = policy.logprobs(mini).logprobs.double()
    values: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    for name, objective in objectives.items():
        values[name], gradient = policy.gradients(objective.mini, objective.loss)
        prefix = f"{name}: " if name else ""
        gradients |= {prefix + tensor: value for tensor, value in _copy(gradient.items()).items()}
    stats = [policy.update(mini, loss, LEARNING_RATE) for _ in range(NUM_UPDATES)]
    return Measured(
        logprobs=logprobs,
        values=values,
        gradients=gradients,
        losses=[update.loss for update in stats],
        grad_norms=[update.grad_norm for update in stats],
        weights=_copy(policy.weights()),
    )


def _copy(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy tensors to the CPU as float64, because the policy may reuse their memory."""
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in tensors}


def compare(actual: Measured, expected: Measured) -> dict[str, float]:
    """Return the differences of `actual` from `expected`; nan and inf are possible.

    gradient  |a - b| / |b| (Euclidean) of the gradient tensor with the largest one
    logprobs  largest absolute difference of a token, in nats
    loss      largest absolute difference of a loss before the updates
    losses    largest absolute difference of the three updates; it also detects copies of a weight
              that drift apart between ranks
    grad_norm largest relative difference of the three updates; it detects a wrong scale of the
              gradient, to which AdamW is invariant
    weights   as `gradient`, for the weights after the updates
    """
    values = [(value, expected.values[name]) for name, value in actual.values.items()]
    losses = zip(actual.losses, expected.losses, strict=True)
    norms = zip(actual.grad_norms, expected.grad_norms, strict=True)
    return {
        "gradient": max(distances(actual.gradients, expected.gradients).values()),
        "logprobs": float((actual.logprobs - expected.logprobs).abs().max()),
        "loss": _largest_gap(values),
        "losses": _largest_gap(losses),
        "grad_norm": max(_distance(*torch.tensor(pair, dtype=torch.float64)) for pair in norms),
        "weights": max(distances(actual.weights, expected.weights).values()),
    }


def _largest_gap(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest difference, or nan if one is nan, which `max` may miss."""
    actual, expected = torch.tensor(list(pairs), dtype=torch.float64).T
    return float((actual - expected).abs().max())


def distances(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |actual - expected| / |expected| of each tensor.

    If `expected` is 0 (an expert without tokens, or clipped sequences only), the distance is 0 or
    inf. It is inf for a tensor with a nan, of different shapes, or that only one side has.
    """
    result = dict.fromkeys(actual.keys() | expected.keys(), math.inf)
    both = actual.keys() & expected.keys()
    return result | {name: _distance(actual[name], expected[name]) for name in both}


def _distance(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    difference, length = float((actual - expected).norm()), float(expected.norm())
    if difference == 0.0:
        return 0.0
    return difference / length if difference < math.inf and length > 0.0 else math.inf
