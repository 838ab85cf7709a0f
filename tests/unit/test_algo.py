"""Properties of the formulas other than the loss, beyond the golden vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo import mismatch
from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.evaluation import avg_at_k, cons_at_k, pass_at_k
from dapo_megatron.algo.mismatch import (
    GapStatistics,
    TokenGap,
    check_gaps,
    gap_statistics,
    merge,
)
from dapo_megatron.algo.overlong import completion_reward, overlong_penalty
from dapo_megatron.algo.sampling import Verdict, verdict
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.types import (
    SyncError,
    TokenBatch,
)

# ------------------------------------------------------------------------ advantage


@settings(deadline=None)
@given(
    groups=st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 10**6),
)
def test_advantage_matches_a_loop_over_groups(groups: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    group_indices = torch.randint(len(groups), (17,), generator=generator)
    ids = torch.tensor(groups)[group_indices]
    rewards = torch.randn(17, generator=generator)
    expected = torch.empty(17)
    for group in groups:
        group_rewards = rewards[ids == group]
        if len(group_rewards) == 1:
            expected[ids == group] = group_rewards / (1 + 1e-6)
        else:
            expected[ids == group] = (group_rewards - group_rewards.mean()) / (
                group_rewards.std() + 1e-6
            )
    advantages = group_advantage(rewards, ids)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


@given(rewards=st.lists(st.sampled_from([-1.0, -0.5, 1.0]), min_size=1, max_size=9))
def test_advantage_without_the_standard_deviation_is_the_centred_reward(
    rewards: list[float],
) -> None:
    """Dr. GRPO. Sequences alternate between two groups; a group of one keeps its reward."""
    groups = [index % 2 for index in range(len(rewards))]
    advantages = group_advantage(
        torch.tensor(rewards, dtype=torch.float64), groups, divide_by_std=False
    )
    for group in set(groups):
        own = torch.tensor([r for r, g in zip(rewards, groups, strict=True) if g == group])
        mean = own.double().mean() if len(own) > 1 else 0.0
        assert advantages[torch.tensor(groups) == group].tolist() == pytest.approx(
            (own.double() - mean).tolist()
        )


def test_advantage_keeps_the_shape_and_rejects_mismatched_or_non_finite_rewards() -> None:
    rewards = torch.tensor([[1.0, -1.0], [0.1, 0.1]])
    advantages = group_advantage(rewards, torch.tensor([[0, 0], [9, 9]]))
    assert advantages.shape == (2, 2)
    assert advantages[1].tolist() == [0.0, 0.0]
    assert group_advantage(torch.zeros(0), []).shape == (0,)
    assert group_advantage(torch.tensor([1, -1]), [0, 0]).dtype == torch.get_default_dtype()
    assert group_advantage(torch.ones(2, dtype=torch.float64), [0, 0]).dtype == torch.float64
    with pytest.raises(ValueError, match="2 rewards, but 1"):
        group_advantage(torch.zeros(2), [0])
    with pytest.raises(ValueError, match="finite"):
        group_advantage(torch.tensor([math.nan, 1.0]), [0, 0])


# ------------------------------------------------------------------------ rewards, schedule, pass@k


def test_overlong_penalty_is_bounded_and_rejects_bad_arguments() -> None:
    values = [overlong_penalty(n, max_tokens=10, buffer_tokens=4) for n in (0, 6, 7, 10, 99)]
    assert values == [0.0, 0.0, -0.25, -1.0, -1.0]
    assert math.copysign(1.0, values[0]) == 1.0
    steepest = [overlong_penalty(n, max_tokens=2, buffer_tokens=1) for n in range(3)]
    assert steepest == [0.0, 0.0, -1.0]
    for maximum, buffer in ((10, 0), (10, 10), (10, -1)):
        with pytest.raises(ValueError, match="buffer_tokens"):
            overlong_penalty(1, max_tokens=maximum, buffer_tokens=buffer)
    with pytest.raises(ValueError, match="negative"):
        overlong_penalty(-1, max_tokens=10, buffer_tokens=4)


def test_completion_reward_keeps_correctness_and_penalty_apart() -> None:
    limits = {"max_tokens": 10, "buffer_tokens": 4}
    assert completion_reward(0.5, 8, penalty=True, **limits) == (0.5, -0.5)
    assert completion_reward(0.5, 8, penalty=True, **limits).total == 0.0
    assert completion_reward(0.5, 99, penalty=False, **limits) == (0.5, 0.0)


def test_group_verdict() -> None:
    assert verdict([True, False]) is Verdict.MIXED
    assert verdict([True, True]) is Verdict.ALL_CORRECT
    assert verdict([False, False]) is Verdict.ALL_WRONG
    with pytest.raises(ValueError, match="without completions"):
        verdict([])


def test_learning_rate_warms_up_linearly() -> None:
    assert warmup_lr(1, lr=0.5, warmup_rollout_steps=0) == 0.5
    assert warmup_lr(3, lr=0.5, warmup_rollout_steps=4) == 0.25
    for step, warmup in ((0, 5), (1, -1)):
        with pytest.raises(ValueError, match="rollout_step"):
            warmup_lr(step, lr=1.0, warmup_rollout_steps=warmup)


def test_pass_at_k_is_unbiased_with_more_than_k_samples() -> None:
    row = [True, False, False, False]
    # 3 of the 6 pairs contain the correct sample.
    assert pass_at_k([row], k=2) == pytest.approx(0.5)
    assert pass_at_k([row, [False] * 4], k=1) == pytest.approx(0.125)
    for k in (0, 5):
        with pytest.raises(ValueError, match="of 4 samples"):
            pass_at_k([row], k=k)


def test_majority_vote_breaks_ties_by_the_first_answer() -> None:
    assert cons_at_k([[True, False]], [["7", "8"]]) == 1.0
    assert cons_at_k([[False, True]], [["8", "7"]]) == 0.0
    assert cons_at_k([[False, True, True]], [["8", "7", "7"]]) == 1.0
    with pytest.raises(ValueError, match="shape"):
        cons_at_k([[True]], [["7", "8"]])


def test_evaluation_without_samples_is_rejected() -> None:
    for empty in ([], [[True], []]):
        with pytest.raises(ValueError, match="at least one"):
            avg_at_k(empty)


# ------------------------------------------------------------------------ mismatch


def batch_with_gaps(
    engine: Sequence[float], policy: Sequence[float], lengths: Sequence[int] = ()
) -> TokenBatch:
    """Sequences of these lengths, or a single one, with tokens 10, 11, ..."""
    num_tokens = len(engine)
    zeros_T, lengths_S = torch.zeros(num_tokens), torch.tensor(lengths or [num_tokens])
    return TokenBatch(
        lengths=lengths_S, loss_tokens=torch.zeros_like(lengths_S),
        group_ids=torch.arange(len(lengths_S)), tokens=torch.arange(10, 10 + num_tokens),
        loss_mask=zeros_T.bool(), advantages=zeros_T, weights=zeros_T,
        engine_logprobs=torch.tensor(engine), old_logprobs=torch.tensor(policy),
        sequence_names=tuple(f"ticket {4 + 3 * n}, sample {2 * n}" for n in range(len(lengths_S))),
    )  # fmt: skip


def all_of(batch: TokenBatch) -> torch.Tensor:
    return torch.ones(len(batch.tokens), dtype=torch.bool)


def test_gap_statistics() -> None:
    batch = batch_with_gaps(
        (-1.0, math.nan, -2.0, -3.0, -1.0, 0.0), (-1.5, 0.0, -2.0, -2.0, -1.0, math.inf)
    )
    gap = gap_statistics(batch, torch.tensor([1, 0, 1, 1, 1, 0]).bool())
    assert (gap.mean, gap.max, gap.num_tokens) == (0.375, 1.0, 4)
    assert gap.worst == TokenGap("ticket 4, sample 0", 3, 13, -3.0, -2.0)
    assert gap.kl == pytest.approx(((math.exp(-0.5) - 0.5) + (math.e - 2)) / 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gap_counts_as_infinite(bad: float) -> None:
    batch = batch_with_gaps((-1.0, bad), (-3.0, -1.0))
    gap = gap_statistics(batch, all_of(batch))
    assert gap.max == gap.mean == gap.kl == math.inf
    assert gap.worst is not None
    assert gap.worst.position == 1


def test_gap_of_no_tokens_is_zero_and_shapes_must_match() -> None:
    batch = batch_with_gaps((1.0, 1.0), (0.0, 0.0))
    no_tokens = gap_statistics(batch, torch.zeros(2).bool())
    assert no_tokens == GapStatistics() == merge([]) == merge([GapStatistics()] * 2)
    assert (no_tokens.mean, no_tokens.max, no_tokens.kl, no_tokens.worst) == (0.0, 0.0, 0.0, None)
    with pytest.raises(ValueError, match="shapes differ"):
        gap_statistics(batch, torch.ones(3).bool())


@given(st.lists(st.sampled_from([0.0, 0.125, -0.5, 1.0]), min_size=1, max_size=12), st.data())
def test_merged_gaps_equal_those_of_all_tokens(gaps: list[float], data: st.DataObject) -> None:
    batch = batch_with_gaps([0.0] * len(gaps), gaps, [1] * len(gaps))
    part_T = torch.tensor([data.draw(st.integers(0, 2)) for _ in gaps])
    parts = [gap_statistics(batch, part_T == part) for part in range(3)]
    whole, merged = gap_statistics(batch, all_of(batch)), merge(parts)
    assert (merged.total, merged.max, merged.num_tokens) == (whole.total, whole.max, len(gaps))
    assert merged.kl == pytest.approx(whole.kl)
    assert merged.worst is not None
    assert abs(merged.worst.policy_logprob) == whole.max


def test_gaps_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_with_gaps([0.0] * 7, [0.0, 0.5, 0.25, 0.0, 0.0, -1.0, 0.25], [3, 4])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool()
    whole = gap_statistics(batch, mask)
    monkeypatch.setattr(mismatch, "CHUNK", 2)
    chunked = gap_statistics(batch, mask)
    assert (chunked.total, chunked.num_tokens, chunked.worst) == (1.75, 6, whole.worst)
    assert chunked.kl == pytest.approx(whole.kl)


def disagreeing_batch() -> TokenBatch:
    """Two sequences of 2 and 3 tokens; the gaps are 0.25 at tokens 1 and 3, and 0.5 at token 2."""
    return batch_with_gaps((-1.0, -2.0, -3.0, -1.0, -2.0), (-1.0, -1.75, -3.5, -0.75, -2.0), (2, 3))


def test_gaps_equal_to_their_bounds_pass() -> None:
    gap = gap_statistics(disagreeing_batch(), torch.tensor([1, 1, 1, 1, 0]).bool())
    assert (gap.mean, gap.max, gap.num_tokens) == (0.25, 0.5, 4)
    check_gaps({0: gap}, version=3, max_gap=0.5, max_mean_gap=0.25)
    check_gaps({0: gap}, version=3, max_gap=0.5, max_mean_gap=None)
    check_gaps({0: GapStatistics()}, version=3, max_gap=-1.0, max_mean_gap=None)


def test_a_mean_gap_above_its_bound_is_reported() -> None:
    gap = gap_statistics(disagreeing_batch(), torch.tensor([1, 1, 1, 1, 0]).bool())
    with pytest.raises(
        SyncError,
        match=r"^weights 3: engine 0 and policy disagree by 0\.25 on the mean of 4 tokens; "
        r"sync\.max_mean_gap is 0\.2\. ",
    ):
        check_gaps({0: gap}, version=3, max_gap=9.0, max_mean_gap=0.2)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_token_with_the_largest_gap_is_reported(rank: int) -> None:
    """Also if another rank holds it: then its statistics are merged with those of others."""
    batch = disagreeing_batch()
    own = gap_statistics(batch, all_of(batch))
    other = GapStatistics(total=0.1, max=0.1, num_tokens=8, worst=TokenGap("other", 0, 1, 0.1, 0.0))
    gap = merge([own, other] if rank == 0 else [GapStatistics(), other, own])
    message = (
        r"^weights 3: engine 0 and policy disagree by 0\.5 on ticket 7, sample 2, token 0 "
        r"\(id 12\): log-prob -3\.000000 by the engine, -3\.500000 by the policy"
    )
    for max_mean_gap in (None, 0.5):
        with pytest.raises(SyncError, match=message + r".*sync\.max_gap is 0\.2\. "):
            check_gaps({0: gap}, version=3, max_gap=0.2, max_mean_gap=max_mean_gap)


def test_the_worst_token_of_held_sequences_has_its_name_in_the_step() -> None:
    whole = disagreeing_batch()
    held = replace(
        whole, owners=torch.tensor([0, 1]), held=torch.tensor([1]),
        tokens=whole.tokens[2:], engine_logprobs=whole.engine_logprobs[2:],
        old_logprobs=whole.old_logprobs[2:],
    )  # fmt: skip
    gap = gap_statistics(held, torch.tensor([0, 1, 1]).bool())
    assert gap.worst == TokenGap("ticket 7, sample 2", 1, 13, -1.0, -0.75)
