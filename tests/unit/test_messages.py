"""Messages between ranks: values are received exactly as sent, and other data is rejected."""

from __future__ import annotations

import math
import pickle
import struct
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, make_dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster.collectives import ErrorRecord, decode, encode
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.doctor.check_result import Check, Status
from dapo_megatron.engine.messages import (
    GroupRequest,
    Hello,
    Order,
    OrderKind,
    Report,
    Sampling,
)
from dapo_megatron.rollout.collector import StepPlan
from dapo_megatron.segments import Segment
from dapo_megatron.types import (
    Completion,
    ConfigError,
    DapoError,
    Finish,
    Grade,
    Prompt,
    RankError,
    Region,
    Stopped,
    TensorSlice,
    TrainingSequence,
)
from tests.helpers.ranks import run_ranks

numbers = st.integers(0, 2**40)
floats = st.floats()
texts = st.text()
tokens = st.lists(numbers).map(tuple)
segments = st.lists(st.builds(Segment, numbers, numbers)).map(tuple)
grades = st.none() | st.builds(Grade, floats, st.booleans(), texts, st.booleans())
completions = st.builds(
    Completion,
    sample=numbers,
    tokens=st.lists(st.integers(0, 2**31 - 1)),
    logprobs=st.lists(st.floats(width=32)),
    text=texts,
    finish=st.sampled_from(Finish),
    segments=segments,
    grade=grades,
)
prompts = st.builds(
    Prompt, texts, numbers, tokens, texts, texts, st.dictionaries(texts, texts, max_size=2)
)
errors = st.none() | st.builds(ErrorRecord, texts, texts)
facts = st.dictionaries(texts, texts, max_size=3)
reports = st.builds(
    Report,
    hello=st.none() | st.builds(Hello, st.none() | numbers, texts, facts),
    ready=st.none() | facts,
    returned=st.lists(st.tuples(numbers, completions, texts), max_size=3),
    num_sampled=numbers,
    is_interrupted=st.booleans(),
    is_news=st.booleans(),
    grade_seconds=floats,
    errors=facts,
    answer=st.none() | st.binary(),
    error=errors,
)


samplings = st.builds(Sampling, texts, numbers, floats, floats, st.booleans())
group_requests = st.lists(
    st.builds(
        GroupRequest,
        numbers,
        prompts,
        st.lists(st.tuples(numbers, st.none() | completions), max_size=3).map(tuple),
    ),
    max_size=2,
)
orders = st.builds(
    Order,
    kind=st.sampled_from(OrderKind),
    text=texts,
    config=st.dictionaries(texts, st.none() | texts | numbers | st.lists(texts), max_size=3),
    seed=numbers,
    report_seconds=floats,
    sampling=st.none() | samplings,
    requests=group_requests,
    num_steps=numbers,
    arguments=st.binary(),
)
plans = st.builds(
    StepPlan,
    sequences=st.lists(
        st.builds(
            TrainingSequence,
            ticket=numbers,
            sample=numbers,
            prompt_tokens=numbers,
            response_tokens=numbers,
            segments=segments,
            advantage=floats,
            in_loss=st.booleans(),
        ),
        max_size=2,
    ),
    metrics=st.dictionaries(texts, floats, max_size=3),
)
regions = st.builds(Region, tokens, tokens)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn])
tensor_slices = st.builds(TensorSlice, texts, tokens, dtypes, regions)
checks = st.builds(Check, texts, st.sampled_from(Status), texts, texts)
paths = st.text("abc./", min_size=1).map(Path)


def typed(strategy: Any, expected_type: Any) -> Any:
    return st.tuples(strategy, st.just(expected_type))


MESSAGES = st.one_of(
    typed(reports, Report),
    typed(orders, Order),
    typed(plans, StepPlan),
    typed(st.lists(tensor_slices), list[TensorSlice]),
    typed(st.tuples(texts, st.booleans(), st.lists(checks)), tuple[str, bool, list[Check]]),
    typed(st.tuples(st.none() | texts, errors), tuple[str | None, ErrorRecord | None]),
    typed(st.lists(paths), list[Path]),
    typed(st.binary(), bytes),
    typed(floats, float),
    typed(st.integers(-(2**63), 2**64 - 1), int),
    typed(
        st.dictionaries(texts, st.tuples(numbers, texts)), dict[str, tuple[int, str]]
    ),
)  # fmt: skip


def exact_form(value: Any) -> Any:
    """Return a form that compares floats by their bits and values with their types."""
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), [exact_form(item) for item in value]
    if isinstance(value, dict):
        return [(exact_form(key), exact_form(item)) for key, item in value.items()]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [exact_form(getattr(value, field.name)) for field in fields(value)]
    return type(value), value


@given(MESSAGES)
def test_a_message_is_received_exactly_as_sent(message: tuple[Any, Any]) -> None:
    value, expected_type = message
    assert exact_form(decode(encode(value), expected_type, "rank 0")) == exact_form(value)


