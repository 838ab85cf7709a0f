"""How far the engine that sampled and the policy that trains disagree about the same tokens.

Not in the paper, which assumes one model. The KL estimate is "k3" of J. Schulman,
"Approximating KL Divergence" (2020): unbiased, and never negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.types import SyncError, TokenBatch


@dataclass(frozen=True, slots=True)
class GapStatistics:
    """Log-prob gap over masked tokens, in nats; gap = |engine - policy|.

    mean, max    of the gap; infinite if any gap is not finite
    kl           mean of exp(d) - 1 - d with d = policy - engine: estimates KL(engine || policy)
    worst_token  flat index of the token with the largest gap; None without tokens
    num_tokens   masked tokens
    """

    mean: float
    max: float
    kl: float
    worst_token: int | None
    num_tokens: int


def gap_statistics(engine_logp: Tensor, policy_logp: Tensor, mask: Tensor) -> GapStatistics:
    """Statistics over the tokens where `mask` is set; the three tensors have one shape, any.

    A nan or inf under the mask makes the gap infinite, so that `max > bound` never misses it;
    outside the mask anything may stand. All zero for an empty mask.
    Raises ValueError if the shapes differ.
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
    """Compare the log-probs of engine and policy on the tokens that weights `version`, the
    policy's own, sampled (`mask`, bool [T]).

    Raises SyncError if the mean gap is above `max_mean_gap`, or the largest one above `max_gap`.
    It names the worst token.
    """
    assert batch.old_logprobs is not None
    gap = gap_statistics(batch.engine_logprobs, batch.old_logprobs, mask)
    if max_mean_gap is not None and gap.mean > max_mean_gap:
        raise SyncError(
            f"weights {version}: engine and policy disagree by {gap.mean:.3g} on the mean of "
            f"{gap.num_tokens} tokens; sync.max_mean_gap is {max_mean_gap:g}. The engine samples "
            "from other weights than are trained, or computes them too coarsely"
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
            "The engine samples from other weights than are trained"
        )
    return gap
