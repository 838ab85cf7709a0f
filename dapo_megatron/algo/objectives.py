"""Objectives: the loss of each token, as `loss.objective` names them.

Each has the arguments of `loss.dapo_loss`, of which it ignores those that it does not use. Let r_t
be the ratio of token t, new policy / old policy, and A_i the advantage of completion o_i. The
papers maximize; these are losses to minimize. What an objective prescribes outside the token loss
(aggregation, advantage) is set by keys of the config, which config/consistency.py checks.

Common departures from the papers: log-ratios are clamped. KL terms and entropy bonuses are added
outside the objective (loss.regularized_loss), if the config asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.algo.loss import clipped_loss, dapo_loss, weighted_sum
from dapo_megatron.types import LossOutput, MicroTokens


def grpo_loss(logprobs: Tensor, tokens: MicroTokens, **numbers: Any) -> LossOutput:
    """GRPO (arXiv 2402.03300, eq. 3):

        1/G sum_i 1/|o_i| sum_t min(r_t A_i, clip(r_t, 1 - eps, 1 + eps) A_i)

    The token loss is DAPO's. `aggregation: sequence` gives both means, over the mini-batch
    instead of one group. Departures: `clip_low` and `clip_high` may differ, and `dual_clip` may
    bound the loss. The paper's KL term is `loss.kl`, which is off by default.
    """
    return dapo_loss(logprobs, tokens, **numbers)


def dr_grpo_loss(logprobs: Tensor, tokens: MicroTokens, **numbers: Any) -> LossOutput:
    """Dr. GRPO (arXiv 2503.20783, figure 1 and section 3.2):

        1/G sum_i sum_t min(r_t A_i, clip(r_t, 1 - eps, 1 + eps) A_i),   A_i = R_i - mean(R)

    The token loss is DAPO's. `advantage_std: false` removes the standard deviation, and
    `aggregation: constant` divides by a constant instead of |o_i|, as the authors' code does: here
    rollout.max_response_tokens. Departures: as in `grpo_loss`.
    """
    return dapo_loss(logprobs, tokens, **numbers)


def gspo_loss(
    logprobs: Tensor,
    tokens: MicroTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    log_ratio_limit: float,
    **_: Any,
) -> LossOutput:
    """GSPO (arXiv 2507.18071, eq. 5 and 7):

        1/G sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)
        s_i = (prod_t r_t)^(1/|o_i|) = exp(1/|o_i| sum_t log r_t)

    Each token carries the loss of its sequence, and `aggregation: sequence` averages them to one
    loss per sequence. The gradient flows through s_i into all tokens of the sequence. Departures:
    |o_i| counts the tokens in the loss, the mean is over the mini-batch instead of one group, and
    `dual_clip` may bound the loss.
    """
    keep = tokens.mask.bool()
    log_ratio = torch.where(keep, logprobs, 0.0) - torch.where(keep, tokens.old_logprobs, 0.0)
    num_tokens = tokens.sequence_sum(keep.to(logprobs.dtype)).clamp(min=1.0)
    mean = tokens.sequence_sum(log_ratio) / num_tokens
    ratio = mean.clamp(-log_ratio_limit, log_ratio_limit).exp()
    loss = clipped_loss(
        ratio,
        tokens.advantages,
        keep,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return weighted_sum(loss.per_token, logprobs, tokens, loss.clip_counts, tis_cap=None)


def cispo_loss(
    logprobs: Tensor,
    tokens: MicroTokens,
    *,
    clip_low: float,
    clip_high: float,
    tis_cap: float | None,
    log_ratio_limit: float,
    **_: Any,
) -> LossOutput:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5):

        1/(sum_i |o_i|) sum_i sum_t sg(clip(r_t, 1 - eps_low, 1 + eps_high)) A_i log pi(o_t)

    sg stops the gradient: the weight is clipped, and every token keeps a gradient. The paper sets
    no lower bound, which is `clip_low: 1.0`. The sum is as with `aggregation: token`. Departures:
    other aggregations are allowed, and the mean is over the mini-batch instead of one group.
    """
    keep = tokens.mask.bool()
    logprobs = torch.where(keep, logprobs, 0.0)
    log_ratio = logprobs.detach() - torch.where(keep, tokens.old_logprobs, 0.0)
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    advantages = torch.where(keep, tokens.advantages, 0.0)
    per_token = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * logprobs
    sums = {
        "clip_fraction_high": (keep & (ratio > 1.0 + clip_high)).sum(dtype=logprobs.dtype),
        "clip_fraction_low": (keep & (ratio < 1.0 - clip_low)).sum(dtype=logprobs.dtype),
    }
    return weighted_sum(per_token, logprobs, tokens, sums, tis_cap=tis_cap)


def sapo_loss(
    logprobs: Tensor,
    tokens: MicroTokens,
    *,
    tau_pos: float,
    tau_neg: float,
    tis_cap: float | None,
    log_ratio_limit: float,
    **_: Any,
) -> LossOutput:
    """SAPO (arXiv 2511.20347, soft adaptive gate):

        1/G sum_i 1/|o_i| sum_t f(r_t) A_i,   f(r) = 4/tau sigmoid(tau (r - 1))

    tau is `tau_pos` where A_i > 0 and `tau_neg` elsewhere. The weight of the gradient is
    f'(r) r, where f'(r) = 4 p (1 - p) with p = sigmoid(tau (r - 1)): 1 at r = 1, and smoothly to 0
    on both sides. The statistic `gate` is f'(r). Departure: the mean of `aggregation: sequence` is
    over the mini-batch instead of one group.
    """
    keep = tokens.mask.bool()
    log_ratio = torch.where(keep, logprobs, 0.0) - torch.where(keep, tokens.old_logprobs, 0.0)
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    advantages = torch.where(keep, tokens.advantages, 0.0)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    share = torch.sigmoid(tau * (ratio - 1.0))
    gate = torch.where(keep, 4.0 * share * (1.0 - share), 0.0).detach()
    per_token = -4.0 / tau * share * advantages
    return weighted_sum(per_token, logprobs, tokens, {"gate": gate.sum()}, tis_cap=tis_cap)


OBJECTIVES: dict[str, Callable[..., LossOutput]] = {
    "dapo": dapo_loss,
    "grpo": grpo_loss,
    "dr_grpo": dr_grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
}
"""The functions that `loss.objective` names."""
