"""Test that a run that is stopped or killed at any point resumes to the same weights.

Runs are stopped between two steps and while sampling, and killed between two updates. After
resuming they equal the undisturbed run bitwise, in float32 on CPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.cluster.attempt import STOPPED
from tests.helpers.commands import Running, run, started
from tests.helpers.configs import TINY
from tests.helpers.training_state import stored_tensors

STEPS = 3
OVERRIDES = (
    *("run.processes=1", "policy.tensor_parallel=1"),
    f"train.rollout_steps={STEPS}",
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"),
    "rollout.on_policy=false",
    "loss.tis_cap=2.0",
    *("train.updates_per_step=2", "optimizer.warmup_rollout_steps=0"),
    *("evaluation.sets=[]", "checkpoint.every=1"),
)
REGULARIZED = ("loss.kl={coefficient: 0.1, place: reward}", "loss.entropy_coefficient=0.01")


def command(
    directory: Path, name: str, end: str = "none", *more: str, mlflow: bool = False
) -> list[str]:
    enabled = str(mlflow).lower()
    tracking = (
        f"tracking.mlflow={enabled}",
        "tracking.wait_seconds=60",
        f"tracking.report={enabled}",
    )
    where = (f"run.directory={directory}", f"run.name={name}", "resume=auto", *tracking)
    program = ("-m", "tests.helpers.stopper", end, "train", str(TINY))
    return [*program, *OVERRIDES, *where, *more]


def environment() -> dict[str, str]:
    """Return the variables of a launcher with one rank, so that the program starts no ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, **ranks, **where}


def start(
    directory: Path, name: str, end: str = "none", *more: str, mlflow: bool = False
) -> subprocess.CompletedProcess[str]:
    return run(*command(directory, name, end, *more, mlflow=mlflow), environment=environment())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    done = start(directory, "undisturbed")
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "undisturbed"


def end_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the metrics without times and without checks repeated at each start, and the saved
    weights and optimizer state."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "memory/", "throughput/", "sync/fingerprinted")
    metrics = [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]
    last = folder / "checkpoints" / f"step_{STEPS:06d}"
    return metrics, stored_tensors(last)


def check_same(folder: Path, undisturbed: Path) -> None:
    metrics, tensors = end_of(folder)
    expected_metrics, expected = end_of(undisturbed)
    assert metrics == expected_metrics
    assert tensors.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(tensors[name], expected[name])]
    assert samples_of(folder) == samples_of(undisturbed)


def samples_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the recorded completions and of the policy's values, which a repeated
    step must leave the same."""
    files = [*folder.glob("samples/*/completions.parquet"), *folder.glob("policy/*")]
    assert len(files) == 2 * STEPS
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.long
def test_a_run_stopped_or_killed_resumes_to_the_same_weights(undisturbed: Path) -> None:
    """Stop before step 2. Kill it between the updates of that step, then in step 3."""
    directory, folder = undisturbed.parent, undisturbed.parent / "stopped"
    done = start(directory, "stopped", "stop:2")
    assert done.returncode == STOPPED, done.stdout + done.stderr
    assert (
        "stopped by SIGUSR1. Saved after step 1; to continue, start with resume=auto" in done.stdout
    )
    done = start(directory, "stopped", "kill:2")
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert (folder / "samples" / "step_000002").exists()

    done = start(directory, "stopped", "kill:3")
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert "trains again on what steps 2 to 2 recorded" in done.stdout

    done = start(directory, "stopped")
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(folder, undisturbed)


@pytest.mark.long
def test_a_step_with_a_reference_is_repeated_with_the_same_weights(tmp_path: Path) -> None:
    done = start(tmp_path, "undisturbed", "none", *REGULARIZED)
    assert done.returncode == 0, done.stdout + done.stderr
    done = start(tmp_path, "killed", "kill:4", *REGULARIZED)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    done = start(tmp_path, "killed", "none", *REGULARIZED)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(tmp_path / "killed", tmp_path / "undisturbed")
    metrics, _ = end_of(tmp_path / "killed")
    assert metrics[0]["kl/reference"] == metrics[0]["kl/reward_penalty"] == 0.0
    assert metrics[1]["kl/reference"] > 0.0 < metrics[1]["policy/entropy_bonus"]


ROUTES = (
    "model.path=model_configs/tiny_qwen3_moe",
    "policy.router_replay=engine",
    "tracking.record_routes=true",
    "rollout.on_policy=false",
)


@pytest.mark.long
def test_a_run_with_routes_of_the_engine_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """Stop between two steps with carried completions, then kill it after an update. Without
    recorded routes the step is sampled again, which gives the same in a deterministic run."""
    done = start(tmp_path, "undisturbed", "none", *ROUTES)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "stopped"
    done = start(tmp_path, "stopped", "stop:2", *ROUTES)
    assert done.returncode == STOPPED, done.stdout + done.stderr
    assert list((folder / "checkpoints").glob("step_*/open.parquet"))
    done = start(tmp_path, "stopped", "kill:2", *ROUTES)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    done = start(tmp_path, "stopped", "none", *ROUTES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trains again on what steps 2 to 2 recorded" in done.stdout
    check_same(folder, tmp_path / "undisturbed")

    replay = ("--replay", str(folder))
    done = start(tmp_path, "replayed", "none", *ROUTES, *replay)
    assert done.returncode == 0, done.stdout + done.stderr
    _, tensors = end_of(tmp_path / "replayed")
    _, expected = end_of(folder)
    assert not [name for name in expected if not torch.equal(tensors[name], expected[name])]


@pytest.mark.long
def test_a_run_stopped_by_a_real_signal_resumes_to_the_same_weights(undisturbed: Path) -> None:
    """The signal arrives at any point. MLflow shows KILLED, then FINISHED, for the same run."""
    from mlflow import MlflowClient

    directory = undisturbed.parent
    folder = directory / "signalled"
    with started(
        *command(directory, "signalled", mlflow=True), environment=environment()
    ) as stopping:
        wait_for_step(folder, 1, stopping)
        signalled_at = time.monotonic()
        stopping.send_signal(signal.SIGUSR1)
        code, out = stopping.wait(timeout=100), stopping.stdout
    assert code == STOPPED, out
    print(f"from SIGUSR1 to the end: {time.monotonic() - signalled_at:.1f} s")
    page = folder / "report.html"
    while "WARNING: report.html is not ready" in out and not page.exists():
        assert time.monotonic() - signalled_at < 100
        time.sleep(0.2)
    assert "asked to stop" in page.read_text(encoding="utf-8")
    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    run_id = json.loads((folder / "mlflow_run.json").read_text())["run_id"]
    if "dapo_megatron track" in out:  # MLflow took longer than a run that was stopped waits
        assert run("track", str(folder)).returncode == 0
    assert client.get_run(run_id).info.status == "KILLED"

    done = start(directory, "signalled", mlflow=True)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(folder, undisturbed)
    assert json.loads((folder / "mlflow_run.json").read_text())["run_id"] == run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    assert "asked to stop" not in page.read_text(encoding="utf-8")


def wait_for_step(folder: Path, step: int, process: Running) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        path = folder / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} not reached")
