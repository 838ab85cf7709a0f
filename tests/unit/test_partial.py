"""Completions whose parts were sampled by several weight versions."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.engine.continuation import append_tokens, prompt_of, tokens_left
from dapo_megatron.types import Completion, DapoError, Finish, Prompt, SampleRequest, Segment

REQUEST = SampleRequest(
    ticket=12,
    sample=3,
    prompt=Prompt("sums", 0, (1, 2), "3+4", "7"),
    seed=5,
    max_tokens=40,
    temperature=1.0,
    top_p=1.0,
)
PARTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=10)


@given(PARTS)
def test_parts_join_into_one_completion_with_a_segment_per_version(
    parts: list[tuple[int, int]],
) -> None:
    """A sequence of (version, number of tokens it sampled), which may be 0."""
    request, history = REQUEST, []
    for version, num_tokens in sorted(parts):
        first = len(history)
        history += [version] * num_tokens
        tokens = list(range(first, first + num_tokens))
        if not history:
            continue
        before = request.so_far
        completion = append_tokens(request, tokens, [-0.5 * token for token in tokens], version)
        if not num_tokens:
            assert completion is before
        request = replace(request, so_far=completion)
    if not history:
        return
    assert completion.tokens.tolist() == list(range(len(history)))
    assert completion.logprobs.tolist() == [-0.5 * token for token in completion.tokens]
    assert completion.segments == tuple(
        Segment(version, len(list(run))) for version, run in groupby(history)
    )
    assert (completion.sample, completion.finish) == (3, Finish.UNFINISHED)
    assert prompt_of(request) == [1, 2, *completion.tokens]
    assert tokens_left(request) == 40 - len(history)


def test_the_last_part_sets_the_finish_reason() -> None:
    so_far = Completion(3, (7,), (-1.0,), "", Finish.UNFINISHED, (Segment(4, 1),))
    whole = append_tokens(replace(REQUEST, so_far=so_far), [8, 9], [-2.0, -3.0], 5, Finish.STOP)
    assert whole == Completion(
        3, (7, 8, 9), (-1.0, -2.0, -3.0), "", Finish.STOP, (Segment(4, 1), Segment(5, 2))
    )
    assert whole.oldest_version == 4


def test_a_wrong_number_of_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ticket 12, sample 3: 1 log-probs for 2 new tokens"):
        append_tokens(REQUEST, [7, 8], [-1.0], 0)


def test_a_request_without_tokens_left_is_refused() -> None:
    so_far = Completion(3, (7,), (-1.0,), "", Finish.UNFINISHED, (Segment(4, 1),))
    request = replace(REQUEST, so_far=so_far, max_tokens=1)
    with pytest.raises(DapoError, match=r"ticket 12, sample 3: .*max_response_tokens is 1"):
        tokens_left(request)
