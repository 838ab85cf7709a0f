"""The tiny model trained over several nodes by slurm/train.sbatch itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.slurm.jobs import REPOSITORY, Project
from tests.slurm.runs import NUM_STEPS, START_SECONDS, Run, assert_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


def test_two_nodes(undisturbed: Run) -> None:
    steps = [row["step"] for row in undisturbed.metrics()]
    assert steps == list(range(NUM_STEPS + 1))
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["num_processes"] == 2
    assert {path.name for path in (undisturbed.folder / "logs").glob("rank_*.log")} == {
        "rank_0.log",
        "rank_1.log",
    }


def test_two_runs_are_the_same(training: Project, undisturbed: Run) -> None:
    """Or comparing a disturbed one with it would prove nothing."""
    again = Run.start(training, "again")
    again.wait_for_end()
    assert_same(again, undisturbed)


def test_four_nodes_after_a_check(training: Project) -> None:
    run = Run.start(training, "four", "train.rollout_steps=3", num_nodes=4, DAPO_PREFLIGHT="1")
    run.wait_for_end()
    assert run.num_steps() == 3
    reports = training.folder / f"slurm_logs/four/{run.job.number}.0/nodes"
    told = {path.stem: json.loads(path.read_text())["status"] for path in reports.glob("*.json")}
    assert set(told) == set(training.cluster.node_names) and "fail" not in told.values()


def test_two_nodes_of_two_ranks(training: Project) -> None:
    run = Run.start(
        training, "two_by_two", "train.rollout_steps=3", "policy.tensor_parallel=2",
        options=("--ntasks-per-node=2",),
    )  # fmt: skip
    run.wait_for_end()
    assert run.num_steps() == 3
    log = next(training.folder.glob(f"slurm_logs/two_by_two/{run.job.number}.0/*-0.log"))
    assert "tensor 2 x data 2" in log.read_text()


def test_evaluate_a_checkpoint(training: Project, undisturbed: Run) -> None:
    checkpoint = undisturbed.newest_checkpoint()
    job = training.sbatch(
        "-N2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=10",
        "model_configs/tiny_cpu.yaml", f"checkpoint={checkpoint}", "policy.tensor_parallel=1",
        "engine.kv_cache_gib=0.1", "evaluation.samples=1", script="evaluate.sbatch",
    )  # fmt: skip
    assert job.wait_for(seconds=START_SECONDS)["JobState"] == "COMPLETED", job.story()
    assert "chain_sum_held_out" in job.log


def test_convert_a_checkpoint(training: Project, undisturbed: Run) -> None:
    checkpoint = undisturbed.newest_checkpoint()
    target = training.folder / "converted"
    job = training.sbatch("megatron-to-hf", str(checkpoint), str(target), script="convert.sbatch")
    assert job.wait_for(seconds=START_SECONDS)["JobState"] == "COMPLETED", job.story()
    base = REPOSITORY / "model_configs/tiny_qwen3"
    tokenizer = "tokenizer.json"
    assert (target / tokenizer).read_bytes() == (base / tokenizer).read_bytes()
    trained, before = load_tensors(target), load_tensors(base)
    assert trained.keys() == before.keys()
    for name, tensor in trained.items():
        assert tensor.shape == before[name].shape, name
        assert 0 < np.abs(tensor - before[name]).max() < 0.1, f"{name} is not the base's, trained"


def load_tensors(model: Path) -> dict[str, np.ndarray]:
    """All of a model's folder."""
    files = model.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
