"""Properties of the token loss and its aggregation, in addition to the golden vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo.loss import (
    aggregation_weights,
    dapo_token_loss,
)
from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.batch import fresh_mask
from dapo_megatron.types import (
    Completion,
    Finish,
    Grade,
    Group,
    MicroTokens,
    Prompt,
    Segment,
)
from tests.helpers.batches import assemble_groups, described
from tests.helpers.losses import loss_with

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
FIELDS = ("old_logprobs", "advantages", "weights", "engine_logprobs", "mask")


def random_micro(num_tokens: int, seed: int) -> tuple[torch.Tensor, MicroTokens]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    old = -normal().abs()
    micro = MicroTokens(
        old_logprobs=old,
        advantages=normal(),
        weights=normal().abs(),
        engine_logprobs=old + 0.3 * normal(),
        mask=torch.rand(num_tokens, generator=generator) < 0.7,
    )
    return (old + normal()).requires_grad_(), micro


def select(micro: MicroTokens, index: torch.Tensor) -> MicroTokens:
    return MicroTokens(*(getattr(micro, name)[index] for name in FIELDS))


# ------------------------------------------------------------------------ loss


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_token_loss_ignores_each_argument_outside_the_mask(argument: int, bad: float) -> None:
    values = [torch.tensor([-0.5, bad if i == argument else -0.5]) for i in range(3)]
    values[0].requires_grad_()
    result = dapo_token_loss(*values, torch.tensor([1.0, 0.0]), clip_low=0.2, clip_high=0.28)
    result.total.backward()
    assert result.per_token.tolist() == [0.5, 0.0]
    assert values[0].grad.tolist() == [0.5, 0.0]


def test_a_nan_inside_the_mask_is_not_hidden() -> None:
    for argument in range(3):
        values = [torch.tensor([math.nan if i == argument else -0.5]) for i in range(3)]
        result = dapo_token_loss(*values, torch.ones(1), **CLIP)
        assert result.total.isnan()


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_micro_batches_add_up_to_the_loss_of_the_batch(seed: int, cuts: list[int]) -> None:
    logp, micro = random_micro(30, seed)
    loss = loss_with(**CLIP, tis_cap=2.0)
    whole = loss(logp, micro)
    (gradient,) = torch.autograd.grad(whole.total, logp)

    edges = sorted([0, *cuts, 30])
    parts = [
        loss(logp[start:stop], select(micro, torch.arange(start, stop)))
        for start, stop in pairwise(edges)
    ]
    total = sum(part.total for part in parts)
    (split_gradient,) = torch.autograd.grad(total, logp)
    torch.testing.assert_close(total, whole.total)
    torch.testing.assert_close(split_gradient, gradient)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(part.sums[name] for part in parts), value)


def test_clip_fractions_count_the_bound_that_determined_the_loss() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 5.0, 1.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    result = dapo_token_loss(ratio.log(), torch.zeros(6), advantage, torch.ones(6), **CLIP)
    assert float(result.clip_fraction_high) == pytest.approx(1 / 6)
    assert float(result.clip_fraction_low) == pytest.approx(1 / 6)
    assert float(result.dual_clip_fraction) == pytest.approx(1 / 6)
    expected = torch.tensor([-1.28, 1.5, -0.5, 0.8, 3.0, -1.0])
    torch.testing.assert_close(result.per_token, expected)
    without = dapo_token_loss(
        ratio.log(), torch.zeros(6), advantage, torch.ones(6), clip_low=0.2, clip_high=0.28
    )
    assert float(without.per_token[4]) == pytest.approx(5.0)
    assert float(without.dual_clip_fraction) == 0.0


def test_clip_fractions_of_one_token_and_of_none() -> None:
    ones = torch.ones(1)
    result = dapo_token_loss(torch.tensor([1.5]).log(), torch.zeros(1), ones / 2, ones, **CLIP)
    assert (result.clip_fraction_high, result.clip_fraction_low) == (1.0, 0.0)
    empty = dapo_token_loss(ones, ones, ones, torch.zeros(1), **CLIP)
    assert empty.clip_fraction_high == empty.clip_fraction_low == empty.dual_clip_fraction == 0.0


def test_a_loss_exactly_at_the_dual_clip_does_not_count_as_clipped() -> None:
    ones = torch.ones(2)
    result = dapo_token_loss(
        torch.zeros(2), torch.zeros(2), -ones, ones, clip_low=0.2, clip_high=0.28, dual_clip=1.0
    )
    assert result.per_token.tolist() == [1.0, 1.0]
    assert float(result.dual_clip_fraction) == 0.0


def test_the_ratio_is_constant_beyond_its_limit() -> None:
    logp = torch.tensor([25.0, 90.0, -90.0], requires_grad=True)
    advantage = torch.tensor([-1.0, -1.0, 1.0])
    result = dapo_token_loss(
        logp, torch.zeros(3), advantage, torch.ones(3), clip_low=0.2, clip_high=0.28
    )
    result.total.backward()
    expected = torch.tensor([math.exp(20), math.exp(20), -math.exp(-20)])
    torch.testing.assert_close(result.per_token.detach(), expected)
    assert not logp.grad.any()


def test_shapes_of_the_loss_must_agree() -> None:
    with pytest.raises(ValueError, match=r"old_logp \(2,\)"):
        dapo_token_loss(torch.zeros(3), torch.zeros(2), torch.zeros(3), torch.ones(3), **CLIP)


def test_tis_weights_of_a_completion_sampled_by_two_versions() -> None:
    """The TIS weight of a token uses the version that sampled it; the ratio uses the old policy.

    The old policy gives 0.25 to each token. Version 1 sampled the first two tokens at 0.5 and
    0.0625: policy / engine is 0.5 and 4, capped at 2. Version 2, that of the policy, sampled the
    others at 0.25 and 0.2: 1 and 1.25.
    """
    engine = (0.5, 0.0625, 0.25, 0.2)
    prompt = Prompt("s", 0, (10,), "4 + 3 =", "7")
    segments = (Segment(1, 2), Segment(2, 2))
    logprobs = tuple(map(math.log, engine))
    mixed = Completion(0, (5, 6, 7, 8), logprobs, "7", Finish.STOP, segments, Grade(1.0, True, "7"))
    other = replace(mixed, sample=1, grade=Grade(-1.0, False, "8"))
    overlong = OverlongConfig(
        max_tokens=8, buffer_tokens=4, penalty=False, filter=False, filtered_in_mean=False
    )
    groups = [Group(0, prompt, (mixed, other))]
    batch = assemble_groups(groups, overlong)
    fresh = fresh_mask(described(groups, overlong), batch, version=2)
    assert fresh.tolist() == 2 * [False, False, False, True, True]
    response = slice(1, 5)  # the tokens of `mixed`, whose advantage is 2 ** -0.5
    old = torch.full((4,), math.log(0.25))
    micro = MicroTokens(
        old_logprobs=old,
        advantages=batch.advantages[response],
        weights=batch.weights[response],
        engine_logprobs=batch.engine_logprobs[response],
        mask=batch.loss_mask[response],
    )
    # The policy now gives 0.275, a ratio of 1.1 for every token, within the clip range.
    out = loss_with(**CLIP, tis_cap=2.0)(torch.full((4,), math.log(0.275)), micro)
    assert float(out.total) == pytest.approx(-(2**-0.5) * 1.1 * (0.5 + 2 + 1 + 1.25), rel=1e-5)
    assert float(out.sums["tis_weight"]) == pytest.approx(0.5 + 2 + 1 + 1.25)
    assert float(out.sums["tis_capped_fraction"]) == 1.0
    plain = loss_with(**CLIP)(torch.full((4,), math.log(0.275)), micro)
    assert float(plain.total) == pytest.approx(-(2**-0.5) * 1.1 * 4, rel=1e-5)
    assert not [name for name in plain.sums if name.startswith("tis")]


def test_only_the_log_probs_have_a_gradient_and_sums_have_their_dtype() -> None:
    logp, micro = random_micro(20, 2)
    old = micro.old_logprobs.requires_grad_()
    out = loss_with(**CLIP, tis_cap=1.1)(logp, micro)
    out.total.backward()
    assert logp.grad is not None and old.grad is None
    assert {value.dtype for value in out.sums.values()} == {torch.float64}


def test_the_limit_of_the_log_ratio_reaches_the_loss() -> None:
    zeros, ones = torch.zeros(1), torch.ones(1)
    micro = MicroTokens(zeros, -ones, ones, zeros, ones)
    limits = {"clip_low": 0.2, "clip_high": 0.28, "log_ratio_limit": 2.0}
    assert float(loss_with(**limits)(5 * ones, micro).total) == pytest.approx(math.exp(2))


def test_a_tis_weight_exactly_at_the_cap_does_not_count_as_capped() -> None:
    like, ones = torch.zeros(2), torch.ones(2)
    out = loss_with(**CLIP, tis_cap=1.0)(like, MicroTokens(like, ones, ones, like, ones))
    assert float(out.sums["tis_weight"]) == 2.0
    assert float(out.sums["tis_capped_fraction"]) == 0.0


# ------------------------------------------------------------------------ aggregation


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    kind=st.sampled_from(["token", "prompt", "sequence"]),
    seed=st.integers(0, 10**6),
)
def test_aggregation_weights_sum_to_the_tokens_and_are_equal_per_unit(
    lengths: list[int], kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(sum(lengths), generator=generator) < 0.6
    groups = torch.randint(-3, 3, (len(lengths),), generator=generator)
    lengths_S = torch.tensor(lengths)
    weights = aggregation_weights(
        kind, mask=mask, lengths=lengths_S, group_ids=groups, dtype=torch.float64
    )
    assert weights.dtype == torch.float64
    assert weights.isfinite().all()
    assert not weights[~mask].any()
    assert float(weights.sum()) == pytest.approx(int(mask.sum()))
    unit = {
        "token": torch.arange(len(mask)),
        "prompt": groups.repeat_interleave(lengths_S),
        "sequence": torch.arange(len(lengths)).repeat_interleave(lengths_S),
    }[kind]
    per_unit = [float(weights[(unit == u) & mask].sum()) for u in unit[mask].unique()]
    assert per_unit == pytest.approx([sum(per_unit) / max(len(per_unit), 1)] * len(per_unit))


def test_the_constant_aggregation_divides_sums_by_the_divisor() -> None:
    """Dr. GRPO: mean over the completions with loss tokens of their sums / divisor."""
    mask = torch.tensor([True, True, False, True, False])
    weights = aggregation_weights(
        "constant",
        mask=mask,
        lengths=torch.tensor([3, 1, 1]),
        group_ids=torch.tensor([1, 1, 2]),
        dtype=torch.float64,
        divisor=10,
    )
    loss = torch.tensor([2.0, 4.0, 9.0, 5.0, 9.0], dtype=torch.float64)
    assert float((weights * loss).sum() / mask.sum()) == pytest.approx((6 / 10 + 5 / 10) / 2)
    none = aggregation_weights(
        "constant", mask=~mask & mask, lengths=torch.tensor([5]), group_ids=torch.ones(1), divisor=1
    )
    assert not none.any()
    with pytest.raises(ValueError, match="needs a divisor"):
        aggregation_weights(
            "constant", mask=mask, lengths=torch.tensor([5]), group_ids=torch.ones(1)
        )


def test_aggregation_refuses_wrong_lengths_and_unknown_kinds() -> None:
    mask, two = torch.ones(5), torch.tensor([2, 3])
    with pytest.raises(ValueError, match="summing to 4"):
        aggregation_weights("token", mask=mask, lengths=torch.tensor([2, 2]), group_ids=two)
    with pytest.raises(ValueError, match="'tokens'"):
        aggregation_weights("tokens", mask=mask, lengths=two, group_ids=two)  # type: ignore[arg-type]
