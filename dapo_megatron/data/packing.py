"""Which sequence runs in which micro-batch of which rank.

Micro-batches are padded: one of n sequences whose longest has L tokens costs n * L of them.
"""

from __future__ import annotations

from collections.abc import Sequence

LINEAR_TOKENS = 24_576
"""Length at which attention costs as much as the rest of a layer: 6 hidden sizes (of 4096)."""


def plan_microbatches(
    lengths: Sequence[int], num_ranks: int, *, max_tokens: int
) -> list[list[list[int]]]:
    """Indices into `lengths` as [rank][micro-batch][sequence]; protocols.Planner once bound.

    Sequences go to ranks longest first, each to the rank with the least work so far (Graham's
    LPT rule: at most 4/3 of the best makespan), work being length^2 + LINEAR_TOKENS * length. Each
    rank cuts its list, still sorted, into micro-batches of at most `max_tokens` padded tokens, so
    that neighbours in length share one. Ranks with fewer micro-batches get empty ones at the end.

    Raises ValueError naming a sequence longer than `max_tokens`.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than the {max_tokens} of a micro-batch"
            )
        rank = work.index(min(work))
        shares[rank].append(index)
        work[rank] += length * (length + LINEAR_TOKENS)
    plans = [_cut(share, lengths, max_tokens) for share in shares]
    num_microbatches = max(map(len, plans))
    return [plan + [[] for _ in range(num_microbatches - len(plan))] for plan in plans]


def _cut(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Consecutive runs of `share`, sorted longest first, each as large as `max_tokens` allows."""
    plan: list[list[int]] = []
    for index in share:
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan
