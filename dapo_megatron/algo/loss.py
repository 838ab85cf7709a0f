"""DAPO token loss (arXiv 2503.14476, eq. 8 and 10).

Departures from the paper: the log-ratio is clamped to +-20 before exp; a dual clip
(arXiv 1912.09729) can bound the loss at negative advantage; the loss is a *sum* over tokens, and
whoever knows the mini-batch divides it by N, its tokens under the mask. Every aggregation is
that sum with per-token weights (`aggregation_weights`), so none depends on how the mini-batch is
cut into ranks and micro-batches. Eq. 8 divides by the tokens of each prompt; `token`, the
default of every public reproduction, divides by those of the mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dapo_megatron.types import LossOutput, MicroTokens

# T tokens of all sequences end to end, S sequences, P prompts

LOG_RATIO_LIMIT = 20.0
"""|log-ratio| beyond which the ratio is constant; e^20 is still far from overflow."""

Aggregation = Literal["token", "prompt", "sequence"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What `dapo_token_loss` returns. Only `total` and `per_token` carry a gradient.

    total               scalar: sum of `per_token`
    per_token           shape of the arguments; 0 where the mask is 0
    clip_fraction_high  share of masked tokens held at 1 + clip_high (advantage > 0)
    clip_fraction_low   share of masked tokens held at 1 - clip_low (advantage < 0)
    dual_clip_fraction  share of masked tokens held at dual_clip x |advantage| (advantage < 0)

    A token counts if that bound gave its loss, so its gradient is 0; the three exclude each
    other. (verl's pg_clipfrac is high + low, its pg_clipfrac_lower is the dual one.) All are 0
    if the mask is empty.
    """

    total: Tensor
    per_token: Tensor
    clip_fraction_high: Tensor
    clip_fraction_low: Tensor
    dual_clip_fraction: Tensor


class _Terms(NamedTuple):
    """The loss of each token, and by which bound it was given (bool)."""

    per_token: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor


