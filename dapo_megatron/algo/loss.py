"""DAPO token loss (arXiv 2503.14476, eq. 8 and 10).

Departures from the paper: the log-ratio is clamped before exp; a dual clip (arXiv 1912.09729) can
bound the loss at negative advantage; the loss is a *sum* over tokens, and whoever knows the
mini-batch divides it by N, its tokens under the mask. Every aggregation is that sum with per-token
weights (`aggregation_weights`), so none depends on how the mini-batch is cut into ranks and
micro-batches. Eq. 8 divides by the tokens of each prompt; `token`, the default of every public
reproduction, divides by those of the mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dapo_megatron.types import LossOutput, MicroTokens

# T tokens of all sequences end to end, S sequences, P prompts

Aggregation = Literal["token", "prompt", "sequence"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and the bound that gave it. Only the loss carries a gradient.

    per_token             shape of the arguments; 0 where the mask is 0
    mask                  bool: tokens that enter the loss
    at_high               bool: held at 1 + clip_high (advantage > 0)
    at_low                bool: held at 1 - clip_low (advantage < 0)
    at_dual               bool: held at dual_clip x |advantage| (advantage < 0)

    The gradient of a token that is held is 0. The three bounds exclude each other. (verl's
    pg_clipfrac is high + low, its pg_clipfrac_lower is the dual one.)
    """

    per_token: Tensor
    mask: Tensor
    at_high: Tensor
    at_low: Tensor
    at_dual: Tensor

    @property
    def total(self) -> Tensor:
        """Scalar: sum of `per_token`."""
        return self.per_token.sum()

    @property
    def clip_fraction_high(self) -> Tensor:
        """Share of masked tokens held at 1 + clip_high; 0 for an empty mask, as the next two."""
        return self._share(self.at_high)

    @property
    def clip_fraction_low(self) -> Tensor:
        """Share of masked tokens held at 1 - clip_low."""
        return self._share(self.at_low)

    @property
    def dual_clip_fraction(self) -> Tensor:
        """Share of masked tokens held at the dual clip."""
        return self._share(self.at_dual)

    def _share(self, is_held: Tensor) -> Tensor:
        return is_held.sum() / self.mask.sum().clamp(min=1)


def dapo_token_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    log_ratio_limit: float = 20.0,
) -> TokenLoss:
    """Return the clipped policy-gradient loss of each token.

    logp       log-probs (nats) under the policy being trained; the gradient flows into it
    old_logp   log-probs under the policy before the first update of the rollout step
    advantage  of the completion that the token belongs to
    mask       bool or 0/1: tokens that enter the loss
    clip_low, clip_high  the ratio is clipped to [1 - clip_low, 1 + clip_high]
    dual_clip  upper bound of the loss as a multiple of -advantage where that is positive
    log_ratio_limit  |log-ratio| beyond which the ratio is constant; exp must not overflow

    The four tensors have one shape, any. What stands where the mask is 0, nan and inf included,
    reaches neither the result nor the gradient. Raises ValueError if the shapes differ.
    """
    if not logp.shape == old_logp.shape == advantage.shape == mask.shape:
        raise ValueError(
            f"shapes differ: logp {tuple(logp.shape)}, old_logp {tuple(old_logp.shape)}, "
            f"advantage {tuple(advantage.shape)}, mask {tuple(mask.shape)}"
        )
    keep = mask.bool()
    # Masked before exp and before any product: where() after them would still let the backward
    # pass multiply 0 by inf.
    log_ratio = torch.where(keep, logp, 0.0) - torch.where(keep, old_logp, 0.0).detach()
    advantage = torch.where(keep, advantage, 0.0).detach()

    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    at_bound = clipped > plain
    per_token = torch.where(at_bound, clipped, plain)
    at_dual = torch.zeros_like(keep)
    if dual_clip is not None:
        ceiling = -advantage * dual_clip
        at_dual = (advantage < 0) & (per_token > ceiling)
        per_token = torch.where(at_dual, ceiling, per_token)
    return TokenLoss(
        per_token=per_token,
        mask=keep,
        at_high=at_bound & (advantage > 0),
        at_low=at_bound & (advantage < 0) & ~at_dual,
        at_dual=at_dual,
    )


def dapo_loss(
    logprobs: Tensor,
    tokens: MicroTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    tis_cap: float | None,
    log_ratio_limit: float,
) -> LossOutput:
    """Return the loss of one micro-batch: sum(weights * [tis *] per-token loss).

    This is the default objective. A function of a user's own (`loss.function`) is called with the
    same arguments: the log-probs, the micro-batch, and the numbers of the config's `loss` section.

    `sums` are scalar sums over the masked tokens, unweighted and without gradient:
    clip_fraction_high, clip_fraction_low, dual_clip_fraction, and approx_kl = old - new log-prob.
    With `tis_cap` also tis_weight and tis_capped_fraction (tokens whose weight would be more).
    """
    loss = dapo_token_loss(
        logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        log_ratio_limit=log_ratio_limit,
    )
    weights = torch.where(loss.mask, tokens.weights, 0.0)
    approx_kl = torch.where(loss.mask, tokens.old_logprobs - logprobs.detach(), 0.0)
    sums = {
        "clip_fraction_high": loss.at_high.sum(dtype=logprobs.dtype),
        "clip_fraction_low": loss.at_low.sum(dtype=logprobs.dtype),
        "dual_clip_fraction": loss.at_dual.sum(dtype=logprobs.dtype),
        "approx_kl": approx_kl.sum(),
    }
    if tis_cap is not None:
        tis = tis_weights(tokens.old_logprobs, tokens.engine_logprobs, loss.mask, cap=math.inf)
        weights = weights * tis.clamp(max=tis_cap)
        sums["tis_weight"] = tis.clamp(max=tis_cap).sum()
        sums["tis_capped_fraction"] = (tis > tis_cap).sum(dtype=logprobs.dtype)
    return LossOutput(total=(weights * loss.per_token).sum(), sums=sums)


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
