"""Token batches: their tensors, advantages, weights, names, diagnostics and mini-batches."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.batch import (
    assemble,
    describe,
    diagnose,
    fresh_mask,
    reward,
    sampled_mask,
    split,
    valid_completions,
)
from dapo_megatron.segments import ENVIRONMENT, Segment
from dapo_megatron.types import (
    Completion,
    Finish,
    Grade,
    Group,
    LogProbs,
    Prompt,
    TokenBatch,
    TrainingSequence,
)
from tests.helpers import batches
from tests.helpers.batches import assemble_groups, tokens_of

RIGHT, WRONG = Grade(1.0, True, "7"), Grade(-1.0, False, "8")


def completion(
    sample: int,
    num_tokens: int,
    grade: Grade | None,
    *,
    finish: Finish = Finish.STOP,
    segments: tuple[Segment, ...] | None = None,
) -> Completion:
    tokens = tuple(range(100, 100 + num_tokens))
    logprobs = tuple(-0.5 - sample - position / 8 for position in range(num_tokens))
    segments = segments or (Segment(3, num_tokens),)
    return Completion(sample, tokens, logprobs, "", finish, segments, grade)


def group(ticket: int, *completions: Completion, num_prompt_tokens: int = 2) -> Group:
    tokens = tuple(range(10, 10 + num_prompt_tokens))
    return Group(ticket, Prompt("s", ticket, tokens, "4 + 3 =", "7"), completions)  # type: ignore[arg-type]


def overlong(
    *, penalty: bool = False, filter: bool = False, in_mean: bool = False
) -> OverlongConfig:
    return OverlongConfig(
        max_tokens=8, buffer_tokens=4, penalty=penalty, filter=filter, filtered_in_mean=in_mean
    )


def assembled(*groups: Group, **mode: bool) -> TokenBatch:
    return assemble_groups(groups, overlong(**mode))


def described(*groups: Group, **mode: bool) -> list[TrainingSequence]:
    return batches.described(groups, overlong(**mode))


def advantages(batch: TokenBatch) -> list[float]:
    """Return the advantage of each sequence, read at its last token."""
    return [float(batch.advantages[end - 1]) for end in batch.lengths.cumsum(0).tolist()]


def test_sequences_are_concatenated_into_flat_tensors() -> None:
    batch = assembled(
        group(12, completion(0, 2, RIGHT), completion(3, 1, WRONG)),
        group(40, completion(1, 1, RIGHT), completion(2, 1, WRONG), num_prompt_tokens=1),
    )
    assert batch.tokens.tolist() == [10, 11, 100, 101, 10, 11, 100, 10, 100, 10, 100]
    assert batch.lengths.tolist() == [4, 3, 2, 2]
    no, yes = False, True
    assert batch.loss_mask.tolist() == [no, no, yes, yes, no, no, yes, no, yes, no, yes]
    assert batch.engine_logprobs.tolist() == [0, 0, -0.5, -0.625, 0, 0, -3.5, 0, -1.5, 0, -2.5]
    assert batch.group_ids.tolist() == [12, 12, 40, 40]
    assert batch.sequence_names == (
        "ticket 12, sample 0",
        "ticket 12, sample 3",
        "ticket 40, sample 1",
        "ticket 40, sample 2",
    )
    assert batch.weights.tolist() == [1.0] * 11
    a = 2**-0.5  # (1 - 0) / sqrt(2), ddof 1
    expected = [0, 0, a, a, 0, 0, -a, 0, a, 0, -a]
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), atol=1e-5, rtol=0)
    assert batch.loss_tokens.tolist() == [2, 1, 1, 1]
    assert batch.tokens.dtype is torch.int32
    of_sequences = (batch.lengths, batch.loss_tokens, batch.group_ids)
    assert {tensor.dtype for tensor in of_sequences} == {torch.int64}
    assert batch.loss_mask.dtype is torch.bool
    floats = (batch.advantages, batch.weights, batch.engine_logprobs)
    assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_a_completion_without_a_grade_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"ticket 7, sample 1: no grade"):
        assembled(group(7, completion(0, 2, RIGHT), completion(1, 5, None)))


# Completions of 2 and 6 tokens, and one truncated at 8. Rewards 1, -1, 1; penalties 0, -.5, -1.
TRUNCATED = group(
    1,
    completion(0, 2, RIGHT),
    completion(1, 6, WRONG),
    completion(2, 8, RIGHT, finish=Finish.LENGTH),
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({}, [0.57735, -1.15470, 0.57735]),  # rewards 1, -1, 1: mean 1/3, std 1.15470
        ({"penalty": True}, [0.92717, -1.05963, 0.13245]),  # 1, -1.5, 0: mean -1/6, std 1.25831
        ({"filter": True}, [0.70711, -0.70711]),  # 1, -1
        ({"filter": True, "penalty": True}, [0.70711, -0.70711]),  # 1, -1.5
        ({"filter": True, "in_mean": True}, [0.57735, -1.15470, 0.57735]),
        ({"filter": True, "in_mean": True, "penalty": True}, [0.92717, -1.05963, 0.13245]),
    ],
)
def test_overlong_modes(mode: dict[str, bool], expected: list[float]) -> None:
    batch = assembled(TRUNCATED, **mode)
    assert advantages(batch) == pytest.approx(expected, abs=1e-5)
    assert (
        batch.num_sequences == len(valid_completions(TRUNCATED, overlong(**mode))) == len(expected)
    )
    assert batch.num_loss_tokens == (8 if mode.get("filter") else 16)
    assert not mode.get("filter") or not batch.loss_mask[12:].any()
    fresh = fresh_mask(described(TRUNCATED, **mode), batch, version=3)
    assert fresh.numel() == batch.tokens.numel()


def test_void_turns_are_left_out_of_the_loss_but_not_of_the_mean() -> None:
    no_answer = replace(WRONG, parsed=False)
    finishes = [Finish.STOP, Finish.STOP, Finish.TURN_LENGTH, Finish.LENGTH, Finish.TURNS]
    grades = [RIGHT, no_answer, RIGHT, WRONG, no_answer]
    ended = (
        completion(number, 2, grade, finish=finish)
        for number, (finish, grade) in enumerate(zip(finishes, grades, strict=True))
    )
    talks = group(1, *ended)
    kept, masked = (
        describe([talks], overlong=overlong(), eps=1e-6, mask_void=mask) for mask in (False, True)
    )
    assert [sequence.in_loss for sequence in kept] == [True] * 5
    assert [sequence.in_loss for sequence in masked] == [True, False, False, False, True]
    assert [s.advantage for s in kept] == [s.advantage for s in masked]
    cut = describe([talks], overlong=overlong(filter=True, in_mean=True), eps=1e-6)
    assert [sequence.in_loss for sequence in cut] == [True, True, False, False, True]


def test_a_group_with_only_truncated_completions_gives_an_empty_batch() -> None:
    only_truncated = replace(TRUNCATED, completions=TRUNCATED.completions[2:])
    assert valid_completions(only_truncated, overlong(filter=True)) == []
    batch = assembled(only_truncated, filter=True)
    assert (batch.num_sequences, batch.num_loss_tokens, batch.tokens.numel()) == (0, 0, 0)
    assert split(batch, 4, "token") == []
    full = assembled(TRUNCATED)
    for name in ("tokens", "lengths", "loss_mask", "advantages", "engine_logprobs", "group_ids"):
        assert getattr(batch, name).dtype == getattr(full, name).dtype, name


def test_fresh_tokens_are_response_tokens_of_this_version() -> None:
    old = completion(0, 5, RIGHT, segments=(Segment(1, 2), Segment(2, 1), Segment(3, 2)))
    groups = [group(1, old, completion(1, 1, WRONG, segments=(Segment(2, 1),)))]
    no, yes = False, True

    def fresh(version: int) -> list[bool]:
        return fresh_mask(described(*groups), assembled(*groups), version=version).tolist()

    assert fresh(3) == [no, no, no, no, no, yes, yes, no, no, no]
    assert fresh(2) == [no, no, no, no, yes, no, no, no, no, yes]
    assert not any(fresh(4))
    assert not fresh_mask(described(*groups), assembled(*groups), version=3, engine=1).any()
    whole = fresh_mask(described(*groups), assembled(*groups), version=2, only_whole=True)
    assert whole.tolist() == [no] * 9 + [yes]
    short = completion(5, 3, RIGHT, segments=(Segment(1, 2),))
    with pytest.raises(ValueError, match=r"ticket 9, sample 5: .* for 3 tokens"):
        assembled(group(9, short))


PARTS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5)
"""Segments of a response: number of tokens, and whether they were observed. The first was not."""


@given(parts=st.lists(PARTS, min_size=2, max_size=4), version=st.integers(1, 4))
def test_observed_tokens_are_read_and_never_trained_on(
    parts: list[list[tuple[int, bool]]], version: int
) -> None:
    completions = []
    for sample, of_response in enumerate(parts):
        segments, logprobs = [], []
        for place, (num_tokens, is_observed) in enumerate(of_response):
            is_observed &= place > 0
            segments.append(Segment(1 + place, num_tokens, ENVIRONMENT if is_observed else 0))
            logprobs += [0.0 if is_observed else -1.0] * num_tokens
        made = completion(
            sample, len(logprobs), (RIGHT, WRONG)[sample % 2], segments=tuple(segments)
        )
        completions.append(replace(made, logprobs=array("f", logprobs)))
    groups = [group(5, *completions)]
    sequences, batch = described(*groups), assembled(*groups)

    # Token by token, from the segments.
    mask, fresh, advantage = [], [], []
    for made, sequence in zip(completions, sequences, strict=True):
        numbers = [None, None]
        for segment in made.segments:
            sampled_by = None if segment.engine == ENVIRONMENT else segment.version
            numbers += [sampled_by] * segment.num_tokens
        mask += [number is not None for number in numbers]
        fresh += [number == version for number in numbers]
        advantage += [0.0 if number is None else sequence.advantage for number in numbers]
    assert batch.loss_mask.tolist() == mask == sampled_mask(batch, sequences).tolist()
    assert batch.num_loss_tokens == sum(mask)
    assert fresh_mask(sequences, batch, version=version, engine=0).tolist() == fresh
    assert batch.advantages.tolist() == pytest.approx(advantage)
    weights = split(batch, 1, "sequence")[0].weights
    assert not weights[~batch.loss_mask].any()
    assert float(weights.sum()) == pytest.approx(sum(mask))

    # Neither log-probs, entropies nor lengths count them.
    policy = LogProbs(torch.where(batch.loss_mask, -3.0, -9.0), batch.engine_logprobs)
    for made, diagnostics in zip(completions, diagnose(sequences, batch, policy), strict=True):
        assert (made.logprob_mean, made.logprob_min) == (-1.0, -1.0)
        assert (diagnostics.gap_mean, diagnostics.gap_max) == (2.0, 2.0)
        shaped = reward(made, overlong(penalty=True))
        penalty = min(0.0, max(-1.0, (4 - made.num_sampled) / 4))
        assert shaped is not None and shaped.penalty == pytest.approx(penalty)


def test_diagnostics_cover_the_response_tokens_of_each_sequence() -> None:
    cut = completion(1, 8, RIGHT, finish=Finish.LENGTH)
    groups = [
        group(7, completion(0, 3, RIGHT), cut, completion(2, 1, WRONG)),
        group(9, completion(5, 2, WRONG), num_prompt_tokens=4),
    ]
    batch = assembled(*groups, filter=True)
    # The gap to the engine grows with the position. Prompt positions must not count.
    offsets = torch.arange(batch.tokens.numel()) / 64
    policy = LogProbs(batch.engine_logprobs + offsets, 10 + offsets)
    sequences = list(diagnose(described(*groups, filter=True), batch, policy))
    first, _, third = sequences
    assert [(sequence.ticket, sequence.sample) for sequence in sequences] == [
        (7, 0),
        (7, 2),
        (9, 5),
    ]
    assert [sequence.advantage for sequence in sequences] == advantages(batch)
    assert first.logprobs.tolist() == [-0.5 + 2 / 64, -0.625 + 3 / 64, -0.75 + 4 / 64]
    assert first.entropy.tolist() == [10 + 2 / 64, 10 + 3 / 64, 10 + 4 / 64]
    assert (first.gap_mean, first.gap_max) == (3 / 64, 4 / 64)
    assert third.entropy.tolist() == [10 + 12 / 64, 10 + 13 / 64]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"logprobs": array("f", [-0.5])}, "2 prompt tokens, 2 response tokens and 1 log-probs"),
        ({"response": array("i", [1, 2, 3])}, "2 prompt tokens, 3 response tokens and 2"),
        ({"prompt": array("i")}, "0 prompt tokens, 2 response tokens and 2"),
        (None, "its tokens are missing"),
    ],
)
def test_tokens_that_do_not_match_their_description_are_rejected(
    broken: dict[str, Any] | None, message: str
) -> None:
    groups = [group(9, completion(4, 2, RIGHT))]
    tokens = tokens_of(groups, overlong())
    tokens = {} if broken is None else {0: replace(tokens[0], **broken)}
    with pytest.raises(ValueError, match=f"^ticket 9, sample 4: {message}"):
        assemble(described(*groups), tokens)


def test_routes_are_of_all_tokens_but_the_last_of_each_sequence() -> None:
    groups = [
        group(7, completion(0, 3, RIGHT), completion(1, 1, WRONG)),
        group(9, completion(5, 2, WRONG), num_prompt_tokens=4),
    ]
    sequences, tokens, expected = described(*groups), tokens_of(groups, overlong()), []
    for index, sequence in enumerate(sequences):
        routes = np.arange(1, 1 + 6 * (sequence.num_tokens - 1), dtype=np.int16) + 100 * index
        tokens[index] = replace(tokens[index], routes=routes)
        expected += [*routes.reshape(-1, 6).tolist(), [0] * 6]
    batch = assemble(sequences, tokens, with_routes=True)
    assert batch.routes is not None and batch.routes.dtype == torch.int16
    assert batch.routes.tolist() == expected
    assert assemble(sequences, tokens).routes is None
    assert assemble([], {}, with_routes=True).routes is None
    for index, size, message in (
        (0, 0, "sample 0: 0 experts in its routes for 4 tokens with 0 "),
        (1, 0, "sample 1: 0 experts in its routes for 2 tokens with 6 "),
        (1, 11, "sample 1: 11 experts in its routes for 2 tokens with 6 "),
    ):
        routes = np.zeros(size, np.int16) if size else None
        wrong = {**tokens, index: replace(tokens[index], routes=routes)}
        with pytest.raises(ValueError, match=f"^ticket 7, {message}"):
            assemble(sequences, wrong, with_routes=True)


@given(
    sizes=st.lists(st.lists(st.integers(1, 7), min_size=2, max_size=5), min_size=1, max_size=6),
    num_updates=st.integers(1, 12),
)
def test_split_is_even_and_keeps_every_sequence(sizes: list[list[int]], num_updates: int) -> None:
    groups = [
        group(ticket, *(completion(s, n, (RIGHT, WRONG)[s % 2]) for s, n in enumerate(row)))
        for ticket, row in enumerate(sizes)
    ]
    batch = assembled(*groups)
    routes = torch.arange(6 * batch.tokens.numel()).view(-1, 6)
    batch = replace(batch, old_logprobs=batch.engine_logprobs - 0.25, routes=routes)
    minis = split(batch, num_updates, "token")
    counts = [mini.num_sequences for mini in minis]
    assert len(minis) == min(num_updates, batch.num_sequences)
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    for name in (
        "tokens", "lengths", "loss_mask", "advantages", "engine_logprobs",
        "group_ids", "old_logprobs", "routes",
    ):  # fmt: skip
        assert torch.equal(torch.cat([getattr(m, name) for m in minis]), getattr(batch, name)), name
    assert sum((mini.sequence_names for mini in minis), ()) == batch.sequence_names
    for mini in minis:
        assert int(mini.lengths.sum()) == mini.tokens.numel()


def weighted_mean(mini: TokenBatch, values: torch.Tensor) -> float:
    """Return the mean loss as policy/step.py computes it from per-token losses."""
    return float((values * mini.weights)[mini.loss_mask].sum() / mini.num_loss_tokens)


def test_aggregation_weights_are_computed_per_mini_batch() -> None:
    # Ticket 1 is split over both mini-batches: each uses its own token count as denominator.
    groups = [
        group(0, completion(0, 1, RIGHT), completion(1, 3, WRONG)),
        group(1, completion(0, 2, RIGHT), completion(1, 4, WRONG)),
        group(2, completion(0, 5, RIGHT), completion(1, 1, WRONG)),
    ]
    batch = assembled(*groups)
    # Each token's loss is its sequence's number of tokens: 1, 3, 2 | 4, 5, 1.
    expected = {
        "token": (14 / 6, 42 / 10),  # (1 + 9 + 4) / 6, (16 + 25 + 1) / 10
        "sequence": (6 / 3, 10 / 3),
        "prompt": ((10 / 4 + 2) / 2, (4 + 26 / 6) / 2),
        "constant": (14 / 8 / 3, 42 / 8 / 3),
    }
    for kind, means in expected.items():
        minis = split(batch, 2, kind, divisor=8)  # type: ignore[arg-type]
        for mini, mean in zip(minis, means, strict=True):
            values = (mini.lengths - 2).repeat_interleave(mini.lengths).float()
            assert weighted_mean(mini, values) == pytest.approx(mean, rel=1e-5), kind
