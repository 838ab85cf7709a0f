"""Which sequence runs in which micro-batch of which rank.

Packed, a micro-batch is one row of sequences end to end: their work is shared out over the
data-parallel ranks, then over the micro-batches of each rank, both by `partition`. Padded, it is a
row per sequence, all as long as the longest: neighbours in length make a micro-batch, and those are
dealt out to the ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

LINEAR_TOKENS = 24_576
"""Length at which attention costs as much as the rest of a layer: 6 hidden sizes (of 4096)."""

Plan = list[list[list[int]]]
"""Indices of sequences as [data-parallel rank][micro-batch][sequence]."""

Tokens = Callable[[Sequence[int]], int]
"""Sequences of one micro-batch, by index -> the tokens of it, padding included."""


def plan_microbatches(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int,
    packed: bool = True,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
    num_multiple: int = 1,
) -> Plan:
    """Share sequences of `lengths` tokens out; protocols.Planner once bound.

    Guaranteed: every sequence once; `padded_tokens` of each micro-batch at most `max_tokens`; as
    many micro-batches on every rank, a multiple of `num_multiple`; the same plan from the same
    lengths. Each rank runs its micro-batches costliest first, so that the j-th of all ranks are
    alike, and empty ones, where sequences are too few, last.

    Packed, ranks differ by at most the work of one sequence, and the slowest has at most
    4/3 - 1/(3 num_ranks) of the least work possible (see `partition`); the number of micro-batches
    need not be the smallest. Padded, it is the smallest that this order of sequences allows, and
    ranks are only in practice alike (docs/results.md).

    Args:
        max_tokens: bound of one micro-batch, padding included.
        packed: sequences end to end in one row; False: one row each.
        sequence_multiple, row_multiple: see `padded_tokens`.
        num_multiple: the interleaved pipeline schedule needs a multiple of the pipeline size.

    Raises ValueError naming a sequence that fits into no micro-batch.
    """

    def tokens(sequences: Sequence[int]) -> int:
        return padded_tokens(
            [lengths[index] for index in sequences],
            packed=packed,
            sequence_multiple=sequence_multiple,
            row_multiple=row_multiple,
        )

    def costliest_first(sequences: list[int]) -> tuple[int, list[int]]:
        return -microbatch_work([lengths[index] for index in sequences], packed=packed), sequences

    for index, length in enumerate(lengths):
        if tokens([index]) > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, with padding {tokens([index])}: more than "
                f"the {max_tokens} of a micro-batch; raise train.max_tokens_per_microbatch"
            )
    if packed:
        plan = _plan_packed(lengths, num_ranks, tokens, max_tokens, num_multiple)
    else:
        plan = _plan_padded(lengths, num_ranks, tokens, max_tokens, num_multiple)
    return [sorted(map(sorted, micros), key=costliest_first) for micros in plan]


def work(length: int) -> int:
    """What a sequence of `length` tokens costs: quadratic attention, and the linear rest."""
    return length * (length + LINEAR_TOKENS)


def microbatch_work(lengths: Sequence[int], *, packed: bool = True) -> int:
    """What a micro-batch of such sequences costs; padded rows cost as much as the longest."""
    if packed:
        return sum(map(work, lengths))
    return len(lengths) * work(max(lengths, default=0))


def padded_tokens(
    lengths: Sequence[int],
    *,
    packed: bool = True,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
) -> int:
    """Tokens of a micro-batch of such sequences, padding included.

    Packed: each sequence is rounded up to `sequence_multiple` (context parallelism cuts each one),
    their row to `row_multiple` (sequence parallelism cuts the row). Padded: a row per sequence, as
    long as the longest rounded up to `row_multiple`. None: 0.
    """
    if packed:
        row = sum(_round_up(length, sequence_multiple) for length in lengths)
        return _round_up(row, row_multiple)
    return len(lengths) * _round_up(max(lengths, default=0), row_multiple)


def partition(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `weights` in `num_parts` parts of nearly equal sums: largest differencing.

    Each weight starts as a partition of its own, with all parts but one empty. The two partitions
    of largest spread (largest sum minus smallest) become one, the largest part of either joined to
    the smallest of the other, until one is left. Its spread is at most the largest weight, its
    largest sum at most 4/3 - 1/(3 num_parts) of the best possible, and in practice far closer.

    Source: Karmarkar and Karp, The differencing method of set partitioning (1982); the bound:
    Michiels, Korst, Aarts and van Leeuwen, doi:10.1007/s10878-006-9010-z.
    """
    # (-spread, tie-break, parts that are not empty as (sum, indices), largest first)
    heap = [(-weight, index, [(weight, [index])]) for index, weight in enumerate(weights)]
    heapify(heap)
    while len(heap) > 1:
        _, tie, one = heappop(heap)
        _, _, other = heappop(heap)
        joined = max(len(one) + len(other) - num_parts, 0)
        keep_one, keep_other = len(one) - joined, len(other) - joined
        parts = one[:keep_one] + other[:keep_other]
        for (sum_one, indices_one), (sum_other, indices_other) in zip(
            one[keep_one:], reversed(other[keep_other:])
        ):
            parts.append((sum_one + sum_other, indices_one + indices_other))
        parts.sort(key=lambda part: -part[0])
        smallest = parts[-1][0] if len(parts) == num_parts else 0
        heappush(heap, (smallest - parts[0][0], tie, parts))
    found = [indices for _, indices in heap[0][2]] if heap else []
    return found + [[] for _ in range(num_parts - len(found))]


