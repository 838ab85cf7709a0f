"""Micro-batch plans: nothing lost, the token bound held, ranks in step and evenly loaded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.data.packing import LINEAR_TOKENS, plan_microbatches


@settings(deadline=None)  # cores are shared
@given(
    lengths=st.lists(st.integers(1, 500), max_size=60),
    num_ranks=st.integers(1, 9),
    max_tokens=st.integers(500, 4000),
)
def test_every_sequence_once_within_the_bound_and_ranks_in_step(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    plan = plan_microbatches(lengths, num_ranks, max_tokens=max_tokens)
    assert len(plan) == num_ranks
    assert len({len(micros) for micros in plan}) == 1
    placed = [index for micros in plan for micro in micros for index in micro]
    assert sorted(placed) == list(range(len(lengths)))
    for micros in plan:
        for micro in micros:
            assert len(micro) * max((lengths[i] for i in micro), default=0) <= max_tokens
        filled = [bool(micro) for micro in micros]
        assert filled == sorted(filled, reverse=True), "an empty micro-batch before a full one"
    assert plan == plan_microbatches(lengths, num_ranks, max_tokens=max_tokens)


@settings(deadline=None)  # cores are shared
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=60), num_ranks=st.integers(1, 8)
)
def test_ranks_differ_by_at_most_one_sequence_of_work(lengths: list[int], num_ranks: int) -> None:
    def work(length: int) -> int:
        return length * (length + LINEAR_TOKENS)

    plan = plan_microbatches(lengths, num_ranks, max_tokens=20_000)
    loads = [sum(work(lengths[i]) for micro in micros for i in micro) for micros in plan]
    assert max(loads) - min(loads) <= max(map(work, lengths))


def test_a_micro_batch_holds_neighbours_in_length() -> None:
    plan = plan_microbatches([10, 100, 10, 100, 10, 100], 1, max_tokens=300)
    assert plan == [[[1, 3, 5], [0, 2, 4]]]


def test_long_and_short_are_shared_out() -> None:
    plan = plan_microbatches([100, 100, 1, 1], 2, max_tokens=100)
    assert plan == [[[0], [2]], [[1], [3]]]


def test_a_sequence_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 101 tokens"):
        plan_microbatches([5, 101], 2, max_tokens=100)


def test_the_bound_is_exact() -> None:
    assert plan_microbatches([3, 3, 3], 1, max_tokens=6) == [[[0, 1], [2]]]
    assert plan_microbatches([3, 3, 3], 1, max_tokens=5) == [[[0], [1], [2]]]


def test_a_long_sequence_weighs_more_than_its_tokens() -> None:
    # Attention is quadratic: one of 9,000 tokens is more work than two of 5,000.
    plan = plan_microbatches([9_000, 5_000, 5_000, 5_000], 2, max_tokens=20_000)
    assert [sorted(i for micro in micros for i in micro) for micros in plan] == [[0], [1, 2, 3]]


def test_ranks_with_less_to_do_end_in_empty_micro_batches() -> None:
    plan = plan_microbatches([9_000, 5_000, 5_000, 5_000], 2, max_tokens=9_000)
    assert plan == [[[0], [], []], [[1], [2], [3]]]
