"""Test checkpoints of Megatron-core against Megatron-core itself, in two ranks: what it saves in a
layout is read, and what is written here it loads in another layout, with the same log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_dist import to_torch_dist
from tools.converting.compare import compare

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": "true"},
    "pp2": {"pipeline_parallel": 2},
    "ep2": {"expert_parallel": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # 99 entries are padded to 100 by two tensor-parallel ranks.
    "tied": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 99}),
    "bias": ("qwen2", {}),
    "experts": ("qwen3_moe", {}),
    # Groups whose score Megatron computes as HF: the sum of two experts.
    "latent": ("deepseek_v3", {"num_hidden_layers": 4, "num_experts_per_tok": 4}),
    "moonlight": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    ),
    "glm": ("glm4_moe", {"num_hidden_layers": 3}),
    "flash": ("glm4_moe_lite", {"num_experts_per_tok": 4}),
}
CASES = [
    ("tied", "tp2"),
    ("tied", "pp2"),
    ("bias", "tp2"),
    ("experts", "tp2"),
    ("experts", "ep2"),
    ("latent", "pp2"),
    ("moonlight", "tp2"),
    ("glm", "ep2"),
    ("flash", "tp2"),
]
"""tests/unit/test_torch_dist_layouts.py has every family in more layouts, without log-probs."""


def exchange_checkpoints(
    rank: int, world_size: int, folder: str
) -> dict[tuple[str, str], dict[str, bool]]:
    """Save and load with Megatron-core in each case. Return what is equal."""
    return {case: save_and_load(Ranks(rank, world_size, rank), folder, *case) for case in CASES}


def save_and_load(exchange: Ranks, folder: str, model: str, layout: str) -> dict[str, bool]:
    from megatron.core import dist_checkpointing

    from dapo_megatron.policy.device import megatron_device
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    keys = {"tensor_parallel": 1, **LAYOUTS[layout], "precision": "float32"}

    def build(path: str) -> MegatronPolicy:
        settings = {f"policy__{key}": value for key, value in keys.items()}
        config = tiny_config(model__path=path, **settings)
        return MegatronPolicy(config, exchange, planner(config.policy, config.train))

    batch = random_batch((9, 14, 5, 11), vocab=99)
    policy = build(f"{folder}/{model}/written")
    direct = policy.logprobs(batch).logprobs
    policy.close()
    policy = build(f"{folder}/{model}/hf")
    before = policy.logprobs(batch).logprobs
    weights = {name: value.clone() for name, value in policy.weights()}
    [decoder] = policy._models()
    saved, written = f"{folder}/{model}/{layout}", f"{folder}/{model}/written/release"
    with megatron_device(), torch.no_grad():
        if exchange.rank == 0:
            Path(saved).mkdir()
        exchange.barrier()
        if layout == "tp2" and model == "experts":
            # By default, as in Megatron-LM. The policy lists which layers have experts, and
            # Megatron does not stack listed layers.
            decoder.config.moe_layer_freq = 1
        dist_checkpointing.save({"model": decoder.sharded_state_dict()}, saved)
        for parameter in decoder.parameters():
            parameter.fill_(torch.nan)
        # As Megatron-LM does: the checkpoint says which keys it has.
        metadata = dist_checkpointing.load_content_metadata(written)
        state = {"model": decoder.sharded_state_dict(metadata=metadata)}
        loaded = dist_checkpointing.load(state, written)
        decoder.load_state_dict(loaded["model"])
    results = {
        "weights": all(torch.equal(value, weights[name]) for name, value in policy.weights()),
        "logprobs": torch.equal(before, policy.logprobs(batch).logprobs),
        "model.path": torch.equal(before, direct),
    }
    policy.close()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in HF folders, and written as checkpoints of Megatron."""
    folder = tmp_path_factory.mktemp("torch_dist")
    for name, (family, overrides) in MODELS.items():
        store = open_store(make_random_model(family, folder / name / "hf", **overrides))
        to_torch_dist(store, folder / name / "written")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[tuple[str, str], dict[str, bool]]:
    by_rank = run_ranks(exchange_checkpoints, 2, 2, str(folder))
    assert by_rank[0] == by_rank[1]
    first: dict[tuple[str, str], dict[str, bool]] = by_rank[0]
    return first


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_megatron_loads_what_is_written_here_and_what_it_saves_is_read(
    results: dict[tuple[str, str], dict[str, bool]], folder: Path, model: str, layout: str
) -> None:
    assert results[model, layout] == {"weights": True, "logprobs": True, "model.path": True}
    hf = open_store(folder / model / "hf")
    saved = open_store(folder / model / layout, hf=folder / model / "hf")
    assert not list(compare(hf, saved, lambda _: None))
