"""Distillation: a teacher of another size and family in all layouts, and the loss on its log-probs
against its definition, in float64."""

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
from dapo_megatron.run.loss import loss_function
from dapo_megatron.run.other_weights import open_teacher
from dapo_megatron.types import ConfigError, LossOutput, MicroTokens
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.policies import build_policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same

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

        policy, _ = build_policy(exchange, str(models / student), overrides)
        store = open_store(models / teacher)
        policy.keep_teacher(store.arch, partial(read_into, store))
        logprobs = policy.logprobs(batch).logprobs
        with_teacher = replace(batch, teacher_logprobs=policy.teacher_logprobs(batch))
        assert same(with_teacher.teacher_logprobs, expected)
        assert same(policy.teacher_logprobs(batch), expected)
        assert same(policy.logprobs(batch).logprobs, logprobs)
        assert not same(logprobs, expected)

        settings = {"teacher": "x", "coefficient": COEFFICIENT}
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
        for name, whole in rights.items():
            assert (gradients[name] - whole).norm() <= 1e-12 * whole.norm(), name
        policy.close()


def test_a_teacher_gives_its_log_probs_and_the_loss_is_that_of_the_definition(
    models: Path,
) -> None:
    run_ranks(check, 2, models)


def test_an_unsuitable_teacher_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    def config(teacher: Path, **overrides: Any) -> Any:
        settings = {"teacher": str(teacher), "coefficient": 1.0}
        return tiny_config(
            loss__distill=settings, model__path=models / "qwen3", run__processes=2, **overrides
        )

    assert open_teacher(config(models / "llama")).arch.num_layers == 4
    other = make_random_model("llama", tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"+"', '"plus"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"loss.distill.teacher: .*other has another tokenizer"):
        open_teacher(config(other))
    with pytest.raises(ConfigError, match=r"loss.distill.teacher: .*virtual_pipeline"):
        open_teacher(
            config(
                models / "qwen3_moe",
                policy__tensor_parallel=1,
                policy__pipeline_parallel=2,
                policy__virtual_pipeline_parallel=3,
            )
        )
    with pytest.raises(ConfigError, match=r"loss.distill.teacher: .*nothing"):
        open_teacher(config(tmp_path / "nothing"))
