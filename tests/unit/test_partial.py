"""Completions whose parts were sampled by several weight versions."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.engine.continuation import append_tokens, observe, prompt_of, tokens_left
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.segments import ENVIRONMENT, Segment
from dapo_megatron.types import Finish, Prompt, SampleRequest

PROMPT = Prompt("sums", 0, (1, 2), "3+4", "7")
REQUEST = SampleRequest(
    ticket=12, sample=3, prompt=PROMPT, seed=5, max_tokens=40, temperature=1.0, top_p=1.0
)
PARTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=10)
WIDTH = 3
"""Experts per token, over all layers."""


@given(parts=PARTS.map(sorted), last=st.integers(1, 3), has_routes=st.booleans())
def test_parts_join_into_one_completion_with_a_segment_per_version(
    parts: list[tuple[int, int]], last: int, has_routes: bool
) -> None:
    """A sequence of (version, number of tokens it sampled), which may be 0."""
    request, history = REQUEST, list[int]()
    for place, (version, num_tokens) in enumerate([*parts, (9, last)]):
        first = len(history)
        history += [version] * num_tokens
        if not history:
            continue
        tokens = list(range(first, first + num_tokens))
        # Each version would choose other experts for all tokens up to now, except the last one.
        routes = np.full((len(PROMPT.tokens) + len(history) - 1) * WIDTH, place, np.uint8)
        finish = Finish.STOP if version == 9 else Finish.UNFINISHED
        completion = append_tokens(
            request, tokens, [-0.5 * token for token in tokens], version, finish,
            routes if has_routes else None,
        )  # fmt: skip
        if not num_tokens:
            assert completion is request.so_far
        elif has_routes:
            assert completion.routes is not None
            kept = request.so_far.routes if request.so_far and request.so_far.routes else []
            new = [place] * (len(routes) - len(kept))
            assert list(completion.routes) == [*kept, *new]
        request = replace(request, so_far=completion)
    assert completion.tokens.tolist() == list(range(len(history)))
    assert completion.logprobs.tolist() == [-0.5 * token for token in completion.tokens]
    assert completion.segments == tuple(
        Segment(version, len(list(run))) for version, run in groupby(history)
    )
    assert (completion.sample, completion.finish) == (3, Finish.STOP)
    assert completion.oldest_version == history[0]
    assert prompt_of(request) == [1, 2, *completion.tokens]
    assert tokens_left(request) == 40 - len(history)


TURNS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2)),
    min_size=1,
    max_size=6,
)
"""Parts of a completion: the version and number of its tokens, and observations after it."""


@given(turns=TURNS.map(sorted))
def test_observed_tokens_are_segments_of_their_own_and_get_routes_when_they_are_read(
    turns: list[tuple[int, int, list[int]]],
) -> None:
    request, expected, logprobs, experts = REQUEST, list[tuple[int, bool]](), [], []
    for place, (version, num_tokens, observations) in enumerate(turns):
        num_before = len(PROMPT.tokens) + len(expected)
        expected += [(version, False)] * num_tokens
        logprobs += [-1.0] * num_tokens
        routes = np.full((num_before + num_tokens - 1) * WIDTH, place, np.uint8)
        completion = append_tokens(
            request, [7] * num_tokens, [-1.0] * num_tokens, version, Finish.STOP, routes
        )
        experts += [place] * (len(routes) - len(experts))
        assert completion.routes is not None and list(completion.routes) == experts
        for number in observations:
            completion = observe(completion, [3] * number, 0, 0)
            expected += [(version, True)] * number
            logprobs += [0.0] * number
            assert completion.finish is Finish.UNFINISHED
        request = replace(request, so_far=completion)
    assert completion.segments == tuple(
        Segment(version, len(list(run)), ENVIRONMENT if is_observed else 0)
        for (version, is_observed), run in groupby(expected)
    )
    assert completion.logprobs.tolist() == logprobs
    assert completion.tokens.tolist() == [3 if is_observed else 7 for _, is_observed in expected]
    assert tokens_left(replace(request, max_tokens=99)) == 99 - len(expected)


@given(st.sets(st.tuples(st.sampled_from("ab"), *[st.integers(0, 20)] * 3), min_size=2))
def test_requests_are_seeded_by_use_ticket_sample_and_tokens_so_far(
    places: set[tuple[str, int, int, int]],
) -> None:
    seeds = []
    for name, ticket, sample, num_tokens in sorted(places):
        so_far = None
        if num_tokens:
            tokens, logprobs = [5] * num_tokens, [-1.0] * num_tokens
            so_far = append_tokens(REQUEST, tokens, logprobs, 0)
        sampling = Sampling(name, 40, 1.0, 1.0, is_seeded=True)
        request = sampling.request(ticket, PROMPT, sample, so_far)
        assert request == sampling.request(ticket, PROMPT, sample, so_far)
        unseeded = replace(sampling, is_seeded=False).request(ticket, PROMPT, sample, so_far)
        assert unseeded == replace(request, seed=None)
        seeds.append(request.seed)
    assert len(set(seeds)) == len(places)
