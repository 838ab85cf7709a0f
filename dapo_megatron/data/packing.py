"""Assigns sequences to micro-batches and data-parallel ranks.

A packed micro-batch is one row of concatenated sequences. `partition` balances their work first
over the ranks, then over the micro-batches of each rank. A padded micro-batch has a row per
sequence, all padded to the longest. It takes sequences of similar length, and whole micro-batches
are then distributed over the ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

LINEAR_TOKENS = 24_576
"""Sequence length at which attention costs as much as the rest of a layer: 6 times a hidden size of
4096."""

MicrobatchPlan = list[list[list[int]]]
"""Indices of sequences as [data-parallel rank][micro-batch][sequence]."""

Tokens = Callable[[Sequence[int]], int]
"""Indices of the sequences of a micro-batch -> its tokens, padding included."""


def plan_microbatches(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int,
    packed: bool = True,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
    num_multiple: int = 1,
) -> MicrobatchPlan:
    """Distribute sequences of `lengths` tokens over ranks and micro-batches. With its options bound
    it is a protocols.MicrobatchPlanner.

    Guarantees: each sequence occurs once. Each micro-batch has at most `max_tokens` tokens. All
    ranks have the same number of micro-batches, a multiple of `num_multiple`. Equal lengths give
    equal plans. Each rank runs its micro-batches costliest first, so the j-th micro-batches of all
    ranks have similar cost. With too few sequences, the last micro-batches are empty.

    Packed: the work of two ranks differs by at most the work of one sequence, and the slowest rank
    has at most 4/3 - 1/(3 num_ranks) times the optimum (see `partition`). The number of
    micro-batches may exceed the minimum. Padded: the number is minimal for sequences sorted by
    length, and the balance of ranks is good in practice (docs/results.md) but not bounded.

    Args:
        max_tokens: maximum tokens of a micro-batch, padding included.
        packed: concatenate sequences in one row. False: one padded row per sequence.
        sequence_multiple, row_multiple: see `padded_tokens`.
        num_multiple: the interleaved pipeline schedule needs a multiple of the pipeline size.

    Raises ValueError naming a sequence that exceeds `max_tokens`.
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
                f"sequence {index} has {length} tokens, {tokens([index])} with padding: more than "
                f"the {max_tokens} of a micro-batch; raise train.max_tokens_per_microbatch"
            )
    if packed:
        plan = _plan_packed(lengths, num_ranks, tokens, max_tokens, num_multiple)
    else:
        plan = _plan_padded(lengths, num_ranks, tokens, max_tokens, num_multiple)
    return [sorted(map(sorted, micros), key=costliest_first) for micros in plan]


