"""Distillation: a teacher of another size and family in all layouts, and the loss on its log-probs
against its definition, in float64, and against HF models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import read_into
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.run.loss import loss_function
from dapo_megatron.run.other_weights import open_teacher
from dapo_megatron.types import ConfigError, LogProbs, LossOutput, MicroTokens, TokenBatch
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.models import load_hf, make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same

TOP_K = 20
LENGTHS = (5, 60, 17, 9, 33, 4, 40, 12, 3)
COEFFICIENT, LIMIT = 0.7, 0.5
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "llama", {"policy__tensor_parallel": 2, "policy__sequence_parallel": "true"}),
    ("qwen3", "llama", {"policy__pipeline_parallel": 2}),
    ("qwen3", "llama", {"policy__context_parallel": 2}),
    ("llama", "qwen3_moe", {"policy__expert_parallel": 2}),
    ("qwen3_moe", "llama", {"policy__expert_parallel": 2}),
]
SIZES = {"llama": {"num_hidden_layers": 4, "hidden_size": 96}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe", "llama"):
        make_random_model(family, folder / family, **SIZES.get(family, {}))
    return folder


def reference(logprobs: Tensor, teacher: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """Return the value of the term, and its gradient by each log-prob."""
    distance = logprobs - teacher
    near = distance.clamp(-LIMIT, LIMIT)
    value = COEFFICIENT * (weights * near * (distance - near / 2)).sum() / (weights > 0).sum()
    return float(value), COEFFICIENT * weights * near


def linear(logprobs: Tensor, tokens: MicroTokens) -> LossOutput:
    """A loss whose gradient by each log-prob is the advantage."""
    return LossOutput((tokens.advantages * logprobs).sum(), {})


def reference_at_top(_: Tensor, tokens: MicroTokens) -> LossOutput:
    """The divergence over the most likely tokens of the teacher and all others."""
    assert tokens.top_logprobs is not None and tokens.teacher_top_logprobs is not None
    p, q = tokens.top_logprobs.exp(), tokens.teacher_top_logprobs.exp()
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    return LossOutput(COEFFICIENT * (tokens.weights * (p * (p / q).log()).sum(1)).sum(), {})


def of_hf(student: Path, teacher: Path, batch: TokenBatch) -> tuple[float, dict[str, Tensor]]:
    """Return the mean KL(policy || teacher) over the whole vocabulary, and its gradient."""
    model, other = load_hf(student), load_hf(teacher)
    terms = []
    sequences = zip(*(x.split(batch.lengths.tolist()) for x in (batch.tokens, batch.loss_mask)))
    for tokens, mask in sequences:
        inputs = tokens[None].long()
        log_p, log_q = (m(inputs).logits[0, :-1].double().log_softmax(-1) for m in (model, other))
        terms.append((log_p.exp() * (log_p - log_q.detach())).sum(-1)[mask[1:]])
    value = COEFFICIENT * torch.cat(terms).mean()
    value.backward()
    return float(value), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(rank: int, models: Path) -> None:
    for student, teacher, overrides in LAYOUTS:
        exchange = Ranks(rank, 2, rank)
        batch = random_batch(LENGTHS, vocab=99)
        batch = replace(
            batch, weights=torch.where(batch.loss_mask, batch.weights.double() + 0.5, 0)
        )
        alone, _ = build_policy(exchange, str(models / teacher), overrides)
        expected = alone.logprobs(batch).logprobs
        alone.close()

        settings: dict[str, Any] = {"teacher": "x", "coefficient": COEFFICIENT, "top_k": TOP_K}
        policy, _ = build_policy(
            exchange, str(models / student), {**overrides, "loss__distill": settings}
        )
        store = open_store(models / teacher)
        policy.keep_teacher(store.arch, partial(read_into, store))
        logprobs = policy.logprobs(batch).logprobs
        taught = policy.teacher_logprobs(batch)
        with_teacher = replace(batch, teacher_logprobs=taught.logprobs)
        assert same(taught.logprobs, expected)
        assert same(policy.teacher_logprobs(batch).logprobs, expected)
        check_top(batch, taught)
        assert same(policy.logprobs(batch).logprobs, logprobs)
        assert not same(logprobs, expected)

        config = tiny_config(
            loss__objective="none",
            loss__tis_cap="null",
            loss__distill=settings,
            loss__log_ratio_limit=LIMIT,
        )
        distance = (logprobs - expected)[batch.loss_mask].abs()
        assert distance.min() < LIMIT < distance.max()
        value, gradients = policy.gradients(with_teacher, loss_function(config.loss))
        right, by_logprob = reference(logprobs, expected, batch.weights)
        assert value == pytest.approx(right, abs=1e-12)
        _, rights = policy.gradients(replace(batch, advantages=by_logprob), linear)
        check_gradients(gradients, rights)

        at_top = replace(batch, top_ids=taught.top_ids, teacher_top_logprobs=taught.top_logprobs)
        value, gradients = policy.gradients(at_top, loss_function(config.loss))
        right, rights = policy.gradients(at_top, reference_at_top)
        assert value == pytest.approx(right, abs=1e-12)
        check_gradients(gradients, rights)
        # An update without a pass for log-probs also scores tokens outside the loss.
        value, gradients = policy.gradients(
            replace(at_top, old_logprobs=None), loss_function(config.loss)
        )
        assert value == pytest.approx(right, abs=1e-12)
        check_gradients(gradients, rights)
        policy.close()


def check_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-12
) -> None:
    assert actual.keys() == expected.keys()
    for name, whole in expected.items():
        assert (actual[name] - whole).norm() <= bound * whole.norm(), name


def check_top(batch: TokenBatch, taught: LogProbs) -> None:
    """Check that the most likely tokens are those of the places where `batch` has its tokens."""
    assert taught.top_ids is not None and taught.top_logprobs is not None
    is_sampled = taught.top_ids == batch.tokens[:, None]
    assert is_sampled.sum() > 30
    sampled = taught.top_logprobs[is_sampled]
    torch.testing.assert_close(sampled, taught.logprobs[is_sampled.any(1)], rtol=0, atol=1e-14)
    outside = ~is_sampled.any(1) & batch.loss_mask
    assert (taught.logprobs[outside] < taught.top_logprobs[outside, -1]).all()
    assert (taught.top_logprobs.diff(dim=1) <= 0).all()


def check_against_hf(rank: int, models: Path) -> None:
    settings = {"teacher": "x", "coefficient": COEFFICIENT, "top_k": 1024}  # the whole vocabulary
    overrides = {"policy__tensor_parallel": 2, "loss__distill": settings}
    batch = random_batch(LENGTHS, vocab=99)
    policy, _ = build_policy(Ranks(rank, 2, rank), str(models / "qwen3"), overrides)
    store = open_store(models / "llama")
    policy.keep_teacher(store.arch, partial(read_into, store))
    taught = policy.teacher_logprobs(batch)
    batch = replace(batch, top_ids=taught.top_ids, teacher_top_logprobs=taught.top_logprobs)
    config = tiny_config(loss__objective="none", loss__tis_cap="null", loss__distill=settings)
    value, gradients = policy.gradients(batch, loss_function(config.loss))
    right, rights = of_hf(models / "qwen3", models / "llama", batch)
    assert value == pytest.approx(right, rel=1e-6)
    check_gradients(gradients, rights, 1e-5)
    policy.close()


def test_a_teacher_gives_its_log_probs_and_the_loss_is_that_of_the_definition(
    models: Path,
) -> None:
    run_ranks(check, 2, models)


def test_with_the_whole_vocabulary_the_loss_is_the_divergence_of_hf_models(models: Path) -> None:
    run_ranks(check_against_hf, 2, models)


def test_an_unsuitable_teacher_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    def config(teacher: Path) -> Config:
        settings = {"teacher": str(teacher), "coefficient": 1.0}
        return tiny_config(loss__distill=settings, model__path=models / "qwen3")

    assert open_teacher(config(models / "llama")).arch.num_layers == 4
    other = make_random_model("llama", tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"+"', '"plus"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"loss.distill.teacher: .*other has another tokenizer"):
        open_teacher(config(other))
    with pytest.raises(ConfigError, match=r"loss.distill.teacher: .*nothing"):
        open_teacher(config(tmp_path / "nothing"))
