"""Hypothesis strategies for groups with any content, and the record of a step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from dapo_megatron.rollout.record import RecordedGroup, StepRecord
from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, Finish, Grade, Group, Outcome, Prompt

INT64 = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=8) | st.sampled_from(["\0", "\0[1]", "a \ud800", "\udc80\udcff"])
FLOAT = st.floats(allow_nan=False)
INT32S = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
BITS = st.sampled_from([0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 1])
"""The bits of float32 values that are easily lost: NaNs, infinities, -0 and a denormal number."""
GRADES = st.builds(Grade, score=st.floats(), correct=st.booleans(), pred=TEXT, parsed=st.booleans())
PROMPTS = st.builds(
    Prompt,
    source=TEXT,
    index=INT64,
    tokens=INT32S.map(tuple),
    text=TEXT,
    truth=TEXT,
    extra=st.dictionaries(TEXT, PLAIN, max_size=2),
)
SEGMENTS = st.builds(Segment, version=INT64, num_tokens=INT64)


@st.composite
def completions(draw: st.DrawFn, sample: int, route_type: str) -> Completion:
    """Draw a completion. `route_type` is the typecode of its routes, if it has some."""
    tokens = draw(INT32S)
    number = len(tokens)
    bits = draw(st.lists(BITS | st.integers(0, 2**32 - 1), min_size=number, max_size=number))
    experts = st.lists(st.integers(0, 255), max_size=4).map(
        lambda values: array(route_type, values)
    )
    return Completion(
        sample=sample,
        tokens=array("i", tokens),
        logprobs=array("f", array("I", bits).tobytes()),
        text=draw(TEXT),
        finish=draw(st.sampled_from(Finish)),
        segments=tuple(draw(st.lists(SEGMENTS, max_size=3))),
        grade=draw(st.none() | GRADES),
        routes=draw(st.none() | experts),
    )


@st.composite
def recorded_groups(draw: st.DrawFn) -> list[RecordedGroup]:
    """Draw groups of distinct tickets, in any order. All routes have the same type."""
    route_type = draw(st.sampled_from("Bh"))
    groups = []
    for ticket in draw(st.lists(INT64, max_size=4, unique=True)):
        samples = sorted(draw(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=3)))
        made = tuple(draw(completions(sample, route_type)) for sample in samples)
        rewards = draw(st.lists(st.none() | FLOAT, min_size=len(made), max_size=len(made)))
        outcome = draw(st.sampled_from(["", *Outcome]))
        group = Group(ticket, draw(PROMPTS), made)
        groups.append(RecordedGroup(group, outcome, draw(st.sampled_from([(), rewards]))))
    return groups


def step_record(
    groups: Iterable[tuple[Group, str]],
    reward: Callable[[Completion], float | None] | None = None,
    **state: Any,
) -> StepRecord:
    """Return the record of a step in which groups ended, each with its outcome.

    reward   score plus length penalty of a completion; None without a grade
    """
    ended = [
        RecordedGroup(group, str(outcome), [*map(reward, group.completions)] if reward else ())
        for group, outcome in groups
    ]
    return StepRecord(ended, [], {"facts": {}, "metrics": {}, "coordinator": {}, **state})
