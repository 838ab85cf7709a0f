"""Train-inference mismatch: how much engine and policy log-probs of the same tokens differ.

The paper does not have this check, because it assumes a single model. The KL estimator is "k3" of
algo/kl.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.algo.kl import k3
from dapo_megatron.types import SyncError, TokenBatch

MEAN_TOKENS = 1000
"""Smallest number of tokens of an engine whose mean gap is checked by itself."""
_CAUSES = (
    "The engine samples with other weights than the policy trains, computes something else with "
    "them (try engine.enforce_eager=true), or with too low a precision"
)
CHUNK = 2**17
"""Number of tokens whose gaps are computed at a time. Each takes about 50 bytes meanwhile."""


@dataclass(frozen=True, slots=True)
class TokenGap:
    """Log-probs of one token. `position` counts from the start of the sequence, prompt included."""

    sequence_name: str
    position: int
    token: int
    engine_logprob: float
    policy_logprob: float

    def __str__(self) -> str:
        return (
            f"{self.sequence_name}, token {self.position} (id {self.token}): log-prob "
            f"{self.engine_logprob:.6f} by the engine, {self.policy_logprob:.6f} by the policy"
        )


@dataclass(frozen=True, slots=True)
class GapStatistics:
    """Statistics of the log-prob gap |engine - policy| over masked-in tokens, in nats. Sums and
    maxima of several parts of a batch can be merged.

    total       sum of the gaps; inf if any gap is not finite
    max         largest gap
    kl_total    sum of estimates of KL(engine || policy): exp(d) - 1 - d with d = policy - engine
    num_tokens  number of masked-in tokens
    worst       the token with the largest gap; None if there are no tokens
    """

    total: float = 0.0
    max: float = 0.0
    kl_total: float = 0.0
    num_tokens: int = 0
    worst: TokenGap | None = None

    @property
    def mean(self) -> float:
        """Mean gap; 0 without tokens."""
        return self.total / max(self.num_tokens, 1)

    @property
    def kl(self) -> float:
        """Mean estimate of KL(engine || policy); 0 without tokens."""
        return self.kl_total / max(self.num_tokens, 1)


def gap_statistics(batch: TokenBatch, mask: Tensor) -> GapStatistics:
    """Return gap statistics over the held tokens of a batch where `mask` (bool [T]) is set.

    A nan or inf where the mask is set makes the gap infinite, so that `max > bound` never misses
    it. Values outside the mask are ignored. Raises ValueError if the mask has another shape.
    """
    assert batch.old_logprobs is not None
    if mask.shape != batch.old_logprobs.shape or mask.shape != batch.engine_logprobs.shape:
        raise ValueError(
            f"shapes differ: mask {tuple(mask.shape)}, engine "
            f"{tuple(batch.engine_logprobs.shape)}, policy {tuple(batch.old_logprobs.shape)}"
        )
    starts = range(0, mask.numel(), CHUNK)
    return merge(
        [
            _statistics(batch, mask[first : first + CHUNK].nonzero()[:, 0] + first)
            for first in starts
        ]
    )


def _statistics(batch: TokenBatch, token_index: Tensor) -> GapStatistics:
    """Return gap statistics over the tokens at these indices of the fields [T]."""
    assert batch.old_logprobs is not None
    if token_index.numel() == 0:
        return GapStatistics()
    policy = batch.old_logprobs.detach()[token_index].double()
    difference = policy - batch.engine_logprobs[token_index].double()
    gap = torch.where(difference.isfinite(), difference.abs(), math.inf)
    kl = torch.where(difference.isfinite(), k3(-difference), math.inf)
    worst = int(gap.argmax())
    return GapStatistics(
        total=float(gap.sum()),
        max=float(gap[worst]),
        kl_total=float(kl.sum()),
        num_tokens=token_index.numel(),
        worst=_token_gap(batch, int(token_index[worst])),
    )


def _token_gap(batch: TokenBatch, index: int) -> TokenGap:
    assert batch.old_logprobs is not None
    lengths = batch.held_lengths
    ends = lengths.cumsum(0)
    row = int((ends <= index).sum())
    return TokenGap(
        sequence_name=batch.sequence_name(row if batch.held is None else int(batch.held[row])),
        position=index - int(ends[row] - lengths[row]),
        token=int(batch.tokens[index]),
        engine_logprob=float(batch.engine_logprobs[index]),
        policy_logprob=float(batch.old_logprobs[index]),
    )


def merge(parts: Sequence[GapStatistics]) -> GapStatistics:
    """Return the statistics over the tokens of all parts. They share no token."""
    largest = max(parts, key=lambda part: (part.num_tokens > 0, part.max), default=GapStatistics())
    return GapStatistics(
        total=sum(part.total for part in parts),
        max=largest.max,
        kl_total=sum(part.kl_total for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        worst=largest.worst,
    )


def check_gaps(
    gaps: Mapping[int, GapStatistics],
    *,
    version: int,
    max_gap: float,
    max_mean_gap: float | None,
) -> None:
    """Check the gap on the tokens that each engine sampled with the policy's current weights.

    `version` is the version of these weights. Raises SyncError naming the engine if its mean gap
    exceeds `max_mean_gap`, or if its largest gap exceeds `max_gap`; the error then names the token.
    """
    bound, total = math.inf if max_mean_gap is None else max_mean_gap, merge([*gaps.values()])
    for engine, gap in gaps.items():
        # The mean of few tokens may consist of one that is far off in a healthy run.
        counts = gap.num_tokens >= MEAN_TOKENS or total.mean > bound
        if counts and gap.mean > bound:
            raise SyncError(
                f"weights {version}: engine {engine} and policy disagree by {gap.mean:.3g} on the "
                f"mean of {gap.num_tokens} tokens; sync.max_mean_gap is {bound:g}. "
                f"{_CAUSES}",
                [engine],
            )
        if gap.max > max_gap and gap.worst is not None:
            raise SyncError(
                f"weights {version}: engine {engine} and policy disagree by {gap.max:.3g} on "
                f"{gap.worst}; sync.max_gap is {max_gap:g}. {_CAUSES}",
                [engine],
            )
