"""Properties of the formulas other than the loss, beyond the golden vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algo import mismatch
from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.evaluation import avg_at_k, bootstrap_interval, cons_at_k, pass_at_k
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


@given(
    rewards=st.lists(st.sampled_from([-1.0, -0.5, 0.1, 1.0]), max_size=9),
    groups=st.lists(st.integers(-(10**12), 10**12), min_size=9, max_size=9)
    | st.lists(st.integers(0, 2), min_size=9, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    by_std=st.booleans(),
)
def test_advantages_are_those_of_a_loop_over_groups(
    rewards: list[float], groups: list[int], dtype: torch.dtype, by_std: bool
) -> None:
    ids = groups[: len(rewards)]
    values = torch.tensor(rewards, dtype=dtype)
    expected = []
    for reward, group in zip(values.tolist(), ids, strict=True):
        own = [r for r, g in zip(values.tolist(), ids, strict=True) if g == group]
        is_single = len(own) == 1  # keeps its reward
        std = 1.0 if is_single else float(np.std(own, ddof=1))
        centred = reward - (0.0 if is_single else float(np.mean(own)))
        expected.append(centred / (std + 1e-6) if by_std else centred)
    advantages = group_advantage(values[None], ids, divide_by_std=by_std)
    assert advantages.dtype == dtype and advantages.shape == (1, len(rewards))
    assert advantages[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_advantages_refuse_mismatched_or_non_finite_rewards() -> None:
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
    for values, resamples in (([], 1), ([0.5], 0)):
        with pytest.raises(ValueError, match=f"^{resamples} resamples of {len(values)} problems"):
            bootstrap_interval(values, resamples=resamples, seed=0)


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


LOGPROBS = st.sampled_from([-0.5, -1.0, -3.25, 0.0])  # differences are exact
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    tokens=st.lists(
        st.tuples(LOGPROBS | BAD, LOGPROBS | BAD, st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    first_length=st.integers(0, 12),
    chunk=st.integers(1, 5),
)
def test_gaps_of_parts_merge_to_those_of_a_loop_over_the_tokens(
    tokens: list[tuple[float, float, int]], first_length: int, chunk: int
) -> None:
    """Parts 0 to 2 are of three ranks; tokens of part 3 are outside the mask."""
    engine, policy, part = map(list, zip(*tokens, strict=True))
    first = min(first_length, len(tokens))
    batch = batch_with_gaps(engine, policy, (first, len(tokens) - first))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch, "CHUNK", chunk)
        parts = [gap_statistics(batch, torch.tensor(part) == number) for number in range(3)]
    merged = merge(parts)
    masked = [index for index in range(len(tokens)) if part[index] < 3]
    differences = [policy[index] - engine[index] for index in masked]
    gaps = [abs(d) if math.isfinite(d) else math.inf for d in differences]
    kls = [math.exp(d) - 1 - d if math.isfinite(d) else math.inf for d in differences]
    assert merged.num_tokens == len(masked)
    if not masked:
        assert merged == GapStatistics() == merge([])
        assert (merged.mean, merged.max, merged.kl, merged.worst) == (0.0, 0.0, 0.0, None)
        return
    assert (merged.mean, merged.max) == (sum(gaps) / len(gaps), max(gaps))
    assert merged.kl == pytest.approx(sum(kls) / len(kls), abs=1e-12)
    worst = merged.worst
    assert worst is not None
    index = worst.token - 10
    assert gaps[masked.index(index)] == max(gaps)
    name, start = ("ticket 4, sample 0", 0) if index < first else ("ticket 7, sample 2", first)
    assert (worst.sequence_name, worst.position) == (name, index - start)


@given(st.sampled_from([0.125, 0.25, 0.5]), st.sampled_from([0.0625, 0.15625, 0.25]))
def test_only_gaps_above_their_bounds_are_reported_with_engine_and_token(
    max_gap: float, max_mean_gap: float
) -> None:
    batch = batch_with_gaps((-1.0, -2.0, -3.0, -1.0), (-1.0, -1.875, -3.5, -1.0), (2, 2))
    gap = gap_statistics(batch, torch.ones(4).bool())
    assert (gap.max, gap.mean) == (0.5, 0.15625)
    message = ""
    if max_gap < 0.5:
        message = (
            r"by 0\.5 on ticket 7, sample 2, token 0 \(id 12\): log-prob -3\.000000 by the engine, "
            rf"-3\.500000 by the policy.*sync\.max_gap is {max_gap:g}"
        )
    if max_mean_gap < 0.15625:
        message = r"by 0\.156 on the mean of 4 tokens; sync\.max_mean_gap is 0\.0625"
    expected = pytest.raises(SyncError, match=f"^weights 3: engine 6 and policy disagree {message}")
    gaps = {2: GapStatistics(), 6: gap}
    with expected if message else nullcontext():
        check_gaps(gaps, version=3, max_gap=max_gap, max_mean_gap=max_mean_gap)


def test_the_worst_token_of_held_sequences_has_its_name_in_the_step() -> None:
    whole = batch_with_gaps((-2.0, -3.0, -1.0), (-1.0, -3.5, -0.75), (1, 2))
    held = replace(
        whole, owners=torch.tensor([0, 1]), held=torch.tensor([1]),
        tokens=whole.tokens[1:], engine_logprobs=whole.engine_logprobs[1:],
        old_logprobs=whole.old_logprobs[1:],
    )  # fmt: skip
    gap = gap_statistics(held, torch.tensor([0, 1]).bool())
    assert gap.worst == TokenGap("ticket 7, sample 2", 1, 12, -1.0, -0.75)
