"""DAPO token loss (arXiv 2503.14476, eq. 8 and 10).

Differences from the paper:
- The log-ratio is clamped before exp.
- A dual clip (arXiv 1912.09729) can bound the loss where the advantage is negative.
- The loss is a *sum* over tokens. The caller, which sees the whole mini-batch, divides it by N,
  the number of masked-in tokens of the mini-batch. Every aggregation is this sum with per-token
  weights (`aggregation_weights`), so it does not depend on how the mini-batch is split over ranks
  and micro-batches.
- Eq. 8 divides by the tokens of each prompt. `token`, the default here and in every public
  reproduction, divides by the tokens of the mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dapo_megatron.algo.kl import KL, Distillation
from dapo_megatron.types import LossOutput, MicroTokens

# Shape letters: T tokens of all sequences, concatenated; S sequences

Aggregation = Literal["token", "prompt", "sequence", "constant"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and which bound clipped it. Only `per_token` carries a gradient.

    per_token  shape of the arguments; 0 where the mask is 0
    mask       bool: tokens that enter the loss
    at_high    bool: ratio clipped to 1 + clip_high (advantage > 0)
    at_low     bool: ratio clipped to 1 - clip_low (advantage < 0)
    at_dual    bool: loss clipped to dual_clip * |advantage| (advantage < 0)

    The gradient of a clipped token is 0. At most one of the three bounds applies to a token.
    verl's pg_clipfrac is high + low; its pg_clipfrac_lower is dual.
    """

    per_token: Tensor
    mask: Tensor
    at_high: Tensor
    at_low: Tensor
    at_dual: Tensor

    # The names of the next four are stable: checks outside of this repository read them.

    @property
    def total(self) -> Tensor:
        """Sum of `per_token`, a scalar."""
        return self.per_token.sum()

    @property
    def clip_fraction_high(self) -> Tensor:
        """Fraction of masked-in tokens clipped at 1 + clip_high; 0 for an empty mask."""
        return self._fraction(self.at_high)

    @property
    def clip_fraction_low(self) -> Tensor:
        """Fraction of masked-in tokens clipped at 1 - clip_low; 0 for an empty mask."""
        return self._fraction(self.at_low)

    @property
    def dual_clip_fraction(self) -> Tensor:
        """Fraction of masked-in tokens clipped by the dual clip; 0 for an empty mask."""
        return self._fraction(self.at_dual)

    @property
    def clip_counts(self) -> dict[str, Tensor]:
        """Number of tokens at each bound, by the name of their fraction."""
        names = ("clip_fraction_high", "clip_fraction_low", "dual_clip_fraction")
        clipped = (self.at_high, self.at_low, self.at_dual)
        dtype = self.per_token.dtype
        return {name: at.sum(dtype=dtype) for name, at in zip(names, clipped, strict=True)}

    def _fraction(self, is_clipped: Tensor) -> Tensor:
        return is_clipped.sum() / self.mask.sum().clamp(min=1)


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

    logp       log-probs (nats) of the policy being trained; the only input with a gradient
    old_logp   log-probs of the policy before the first update of the rollout step
    advantage  advantage of the token's completion
    mask       bool or 0/1: tokens that enter the loss
    clip_low, clip_high  the ratio is clipped to [1 - clip_low, 1 + clip_high]
    dual_clip  where the advantage is negative, bound the loss by dual_clip * -advantage
    log_ratio_limit  clamp the log-ratio to +-log_ratio_limit, so that exp does not overflow

    The four tensors have the same shape, of any rank. Values where the mask is 0, even nan or inf,
    affect neither the result nor the gradient. Raises ValueError if the shapes differ.
    """
    if not logp.shape == old_logp.shape == advantage.shape == mask.shape:
        raise ValueError(
            f"shapes differ: logp {tuple(logp.shape)}, old_logp {tuple(old_logp.shape)}, "
            f"advantage {tuple(advantage.shape)}, mask {tuple(mask.shape)}"
        )
    keep = mask.bool()
    # Mask before exp and before any product. A torch.where() after them would still let the
    # backward pass compute 0 * inf = nan.
    log_ratio = torch.where(keep, logp, 0.0) - torch.where(keep, old_logp, 0.0).detach()
    ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit).exp()
    return clipped_loss(
        ratio,
        advantage,
        keep,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def clipped_loss(
    ratio: Tensor,
    advantage: Tensor,
    keep: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """Return the loss of each token from its ratio, which must be finite. `keep` is a bool mask.
    Other arguments: see `dapo_token_loss`."""
    advantage = torch.where(keep, advantage, 0.0).detach()
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

    This is the default objective; objectives.py has the others. A user-defined function
    (`loss.function`) is called with the same arguments: the log-probs, the micro-batch, and the
    numbers of the config's `loss` section.

    `sums` are scalar sums over the masked-in tokens, unweighted and without gradient:
    clip_fraction_high, clip_fraction_low, dual_clip_fraction, and approx_kl = old - new log-prob.
    With `tis_cap` also tis_weight, and tis_capped_fraction (tokens whose weight was capped).
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
    return weighted_sum(loss.per_token, logprobs, tokens, loss.clip_counts, tis_cap=tis_cap)


def weighted_sum(
    per_token: Tensor,
    logprobs: Tensor,
    tokens: MicroTokens,
    sums: Mapping[str, Tensor],
    *,
    tis_cap: float | None,
) -> LossOutput:
    """Return sum(weights * [tis *] per_token) over the masked-in tokens, and `sums` with the
    statistics that all objectives have: approx_kl and the statistics of `tis_cap`.

    `per_token` must be finite everywhere. Its values where the mask is 0 do not count.
    """
    keep = tokens.mask.bool()
    weights = torch.where(keep, tokens.weights, 0.0)
    approx_kl = torch.where(keep, tokens.old_logprobs - logprobs.detach(), 0.0)
    sums = {**sums, "approx_kl": approx_kl.sum()}
    if tis_cap is not None:
        tis = tis_weights(tokens.old_logprobs, tokens.engine_logprobs, keep, cap=math.inf)
        weights = weights * tis.clamp(max=tis_cap)
        sums["tis_weight"] = tis.clamp(max=tis_cap).sum()
        sums["tis_capped_fraction"] = (tis > tis_cap).sum(dtype=logprobs.dtype)
    return LossOutput(total=(weights * per_token).sum(), sums=sums)


def no_loss(logprobs: Tensor, tokens: MicroTokens) -> LossOutput:
    """Return 0: what is trained is added outside the objective, such as loss.distill."""
    return weighted_sum(torch.zeros_like(logprobs), logprobs, tokens, {}, tis_cap=None)


def regularized_loss(
    logprobs: Tensor,
    tokens: MicroTokens,
    *,
    objective: Callable[[Tensor, MicroTokens], LossOutput],
    entropy_coefficient: float,
    kl: KL | None = None,
    distill: Distillation | None = None,
) -> LossOutput:
    """Return the loss of `objective` plus the terms that are added outside every objective:

        sum(weights * (kl.coefficient * k + distill.coefficient * t))
        - entropy_coefficient * sum(weights * entropy)

    over the masked-in tokens, k with the reference and t with the teacher. The weights are the
    objective's for token losses (aggregation and corrections), without `tis_cap`. `sums` gets the
    terms that are in use, with their coefficients and weights: kl_penalty, distill_penalty and
    entropy_bonus.
    """
    output = objective(logprobs, tokens)
    keep = tokens.mask.bool()
    weights = torch.where(keep, tokens.weights, 0.0)
    total, sums = output.total, dict(output.sums)
    penalties: dict[str, tuple[float, Tensor]] = {}
    if kl is not None:
        assert tokens.reference_logprobs is not None
        estimates = kl.per_token(logprobs, tokens.reference_logprobs, keep)
        penalties["kl_penalty"] = kl.coefficient, estimates
    if distill is not None:
        penalties["distill_penalty"] = distill.coefficient, distill.per_token(logprobs, tokens)
    for name, (coefficient, estimates) in penalties.items():
        penalty = coefficient * (weights * estimates).sum()
        total, sums[name] = total + penalty, penalty.detach()
    if entropy_coefficient:
        assert tokens.entropy is not None
        bonus = entropy_coefficient * (weights * torch.where(keep, tokens.entropy, 0.0)).sum()
        total, sums["entropy_bonus"] = total - bonus, bonus.detach()
    return LossOutput(total=total, sums=sums)


def aggregation_weights(
    kind: Aggregation,
    *,
    mask: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    dtype: torch.dtype = torch.float32,
    divisor: int | None = None,
) -> Tensor:
    """Return per-token weights such that sum(weight * loss) / N is the chosen aggregation.

    kind       token: mean over tokens
               prompt: mean over prompts of their token means (eq. 8 exactly)
               sequence: mean over completions of their token means (GRPO)
               constant: mean over completions of their token sums / divisor (Dr. GRPO)
    mask       bool or 0/1 [T]: tokens that enter the loss; N is their number
    lengths    int [S]: number of tokens of each sequence, summing to T
    group_ids  int [S]: any values; equal ids belong to the same prompt
    divisor    number of tokens; needed by constant only

    The result is [T], 0 where the mask is 0, and sums to N, except with `constant`. A prompt or
    completion without masked-in tokens is not counted. Pass the whole mini-batch: weights computed
    per micro-batch would differ. Raises ValueError if shapes do not match or `kind` is unknown.
    """
    keep_T = mask.bool()
    if lengths.shape != group_ids.shape or int(lengths.sum()) != keep_T.numel():
        raise ValueError(
            f"{keep_T.numel()} tokens, {lengths.numel()} lengths summing to {int(lengths.sum())}, "
            f"{group_ids.numel()} group ids"
        )
    number_S = torch.arange(lengths.numel(), device=lengths.device)
    loss_tokens_S = number_S.repeat_interleave(lengths)[keep_T].bincount(minlength=len(number_S))
    weight_S = sequence_weights(
        kind, loss_tokens=loss_tokens_S, group_ids=group_ids, divisor=divisor
    )
    return torch.where(keep_T, weight_S.repeat_interleave(lengths), 0.0).to(dtype)


def sequence_weights(
    kind: Aggregation, *, loss_tokens: Tensor, group_ids: Tensor, divisor: int | None = None
) -> Tensor:
    """Return the weight that `aggregation_weights` gives to the masked-in tokens of each sequence.

    loss_tokens  int [S]: masked-in tokens of each sequence

    The result is float64 [S], 0 for a sequence without masked-in tokens. Raises ValueError if
    `kind` is unknown, or is constant and `divisor` is missing.
    """
    has_loss = (loss_tokens > 0).double()
    if kind == "token":
        return has_loss
    if kind == "constant":
        if divisor is None:
            raise ValueError("the aggregation 'constant' needs a divisor")
        return has_loss * loss_tokens.sum() / (has_loss.sum().clamp(min=1) * divisor)
    if kind == "prompt":
        unit_S = torch.unique(group_ids, return_inverse=True)[1]
    elif kind == "sequence":
        unit_S = torch.arange(loss_tokens.numel(), device=loss_tokens.device)
    else:
        raise ValueError(f"unknown aggregation {kind!r}")
    tokens_per_unit = torch.bincount(unit_S, weights=loss_tokens.double())
    num_units = (tokens_per_unit > 0).sum()
    weight_S = loss_tokens.sum() / (num_units * tokens_per_unit[unit_S])
    return torch.where(loss_tokens > 0, weight_S, 0.0)


def tis_weights(old_logp: Tensor, engine_logp: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Return the truncated importance weight min(exp(old_logp - engine_logp), cap) per token.

    It corrects for tokens that were sampled from the engine's distribution, not the policy's. This
    is not in the paper. The result has the shape of the arguments and no gradient. It is 0 where
    the mask is 0, even if a log-prob there is nan or inf.
    """
    keep = mask.bool()
    gap = torch.where(keep, old_logp - engine_logp, 0.0).detach()
    return torch.where(keep, gap.exp().clamp(max=cap), 0.0)
