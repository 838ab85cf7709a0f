"""Train-inference mismatch: how much engine and policy log-probs of the same tokens differ.

The paper does not have this check, because it assumes a single model. The KL estimator is "k3" of
J. Schulman, "Approximating KL Divergence" (2020), which is unbiased and never negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.types import SyncError, TokenBatch


@dataclass(frozen=True, slots=True)
class GapStatistics:
    """Statistics of the log-prob gap |engine - policy| over masked-in tokens, in nats.

    mean, max    mean and maximum of the gap; inf if any gap is not finite
    kl           estimate of KL(engine || policy): mean of exp(d) - 1 - d with d = policy - engine
    worst_token  flat index of the token with the largest gap; None if there are no tokens
    num_tokens   number of masked-in tokens
    """

    mean: float
    max: float
    kl: float
    worst_token: int | None
    num_tokens: int


def gap_statistics(engine_logp: Tensor, policy_logp: Tensor, mask: Tensor) -> GapStatistics:
    """Return gap statistics over the tokens where `mask` is set.

    The three tensors have the same shape, of any rank. A nan or inf where the mask is set makes
    the gap infinite, so that `max > bound` never misses it. Values outside the mask are ignored.
    All statistics are 0 for an empty mask. Raises ValueError if the shapes differ.
    """
    if not engine_logp.shape == policy_logp.shape == mask.shape:
        raise ValueError(
            f"shapes differ: engine {tuple(engine_logp.shape)}, policy "
            f"{tuple(policy_logp.shape)}, mask {tuple(mask.shape)}"
        )
    token_index = mask.reshape(-1).nonzero().reshape(-1)
    if token_index.numel() == 0:
        return GapStatistics(mean=0.0, max=0.0, kl=0.0, worst_token=None, num_tokens=0)
    policy = policy_logp.detach().reshape(-1)[token_index].double()
    engine = engine_logp.detach().reshape(-1)[token_index].double()
    difference = policy - engine
    gap = torch.where(difference.isfinite(), difference.abs(), math.inf)
    kl = torch.where(difference.isfinite(), difference.expm1() - difference, math.inf)
    worst = int(gap.argmax())
    return GapStatistics(
        mean=float(gap.mean()),
        max=float(gap[worst]),
        kl=float(kl.mean()),
        worst_token=int(token_index[worst]),
        num_tokens=token_index.numel(),
    )


def check_gap(
    batch: TokenBatch, mask: Tensor, *, version: int, max_gap: float, max_mean_gap: float | None
) -> GapStatistics:
    """Compare engine and policy log-probs on the tokens sampled by the policy's current weights.

    `mask` (bool [T]) selects these tokens; `version` is the version of the weights.
    Raises SyncError if the mean gap exceeds `max_mean_gap`, or if the largest gap exceeds
    `max_gap`; the error then names the worst token.
    """
    assert batch.old_logprobs is not None
    gap = gap_statistics(batch.engine_logprobs, batch.old_logprobs, mask)
    if max_mean_gap is not None and gap.mean > max_mean_gap:
        raise SyncError(
            f"weights {version}: engine and policy disagree by {gap.mean:.3g} on the mean of "
            f"{gap.num_tokens} tokens; sync.max_mean_gap is {max_mean_gap:g}. The engine samples "
            "with other weights than the policy trains, or computes with too low a precision"
        )
    if gap.max > max_gap and gap.worst_token is not None:
        token = gap.worst_token
        ends = batch.lengths.cumsum(0)
        sequence = int((ends <= token).sum())
        position = token - int(ends[sequence] - batch.lengths[sequence])
        raise SyncError(
            f"weights {version}: engine and policy disagree by {gap.max:.3g} on "
            f"{batch.sequence_names[sequence]}, token {position} (id {int(batch.tokens[token])}): "
            f"log-prob {float(batch.engine_logprobs[token]):.6f} by the engine, "
            f"{float(batch.old_logprobs[token]):.6f} by the policy; sync.max_gap is {max_gap:g}. "
            "The engine samples with other weights than the policy trains"
        )
    return gap
