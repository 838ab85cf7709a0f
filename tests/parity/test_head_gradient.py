"""Test the log-prob head in a policy of two data-parallel ranks: its weight gradient is added to
Megatron's buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

LENGTHS = (5, 40, 17, 9, 33, 4, 40, 12)
VOCAB = 99
LOSS = loss_with()


def observe_both(rank: int, world_size: int, untied: Path, tied: Path) -> list[dict[str, Any]]:
    return [observe(Ranks(rank, world_size, rank), model) for model in (untied, tied)]


def observe(exchange: Ranks, model: Path) -> dict[str, Any]:
    from dapo_megatron.policy import step
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    config = tiny_config(
        model__path=model, train__max_tokens_per_microbatch=64, policy__tensor_parallel=1
    )
    policy = MegatronPolicy(config, exchange, planner(config.policy, config.train))
    batch = random_batch(LENGTHS, vocab=VOCAB)
    chunk = policy._chunks[0]
    weight = chunk.module.head_weight
    observed: dict[str, Any] = {"fused": policy.gradients(batch, LOSS)}
    observed["is_added"] = weight.grad_added_to_main_grad
    observed["overlaps"] = chunk.ddp_config.overlap_grad_reduce
    group = chunk.param_to_bucket_group[weight]
    observed["counts"] = [dict(group.per_param_grad_ready_counts)[weight]]

    head = step.linear_logprobs
    step.linear_logprobs = lambda *args, **kwargs: head(
        *args, **{**kwargs, "gradient_accumulation_fusion": False}
    )
    observed["separate"] = policy.gradients(batch, LOSS)
    observed["counts"].append(group.golden_per_param_grad_ready_counts[weight])
    step.linear_logprobs = head

    policy.close()
    return observed


def test_the_gradient_of_an_untied_head_is_added_to_the_buffer(tmp_path: Path) -> None:
    models = [tmp_path / "untied", tmp_path / "tied"]
    for model in models:
        is_tied = model.name == "tied"
        make_random_model("qwen3", model, seed=1, tie_word_embeddings=is_tied, vocab_size=VOCAB)
    for by_model in run_ranks(observe_both, 2, 2, *models):
        for observed, is_tied in zip(by_model, (False, True), strict=True):
            assert observed["is_added"] != is_tied
            # Megatron's hook ran for this weight, and expects it before it reduces the bucket.
            assert observed["overlaps"] and observed["counts"] == [1, 1]
            (loss, fused), (expected_loss, separate) = observed["fused"], observed["separate"]
            assert loss == expected_loss and fused.keys() == separate.keys()
            for name, gradient in fused.items():
                assert torch.equal(gradient, separate[name]), name
                assert gradient.any(), name