def _plan_packed(
    lengths: Sequence[int], num_ranks: int, tokens: Tokens, max_tokens: int, num_multiple: int
) -> Plan:
    """Shares of nearly equal work, each in micro-batches of nearly equal work.

    Balanced work is not balanced tokens, so the number of micro-batches that the tokens alone ask
    for can be too small. It grows by a sixteenth until all fit; one for each sequence does.
    """
    works = [work(length) for length in lengths]
    shares = partition(works, num_ranks)
    most = max(map(len, shares))
    num = max(-(-max(map(tokens, shares)) // max_tokens), 1)
    while True:
        num = _round_up(num, num_multiple)
        plan: Plan = []
        for share in shares:
            parts = partition([works[index] for index in share], num)
            micros = [[share[place] for place in part] for part in parts]
            if max(map(tokens, micros)) > max_tokens:
                break
            plan.append(micros)
        else:
            return plan
        num = min(num + num // 16 + 1, most)


def _plan_padded(
    lengths: Sequence[int], num_ranks: int, tokens: Tokens, max_tokens: int, num_multiple: int
) -> Plan:
    """Runs of neighbours in length. The costliest are the first of the ranks, the next ones the
    second, and so on, each time the costliest to the rank with the least so far.

    Cutting after sharing out would pad seven times as much at 32 sequences per rank: there, the
    next longest sequence of the same rank is far shorter.
    """
    rows = [tokens([index]) for index in range(len(lengths))]
    ordered = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fewest = max(len(_cut(ordered, rows, max_tokens)), 1)
    num = _round_up(fewest, num_ranks * num_multiple)
    runs = _cut_evenly(ordered, rows, max_tokens, num)
    costs = [microbatch_work([lengths[index] for index in run], packed=False) for run in runs]
    costliest = sorted(range(len(runs)), key=lambda run: -costs[run])
    plan: Plan = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for start in range(0, num, num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: load[rank])
        for rank, run in zip(least_first, costliest[start : start + num_ranks]):
            plan[rank].append(runs[run])
            load[rank] += costs[run]
    return [micros + [[] for _ in range(num // num_ranks - len(micros))] for micros in plan]


def _cut_evenly(
    ordered: Sequence[int], rows: Sequence[int], max_tokens: int, num: int
) -> list[list[int]]:
    """At most `num` runs whose largest is as small as can be: that bound, by bisection."""
    bounds = range(max_tokens)
    bound = bisect_left(bounds, True, key=lambda bound: len(_cut(ordered, rows, bound)) <= num)
    return _cut(ordered, rows, bound)


def _cut(ordered: Sequence[int], rows: Sequence[int], bound: int) -> list[list[int]]:
    """Consecutive runs of `ordered`, longest first, each as large as `bound` padded tokens allow;
    a row longer than `bound` is a run of its own. No cut of this order has fewer."""
    runs: list[list[int]] = []
    for index in ordered:
        if runs and (len(runs[-1]) + 1) * rows[runs[-1][0]] <= bound:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
