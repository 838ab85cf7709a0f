"""Detection of a grader that fails on every completion of its data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MIN_ABSTAINED = 8
"""Minimum number of abstained groups after which a grader counts as broken."""


class GraderHealth:
    """Counts by data set. They are not in the checkpoint, because a resumed run may have another
    grader."""

    def __init__(self, prompts_per_step: int) -> None:
        # In a tiny step a few failures mean nothing.
        self._limit = max(prompts_per_step, MIN_ABSTAINED)
        self._answered: set[str] = set()  # data sets with at least one graded completion
        self._abstained: Counter[str] = Counter()  # number of groups

    def graded(self, source: str) -> None:
        """Record that a completion of the data set was graded."""
        self._answered.add(source)

    def abstained(self, source: str) -> None:
        """Record that a group of the data set has a completion without a grade."""
        self._abstained[source] += 1

    def failure(self, last_errors: Mapping[str, str]) -> str | None:
        """Return a message about a data set of which all gradings failed, or None. `last_errors`
        are the graders' last errors by data set."""
        for source, num_groups in self._abstained.items():
            if num_groups >= self._limit and source not in self._answered:
                error = last_errors.get(source, "it hung or died")
                return (
                    f"data set {source!r}: its grader failed on every completion of {num_groups} "
                    f"groups; last error: {error}. Fix the grader configured for this data set "
                    "(its limits are rewards.timeout_seconds and rewards.memory_mib)"
                )
        return None
