"""The memory estimate against what tiny models really take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dapo_megatron.algo.loss import make_loss
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.memory import estimate
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

LOSS = make_loss(clip_low=0.2, clip_high=0.28, dual_clip=10.0, tis_cap=None)
BFLOAT16 = {"policy__precision": "bfloat16"}
SEQUENCE = {"policy__tensor_parallel": 2, "policy__sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("qwen3", {}),
    "data bfloat16": ("qwen3", BFLOAT16),
    "tensor": ("qwen3", {"policy__tensor_parallel": 2}),
    "sequence bfloat16": ("llama", SEQUENCE | BFLOAT16),
    "pipeline": ("qwen3", {"policy__pipeline_parallel": 2}),
    "interleaved": (
        "llama",
        {"policy__pipeline_parallel": 2, "policy__virtual_pipeline_parallel": 2},
    ),
    "experts": ("qwen3_moe", {"policy__expert_parallel": 2}),
    "experts tensor": ("qwen3_moe", SEQUENCE),
    "recompute": ("llama", {"policy__recompute": "full"}),
}
TOKENS = (120, 200, 64, 128)
"""Two of which, or all, fill a micro-batch of 512 tokens."""


def config_of(models: Path, case: str) -> Config:
    family, keys = CASES[case]
    usual = {"policy__tensor_parallel": 1, "train__max_tokens_per_microbatch": 512}
    return tiny_config(model__path=models / family, **{**usual, **keys})


def measure(rank: int, models: Path, root: Path, case: str) -> Any:
    """Bytes of this rank: weights, gradients, optimizer, activations, in memory and on disk."""
    from dapo_megatron.build import planner
    from dapo_megatron.policy.policy import MegatronPolicy

    config = config_of(models, case)
    exchange = Ranks(rank, 2, rank)
    policy = MegatronPolicy(config, exchange, planner(config.policy, config.train))
    weights = sum(p.nbytes for model in policy._models() for p in model.parameters())
    gradients = sum(
        bucket.grad_data.nbytes
        for chunk in policy._chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
        for bucket in buffer.buckets
    )
    kept: dict[int, int] = {}
    own = {
        tensor.untyped_storage().data_ptr()
        for chunk in policy._chunks
        for tensor in chunk.parameters()
    }

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.update(random_batch(TOKENS, vocab=99), LOSS, 1e-3)
    folder = root / case
    folder.mkdir(parents=True, exist_ok=True)
    policy.snapshot()(folder)
    exchange.barrier()
    policy.close()
    return weights, gradients, sum(kept.values()), on_disk(folder, rank)


def on_disk(folder: Path, rank: int) -> dict[str, int]:
    """Bytes of a rank's file, by the first part of the tensors' names; `step` is a number."""
    found: dict[str, int] = {}
    with safe_open(folder / f"rank_{rank:05d}.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            if not key.endswith("/step"):
                room = key.partition("/")[0]
                found[room] = found.get(room, 0) + file.get_tensor(key).nbytes
    return found


def all_cases(rank: int, models: Path, root: Path) -> dict[str, Any]:
    return {case: measure(rank, models, root, case) for case in CASES}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    models, root = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("saved")
    for family in {family for family, _ in CASES.values()}:
        make_random_model(family, models / family, num_hidden_layers=4)
    ranks = run_ranks(all_cases, 2, models, root)
    return models, {case: [of_rank[case] for of_rank in ranks] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_what_is_counted_is_what_is_there(
    case: str, measured: tuple[Path, dict[str, list[Any]]]
) -> None:
    models, found = measured
    ranks = found[case]
    rows = {row.part: row.size_bytes for row in estimate(config_of(models, case), 2).rows}
    weights, gradients, *_ = ranks[0]  # of the first stage: it holds more activations
    assert rows["policy weights"] == weights
    # Megatron pads its buffers: each parameter to 64 numbers, each bucket to 128 per rank.
    assert rows["gradients"] <= gradients < 1.1 * rows["gradients"]
    # All ranks together are exact; which of them has a number more depends on the padding.
    files = [on_disk for *_, on_disk in ranks]
    assert rows["checkpoint"] == sum(file["model"] + file["optimizer"] for file in files)
    largest = max(file["model"] + file["optimizer"] for file in files)
    assert rows["checkpoint, a rank's part"] == pytest.approx(largest, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_activations_are_roughly_bounded(
    case: str, measured: tuple[Path, dict[str, list[Any]]]
) -> None:
    models, found = measured
    rows = {row.part: row.size_bytes for row in estimate(config_of(models, case), 2).rows}
    largest = max(kept for _, _, kept, _ in found[case])
    assert 0.5 < rows["activations"] / largest < 2.0
