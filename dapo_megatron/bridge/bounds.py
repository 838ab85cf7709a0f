"""Bounds of the gap between engine and policy on the canary sequences.

Rounding gives a few tokens of a healthy run a large gap, so its maximum has to be allowed nats.
The mean and a high quantile do not depend on single tokens, so their bounds can be much lower. They
follow from the precisions that policy and engine compute with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.config import Config

QUANTILE = 0.99
DERIVED = {
    "float32": (1e-4, 1e-3),
    "float32 with experts": (1e-4, 1e-3),
    "bfloat16": (0.1, 0.5),
    "bfloat16 with experts": (0.15, 1.0),
    "fp8": (0.3, 1.5),
    "fp8 with experts": (0.45, 3.0),
}
"""Bounds of mean and quantile, in nats, by the lowest precision of policy and engine.

- float32: at most 3e-5 on any token was measured.
- bfloat16: 0.025 is the mean expected of a model whose logits are rounded, with 0.1 as the largest
  gap. A random model of two layers has 0.01 and 0.06. The bounds are four to five times that.
- Experts: a token whose router is undecided goes to other experts in the engine, which moves single
  tokens by tenths of nats or more. A random model has 0.03 on the mean, and 0.4 at the quantile.
- fp8: weights and activations have 3 bits of mantissa instead of 7. A random model of two layers
  has 0.11 on the mean and 0.41 at the quantile. The bounds are three times those of bfloat16.
"""


@dataclass(frozen=True, slots=True)
class CanaryGap:
    """Gap of one engine's log-probs on the canary sequences, in nats."""

    max: float
    sequence: int
    """Sequence and token with the largest gap."""
    token: int
    mean: float
    quantile: float
    """Gap that at most 1% of the tokens exceed."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CanaryBounds:
    """Largest allowed gaps on the canary sequences, in nats."""

    max: float
    mean: float
    quantile: float
    basis: str
    """Precisions that the bounds in `derived` follow from."""
    derived: frozenset[str]
    """Keys of the bounds that are not in the config."""

    def allow(self, gap: CanaryGap) -> bool:
        """Return whether no figure of a gap exceeds its bound."""
        return gap.max <= self.max and gap.mean <= self.mean and gap.quantile <= self.quantile

    def excess(self, gaps: Mapping[int, CanaryGap]) -> str | None:
        """Return a description of the first figure of any engine that exceeds its bound, or None.
        `gaps` are by replica."""
        for key, bound, values, over in (
            ("sync.max_gap", self.max, {number: gap.max for number, gap in gaps.items()}, ""),
            (
                "sync.canary_mean_gap",
                self.mean,
                {number: gap.mean for number, gap in gaps.items()},
                "the mean",
            ),
            (
                "sync.canary_quantile_gap",
                self.quantile,
                {number: gap.quantile for number, gap in gaps.items()},
                f"more than {1 - QUANTILE:.0%}",
            ),
        ):
            numbers = [number for number, value in values.items() if value > bound]
            if numbers:
                worst = max(numbers, key=values.__getitem__)
                gap = gaps[worst]
                place = f"sequence {gap.sequence}, token {gap.token}"
                if over:
                    place = f"on {over} of {gap.num_tokens} tokens; by {gap.max:.3g} at {place}"
                basis = f", derived from {self.basis}" if key in self.derived else ""
                return (
                    f"{values[worst]:.3g} ({place}), engine {', '.join(map(str, numbers))}; "
                    f"{key} is {bound:g}{basis}"
                )
        return None


def canary_bounds(config: Config, *, has_experts: bool) -> CanaryBounds:
    """Return the bounds of `config.sync`, or those derived from the precisions. `has_experts`:
    whether the model is a mixture of experts."""
    sync = config.sync
    has_fp8 = config.policy.fp8 is not None or config.engine.quantization == "fp8"
    is_bfloat16 = config.policy.precision == "bfloat16"  # the engine's, too
    basis = "fp8" if has_fp8 else "bfloat16" if is_bfloat16 else "float32"
    basis += " with experts" if has_experts else ""
    mean, quantile = DERIVED[basis]
    given = {
        "sync.canary_mean_gap": sync.canary_mean_gap,
        "sync.canary_quantile_gap": sync.canary_quantile_gap,
    }
    return CanaryBounds(
        max=sync.max_gap,
        mean=sync.canary_mean_gap or mean,
        quantile=sync.canary_quantile_gap or quantile,
        basis=basis,
        derived=frozenset(key for key, bound in given.items() if bound is None),
    )


def canary_gap(policy: Tensor, engine: list[list[float]]) -> CanaryGap:
    """Return the gap between the log-probs of policy and engine. NaN counts as infinity.

    `policy` holds the log-probs of all tokens of all sequences, end to end. `engine` lacks those of
    each sequence's first token.
    """
    num_tokens = len(engine[0]) + 1
    expected = policy.view(-1, num_tokens)[:, 1:].double()
    gaps = (torch.tensor(engine, dtype=torch.float64) - expected).abs()
    gaps = torch.where(gaps.isnan(), torch.inf, gaps)
    worst = int(gaps.argmax())
    rank = max(1, math.ceil(QUANTILE * gaps.numel()))
    return CanaryGap(
        max=float(gaps.max()),
        sequence=worst // (num_tokens - 1),
        token=worst % (num_tokens - 1) + 1,
        mean=float(gaps.mean()),
        quantile=float(gaps.flatten().kthvalue(rank).values),
        num_tokens=gaps.numel(),
    )