def dapo_token_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped policy-gradient loss of each token and its sum.

    logp       log-probs (nats) under the policy being trained; the gradient flows into it
    old_logp   log-probs under the policy before the first update of the rollout step
    advantage  of the completion that the token belongs to
    mask       bool or 0/1: tokens that enter the loss
    clip_low, clip_high  the ratio is clipped to [1 - clip_low, 1 + clip_high]
    dual_clip  upper bound of the loss as a multiple of -advantage where that is positive

    The four tensors have one shape, any. What stands where the mask is 0, nan and inf included,
    reaches neither the result nor the gradient. Raises ValueError if the shapes differ.
    """
    keep = mask.bool()
    terms = _clipped(
        logp, old_logp, advantage, keep, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    count = keep.sum().clamp(min=1)
    return TokenLoss(
        total=terms.per_token.sum(),
        per_token=terms.per_token,
        clip_fraction_high=terms.high.sum() / count,
        clip_fraction_low=terms.low.sum() / count,
        dual_clip_fraction=terms.dual.sum() / count,
    )


def make_loss(
    *, clip_low: float, clip_high: float, dual_clip: float | None, tis_cap: float | None
) -> Callable[[Tensor, MicroTokens], LossOutput]:
    """The loss of a run as one function of (log-probs, micro-batch); numbers as in the config.

    Its `total` is sum(weights * [tis *] per-token loss). Its `sums` are scalar sums over the
    masked tokens, unweighted and without gradient: clip_fraction_high, clip_fraction_low,
    dual_clip_fraction, and approx_kl = old - new log-prob. With `tis_cap` also tis_weight and
    tis_capped_fraction (tokens whose weight would be more).
    """

    def loss(logp: Tensor, micro: MicroTokens) -> LossOutput:
        keep = micro.mask.bool()
        terms = _clipped(
            logp,
            micro.old_logprobs,
            micro.advantages,
            keep,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )
        weights = torch.where(keep, micro.weights, 0.0)
        approx_kl = torch.where(keep, micro.old_logprobs - logp.detach(), 0.0)
        sums = {
            "clip_fraction_high": terms.high.sum(dtype=logp.dtype),
            "clip_fraction_low": terms.low.sum(dtype=logp.dtype),
            "dual_clip_fraction": terms.dual.sum(dtype=logp.dtype),
            "approx_kl": approx_kl.sum(),
        }
        if tis_cap is not None:
            tis = tis_weights(micro.old_logprobs, micro.engine_logprobs, keep, cap=math.inf)
            weights = weights * tis.clamp(max=tis_cap)
            sums["tis_weight"] = tis.clamp(max=tis_cap).sum()
            sums["tis_capped_fraction"] = (tis > tis_cap).sum(dtype=logp.dtype)
        return LossOutput(total=(weights * terms.per_token).sum(), sums=sums)

    return loss


def aggregation_weights(
    kind: Aggregation,
    *,
    mask: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token of a mini-batch such that sum(weight * loss) / N is the aggregation.

    kind       token: mean over tokens; prompt: mean over prompts of their token means (eq. 8 to
               the letter); sequence: mean over completions of their token means (GRPO)
    mask       bool or 0/1 [T]: tokens that enter the loss; N is their number
    lengths    int [S]: tokens of each sequence, summing to T
    group_ids  int [S]: any values; equal ids are one prompt

    Returns [T], 0 where the mask is 0; the sum is N. A prompt or completion without a masked
    token is not counted. It must see the whole mini-batch: weights of its parts differ.
    Raises ValueError on shapes that do not fit or an unknown kind.
    """
    keep_T = mask.bool()
    if lengths.shape != group_ids.shape or int(lengths.sum()) != keep_T.numel():
        raise ValueError(
            f"{keep_T.numel()} tokens, {lengths.numel()} lengths summing to {int(lengths.sum())}, "
            f"{group_ids.numel()} group ids"
        )
    if kind == "token":
        return keep_T.to(dtype)
    if kind == "prompt":
        unit_S = torch.unique(group_ids, return_inverse=True)[1]
    elif kind == "sequence":
        unit_S = torch.arange(lengths.numel(), device=lengths.device)
    else:
        raise ValueError(f"unknown aggregation {kind!r}")

    unit_T = unit_S.repeat_interleave(lengths)
    tokens_per_unit = torch.bincount(unit_T, weights=keep_T.double())
    num_units = (tokens_per_unit > 0).sum()
    weight_T = keep_T.sum() / (num_units * tokens_per_unit[unit_T])
    return torch.where(keep_T, weight_T, 0.0).to(dtype)


def tis_weights(old_logp: Tensor, engine_logp: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weight min(exp(old_logp - engine_logp), cap) of each token.

    Corrects for tokens drawn from the engine's distribution instead of the policy's (not in the
    paper). Same shape as the arguments, without gradient; 0 where the mask is 0, whatever
    stands there.
    """
    keep = mask.bool()
    gap = torch.where(keep, old_logp - engine_logp, 0.0).detach()
    return torch.where(keep, gap.exp().clamp(max=cap), 0.0)


def _clipped(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    keep: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> _Terms:
    if not logp.shape == old_logp.shape == advantage.shape == keep.shape:
        raise ValueError(
            f"shapes differ: logp {tuple(logp.shape)}, old_logp {tuple(old_logp.shape)}, "
            f"advantage {tuple(advantage.shape)}, mask {tuple(keep.shape)}"
        )
    # Masked before exp and before any product: where() after them would still let the backward
    # pass multiply 0 by inf.
    log_ratio = torch.where(keep, logp, 0.0) - torch.where(keep, old_logp, 0.0).detach()
    advantage = torch.where(keep, advantage, 0.0).detach()

    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    at_bound = clipped > plain
    per_token = torch.where(at_bound, clipped, plain)
    dual = torch.zeros_like(keep)
    if dual_clip is not None:
        ceiling = -advantage * dual_clip
        dual = (advantage < 0) & (per_token > ceiling)
        per_token = torch.where(dual, ceiling, per_token)
    return _Terms(
        per_token=per_token,
        high=at_bound & (advantage > 0),
        low=at_bound & (advantage < 0) & ~dual,
        dual=dual,
    )
