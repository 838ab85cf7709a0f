"""The prompt stream: complete epochs, an order that depends only on the seed, exact resumption."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.types import Prompt


def prompts(num: int) -> list[Prompt]:
    return [Prompt("s", index, (index,), str(index), "0") for index in range(num)]


def take_indices(stream: PromptStream, num: int) -> list[int]:
    return [prompt.index for prompt in stream.take(num)]


def test_each_epoch_is_a_fresh_permutation() -> None:
    stream = PromptStream(prompts(50), seed=1, shuffle=True)
    first, second = take_indices(stream, 50), take_indices(stream, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_order_depends_only_on_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return take_indices(PromptStream(prompts(30), seed=seed, shuffle=True), 75)

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # Otherwise a resumed run would continue in another order.
    assert take_indices(PromptStream(prompts(8), seed=7, shuffle=True), 8) == [
        6,
        3,
        2,
        1,
        7,
        0,
        4,
        5,
    ]


def test_without_shuffle_the_order_is_the_source_order() -> None:
    assert take_indices(PromptStream(prompts(3), seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


@settings(deadline=None)  # cores are shared
@given(
    num=st.integers(1, 20),
    seed=st.integers(),
    shuffle=st.booleans(),
    before=st.lists(st.integers(0, 30), max_size=4),
    after=st.integers(1, 60),
)
def test_a_restored_position_continues_exactly(
    num: int, seed: int, shuffle: bool, before: list[int], after: int
) -> None:
    stream = PromptStream(prompts(num), seed=seed, shuffle=shuffle)
    for count in before:
        stream.take(count)
    assert stream.position == sum(before)
    restored = PromptStream(prompts(num), seed=seed, shuffle=shuffle)
    restored.seek(stream.position)
    assert restored.position == stream.position
    assert take_indices(restored, after) == take_indices(stream, after)


def test_an_empty_stream_and_a_negative_position_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="-1"):
        PromptStream(prompts(1), seed=0, shuffle=True).seek(-1)
