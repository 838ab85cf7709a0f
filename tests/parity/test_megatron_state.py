"""Test that Megatron-core reads a training checkpoint with its optimizer, and that the policy reads
what Megatron-core saves, each in another layout than it was saved in.

Weights, main weights, moments and the number of updates are gathered from the ranks' memory by HF
name. They are bitwise the same.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.models import make_random_model
from tests.helpers.policies import named_parameters
from tests.helpers.ranks import run_ranks
from tests.helpers.updates import save, update
from tests.parity.test_reshard import build, equal, gathered

TIED = {"tie_word_embeddings": True, "num_hidden_layers": 4, "vocab_size": 99}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", TIED),
    "experts": ("qwen3_moe", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "one KV head": ("llama", {"num_hidden_layers": 2, "num_key_value_heads": 1}),
}
OURS, MEGATRON = "policy", "Megatron"
Case = tuple[str, str, str, str, str, int | None]
"""Model, layout and program that saves, layout and program that loads, elements of a bucket.
(With several buckets, Megatron-core 0.16.1 saves wrong values.)"""
CASES: list[Case] = [
    ("tied", "tp2", OURS, "pp2", MEGATRON, None),
    ("tied", "dp", OURS, "tp2", MEGATRON, 20_000),
    ("experts", "ep2", OURS, "dp", MEGATRON, None),
    ("tied", "tp2", MEGATRON, "pp2", OURS, None),
    ("tied", "dp", MEGATRON, "tp2", OURS, None),
    ("experts", "ep2", MEGATRON, "dp", OURS, None),
    ("tied", "dp", OURS, "tp2", OURS, 20_000),
    ("one KV head", "dp", OURS, "tp2", OURS, None),
    ("one KV head", "tp2", OURS, "dp", MEGATRON, None),
]
FLOAT32 = "one KV head"
"""Model that is trained in float32, without main weights of its own."""


# ------------------------------------------------------------------------------- on the ranks


def megatron_state(policy: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return what Megatron-LM saves and loads with the format fully_reshardable."""
    from dapo_megatron.policy.boxes import CONTENT

    [model] = policy._models()
    state = {"model": model.sharded_state_dict(metadata=dict(CONTENT))}
    state["optimizer"] = policy._optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=dict(CONTENT)
    )
    return state


def save_by(program: str, policy: Any, exchange: Ranks, model: Path, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    from dapo_megatron.policy.boxes import CONTENT
    from dapo_megatron.policy.device import megatron_device

    if program == OURS:
        save(policy, exchange, model, folder)
        return
    if exchange.rank == 0:
        folder.mkdir()
    exchange.barrier()
    with megatron_device():
        state = megatron_state(policy, is_loading=False)
        dist_checkpointing.save(state, str(folder), content_metadata=dict(CONTENT))
    exchange.barrier()


def load_by(program: str, policy: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    from dapo_megatron.policy.device import megatron_device
    from dapo_megatron.policy.optimizer import init_state

    if program == OURS:
        policy.load(folder)
        return
    init_state(policy._optimizer)
    with megatron_device(), without_steps_of_parameters():
        loaded = dist_checkpointing.load(megatron_state(policy, is_loading=True), str(folder))
        policy._models()[0].load_state_dict(loaded["model"])
        policy._optimizer.load_state_dict(loaded["optimizer"])


def without_steps_of_parameters() -> Any:
    """Return a context in which Megatron-core 0.16.1 loads the state of torch's AdamW, which counts
    updates for each parameter. It knows only those that do not."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_values = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_without_step(optimizer: Any, param: Any, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        step = optimizer.optimizer.state[main]["step"]
        with torch.no_grad():
            set_values(optimizer, param, {**tensors, "step": step})

    return patch.object(DistributedOptimizer, set_values.__name__, set_without_step)


def travel(rank: int, models: Path, root: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """Train and save, then load. Return both states, and facts about buckets and owned parts."""
    from dapo_megatron.policy import data_parallel
    from dapo_megatron.policy.optimizer import owned_parts

    warnings.simplefilter("ignore")
    exchange, results = Ranks(rank, 2, rank), []
    for number, (name, layout, saver, other, loader, bucket) in enumerate(cases):
        data_parallel.BUCKET_ELEMENTS = bucket
        precision = "float32" if name == FLOAT32 else "bfloat16"
        policy = build(exchange, models / name, layout, precision)
        update(policy, 0)
        update(policy, 1)
        result: dict[str, Any] = {
            "saved": gathered(policy, exchange),
            "buckets": sum(len(buffer.buckets) for buffer in policy._chunks[0].buffers),
            "owned": len(list(owned_parts(policy._optimizer))),
            "params": len(named_parameters(policy)),
        }
        save_by(saver, policy, exchange, models / name, root / f"{number}")
        policy.close()
        policy = build(exchange, models / name, other, precision)
        load_by(loader, policy, root / f"{number}")
        result["loaded"] = gathered(policy, exchange)
        policy.close()
        results.append(result)
    return results


# ------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    models = tmp_path_factory.mktemp("models")
    for name, (family, overrides) in MODELS.items():
        make_random_model(family, models / name, seed=1, **overrides)
    root = tmp_path_factory.mktemp("saved")
    result: list[dict[str, Any]] = run_ranks(travel, 2, models, root, CASES)[0]
    return result


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: " ".join(map(str, CASES[n])))
def test_training_states_pass_between_the_policy_and_megatron(number: int, results: Any) -> None:
    result, (name, layout, _, _, _, bucket) = results[number], CASES[number]
    saved, loaded = result["saved"], result["loaded"]
    fields = {"weights", "exp_avg", "exp_avg_sq", "step", *(["param"] * (name != FLOAT32))}
    assert loaded.keys() == saved.keys() == fields
    assert saved["step"]["step"].tolist() == [2.0]
    for field, tensors in saved.items():
        assert equal(loaded[field], tensors), field
    if bucket:
        assert result["buckets"] > 1
    if layout == "dp":  # of some parameters this rank's optimizer owns nothing
        assert 0 < result["owned"] < result["params"]
