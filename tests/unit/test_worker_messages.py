"""Messages between the pool and its workers: they arrive as sent, or are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rewards.worker_messages import (
    MAX_DETAIL,
    MAX_PRED,
    MAX_SCORE,
    Failure,
    decode_answer,
    decode_batch,
    decode_refusal,
    encode,
    encode_answer,
    encode_batch,
    encode_task,
)
from dapo_megatron.types import Grade

texts = st.text(st.characters(codec=None))  # with lone surrogates
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
markers = st.sampled_from(["__tuple__", "__items__", "__float__"])  # a row may use them as keys
keys = texts | markers | st.integers() | st.tuples(st.integers(), st.integers())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=10,
)


@given(st.lists(st.tuples(texts, texts, texts, st.dictionaries(texts, values, max_size=3))))
def test_a_batch_arrives_as_it_was_sent(tasks: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    message = encode_batch(encode_task(*task) for task in tasks)
    assert message.count(b"\n") == 1
    assert message.endswith(b"\n")
    assert decode_batch(message) == tasks


scores = st.floats(-MAX_SCORE, MAX_SCORE)


@given(st.builds(Grade, scores, st.booleans(), texts, st.booleans()))
def test_a_grade_arrives_as_it_was_sent(grade: Grade) -> None:
    assert decode_answer(encode_answer(grade)) == grade


shown = st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from("\n\t "))


@given(st.builds(Failure, st.sampled_from(["error", "memory"]), shown))
def test_a_failure_arrives_as_it_was_sent(failure: Failure) -> None:
    assert decode_answer(encode_answer(failure)) == failure


def test_control_characters_in_a_workers_message_are_replaced() -> None:
    failure = decode_answer(encode_answer(Failure("error", "\x1b[2J\rline\n\ud800")))
    assert failure == Failure("error", "?[2J?line\n?")


@pytest.mark.parametrize(
    "answer",
    [
        Grade(1e308, True, ""),
        Grade(-1.1e6, True, ""),
        Grade(1.0, True, "x" * (MAX_PRED + 1)),
        Failure("error", "x" * (MAX_DETAIL + 1)),
    ],
)
def test_answers_beyond_the_limits_of_a_grader_are_refused(answer: Grade | Failure) -> None:
    with pytest.raises(ValueError, match="not an answer"):
        decode_answer(encode_answer(answer))


@given(st.none() | texts)
def test_a_refusal_arrives_as_it_was_sent(refusal: str | None) -> None:
    assert decode_refusal(encode({"refusal": refusal})) == refusal


VALID = {"score": 1.0, "correct": True, "pred": "", "parsed": True}
damaged = st.sampled_from(list(VALID)).flatmap(
    lambda name: values.filter(lambda value: type(value) is not type(VALID[name])).map(
        lambda value: VALID | {name: value}
    )
)


@given(damaged.map(lambda value: json.dumps(value, default=str, skipkeys=True).encode()))
def test_a_grade_with_a_wrong_field_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not an answer"):
        decode_answer(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(message: bytes) -> None:
    for decode in (decode_answer, decode_refusal):
        try:
            decode(message)
        except ValueError:
            continue
