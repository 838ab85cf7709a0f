"""The formulas against the golden vectors (tests/golden/dapo.json), in float64.

The vectors come from reference implementations; none was computed with this code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.evaluation import avg_at_k, cons_at_k, pass_at_k
from dapo_megatron.algo.loss import aggregation_weights, dapo_token_loss, tis_weights
from dapo_megatron.algo.overlong import overlong_penalty
from dapo_megatron.algo.sampling import Verdict, verdict
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.policy.vocab_parallel import linear_logprobs
from dapo_megatron.types import MicroTokens
from tests.helpers.losses import loss_with

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "dapo.json").read_text(encoding="utf-8")
)
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def doubles(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flat(rows: list[list[float]]) -> torch.Tensor:
    return doubles([value for row in rows for value in row])


# ------------------------------------------------------------------------ advantage


@pytest.mark.parametrize("case", GOLDEN["advantage"]["cases"], ids=lambda case: case["name"])
def test_advantage(case: dict[str, Any]) -> None:
    rewards = doubles(case["rewards"])
    actual = group_advantage(rewards, [7] * len(rewards))
    torch.testing.assert_close(actual, doubles(case["advantages"]), **EXACT)


@pytest.mark.parametrize("row", GOLDEN["advantage"]["G16_table"], ids=lambda r: r["k_correct"])
def test_advantage_of_a_group_of_16(row: dict[str, Any]) -> None:
    k = row["k_correct"]
    actual = group_advantage(doubles([1.0] * k + [-1.0] * (16 - k)), [0] * 16)
    expected = [row["adv_correct"]] * k + [row["adv_incorrect"]] * (16 - k)
    torch.testing.assert_close(actual, doubles(expected), **EXACT)
    kept = verdict([True] * k + [False] * (16 - k)) is Verdict.MIXED
    assert kept == row["kept_by_dynamic_sampling"]


def test_advantage_of_interleaved_groups() -> None:
    case = GOLDEN["advantage"]["interleaved"]
    actual = group_advantage(doubles(case["rewards"]), [ord(uid) for uid in case["uid"]])
    torch.testing.assert_close(actual, doubles(case["advantages"]), **EXACT)


# ------------------------------------------------------------------------ token loss


@pytest.mark.parametrize("case", GOLDEN["per_token_loss"]["cases"], ids=lambda case: case["name"])
def test_token_loss_and_gradient(case: dict[str, Any]) -> None:
    logp = doubles([case["log_ratio"]]).requires_grad_()
    result = dapo_token_loss(
        logp,
        doubles([0.0]),
        doubles([case["advantage"]]),
        torch.ones(1, dtype=torch.bool),
        clip_low=case["params"]["eps_low"],
        clip_high=case["params"]["eps_high"],
        dual_clip=case["params"]["c"],
    )
    result.total.backward()
    torch.testing.assert_close(result.per_token.detach(), doubles([case["loss"]]), **EXACT)
    torch.testing.assert_close(logp.grad, doubles([case["grad_wrt_logp"]]), **EXACT)
    clipped = result.clip_fraction_high + result.clip_fraction_low
    assert bool(clipped) == case["clip_active"]
    assert bool(result.dual_clip_fraction) == case["dual_clip_active"]


# ------------------------------------------------------------------------ aggregation

AGGREGATION = GOLDEN["aggregation"]
KINDS = {
    "token": "token_mean_global",
    "prompt": "prompt_token_mean_paper_eq8",
    "sequence": "seq_mean_token_mean_grpo",
}


def aggregated(kind: str) -> tuple[torch.Tensor, MicroTokens]:
    lengths = torch.tensor(AGGREGATION["lengths"])
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    uid = torch.tensor(AGGREGATION["uid"]) * 1000 - 3
    weights = aggregation_weights(
        kind, mask=mask, lengths=lengths, group_ids=uid, dtype=torch.float64
    )
    advantages = group_advantage(doubles(AGGREGATION["rewards"]), uid)
    torch.testing.assert_close(advantages, doubles(AGGREGATION["advantages"]), **EXACT)
    old = flat(AGGREGATION["old_logp"])
    micro = MicroTokens(old, advantages.repeat_interleave(lengths), weights, old, mask)
    return flat(AGGREGATION["new_logp"]).requires_grad_(), micro


@pytest.mark.parametrize("kind", KINDS)
def test_aggregation_and_gradient(kind: str) -> None:
    logp, micro = aggregated(kind)
    loss = loss_with()
    mean = loss(logp, micro).total / AGGREGATION["total_tokens"]
    mean.backward()
    expected = AGGREGATION["losses"][KINDS[kind]]
    torch.testing.assert_close(mean.detach(), doubles(expected), **EXACT)
    gradient = flat(AGGREGATION["grad_wrt_new_logp"][KINDS[kind]])
    torch.testing.assert_close(logp.grad, gradient, **EXACT)


def test_statistics_of_the_aggregation_case() -> None:
    logp, micro = aggregated("token")
    loss = loss_with()
    total, sums = (out := loss(logp, micro)).total, out.sums
    n, metrics = AGGREGATION["total_tokens"], AGGREGATION["metrics"]
    assert float(total.detach()) == pytest.approx(AGGREGATION["losses"]["token_sum"], rel=1e-12)
    both = float(sums["clip_fraction_high"] + sums["clip_fraction_low"]) / n
    assert both == pytest.approx(metrics["pg_clipfrac"])
    assert float(sums["dual_clip_fraction"]) / n == pytest.approx(metrics["pg_clipfrac_lower"])
    assert float(sums["approx_kl"]) / n == pytest.approx(metrics["ppo_kl"])


def test_micro_batches_of_all_ranks_add_up_to_the_global_token_mean() -> None:
    logp, micro = aggregated("token")
    loss = loss_with()
    sequence_of = torch.arange(6).repeat_interleave(torch.tensor(AGGREGATION["lengths"]))
    total = 0.0
    for rank in AGGREGATION["per_microbatch_global_token_mean"].values():
        for case in rank:
            chosen = torch.isin(sequence_of, torch.tensor(case["seqs"]))
            part = MicroTokens(
                old_logprobs=micro.old_logprobs[chosen],
                advantages=micro.advantages[chosen],
                weights=micro.weights[chosen],
                engine_logprobs=micro.engine_logprobs[chosen],
                mask=micro.mask[chosen],
            )
            part_total = float(loss(logp[chosen], part).total.detach())
            assert part_total == pytest.approx(case["loss_sum"], rel=1e-12)
            total += part_total
    expected = AGGREGATION["losses"]["token_mean_global"]
    assert total / AGGREGATION["total_tokens"] == pytest.approx(expected, rel=1e-12)


# ------------------------------------------------------------------------ other formulas


@pytest.mark.parametrize("case", GOLDEN["overlong"]["cases"], ids=str)
def test_overlong_penalty(case: dict[str, Any]) -> None:
    penalty = overlong_penalty(
        case["length"], max_tokens=case["L_max"], buffer_tokens=case["L_cache"]
    )
    assert penalty == case["penalty_paper"]
    assert 1.0 + penalty == case["reward_if_correct"]


def test_dynamic_sampling_keeps_the_first_mixed_groups_in_order() -> None:
    case = GOLDEN["dynamic_sampling"]
    size = case["params"]["G"]
    kept = [
        [batch, prompt]
        for batch, counts in enumerate(case["gen_batches_correct_counts"])
        for prompt, c in enumerate(counts)
        if verdict([True] * c + [False] * (size - c)) is Verdict.MIXED
    ]
    num_wanted = case["params"]["train_prompts"]
    assert kept[:num_wanted] == case["selected"]
    assert kept[num_wanted:] == case["discarded_valid"]


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN["dynamic_sampling"]["extra"] if "acc" in c], ids=lambda c: c["desc"]
)
def test_dynamic_sampling_uses_raw_correctness(case: dict[str, Any]) -> None:
    assert (verdict(case["acc"]) is Verdict.MIXED) == case["keep_by_acc"]


@pytest.mark.parametrize("warmup", [10, 20])
def test_learning_rate(warmup: int) -> None:
    for step, lr in GOLDEN["lr_schedule"][f"warmup{warmup}"]:
        actual = warmup_lr(step, lr=1e-6, warmup_rollout_steps=warmup)
        assert actual == pytest.approx(lr, rel=1e-12)


def test_evaluation_metrics() -> None:
    case = GOLDEN["eval_metrics"]
    assert avg_at_k(case["correct"]) == pytest.approx(case["avg_at_4"], rel=1e-12)
    assert pass_at_k(case["correct"]) == pytest.approx(case["pass_at_4"], rel=1e-12)
    assert pass_at_k(case["correct"], k=4) == pytest.approx(case["pass_at_4"], rel=1e-12)
    actual = cons_at_k(case["correct"], case["predictions"])
    assert actual == pytest.approx(case["cons_at_4"], rel=1e-12)


@pytest.mark.parametrize("case", GOLDEN["tis_optional"]["cases"], ids=str)
def test_truncated_importance_weight(case: dict[str, Any]) -> None:
    actual = tis_weights(
        doubles([case["logp_train_old"]]),
        doubles([case["logp_rollout"]]),
        torch.ones(1),
        cap=GOLDEN["tis_optional"]["C"],
    )
    torch.testing.assert_close(actual, doubles([case["w"]]), **EXACT)


# ------------------------------------------------------------------------ the policy


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("case", GOLDEN["logprob_entropy"], ids=lambda c: c["temperature"])
def test_logprob_entropy_and_gradient(case: dict[str, Any], padding: int) -> None:
    """In float32, like the policy. The hidden state is the logits and the weight is the identity. A
    padding row of the weight must not affect the result."""
    num = len(case["logits"])
    logits = torch.tensor([case["logits"]], requires_grad=True)
    weight = torch.cat([torch.eye(num), torch.full((padding, num), 9.0)]).requires_grad_()
    logp, entropy = linear_logprobs(
        logits,
        weight,
        torch.tensor([case["label"]]),
        temperature=case["temperature"],
        first_entry=0,
        num_entries=num,
        group=None,
    )
    assert float(logp.detach()) == pytest.approx(case["logp"], abs=1e-6)
    assert float(entropy) == pytest.approx(case["entropy"], abs=1e-6)
    logp.sum().backward()
    plain = doubles(case["logits"]).requires_grad_()
    (plain / case["temperature"]).log_softmax(-1)[case["label"]].backward()
    assert logits.grad is not None and weight.grad is not None and plain.grad is not None
    torch.testing.assert_close(logits.grad[0].double(), plain.grad, rtol=1e-5, atol=1e-7)
    expected_weight_gradient = plain.grad[:, None] * doubles(case["logits"])
    torch.testing.assert_close(
        weight.grad[:num].double(), expected_weight_gradient, rtol=1e-5, atol=1e-6
    )
    assert not weight.grad[num:].any()
