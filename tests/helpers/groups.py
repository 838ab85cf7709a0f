"""Hypothesis strategies for groups with any content."""

from __future__ import annotations

from hypothesis import strategies as st

from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment

TEXT = st.text(max_size=8)
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
        st.builds(Segment, version=st.integers(0, 10_000), num_tokens=st.integers(1)), max_size=3
    ).map(tuple),
    grade=st.none()
    | st.builds(Grade, score=FLOAT, correct=st.booleans(), pred=TEXT, parsed=st.booleans()),
)
GROUPS = st.builds(
    Group,
    ticket=st.integers(0),
    prompt=st.builds(
        Prompt,
        source=TEXT,
        index=st.integers(0),
        tokens=TOKENS,
        text=TEXT,
        truth=TEXT,
        extra=st.dictionaries(TEXT, PLAIN, max_size=2),
    ),
    completions=st.lists(COMPLETIONS, max_size=3).map(tuple),
)
