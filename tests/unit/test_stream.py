"""The prompt stream: whole epochs, an order that depends on the seed alone, exact continuation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.types import Prompt


def prompts(num: int) -> list[Prompt]:
    return [Prompt("s", index, (index,), str(index), "0") for index in range(num)]


def taken(stream: PromptStream, num: int) -> list[int]:
    return [prompt.index for prompt in stream.take(num)]


def test_each_epoch_is_a_fresh_permutation() -> None:
    stream = PromptStream(prompts(50), seed=1, shuffle=True)
    first, second = taken(stream, 50), taken(stream, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_order_depends_on_the_seed_and_nothing_else() -> None:
    def order(seed: int) -> list[int]:
        return taken(PromptStream(prompts(30), seed=seed, shuffle=True), 75)

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_order_is_the_same_on_every_machine_and_version() -> None:
    # A resumed run would otherwise train on another order than the one it was stopped in.
    assert taken(PromptStream(prompts(8), seed=7, shuffle=True), 8) == [6, 3, 2, 1, 7, 0, 4, 5]


def test_without_shuffle_the_order_is_the_source_order() -> None:
    assert taken(PromptStream(prompts(3), seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


@settings(deadline=None)  # cores are shared
@given(
    num=st.integers(1, 20),
    seed=st.integers(),
    shuffle=st.booleans(),
    before=st.lists(st.integers(0, 30), max_size=4),
    after=st.integers(1, 60),
)
def test_restored_position_continues_exactly(
    num: int, seed: int, shuffle: bool, before: list[int], after: int
) -> None:
    stream = PromptStream(prompts(num), seed=seed, shuffle=shuffle)
    for count in before:
        stream.take(count)
    assert stream.position == sum(before)
    restored = PromptStream(prompts(num), seed=seed, shuffle=shuffle)
    restored.seek(stream.position)
    assert restored.position == stream.position
    assert taken(restored, after) == taken(stream, after)


def test_nothing_to_stream_and_a_negative_position_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="-1"):
        PromptStream(prompts(1), seed=0, shuffle=True).seek(-1)
