"""The prompt stream: complete epochs, an order that depends only on the seed, exact resumption."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.types import Prompt


def prompts(num: int) -> list[Prompt]:
    return [Prompt("s", index, (index,), str(index), "0") for index in range(num)]


def take_indices(stream: PromptStream, num: int) -> list[int]:
    return [prompt.index for prompt in stream.take(num)]


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # Otherwise a resumed run would continue in another order.
    orders = {(7, True): [6, 3, 2, 1, 7, 0, 4, 5], (7, False): [*range(8)]}
    for (seed, shuffle), order in orders.items():
        assert take_indices(PromptStream(prompts(8), seed=seed, shuffle=shuffle), 8) == order


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


@given(num=st.integers(1, 20), seed=st.integers(), shuffle=st.booleans())
def test_an_epoch_has_every_prompt_once_and_the_next_one_another_order(
    num: int, seed: int, shuffle: bool
) -> None:
    stream = PromptStream(prompts(num), seed=seed, shuffle=shuffle)
    epochs = [take_indices(stream, num) for _ in range(20)]
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs)
    if shuffle and num > 4:
        assert len({tuple(epoch) for epoch in epochs}) > 1
    else:
        assert shuffle or epochs == [list(range(num))] * 20


def test_an_empty_stream_and_a_negative_position_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="-1"):
        PromptStream(prompts(1), seed=0, shuffle=True).seek(-1)
