"""The reference of loss.kl on two ranks: its log-probs, and that the policy does not change.

Log-probs under the reference equal those of a policy with its weights, bit by bit, and a run with
passes of the reference has the results of a run without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same

LOSS = loss_with()
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "interleaved": (
        "qwen3",
        {
            "policy__pipeline_parallel": 2,
            "policy__virtual_pipeline_parallel": 2,
            "policy__precision": "bfloat16",
            "policy__offload": "[weights,optimizer]",
        },
    ),
    "ep2": ("deepseek_v3", {"policy__expert_parallel": 2}),  # with a bias that is not trained
    "dp2 on the host": ("qwen3", {"optimizer__cpu_offload": 0.5, "policy__precision": "bfloat16"}),
}
CHUNK_BYTES = 2**14
"""Small, so that storages cross the boundaries of chunks of host memory."""


def batch(seed: int) -> Any:
    return random_batch((5, 40, 17, 9), vocab=90, seed=seed)


def build(exchange: Ranks, models: Path, layout: str, name: str = "start") -> tuple[Any, Any]:
    """Return a policy with the weights `name`, and its config."""
    from dapo_megatron.policy import offload
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    offload.CHUNK_BYTES = CHUNK_BYTES
    model, keys = LAYOUTS[layout]
    settings = {"policy__tensor_parallel": 1, "train__max_tokens_per_microbatch": 128, **keys}
    config = tiny_config(
        model__path=models / f"{model}_{name}",
        loss__kl__coefficient=0.1,
        loss__kl__reference=models / f"{model}_other",
        **settings,
    )
    return MegatronPolicy(config, exchange, planner(config.policy, config.train)), config


def everything(policy: Any) -> dict[str, Tensor]:
    """Return copies of this rank's weights, optimizer state and random states."""
    boxes = policy.snapshot()._boxes
    return {f"{box.key}{box.offset}": box.values.clone() for box in boxes}


def train(policy: Any, *, compares: bool) -> list[Any]:
    """Do two updates, each after a pass of the reference if `compares`, which must change nothing.
    Return all results."""
    results: list[Any] = []
    for seed in range(2):
        policy.offload()
        policy.onload()
        if compares:
            before = everything(policy)
            policy.reference_logprobs(batch(seed))
            assert same(before, everything(policy))
        results += [policy.logprobs(batch(seed)).logprobs, policy.update(batch(seed), LOSS, 1e-2)]
    return [*results, everything(policy)]


def check(rank: int, models: Path) -> None:
    for layout in LAYOUTS:
        check_layout(Ranks(rank, 2, rank), models, layout)


def check_layout(exchange: Ranks, models: Path, layout: str) -> None:
    from dapo_megatron.run.other_weights import keep_reference

    policy, _ = build(exchange, models, layout, "other")
    other = policy.logprobs(batch(7)).logprobs
    policy.close()

    policy, _ = build(exchange, models, layout)
    start = policy.logprobs(batch(7)).logprobs
    assert not torch.equal(other, start)
    without = train(policy, compares=False)
    policy.close()

    policy, _ = build(exchange, models, layout)
    policy.keep_reference()
    assert torch.equal(policy.reference_logprobs(batch(7)), start)  # a KL of exactly 0 in step 1
    assert same(train(policy, compares=True), without)
    assert torch.equal(policy.reference_logprobs(batch(7)), start)
    assert not torch.equal(policy.logprobs(batch(7)).logprobs, start)
    policy.close()

    policy, config = build(exchange, models, layout)
    keep_reference(config, exchange, policy)
    assert torch.equal(policy.reference_logprobs(batch(7)), other)
    assert same(train(policy, compares=True), without)
    policy.close()


def test_the_reference_has_the_log_probs_of_its_weights_and_changes_no_result(
    tmp_path: Path,
) -> None:
    for seed, name in enumerate(("start", "other")):
        dense = {"tie_word_embeddings": True, "num_hidden_layers": 4}
        make_random_model("qwen3", tmp_path / f"qwen3_{name}", seed=seed, **dense)
        folder = tmp_path / f"deepseek_v3_{name}"
        make_random_model("deepseek_v3", folder, seed=seed, num_hidden_layers=2)
    run_ranks(check, 2, tmp_path, timeout=900.0)
