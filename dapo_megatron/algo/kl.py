"""KL divergence between the policy and a fixed reference model, estimated on sampled tokens.

Let d = log policy - log reference of a token that the policy sampled. J. Schulman, "Approximating
KL Divergence" (2020), estimates KL(policy || reference) by the mean of

    k1 = d                    unbiased, of either sign
    k2 = d^2 / 2              never negative, biased (little while d is small)
    k3 = exp(-d) - 1 + d      unbiased, never negative; GRPO's (arXiv 2402.03300, eq. 4)

Where the estimate is used decides what it does:

    place: reward   R_i - coefficient * sum of k over the completion's tokens (Ouyang et al., arXiv
                    2203.02155, eq. 2, with k1). Group advantages are computed from these rewards.
    place: loss     coefficient * k is added to the loss of each token, as in GRPO (with k3). Then
                    the gradient of k counts. Its mean over the policy's own tokens is 0 for k1,
                    that of KL(policy || reference) for k2, and that of KL(reference || policy) for
                    k3.

Departures: d is clamped to +-log_ratio_limit, beyond which the loss has no gradient. All other
differences from GRPO are those of the aggregation, because k has the weight of its token's loss.
As in GRPO, tokens count as sampled by the policy although it moves within a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dapo_megatron.types import MicroTokens, TokenBatch

Estimator = Literal["k1", "k2", "k3"]


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d for each d."""
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": k3,
}


@dataclass(frozen=True, slots=True)
class KL:
    """Numbers of loss.kl."""

    coefficient: float
    estimator: Estimator
    log_ratio_limit: float

    def per_token(self, logp: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """Return the estimate of each token, with gradient to `logp` only; 0 where the bool mask is
        0, whatever the log-probs there are. All have the same shape."""
        # Masked first, because the backward pass would compute 0 * inf = nan.
        log_ratio = torch.where(mask, logp, 0.0) - torch.where(mask, reference, 0.0).detach()
        return ESTIMATORS[self.estimator](
            log_ratio.clamp(-self.log_ratio_limit, self.log_ratio_limit)
        )


@dataclass(frozen=True, slots=True)
class Distillation:
    """Numbers of loss.distill."""

    coefficient: float
    log_ratio_limit: float

    def per_token(self, logp: Tensor, tokens: MicroTokens) -> Tensor:
        """Return the term of each token, as `KL.per_token` does: with loss.distill.top_k the
        divergence over the teacher's most likely tokens, else its estimate from the sampled one.
        """
        mask = tokens.mask.bool()
        if tokens.teacher_top_logprobs is not None:
            assert tokens.top_logprobs is not None
            return _divergence_at_top(tokens.top_logprobs, tokens.teacher_top_logprobs, mask)
        assert tokens.teacher_logprobs is not None
        return self._of_sample(logp, tokens.teacher_logprobs, mask)

    def _of_sample(self, logp: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return d^2 / 2, linear where |d| exceeds `log_ratio_limit`. The gradient is d, clamped:
        tokens that the teacher finds impossible keep one."""
        logp, teacher = torch.where(mask, logp, 0.0), torch.where(mask, teacher, 0.0).detach()
        return torch.nn.functional.huber_loss(
            logp, teacher.to(logp.dtype), reduction="none", delta=self.log_ratio_limit
        )


def _divergence_at_top(logp: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return KL(policy || teacher) at each place, [n], of their distributions over the teacher's k
    most likely tokens and one outcome for all others. It is at most that of whole distributions.

    logp, teacher  log-probs of these tokens, [n, k]
    mask           bool [n]
    """
    log_p = _with_rest(logp, mask)
    log_q = _with_rest(teacher.to(logp.dtype), mask).detach()
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _with_rest(logp: Tensor, mask: Tensor) -> Tensor:
    """Append the log-prob of all other tokens. Where the mask is 0, distributions are uniform."""
    logp = torch.where(mask[:, None], logp, -math.log(logp.shape[1] + 1))
    rest = 1.0 - logp.exp().sum(1, keepdim=True)
    # Rounding can make it 0 or negative.
    return torch.cat([logp, rest.clamp(min=torch.finfo(logp.dtype).eps).log()], 1)


@dataclass(frozen=True, slots=True)
class KLStatistics:
    """Sums over the loss tokens of a batch, before the step's first update.

    total        sum of the estimates
    num_clamped  tokens whose log-ratio exceeds log_ratio_limit
    """

    total: float
    num_clamped: int
    num_tokens: int


def statistics(batch: TokenBatch, logprobs: Tensor, kl: KL) -> KLStatistics:
    """Return the statistics of the held tokens, whose log-probs by the other model are given."""
    assert batch.old_logprobs is not None
    old, other = (values[batch.loss_mask].double() for values in (batch.old_logprobs, logprobs))
    estimates = kl.per_token(old, other, torch.ones_like(old, dtype=torch.bool))
    return KLStatistics(
        total=float(estimates.sum()),
        num_clamped=int(((old - other).abs() > kl.log_ratio_limit).sum()),
        num_tokens=old.numel(),
    )


def merge(parts: Sequence[KLStatistics]) -> KLStatistics:
    """Return the statistics over the tokens of all parts. They share no token."""
    return KLStatistics(
        total=sum(part.total for part in parts),
        num_clamped=sum(part.num_clamped for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
    )


def penalties(batch: TokenBatch, is_sampled: Tensor, kl: KL) -> list[float]:
    """Return the penalty of each held sequence: coefficient * sum of the estimates over its sampled
    tokens, whether or not they enter the loss.

    batch       has old and reference log-probs
    is_sampled  bool [T]
    """
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None
    result = []
    lengths = batch.held_lengths.tolist()
    parts = [values.split(lengths) for values in (batch.old_logprobs, batch.reference_logprobs)]
    for old, reference, mask in zip(*parts, is_sampled.split(lengths), strict=True):
        old, reference = old[mask].double(), reference[mask].double()
        estimates = kl.per_token(old, reference, torch.ones_like(old, dtype=torch.bool))
        result.append(kl.coefficient * float(estimates.sum()))
    return result
