"""Forecast of how many prompts yield the mixed groups that a step still needs.

The keep rate p is the share of groups that can be trained on. It has a Beta posterior. The
configured prior counts as `prior_weight` groups. The weight of observed groups halves with every
step, because p drifts as the policy learns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE_DEVIATIONS = 1.645
"""One-sided 95% quantile of the normal distribution. The margin is large because too few prompts
cost a second wait for the slowest completion, and too many cost their tokens only."""


@dataclass
class KeepRate:
    """Beta posterior of the keep rate, from the prior and the numbers of kept and decided
    groups."""

    prior: float
    prior_weight: float
    kept: float = 0.0
    decided: float = 0.0

    @property
    def mean(self) -> float:
        """Posterior mean of p, above 0."""
        return (self.kept + self.prior * self.prior_weight) / (self.decided + self.prior_weight)

    def observe(self, kept: bool) -> None:
        """Add one decided group."""
        self.kept += kept
        self.decided += 1

    def forget(self) -> None:
        """Halve the weight of all observed groups, at the end of a step."""
        self.kept /= 2
        self.decided /= 2

    def prompts_for(self, num_groups: int) -> int:
        """Return the fewest prompts that yield `num_groups` mixed groups with 95% probability.

        Uses the normal approximation of the beta-binomial. Returns 0 for `num_groups` <= 0, and at
        most twice `num_groups` / mean: if p is still uncertain, the first groups reveal it.
        """
        if num_groups <= 0:
            return 0
        low, high = num_groups - 1, math.ceil(2 * num_groups / self.mean)
        while high - low > 1:
            middle = (low + high) // 2
            if self._suffices(middle, num_groups):
                high = middle
            else:
                low = middle
        return high

    def _suffices(self, num_prompts: int, num_groups: int) -> bool:
        mean, weight = self.mean, self.decided + self.prior_weight
        # Factor by which the uncertainty of p increases the binomial variance.
        spread = 1 + (num_prompts - 1) / (weight + 1)
        deviation = math.sqrt(num_prompts * mean * (1 - mean) * spread)
        return num_prompts * mean - CONFIDENCE_DEVIATIONS * deviation >= num_groups - 0.5
