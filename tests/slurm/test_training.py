"""Train the tiny model on several emulated nodes with the real slurm/train.sbatch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.slurm.jobs import REPOSITORY, Project
from tests.slurm.runs import NUM_STEPS, START_SECONDS, Run, assert_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


def test_a_run_on_two_nodes_completes(undisturbed: Run) -> None:
    steps = [row["step"] for row in undisturbed.metrics()]
    assert steps == list(range(NUM_STEPS + 1))
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["num_processes"] == 2
    assert {path.name for path in (undisturbed.folder / "logs").glob("rank_*.log")} == {
        "rank_0.log",
        "rank_1.log",
    }


def test_two_undisturbed_runs_are_the_same(training: Project, undisturbed: Run) -> None:
    """Without this, comparing a disturbed run with an undisturbed one would prove nothing."""
    again = Run.start(training, "again")
    again.wait_for_end()
    assert_same(again, undisturbed)


def test_a_run_on_four_nodes_starts_after_the_node_check(training: Project) -> None:
    run = Run.start(training, "four", "train.rollout_steps=3", num_nodes=4, DAPO_PREFLIGHT="1")
    run.wait_for_end()
    assert run.num_steps() == 3
    reports = training.folder / f"slurm_logs/four/{run.job.number}.0/nodes"
    statuses = {
        path.stem: json.loads(path.read_text())["status"] for path in reports.glob("*.json")
    }
    assert set(statuses) == set(training.cluster.node_names) and "fail" not in statuses.values()


def test_a_run_on_two_nodes_with_two_ranks_each_completes(training: Project) -> None:
    run = Run.start(
        training, "two_by_two", "train.rollout_steps=3", "policy.tensor_parallel=2",
        options=("--ntasks-per-node=2",),
    )  # fmt: skip
    run.wait_for_end()
    assert run.num_steps() == 3
    log = next(training.folder.glob(f"slurm_logs/two_by_two/{run.job.number}.0/*-0.log"))
    assert "tensor 2 x data 2" in log.read_text()


def test_evaluate_sbatch_evaluates_a_checkpoint(training: Project, undisturbed: Run) -> None:
    checkpoint = undisturbed.newest_checkpoint()
    job = training.sbatch(
        "-N2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=10",
        "model_configs/tiny_cpu.yaml", f"checkpoint={checkpoint}", "policy.tensor_parallel=1",
        "engine.kv_cache_gib=0.1", "evaluation.samples=1", script="evaluate.sbatch",
    )  # fmt: skip
    assert job.wait_for(seconds=START_SECONDS)["JobState"] == "COMPLETED", job.story()
    assert "chain_sum_held_out" in job.log


def test_convert_sbatch_exports_the_trained_weights(training: Project, undisturbed: Run) -> None:
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
        assert 0 < np.abs(tensor - before[name]).max() < 0.1, (
            f"{name} does not differ from the base model by a few updates"
        )


def load_tensors(model: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a model folder."""
    files = model.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
