"""Test policy checkpoints: loading and updating on is bitwise exact, damaged files are refused by
name, and the HF export loads in transformers."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.checkpoints.folder import fault_of
from dapo_megatron.checkpoints.formats.export import HfExport
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.torch_dist.boxes import METADATA, read_metadata
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.types import CheckpointError, StepStats
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model, per_expert
from tests.helpers.ranks import run_ranks
from tests.helpers.saving import Source

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"policy__tensor_parallel": 2},
    "dp2": {},
    "pp2": {"policy__pipeline_parallel": 2},
    "interleaved": {
        "policy__pipeline_parallel": 2,
        "policy__virtual_pipeline_parallel": 2,
    },
    "cp2": {"policy__context_parallel": 2},
    "ep2": {"policy__expert_parallel": 2},
    "delta tp2": {"policy__tensor_parallel": 2},
    "delta ep2": {"policy__expert_parallel": 2},
}
MODELS = {
    "ep2": "qwen3_moe",
    "delta tp2": "qwen3_5_text",
    "delta ep2": "qwen3_5_moe_text",
}
"""Families, if they are not qwen3."""
LOSS = loss_with()
STEP = 1
CUT_SHORT, KEY_GONE = "cut_short", "key_gone"


def config_of(models: Path, layout: str) -> Config:
    keys = {
        "policy__tensor_parallel": 1,
        "train__max_tokens_per_microbatch": 128,
        "checkpoint__export_hf": "true",
    }
    return tiny_config(model__path=model_of(models, layout), **{**keys, **LAYOUTS[layout]})


def build(models: Path, layout: str, exchange: Ranks) -> Any:
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    config = config_of(models, layout)
    return MegatronPolicy(config, exchange, planner(config.policy, config.train))


def checkpoint(root: Path, layout: str) -> Path:
    return root / layout / f"step_{STEP:06d}"


def model_of(models: Path, layout: str) -> Path:
    return models / MODELS.get(layout, "qwen3")


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def two_updates(policy: Any) -> tuple[list[StepStats], dict[str, Tensor], Tensor]:
    """Return the statistics of two updates, the weights, and a draw from torch's generator, whose
    state is part of the checkpoint."""
    stats = [update(policy, seed) for seed in (1, 2)]
    return stats, weights(policy), torch.rand(4)


def update(policy: Any, seed: int) -> StepStats:
    return policy.update(random_batch((5, 40, 17, 9), vocab=99, seed=seed), LOSS, 1e-3)


def refusal(policy: Any, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        policy.load(folder)
    return str(caught.value)


def run(rank: int, world_size: int, models: Path, root: Path) -> dict[str, Any]:
    exchange = Ranks(rank, world_size, rank)
    return {name: save_and_load(exchange, models, root, name) for name in LAYOUTS} | {
        "refused": refusals(exchange, models, root)
    }


def saver(exchange: Ranks, config: Config, policy: Any, folder: Path) -> CheckpointSaver:
    return CheckpointSaver(
        config,
        folder,
        exchange,
        background=exchange.second(),
        policy=policy,
        recorder=Source(),
        companions=Companions.of(config),
        export=HfExport(config),
    )


def save_and_load(exchange: Ranks, models: Path, root: Path, layout: str) -> Any:
    policy = build(models, layout, exchange)
    update(policy, 0)
    checkpoints = saver(exchange, config_of(models, layout), policy, root / layout)
    publish = checkpoints.commit(STEP, {})
    saved = weights(policy)
    publish()
    continued = two_updates(policy)  # while the checkpoint is being written
    checkpoints.wait()
    folder = checkpoint(root, layout)
    fault = fault_of(folder, exchange)
    policy.close()
    policy = build(models, layout, exchange)
    policy.load(folder)
    loaded, resumed = weights(policy), two_updates(policy)
    policy.close()
    return saved, continued, loaded, resumed, fault


def refusals(exchange: Ranks, models: Path, root: Path) -> dict[str, str]:
    policy = build(models, "dp2", exchange)
    intact = checkpoint(root, "dp2")
    if exchange.rank == 0:
        for folder in (CUT_SHORT, KEY_GONE):
            shutil.copytree(intact, root / folder)
        os.truncate(root / CUT_SHORT / "__1_0.distcp", 1000)
        metadata = read_metadata(intact)
        del metadata.state_dict_metadata["optimizer.state.exp_avg.decoder.final_layernorm.weight"]
        (root / KEY_GONE / METADATA).write_bytes(pickle.dumps(metadata))
    exchange.barrier()
    before = weights(policy)
    messages = {folder: refusal(policy, root / folder) for folder in (CUT_SHORT, KEY_GONE)}
    assert equal(weights(policy), before)  # a refused checkpoint changes nothing
    policy.close()
    return messages


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in {"qwen3", *MODELS.values()}:
        make_random_model(
            family, root / family, seed=1, tie_word_embeddings=True, num_hidden_layers=4
        )
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(models: Path, root: Path) -> list[dict[str, Any]]:
    return run_ranks(run, 2, 2, models, root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_after_loading_are_bitwise_those_of_the_saved_policy(
    layout: str, ranks: Any, root: Path
) -> None:
    for rank in ranks:
        saved, continued, loaded, resumed, fault = rank[layout]
        assert fault is None
        assert equal(loaded, saved)
        assert resumed[0] == continued[0]
        assert equal(resumed[1], continued[1])
        assert torch.equal(resumed[2], continued[2])
        assert not equal(continued[1], saved)
    store = open_store(checkpoint(root, layout))
    assert equal({name: store.read(name) for name in store.tensors}, ranks[0][layout][0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_loads_the_export_with_the_same_weights(
    layout: str, ranks: Any, root: Path, models: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = checkpoint(root, layout) / "hf"
    loaded, info = AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    held = per_expert({n: p.detach() for n, p in loaded.named_parameters()})
    assert equal(held, ranks[0][layout][0])
    for path in model_of(models, layout).iterdir():
        if path.suffix != ".safetensors":
            assert (export / path.name).read_bytes() == path.read_bytes()
    assert AutoTokenizer.from_pretrained(export)("12").input_ids


def test_damaged_files_and_missing_tensors_are_refused_by_name(ranks: Any, root: Path) -> None:
    for rank in ranks:
        messages = rank["refused"]
        assert f"{root / CUT_SHORT}/__1_0.distcp: missing or cut off" in messages[CUT_SHORT]
        gone = (
            f"{root / KEY_GONE}: optimizer.state.exp_avg.decoder.final_layernorm.weight is missing"
        )
        assert gone in messages[KEY_GONE]
