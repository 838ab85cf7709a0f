"""The rule of dynamic sampling (arXiv 2503.14476, eq. 11): keep a group iff 0 < correct < G.

It judges raw correctness, never the shaped reward. One departure, as in the reference
implementation: a group of one is kept. It can never be mixed, yet it has an advantage (its
reward), so it is not without a gradient as a uniform group is.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapo_megatron.types import Verdict

__all__ = ["Verdict", "verdict"]


def verdict(correct: Sequence[bool]) -> Verdict:
    """MIXED (train on the group), ALL_CORRECT or ALL_WRONG (filter it); MIXED for a group of one.

    correct: raw correctness of each completion of one group. Raises ValueError if it is empty.
    """
    if len(correct) == 0:
        raise ValueError("a group without completions has no verdict")
    if len(correct) == 1:
        return Verdict.MIXED
    if all(correct):
        return Verdict.ALL_CORRECT
    return Verdict.MIXED if any(correct) else Verdict.ALL_WRONG
