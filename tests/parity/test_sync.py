"""The last link of the chain: Megatron = vLLM, after 0, 1 and 3 updates, in equal and in different
layouts; and an engine that missed a sync is caught, by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.ranks import run_ranks

LAYOUTS = {
    "tp2_to_tp2": {"policy__tensor_parallel": 2},
    "pp2_to_two_replicas": {"policy__tensor_parallel": 1, "policy__pipeline_parallel": 2},
    "dp2_to_tp2": {"policy__tensor_parallel": 1, "engine__tensor_parallel": 2},
}


def gaps(rank: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Largest gap on fresh samples after 0, 1 and 3 updates; then what a stale engine raises."""
    from dapo_megatron import build, loop
    from dapo_megatron.algo.loss import make_loss
    from dapo_megatron.cluster.ranks import Ranks
    from dapo_megatron.rollout.driver import Sampling
    from dapo_megatron.types import SyncError

    config = tiny_config(data__train__0__size=64, evaluation__sets="[]", **overrides)
    core = build.build_core(config, Ranks(rank, 2, rank))
    prompts = list(enumerate(build.load_prompts(config).train[:6]))
    numbers = config.loss
    loss = make_loss(
        clip_low=numbers.clip_low, clip_high=numbers.clip_high, dual_clip=None, tis_cap=None
    )
    training = random_batch((30, 7, 18), vocab=100)
    sampling = Sampling(4, 16, 1.0, 1.0, "sync")

    def measure(version: int) -> float:
        groups = core.driver.run(prompts, sampling)
        batch = loop.make_batch(config, groups)
        batch = replace(batch, old_logprobs=core.policy.logprobs(batch).logprobs)
        return loop.check_gap(config, batch, groups, version).max

    seen: dict[str, Any] = {}
    for version, num_updates in enumerate((0, 1, 2)):
        for _ in range(num_updates):
            core.policy.update(training, loss, 1e-3)
        seen[f"tensors_{version}"] = core.sync(version).num_tensors
        seen[f"gap_{version}"] = measure(version)
    core.policy.update(training, loss, 1e-2)  # and no sync
    try:
        measure(2)
    except SyncError as error:
        seen["stale"] = str(error)
    core.close()
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_equals_policy_after_updates(layout: str) -> None:
    first, second = run_ranks(gaps, 2, LAYOUTS[layout])
    assert first == second
    assert [first[f"tensors_{version}"] for version in range(3)] == [46, 46, 46]
    assert max(first[f"gap_{version}"] for version in range(3)) < 1e-4
    assert "engine and policy disagree by" in first["stale"]
    assert "ticket" in first["stale"]
    assert "token" in first["stale"]
