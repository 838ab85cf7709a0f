"""The tiny model trained over several nodes by slurm/train.sbatch itself."""

from __future__ import annotations

import json

import pytest

from tests.slurm.jobs import REPOSITORY, Project
from tests.slurm.runs import START_SECONDS, Run, assert_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


def test_two_nodes(undisturbed: Run) -> None:
    steps = [row["step"] for row in undisturbed.metrics()]
    assert steps == list(range(1, len(steps) + 1))
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
    nodes = {f"node{number}" for number in range(1, 5)} if training.cluster.has_networks else told
    assert set(nodes) <= set(told) and "fail" not in told.values()


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
    checkpoint = sorted((undisturbed.folder / "checkpoints").glob("step_*"))[-1]
    job = training.sbatch(
        "-N2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=10",
        "model_configs/tiny_cpu.yaml", f"checkpoint={checkpoint}", "policy.tensor_parallel=1",
        "engine.kv_cache_gib=0.1", "evaluation.samples=1", script="evaluate.sbatch",
    )  # fmt: skip
    assert job.wait_for(seconds=START_SECONDS)["JobState"] == "COMPLETED", job.story()
    assert "chain_sum_held_out" in job.log


def test_convert_a_checkpoint(training: Project, undisturbed: Run) -> None:
    checkpoint = sorted((undisturbed.folder / "checkpoints").glob("step_*"))[-1]
    target = training.folder / "converted"
    job = training.sbatch("megatron-to-hf", str(checkpoint), str(target), script="convert.sbatch")
    assert job.wait_for(seconds=START_SECONDS)["JobState"] == "COMPLETED", job.story()
    kept = {"config.json", "tokenizer.json"}
    assert kept <= {path.name for path in target.iterdir()}
    assert (REPOSITORY / "model_configs/tiny_qwen3/config.json").exists()
