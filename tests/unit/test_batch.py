"""Token batches: what is trained on, with which advantage, weight and name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.data.batch import assemble, fresh_mask, graded, split
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, TokenBatch

RIGHT, WRONG = Grade(1.0, True, "7"), Grade(-1.0, False, "8")


def completion(
    sample: int,
    num_tokens: int,
    grade: Grade | None,
    *,
    finish: Finish = Finish.STOP,
    version: int = 3,
) -> Completion:
    tokens = tuple(range(100, 100 + num_tokens))
    logprobs = tuple(-0.5 - sample - place / 8 for place in range(num_tokens))
    return Completion(sample, tokens, logprobs, "", finish, version, grade)


def group(ticket: int, *completions: Completion, num_prompt_tokens: int = 2) -> Group:
    tokens = tuple(range(10, 10 + num_prompt_tokens))
    return Group(ticket, Prompt("s", ticket, tokens, "4 + 3 =", "7"), completions)


def assembled(*groups: Group, penalty: bool = False, filter_truncated: bool = False) -> TokenBatch:
    return assemble(
        groups,
        max_tokens=8,
        buffer_tokens=4,
        penalty=penalty,
        filter_truncated=filter_truncated,
        eps=1e-6,
    )


def test_layout_of_a_batch() -> None:
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
    assert {batch.tokens.dtype, batch.lengths.dtype, batch.group_ids.dtype} == {torch.int64}
    assert batch.loss_mask.dtype is torch.bool
    floats = (batch.advantages, batch.weights, batch.engine_logprobs)
    assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_ungraded_completions_are_left_out_of_everything() -> None:
    with_it = group(1, completion(0, 2, RIGHT), completion(1, 5, None), completion(2, 2, WRONG))
    without = group(1, completion(0, 2, RIGHT), completion(2, 2, WRONG))
    left, right = assembled(with_it), assembled(without)
    assert left.sequence_names == right.sequence_names
    assert torch.equal(left.tokens, right.tokens)
    assert torch.equal(left.advantages, right.advantages)
    assert len(list(graded([with_it]))) == 2
    assert fresh_mask([with_it], 3).numel() == left.tokens.numel()


def test_overlong_penalty_shapes_the_reward_of_long_answers() -> None:
    # 6 tokens of 8, buffer 4: penalty -0.5. Rewards 1, 0.5, -1; mean 1/6, ddof-1 std 1.0408.
    long = group(1, completion(0, 2, RIGHT), completion(1, 6, RIGHT), completion(2, 2, WRONG))
    shaped = assembled(long, penalty=True)
    firsts = [shaped.advantages[2], shaped.advantages[6], shaped.advantages[14]]
    assert [float(value) for value in firsts] == pytest.approx(
        [0.80064, 0.32026, -1.12090], abs=1e-4
    )
    plain = assembled(long)
    assert float(plain.advantages[2]) == float(plain.advantages[6])


def test_filtered_truncated_completions_still_enter_the_group_mean() -> None:
    cut = group(
        1,
        completion(0, 2, RIGHT),
        completion(1, 2, WRONG),
        completion(2, 8, WRONG, finish=Finish.LENGTH),
    )
    kept, filtered = assembled(cut), assembled(cut, filter_truncated=True)
    assert (kept.num_loss_tokens, filtered.num_loss_tokens) == (12, 4)
    assert not filtered.loss_mask[8:].any()
    assert torch.equal(kept.advantages, filtered.advantages)
    assert kept.num_sequences == filtered.num_sequences == 3


def test_fresh_tokens_are_response_tokens_of_this_version() -> None:
    mixed = group(1, completion(0, 2, RIGHT, version=3), completion(1, 1, WRONG, version=2))
    assert fresh_mask([mixed], 3).tolist() == [False, False, True, True, False, False, False]
    assert fresh_mask([mixed], 2).tolist() == [False] * 6 + [True]


def test_logprobs_that_do_not_cover_the_tokens_are_refused() -> None:
    broken = replace(completion(4, 2, RIGHT), logprobs=(-0.5,))
    with pytest.raises(ValueError, match=r"ticket 9, sample 4: 1 log-probs for 2 tokens"):
        assembled(group(9, broken))


def test_no_graded_completion_gives_an_empty_batch_and_no_update() -> None:
    batch = assembled(group(1, completion(0, 2, None)))
    assert (batch.num_sequences, batch.num_loss_tokens, batch.tokens.numel()) == (0, 0, 0)
    assert split(batch, 4, "token") == []


@settings(deadline=None)  # cores are shared
@given(
    sizes=st.lists(st.lists(st.integers(1, 7), min_size=2, max_size=5), min_size=1, max_size=6),
    num_updates=st.integers(1, 12),
)
def test_split_is_even_and_loses_nothing(sizes: list[list[int]], num_updates: int) -> None:
    groups = [
        group(ticket, *(completion(s, n, (RIGHT, WRONG)[s % 2]) for s, n in enumerate(row)))
        for ticket, row in enumerate(sizes)
    ]
    batch = assembled(*groups)
    batch = replace(batch, old_logprobs=batch.engine_logprobs - 0.25)
    minis = split(batch, num_updates, "token")
    counts = [mini.num_sequences for mini in minis]
    assert len(minis) == min(num_updates, batch.num_sequences)
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    for name in (
        "tokens", "lengths", "loss_mask", "advantages", "engine_logprobs",
        "group_ids", "old_logprobs",
    ):  # fmt: skip
        assert torch.equal(torch.cat([getattr(m, name) for m in minis]), getattr(batch, name)), name
    assert sum((mini.sequence_names for mini in minis), ()) == batch.sequence_names
    for mini in minis:
        assert int(mini.lengths.sum()) == mini.tokens.numel()


def weighted_mean(mini: TokenBatch, values: torch.Tensor) -> float:
    """What policy/step.py makes of per-token losses."""
    return float((values * mini.weights)[mini.loss_mask].sum() / mini.num_loss_tokens)


def test_weights_follow_the_aggregation_of_each_part() -> None:
    # Ticket 1 lies across both parts: its denominator is that of the part.
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
    }
    for kind, means in expected.items():
        for mini, mean in zip(split(batch, 2, kind), means, strict=True):  # type: ignore[arg-type]
            values = (mini.lengths - 2).repeat_interleave(mini.lengths).float()
            assert weighted_mean(mini, values) == pytest.approx(mean, rel=1e-5), kind
