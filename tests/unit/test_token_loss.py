"""Properties of the token loss and its aggregation, in addition to the golden vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algo.loss import (
    aggregation_weights,
    dapo_token_loss,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


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


def test_clip_fractions_count_the_bound_that_determined_the_loss() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 5.0, 1.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    result = dapo_token_loss(ratio.log(), torch.zeros(6), advantage, torch.ones(6), **CLIP)
    assert float(result.clip_fraction_high) == pytest.approx(1 / 6)
    assert float(result.clip_fraction_low) == pytest.approx(1 / 6)
    assert float(result.dual_clip_fraction) == pytest.approx(1 / 6)
    for at, index in ((result.at_high, 0), (result.at_low, 3), (result.at_dual, 4)):
        assert at.nonzero().tolist() == [[index]]
    expected = torch.tensor([-1.28, 1.5, -0.5, 0.8, 3.0, -1.0])
    torch.testing.assert_close(result.per_token, expected)
    without = dapo_token_loss(
        ratio.log(), torch.zeros(6), advantage, torch.ones(6), clip_low=0.2, clip_high=0.28
    )
    assert float(without.per_token[4]) == pytest.approx(5.0)
    assert float(without.dual_clip_fraction) == 0.0


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


# ------------------------------------------------------------------------ aggregation


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
    assert none.dtype == torch.float32 and not none.any()
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
