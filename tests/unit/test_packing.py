"""Micro-batch plans: every sequence is placed, micro-batches respect the token bound, and ranks get
equally many micro-batches and about the same work."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dapo_megatron.data.packing import (
    microbatch_work,
    padded_tokens,
    partition,
    plan_microbatches,
    work,
)

LENGTHS = st.lists(st.integers(1, 500), max_size=60)
RANKS = st.integers(1, 9)
MULTIPLES = st.sampled_from([1, 4, 8])


@given(
    lengths=LENGTHS,
    num_ranks=RANKS,
    max_tokens=st.integers(504, 4000),
    packed=st.booleans(),
    sequence_multiple=MULTIPLES,
    row_multiple=MULTIPLES,
    num_multiple=st.integers(1, 4),
)
@example(
    [200] * 5, 1, 504, True, 1, 1, 1
)  # two would hold all tokens, but no three sequences fit into one
@example([500, 1, 1, 1], 3, 504, False, 8, 8, 2)
def test_each_sequence_is_placed_once_and_ranks_get_equally_many_micro_batches(
    lengths: list[int],
    num_ranks: int,
    max_tokens: int,
    packed: bool,
    sequence_multiple: int,
    row_multiple: int,
    num_multiple: int,
) -> None:
    rows: dict[str, Any] = {
        "packed": packed,
        "sequence_multiple": sequence_multiple,
        "row_multiple": row_multiple,
    }
    options: dict[str, Any] = {**rows, "max_tokens": max_tokens, "num_multiple": num_multiple}
    plan = plan_microbatches(lengths, num_ranks, **options)
    assert plan == plan_microbatches(tuple(lengths), num_ranks, **options)
    assert len(plan) == num_ranks
    assert len({len(micros) for micros in plan}) == 1
    assert len(plan[0]) > 0
    assert len(plan[0]) % num_multiple == 0
    placed = [index for micros in plan for micro in micros for index in micro]
    assert sorted(placed) == list(range(len(lengths)))
    for micros in plan:
        inside = [[lengths[index] for index in micro] for micro in micros]
        for micro in inside:
            ends = [-(-length // sequence_multiple) * sequence_multiple for length in micro]
            size = sum(ends) if packed else max(micro, default=0)
            padded = -(-size // row_multiple) * row_multiple * (1 if packed else len(micro))
            assert padded_tokens(micro, **rows) == padded <= max_tokens
        works = [microbatch_work(micro, packed=packed) for micro in inside]
        assert works == sorted(works, reverse=True)
        assert all(micros[: len(micros) - micros.count([])]), (
            "an empty micro-batch comes before a full one"
        )
        if packed and [] in micros:
            assert max(map(len, micros)) <= 1, (
                "an empty micro-batch next to one that could be split"
            )


@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=60), num_ranks=RANKS)
def test_ranks_differ_by_at_most_one_sequence_of_work(lengths: list[int], num_ranks: int) -> None:
    plan = plan_microbatches(lengths, num_ranks, max_tokens=20_000)
    loads = [sum(work(lengths[i]) for micro in micros for i in micro) for micros in plan]
    assert max(loads) - min(loads) <= max(map(work, lengths))


@given(weights=st.lists(st.integers(0, 30), min_size=1, max_size=7), num_parts=st.integers(1, 3))
@example([3, 3, 2, 2, 2], 2)  # 7/6 of the optimum, the worst case for two parts
def test_partition_stays_within_its_published_bound(weights: list[int], num_parts: int) -> None:
    parts = partition(weights, num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(weights)))
    largest = max(sum(weights[index] for index in part) for part in parts)
    best = min(
        max(
            sum(weight for weight, assigned in zip(weights, assignment) if assigned == part)
            for part in range(3)
        )
        for assignment in itertools.product(range(num_parts), repeat=len(weights))
    )
    assert 3 * num_parts * largest <= (4 * num_parts - 1) * best


class Measured:
    """Share of padding, work of the slowest rank over the mean rank, and size of a plan."""

    def __init__(
        self, lengths: list[int], num_ranks: int = 16, max_tokens: int = 24_576, packed: bool = True
    ) -> None:
        rows: dict[str, Any] = {"packed": packed, "sequence_multiple": 4, "row_multiple": 4}
        plan = plan_microbatches(lengths, num_ranks, max_tokens=max_tokens, **rows)
        micros = [[[lengths[index] for index in micro] for micro in rank] for rank in plan]
        tokens = [padded_tokens(micro, **rows) for rank in micros for micro in rank]
        loads = [sum(microbatch_work(micro, packed=packed) for micro in rank) for rank in micros]
        self.padding = 1 - sum(lengths) / sum(tokens)
        self.slowest_rank = max(loads) / fmean(loads)
        self.lower_bound = max(work(max(lengths)) / fmean(loads), 1.0)
        self.largest_tokens, self.num_microbatches = max(tokens), len(plan[0])


def realistic_lengths(num: int, seed: int) -> list[int]:
    """Return log-normal lengths (median 1,500), cut at 20,480 tokens."""
    rng = random.Random(seed)
    drawn = (rng.lognormvariate(math.log(1_500), 1.0) for _ in range(num))
    return [min(max(round(length), 1), 20_480) for length in drawn]


@pytest.mark.parametrize("num", [8192, 512])
@pytest.mark.parametrize("seed", range(3))
def test_realistic_lengths_meet_the_padding_and_balance_targets(num: int, seed: int) -> None:
    lengths = realistic_lengths(num, seed)
    measured = Measured(lengths)
    assert measured.padding <= 0.01
    assert measured.slowest_rank <= 1.001
    assert measured.largest_tokens <= 24_576
    fewest = sum(lengths) / 24_576 / 16
    assert measured.num_microbatches <= max(1.15 * fewest, fewest + 2)


@pytest.mark.parametrize(
    ("lengths", "num_ranks"),
    [
        (
            [20_000] + [200] * 2_000,
            4,
        ),  # the mean work of a rank is above that of the longest sequence
        ([20_000] + [200] * 50, 4),  # and below it: the longest sequence gets a rank of its own
        ([200, 20_000] * 64, 8),
        ([20_000] * 3 + [200] * 300, 3),
    ],
)
@pytest.mark.parametrize(("packed", "bound"), [(True, 1.001), (False, 1.15)])
def test_skewed_lengths_stay_balanced(
    lengths: list[int], num_ranks: int, packed: bool, bound: float
) -> None:
    measured = Measured(lengths, num_ranks, 20_480, packed)
    assert measured.slowest_rank <= bound * measured.lower_bound
    assert measured.padding <= 0.01
    assert measured.largest_tokens <= 20_480


@pytest.mark.parametrize("packed", [True, False])
def test_a_sequence_too_long_for_any_micro_batch_is_reported(packed: bool) -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 101 tokens.*max_tokens_per_microbatch"):
        plan_microbatches([5, 101], 2, max_tokens=100, packed=packed)
    with pytest.raises(ValueError, match="sequence 1 has 98 tokens, 104 with padding"):
        plan_microbatches([5, 98], 2, max_tokens=100, packed=packed, row_multiple=8)


def test_padded_micro_batches_go_to_the_rank_with_the_least_work() -> None:
    plan = plan_microbatches([3, 9, 6, 3, 7, 1, 2], 2, max_tokens=9, packed=False)
    # In rounds: 9 and 7 tokens, then 6 and two rows of 2, which cost more than one of 3, then 3s.
    assert plan == [[[1], [5, 6], [3]], [[4], [2], [0]]]


def test_the_token_bound_is_exact() -> None:
    for packed in (True, False):
        plan = plan_microbatches([3, 3, 3], 1, max_tokens=6, packed=packed)
        assert plan == [[[0, 1], [2]]], packed
        plan = plan_microbatches([3, 3, 3], 1, max_tokens=5, packed=packed)
        assert plan == [[[0], [1], [2]]], packed
    options = {"max_tokens": 15, "sequence_multiple": 4, "row_multiple": 8}
    assert plan_microbatches([3, 3, 3], 1, **options) == [
        [[0, 1], [2]]
    ]  # 12 tokens are padded to 16
    plan = plan_microbatches([3, 3, 3], 1, max_tokens=11, sequence_multiple=4)
    assert plan == [[[0, 1], [2]]]  # 4 + 4 + 4 is more than 11
