"""Test that `rewrite` replaces the weights and the optimizer's copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Shard
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

LOSS = loss_with()
LAYOUTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"policy__precision": "bfloat16"},
    "float32, cut": {"policy__tensor_parallel": 2},
    "on the host": {"optimizer__cpu_offload": 0.5, "policy__precision": "bfloat16"},
}


def double(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.write(shard.read() * 2)


def run(rank: int, world_size: int, model: Path) -> dict[str, list[dict[str, Tensor]]]:
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    exchange, by_layout = Ranks(rank, world_size, rank), {}
    for layout, keys in LAYOUTS.items():
        settings = {"policy__tensor_parallel": 1, "train__max_tokens_per_microbatch": 128, **keys}
        config = tiny_config(model__path=model, **settings)
        policy = MegatronPolicy(config, exchange, planner(config.policy, config.train))
        batch = random_batch((5, 40, 17, 9), vocab=90, seed=1)
        snapshots = []
        for _ in range(2):  # without and with optimizer state
            snapshots.append({name: tensor.clone() for name, tensor in policy.weights()})
            policy.rewrite(double)
            snapshots.append({name: tensor.clone() for name, tensor in policy.weights()})
            policy.update(batch, LOSS, 0.0)
        snapshots.append({name: tensor.clone() for name, tensor in policy.weights()})
        policy.close()
        by_layout[layout] = snapshots
    return by_layout


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    model = tmp_path_factory.mktemp("models") / "qwen3"
    make_random_model("qwen3", model, seed=1, num_hidden_layers=2)
    return run_ranks(run, 2, 2, model, timeout=300.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewritten_weights_survive_the_next_update(layout: str, ranks: Any) -> None:
    for rank in ranks:
        first, doubled, updated, again, last = rank[layout]
        for name, tensor in first.items():
            assert torch.equal(doubled[name], 2 * tensor), name
            # An update with learning rate 0 copies the optimizer's weights into the model.
            assert torch.equal(updated[name], doubled[name]), name
            assert torch.equal(again[name], 4 * tensor), name
            assert torch.equal(last[name], again[name]), name
