"""Dynamic sampling (arXiv 2503.14476, eq. 11): keep a group iff 0 < correct < G.

The rule uses raw correctness, never the shaped reward. Unlike the paper, but like the reference
implementation, it keeps a group of one. Such a group is never mixed, but its advantage is its
reward, so it does have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapo_megatron.types import Verdict

__all__ = ["Verdict", "verdict"]


def verdict(correct: Sequence[bool]) -> Verdict:
    """Return MIXED (train on the group), or ALL_CORRECT or ALL_WRONG (filter it out).

    `correct` is the raw correctness of each completion of one group. A group of one is MIXED.
    Raises ValueError if `correct` is empty.
    """
    if len(correct) == 0:
        raise ValueError("a group without completions has no verdict")
    if len(correct) == 1:
        return Verdict.MIXED
    if all(correct):
        return Verdict.ALL_CORRECT
    return Verdict.MIXED if any(correct) else Verdict.ALL_WRONG
