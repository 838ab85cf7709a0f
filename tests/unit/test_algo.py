"""Properties of the formulas other than the loss, beyond the golden vectors."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.evaluation import avg_at_k, cons_at_k, pass_at_k
from dapo_megatron.algo.mismatch import GapStatistics, check_gap, gap_statistics
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


def test_gap_statistics() -> None:
    engine = torch.tensor([[-1.0, math.nan, -2.0], [-3.0, -1.0, 0.0]])
    policy = torch.tensor([[-1.5, 0.0, -2.0], [-2.0, -1.0, math.inf]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    gap = gap_statistics(engine, policy, mask)
    assert (gap.mean, gap.max, gap.worst_token, gap.num_tokens) == (0.375, 1.0, 3, 4)
    assert gap.kl == pytest.approx(((math.exp(-0.5) - 0.5) + (math.e - 2)) / 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gap_counts_as_infinite(bad: float) -> None:
    gap = gap_statistics(torch.tensor([-1.0, bad]), torch.tensor([-3.0, -1.0]), torch.ones(2))
    assert gap.max == gap.mean == gap.kl == math.inf
    assert gap.worst_token == 1


def test_gap_of_no_tokens_is_zero_and_shapes_must_match() -> None:
    no_tokens = gap_statistics(torch.ones(2), torch.zeros(2), torch.zeros(2))
    assert no_tokens == GapStatistics(mean=0.0, max=0.0, kl=0.0, worst_token=None, num_tokens=0)
    with pytest.raises(ValueError, match="shapes differ"):
        gap_statistics(torch.ones(2), torch.zeros(1), torch.ones(2))


def disagreeing_batch() -> TokenBatch:
    """Two sequences of 2 and 3 tokens; the gaps are 0.25 at tokens 1 and 3, and 0.5 at token 2."""
    engine = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0])
    zeros = torch.zeros(5)
    return TokenBatch(
        tokens=torch.arange(10, 15), lengths=torch.tensor([2, 3]), loss_mask=zeros.bool(),
        advantages=zeros, weights=zeros, engine_logprobs=engine, group_ids=torch.tensor([0, 1]),
        old_logprobs=engine + torch.tensor([0.0, 0.25, -0.5, 0.25, 0.0]),
        sequence_names=("ticket 4, sample 0", "ticket 7, sample 2"),
    )  # fmt: skip


def test_gaps_equal_to_their_bounds_pass() -> None:
    batch, mask = disagreeing_batch(), torch.tensor([1, 1, 1, 1, 0]).bool()
    gap = check_gap(batch, mask, version=3, max_gap=0.5, max_mean_gap=0.25)
    assert (gap.mean, gap.max, gap.num_tokens, gap.worst_token) == (0.25, 0.5, 4, 2)
    assert check_gap(batch, mask, version=3, max_gap=0.5, max_mean_gap=None) == gap
    no_tokens = check_gap(batch, torch.zeros(5).bool(), version=3, max_gap=-1.0, max_mean_gap=None)
    assert no_tokens.num_tokens == 0


def test_a_mean_gap_above_its_bound_is_reported() -> None:
    batch = disagreeing_batch()
    mask = torch.tensor([1, 1, 1, 1, 0]).bool()
    with pytest.raises(
        SyncError,
        match=r"^weights 3: engine and policy disagree by 0\.25 on the mean of 4 tokens; "
        r"sync\.max_mean_gap is 0\.2\. ",
    ):
        check_gap(batch, mask, version=3, max_gap=9.0, max_mean_gap=0.2)


@pytest.mark.parametrize(
    ("mask_values", "message"),
    [
        ([1, 1, 1, 1, 1], r"0\.5 on ticket 7, sample 2, token 0 \(id 12\): log-prob -3\.000000 by "
                          r"the engine, -3\.500000 by the policy"),
        ([1, 1, 0, 0, 0], r"0\.25 on ticket 4, sample 0, token 1 \(id 11\): log-prob -2\.000000"),
        ([0, 0, 0, 1, 1], r"0\.25 on ticket 7, sample 2, token 1 \(id 13\): log-prob -1\.000000"),
    ],
)  # fmt: skip
def test_the_token_with_the_largest_gap_is_reported(mask_values: list[int], message: str) -> None:
    mask = torch.tensor(mask_values).bool()
    with pytest.raises(SyncError, match=f"^weights 3: engine and policy disagree by {message}"):
        check_gap(disagreeing_batch(), mask, version=3, max_gap=0.2, max_mean_gap=None)
    with pytest.raises(SyncError, match=r"sync\.max_gap is 0\.2\. "):
        check_gap(disagreeing_batch(), mask, version=3, max_gap=0.2, max_mean_gap=0.5)


def test_algo_imports_neither_megatron_nor_vllm_nor_the_config() -> None:
    code = (
        "import sys, dapo_megatron.algo; "
        "assert not {'megatron', 'vllm', 'pydantic', 'dapo_megatron.config'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
