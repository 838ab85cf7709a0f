"""Corrections for the mismatch between engine and policy: loss weights from probability ratios.

Let r_t = policy / engine be the probability ratio of token t of a completion, both before the
step's first update. The engine's comes from the weights that sampled the token, so tokens of older
weights are included. A completion is weighed or masked by

    sequence_tis_cap   weight min(prod_t r_t, cap)              truncated importance sampling
    token_band         weight r_t inside [low, high]; outside   IcePop (arXiv 2510.18855)
                       0 (mask) or the nearest bound (truncate)
    sequence_mean      mask if (prod_t r_t)^(1/T) is outside    geometric mean
    sequence_product   mask if prod_t r_t is outside
    worst_token        mask if any r_t is outside               veto

Products and means are over the T tokens of the completion that enter the loss. The weights multiply
those of the loss. The loss is still divided by the number of all loss tokens: a masked token counts
there, so the other tokens weigh what they weighed before. The loss itself applies token TIS
(`tis_cap`).

Each data-parallel index computes its own completions, once per step, on the host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from dapo_megatron.types import TokenBatch

Bounds = tuple[float, float]
"""Lower and upper bound of a ratio."""

_MAGNITUDES = torch.logspace(-6, 2, 401, dtype=torch.float64)
EDGES = torch.cat([-_MAGNITUDES.flip(0), _MAGNITUDES])
"""Edges of the bins of log-ratios in nats, from -100 to 100. The magnitude in a bin varies by 5%.
The bin around 0 reaches from -1e-6 to 1e-6."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Numbers of the corrections; None: not applied. `tis_cap` is used by statistics only."""

    sequence_tis_cap: float | None = None
    token_band: Bounds | None = None
    outside_band: Literal["mask", "truncate"] = "mask"
    sequence_mean: Bounds | None = None
    sequence_product: Bounds | None = None
    worst_token: Bounds | None = None
    tis_cap: float | None = None

    @property
    def names(self) -> list[str]:
        """Names of the corrections that are applied."""
        names = ("sequence_tis_cap", "token_band", *_MASKS)
        return [name for name in names if getattr(self, name) is not None]


_MASKS = ("sequence_mean", "sequence_product", "worst_token")


@dataclass(frozen=True, slots=True)
class CorrectionStatistics:
    """Statistics over the sequences with loss tokens. Those of parts of a batch can be merged.

    counts   tokens and sequences; of these masked_tokens and masked_sequences (all tokens masked);
             and by correction the sequences outside its bounds (for token_band, tokens)
    weights  sum of the tokens' importance weights, token TIS included
    squares  sum of the squares of these weights
    bins     number of tokens or sequences in each bin of the log-ratio (EDGES), for the ratios
             token, sequence_mean and sequence_product
    """

    counts: dict[str, int]
    weights: float
    squares: float
    bins: dict[str, list[int]]

    @property
    def effective_sample_share(self) -> float:
        """Effective sample size of the tokens' weights, (sum w)^2 / sum w^2, as a share of the
        tokens; 0 if all are masked."""
        return self.weights**2 / (self.squares * self.counts["tokens"]) if self.squares else 0.0

    def quantile(self, kind: str, share: float) -> float:
        """Return a quantile of the ratios of this kind, to the width of a bin."""
        cumulative = torch.tensor(self.bins[kind]).cumsum(0)
        rank = max(math.ceil(share * int(cumulative[-1])), 1)
        index = int(torch.searchsorted(cumulative, rank))
        return math.exp(float(EDGES[max(index - 1, 0) : index + 1].mean()))