def minibatch_ranges(num_sequences: int, num_updates: int) -> list[range]:
    """Return the sequences of each mini-batch: consecutive ones, in numbers that differ by at most
    one.

    There are `num_updates` mini-batches, or one per sequence if there are fewer sequences. None is
    empty.
    """
    num_minis = min(num_updates, num_sequences)
    return [
        range(mini * num_sequences // num_minis, (mini + 1) * num_sequences // num_minis)
        for mini in range(num_minis)
    ]


def work(length: int) -> int:
    """Return the relative cost of a sequence of `length` tokens: quadratic attention plus the
    linear rest of a layer."""
    return length * (length + LINEAR_TOKENS)


def microbatch_work(lengths: Sequence[int], *, packed: bool = True) -> int:
    """Return the relative cost of a micro-batch. Each padded row costs as much as the longest."""
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
    """Return the tokens of a micro-batch of sequences of `lengths` tokens, padding included.

    Packed: each sequence is rounded up to `sequence_multiple`, because context parallelism splits
    each sequence, and the row to `row_multiple`, because sequence parallelism splits the row.
    Padded: each row is as long as the longest sequence, rounded up to `row_multiple`.
    """
    if packed:
        if sequence_multiple > 1:
            lengths = [_round_up(length, sequence_multiple) for length in lengths]
        return _round_up(sum(lengths), row_multiple)
    return len(lengths) * _round_up(max(lengths, default=0), row_multiple)


def partition(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split the indices of `weights` into `num_parts` parts of nearly equal sums, by the largest
    differencing method (Karmarkar-Karp).

    Each weight starts as a partition with one nonempty part. The two partitions of largest spread
    (largest sum minus smallest) are merged until one is left: the largest part of each is joined to
    the smallest of the other. The final spread is at most the largest weight. The largest sum is at
    most 4/3 - 1/(3 num_parts) times the optimum, and in practice far closer.

    Source: Karmarkar and Karp, The differencing method of set partitioning (1982). Bound: Michiels,
    Korst, Aarts and van Leeuwen, doi:10.1007/s10878-006-9010-z.
    """
    # (-spread, tie-break, nonempty parts as (sum, indices), largest first)
    heap = [(-weight, index, [(weight, [index])]) for index, weight in enumerate(weights)]
    heapify(heap)
    while len(heap) > 1:
        _, tie, first = heappop(heap)
        _, _, second = heap[0]
        joined = max(len(first) + len(second) - num_parts, 0)
        keep_first, keep_second = len(first) - joined, len(second) - joined
        parts = first[:keep_first] + second[:keep_second]
        for (sum_first, indices_first), (sum_second, indices_second) in zip(
            first[keep_first:], reversed(second[keep_second:])
        ):
            parts.append((sum_first + sum_second, indices_first + indices_second))
        parts.sort(key=itemgetter(0), reverse=True)
        smallest = parts[-1][0] if len(parts) == num_parts else 0
        heapreplace(heap, (smallest - parts[0][0], tie, parts))
    nonempty = [indices for _, indices in heap[0][2]] if heap else []
    return nonempty + [[] for _ in range(num_parts - len(nonempty))]


def _plan_packed(
    lengths: Sequence[int], num_ranks: int, tokens: Tokens, max_tokens: int, num_multiple: int
) -> MicrobatchPlan:
    """Return ranks of nearly equal work, each with micro-batches of nearly equal work.

    Balanced work does not balance tokens, so the number of micro-batches computed from the tokens
    may be too small. It grows by a sixteenth until every micro-batch fits. One sequence per
    micro-batch always fits.
    """
    works = [work(length) for length in lengths]
    shares = partition(works, num_ranks)
    max_num = max(map(len, shares))
    num = max(-(-max(map(tokens, shares)) // max_tokens), 1)
    while True:
        num = _round_up(num, num_multiple)
        plan: MicrobatchPlan = []
        for share in shares:
            parts = partition([works[index] for index in share], num)
            micros = [[share[position] for position in part] for part in parts]
            if max(map(tokens, micros)) > max_tokens:
                break
            plan.append(micros)
        else:
            return plan
        num = min(num + num // 16 + 1, max_num)


def _plan_padded(
    lengths: Sequence[int], num_ranks: int, tokens: Tokens, max_tokens: int, num_multiple: int
) -> MicrobatchPlan:
    """Return padded micro-batches: consecutive runs of the sequences sorted by length.

    Runs are distributed in rounds, costliest first. In each round every rank gets one run, and the
    costliest run goes to the rank with the least work so far. Distributing sequences to ranks first
    would cost seven times the padding at 32 sequences per rank, because sequences of one rank then
    differ more in length.
    """
    rows = [tokens([index]) for index in range(len(lengths))]
    ordered = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fewest = max(len(_cut(ordered, rows, max_tokens)), 1)
    num = _round_up(fewest, num_ranks * num_multiple)
    bounds = range(max_tokens)  # the smallest that needs no more runs makes them even
    bound = bisect_left(bounds, True, key=lambda bound: len(_cut(ordered, rows, bound)) <= num)
    runs = _cut(ordered, rows, bound)
    costs = [microbatch_work([lengths[index] for index in run], packed=False) for run in runs]
    costliest = sorted(range(len(runs)), key=lambda run: -costs[run])
    plan: MicrobatchPlan = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for start in range(0, num, num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: load[rank])
        for rank, run in zip(least_first, costliest[start : start + num_ranks]):
            plan[rank].append(runs[run])
            load[rank] += costs[run]
    return [micros + [[] for _ in range(num // num_ranks - len(micros))] for micros in plan]


def _cut(ordered: Sequence[int], rows: Sequence[int], bound: int) -> list[list[int]]:
    """Split `ordered` (longest first) greedily into runs of at most `bound` padded tokens. This
    gives the fewest runs for the order. A row longer than `bound` is a separate run."""
    runs: list[list[int]] = []
    for index in ordered:
        if runs and (len(runs[-1]) + 1) * rows[runs[-1][0]] <= bound:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
