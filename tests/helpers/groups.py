"""Hypothesis strategies for groups with any content."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.sample_index import IndexedGroup, verdict_of
from dapo_megatron.tracking.rollout_writer import RolloutWriter
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment

INT64 = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=8) | st.sampled_from(["\0", "\0[1]", "a \ud800", "\udc80\udcff"])
FLOAT = st.floats(allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
COMPLETIONS = st.builds(
    Completion,
    sample=st.integers(0, 64),
    tokens=TOKENS,
    logprobs=st.lists(st.floats(allow_nan=False, width=32), max_size=4).map(tuple),
    text=TEXT,
    finish=st.sampled_from(Finish),
    segments=st.lists(
        st.builds(Segment, version=st.integers(0, 10_000), num_tokens=INT64), max_size=3
    ).map(tuple),
    grade=st.none()
    | st.builds(Grade, score=FLOAT, correct=st.booleans(), pred=TEXT, parsed=st.booleans()),
)
GROUPS = st.builds(
    Group,
    ticket=INT64,
    prompt=st.builds(
        Prompt,
        source=TEXT,
        index=INT64,
        tokens=TOKENS,
        text=TEXT,
        truth=TEXT,
        extra=st.dictionaries(TEXT, PLAIN, max_size=2),
    ),
    completions=st.lists(COMPLETIONS, max_size=3).map(tuple),
)


BITS = st.integers(0, 2**32 - 1)
"""The bits of a float32, also of a NaN."""


def _floats(bits: list[int]) -> array[float]:
    values = array("f")
    values.frombytes(array("I", bits).tobytes())
    return values


@st.composite
def rows_of_completions(draw: st.DrawFn) -> list[CompletionRow]:
    """Draw rows with any content, in any order, of distinct (ticket, sample)."""
    prompts = draw(st.lists(GROUPS.map(lambda group: group.prompt), min_size=1, max_size=3))
    keys = draw(st.lists(st.tuples(INT64, st.integers(0, 2**31 - 1)), max_size=4, unique=True))
    is_float64 = draw(st.booleans())
    expert = draw(st.sampled_from("Bh"))
    rows = []
    for ticket, sample in keys:
        tokens = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
        bits = draw(st.lists(BITS, min_size=len(tokens), max_size=len(tokens)))
        old = np.frombuffer(_floats(bits), np.float32)
        rows.append(
            CompletionRow(
                ticket=ticket,
                prompt=draw(st.sampled_from(prompts)),
                completion=Completion(
                    sample=sample,
                    tokens=array("i", tokens),
                    logprobs=_floats(bits),
                    text=draw(TEXT),
                    finish=draw(st.sampled_from(Finish)),
                    segments=draw(
                        st.lists(
                            st.builds(Segment, version=INT64, num_tokens=INT64), max_size=3
                        ).map(tuple)
                    ),
                    grade=draw(COMPLETIONS).grade,
                    routes=draw(
                        st.none()
                        | st.lists(st.integers(0, 255)).map(lambda values: array(expert, values))
                    ),
                ),
                outcome=draw(TEXT),
                verdict=draw(st.none() | TEXT),
                reward=draw(st.none() | FLOAT),
                old_logprobs=draw(
                    st.sampled_from([None, old.astype(np.float64) if is_float64 else old])
                ),
            )
        )
    return rows


def record_groups(
    writer: RolloutWriter,
    step: int,
    groups: Iterable[tuple[Any, str]],
    reward: Callable[[Completion], float | None] | None = None,
) -> None:
    """Record groups, each with its outcome, and their index.

    reward   score plus length penalty of a completion; None without a grade
    """
    ended = [
        (group, str(outcome), verdict_of(completion.grade for completion in group.completions))
        for group, outcome in groups
    ]
    rows = (
        CompletionRow(
            ticket=group.ticket,
            prompt=group.prompt,
            completion=completion,
            outcome=outcome,
            verdict=verdict,
            reward=None if reward is None else reward(completion),
        )
        for group, outcome, verdict in ended
        for completion in group.completions
    )
    indexed = (
        IndexedGroup(
            ticket=group.ticket,
            source=group.prompt.source,
            outcome=outcome,
            verdict=verdict,
            completions=group.completions,
        )
        for group, outcome, verdict in ended
    )
    writer.completions(step, rows)
    writer.index(step, indexed)