def token_weights(log_ratio: Tensor, numbers: Correction) -> tuple[Tensor, Counter[str]]:
    """Return the weight of each loss token of one sequence, and by correction how often it masked
    or capped: 0 or 1, for token_band the number of tokens.

    log_ratio  float64 [T], at least one token: log r_t
    """
    total = float(log_ratio.sum())
    lowest, highest = map(float, log_ratio.aminmax())
    mean = total / len(log_ratio)
    ranges = {
        "sequence_mean": (mean, mean),
        "sequence_product": (total, total),
        "worst_token": (lowest, highest),
    }
    applied: Counter[str] = Counter()
    for name in _MASKS:
        if (bounds := getattr(numbers, name)) is not None:
            low, high = map(math.log, bounds)
            applied[name] = not (low <= ranges[name][0] and ranges[name][1] <= high)
    is_masked = applied.total() > 0
    weights = torch.ones_like(log_ratio)
    if numbers.token_band is not None:
        ratio = log_ratio.exp()
        nearest = ratio.clamp(*numbers.token_band)
        is_outside = ratio != nearest
        weights *= nearest
        if numbers.outside_band == "mask":
            weights[is_outside] = 0.0
        applied["token_band"] = int(is_outside.sum())
    if numbers.sequence_tis_cap is not None:
        limit = math.log(numbers.sequence_tis_cap)
        weights *= math.exp(min(total, limit))
        applied["sequence_tis_cap"] = total > limit
    # Not a product, because 0 * NaN is NaN.
    return torch.zeros_like(weights) if is_masked else weights, applied


def correct(batch: TokenBatch, numbers: Correction) -> tuple[TokenBatch, CorrectionStatistics]:
    """Return `batch` with its loss weights multiplied by the corrections, and statistics over the
    held sequences. `batch` needs old log-probs."""
    assert batch.old_logprobs is not None
    weights = batch.weights.clone()
    counts = Counter(dict.fromkeys(numbers.names, 0))
    sum_of_weights = sum_of_squares = 0.0
    token_bins = torch.zeros(len(EDGES) + 1, dtype=torch.int64)
    totals: list[float] = []
    means: list[float] = []
    for start, end in pairwise([0, *batch.held_lengths.cumsum(0).tolist()]):
        mask = batch.loss_mask[start:end]
        if not mask.any():
            continue
        old = batch.old_logprobs[start:end][mask].double()
        log_ratio = old - batch.engine_logprobs[start:end][mask].double()
        factor, applied = token_weights(log_ratio, numbers)
        weights[start:end][mask] *= factor.to(weights.dtype)
        num_masked = int((factor == 0.0).sum())
        counts.update(applied)
        counts["tokens"] += len(log_ratio)
        counts["sequences"] += 1
        counts["masked_tokens"] += num_masked
        counts["masked_sequences"] += num_masked == len(log_ratio)
        if numbers.tis_cap is not None:
            factor = factor * log_ratio.exp().clamp(max=numbers.tis_cap)
        sum_of_weights += float(factor.sum())
        sum_of_squares += float(factor.square().sum())
        token_bins += _bins(log_ratio)
        totals.append(float(log_ratio.sum()))
        means.append(totals[-1] / len(log_ratio))
    bins = {
        "token": token_bins,
        "sequence_mean": _bins(torch.tensor(means, dtype=torch.float64)),
        "sequence_product": _bins(torch.tensor(totals, dtype=torch.float64)),
    }
    return replace(batch, weights=weights), CorrectionStatistics(
        counts=dict(counts),
        weights=sum_of_weights,
        squares=sum_of_squares,
        bins={kind: values.tolist() for kind, values in bins.items()},
    )


def _bins(log_ratio: Tensor) -> Tensor:
    """Return the number of values in each bin. NaN counts as the largest."""
    return torch.bucketize(log_ratio, EDGES).bincount(minlength=len(EDGES) + 1)


def merge(parts: Sequence[CorrectionStatistics]) -> CorrectionStatistics:
    """Return the statistics over the sequences of all parts, which share none."""
    names = {name for part in parts for name in part.counts}
    columns = {
        kind: zip(*(part.bins[kind] for part in parts), strict=True) for kind in parts[0].bins
    }
    return CorrectionStatistics(
        counts={name: sum(part.counts.get(name, 0) for part in parts) for name in sorted(names)},
        weights=sum(part.weights for part in parts),
        squares=sum(part.squares for part in parts),
        bins={kind: list(map(sum, column)) for kind, column in columns.items()},
    )