@st.composite
def hostile(draw: st.DrawFn) -> tuple[bytes, Any]:
    """Draw bytes and the type that is expected: a damaged message, a pickle, or any bytes."""
    value, expected_type = draw(MESSAGES)
    data = encode(value)
    kind = draw(st.sampled_from(["cut", "changed", "inserted", "pickle", "any"]))
    place = draw(st.integers(0, len(data) - 1))
    if kind == "cut":
        return data[:place], expected_type
    if kind == "pickle":
        protocol = draw(st.integers(0, pickle.HIGHEST_PROTOCOL))
        return pickle.dumps(Payload(), protocol), expected_type
    if kind == "any":
        return draw(st.binary(max_size=200)), expected_type
    inserted = draw(st.binary(min_size=1, max_size=3))
    rest = data[place + (kind == "changed") :]
    return data[:place] + inserted + rest, expected_type


class Payload:
    """Object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was loaded",)


@given(hostile())
def test_any_bytes_give_a_value_of_the_type_or_an_error_with_the_rank(
    message: tuple[bytes, Any],
) -> None:
    data, expected_type = message
    try:
        value = decode(data, expected_type, "rank 3")
    except RankError as error:
        assert "rank 3" in str(error)
    else:
        assert exact_form(decode(encode(value), expected_type, "rank 3")) == exact_form(value)
    with pytest.raises(TypeError, match="Payload: ranks cannot send"):
        encode(Payload())


@pytest.mark.parametrize(
    ("sent", "expected_type"),
    [
        (1, str),
        ("1", int),
        (None, bool),
        ([1, "2"], list[int]),
        ({"kind": "ConfigError"}, ErrorRecord),
        ("float33", torch.dtype),
        ("load", torch.dtype),  # a function in torch, not a dtype
        (7, Path),
        ([1, 2], array),
        (b"?1234", array),  # no such type code
        (b"i12345", array),  # not a whole number of elements
        (b"", array),
    ],
)
def test_a_value_of_another_type_is_rejected(sent: Any, expected_type: Any) -> None:
    with pytest.raises(RankError, match="rank 5: sent a message that cannot be read"):
        decode(encode(sent), expected_type, "rank 5")


def test_a_lone_surrogate_is_replaced_and_does_not_end_the_run() -> None:
    """The text of a grader, or an OSError about a file name, may contain one."""
    grade = Grade(1.0, True, "a\ud800b")
    assert decode(encode((grade, b"\xff")), tuple[Grade, bytes], "rank 0") == (
        Grade(1.0, True, "a\ufffdb"),
        b"\xff",
    )


def test_errors_keep_their_type_or_its_known_base_type() -> None:
    class Unknown(ConfigError):
        """Error of a module that other ranks may not have imported."""

    for error, kind in ((Stopped("x"), Stopped), (Unknown("x"), ConfigError)):
        record = ErrorRecord.of(error)
        assert record is not None
        assert type(record.error()) is kind
        assert str(record.error()) == str(error)
    assert ErrorRecord.of(None) is None
    assert type(ErrorRecord("SystemExit", "x").error()) is DapoError


def exchange(rank: int) -> dict[str, Any]:
    ranks = Ranks(rank, 3, rank)
    error_message = ""
    gathered = ranks.all_gather([0.1] * (1000 * rank), list[float])
    sent = ranks.broadcast((rank, Path("/a")), tuple[int, Path])
    try:
        ranks.all_gather("text" if rank == 1 else rank, int)  # type: ignore[type-var]
    except RankError as error:
        error_message = str(error)
    return {"gathered": gathered, "sent": sent, "refused": error_message}


def test_ranks_exchange_values_of_different_lengths() -> None:
    for result in run_ranks(exchange, 3):
        assert result["gathered"] == [[0.1] * (1000 * rank) for rank in range(3)]
        assert result["sent"] == (0, Path("/a"))
        assert result["refused"].startswith("rank 1: sent a message that cannot be read")


def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(40):
            names = [f"f{number}" for number in range(8)]
            inner = [make_dataclass(f"Inner{n}", [(f, int) for f in names]) for n in range(6)]
            outer = make_dataclass("Outer", [(f"g{n}", kind) for n, kind in enumerate(inner)])
            for kind in (*inner, outer):
                kind.__module__ = "builtins"
            message = encode(outer(*(kind(*range(8)) for kind in inner)))
            start = Barrier(8)

            def read(start: Barrier = start, kind: Any = outer, message: bytes = message) -> bytes:
                start.wait()
                return encode(decode(message, kind, "rank 1"))

            with ThreadPoolExecutor(8) as threads:
                results = [threads.submit(read) for _ in range(8)]
            assert {result.result() for result in results} == {message}
    finally:
        sys.setswitchinterval(interval)
