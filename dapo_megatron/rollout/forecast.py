"""How many prompts will give the mixed groups that are still wanted?

The keep rate p (the share of groups that can be trained on) has a Beta posterior: the configured
guess weighs as much as `prior_weight` groups, and what was seen counts half as much with every
step that goes by, for p drifts as the policy learns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE_DEVIATIONS = 1.645
"""One-sided 95%: too few prompts cost a whole tail of generation, too many only their tokens."""


@dataclass
class KeepRate:
    """Posterior of the keep rate: Beta(prior and kept, prior and not kept)."""

    prior: float
    prior_weight: float
    kept: float = 0.0
    decided: float = 0.0

    @property
    def mean(self) -> float:
        """The forecast of p, above 0."""
        return (self.kept + self.prior * self.prior_weight) / (self.decided + self.prior_weight)

    def observe(self, kept: bool) -> None:
        """Take in one group."""
        self.kept += kept
        self.decided += 1

    def forget(self) -> None:
        """A step has gone by."""
        self.kept /= 2
        self.decided /= 2

    def prompts_for(self, num_groups: int) -> int:
        """The fewest prompts that give `num_groups` mixed groups with 95% probability, by the
        normal approximation of the beta-binomial; 0 for none. At most twice the mean number: a
        rate hardly known yet is found out by the first of them."""
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
        # Binomial, and what is not known of p itself.
        spread = 1 + (num_prompts - 1) / (weight + 1)
        deviation = math.sqrt(num_prompts * mean * (1 - mean) * spread)
        return num_prompts * mean - CONFIDENCE_DEVIATIONS * deviation >= num_groups - 0.5
