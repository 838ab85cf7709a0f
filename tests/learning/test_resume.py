"""Test that a run gives the same weights bit by bit, in float32 on CPU: with an engine on other
devices, replayed, and resumed after it was stopped or killed at any point."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.cluster.attempt import STOPPED
from dapo_megatron.plan.estimate import NodeSpec, estimate_memory
from dapo_megatron.plan.speed import estimate_speed
from tests.helpers.commands import run, started
from tests.helpers.configs import TINY, tiny_config
from tests.helpers.models import as_released, make_random_model
from tests.helpers.processes import wait_until
from tests.helpers.runs import (
    FREE,
    SEPARATE,
    SMALL,
    check_ledger,
    metrics_of,
    rank_environment,
    servers,
    wait_for_row,
    wait_for_the_end,
)
from tests.helpers.training_state import stored_tensors

STEPS = 3
OVERRIDES = (
    *("resume=auto", f"train.rollout_steps={STEPS}", "train.updates_per_step=2"),
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"),
    "rollout.on_policy=false",  # so that some groups are sampled by older weights than are trained
    # So that the engine's log-probs matter.
    *("loss.tis_cap=2.0", "loss.correction.sequence_mean=[0.9, 1.1]"),
    *("optimizer.warmup_rollout_steps=0", "policy.sequence_parallel=false"),
    *("evaluation.sets=[]", "checkpoint.every=1"),
)
UNTRACKED = ("tracking.mlflow=false", "tracking.report=false")


def command(directory: Path, name: str, *more: str) -> list[str]:
    where = (f"run.directory={directory}", f"run.name={name}")
    return ["train", str(TINY), *OVERRIDES, *where, *more]


def finish(directory: Path, name: str, *more: str) -> Path:
    """Run to the end, and return the run's folder."""
    done = run(*command(directory, name, *UNTRACKED, *more))
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / name


def end_at(point: str, directory: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run until a point of `tests.helpers.stopper`, and check how the run ends there."""
    program = ("-m", "tests.helpers.stopper", point)
    words = command(directory, name, *UNTRACKED, *SMALL, *more)
    done = run(*program, *words, environment=rank_environment())
    code = STOPPED if point.startswith("stop") else -signal.SIGKILL
    assert done.returncode == code, done.stdout + done.stderr
    return done


def tensors_of(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Return weights, optimizer state and random states of the policy."""
    return stored_tensors(folder / "checkpoints" / f"step_{step:06d}")


def differing(folder: Path, expected: Path, step: int = STEPS) -> list[str]:
    tensors, others = tensors_of(folder, step), tensors_of(expected, step)
    assert tensors.keys() == others.keys()
    return [name for name in others if not torch.equal(tensors[name], others[name])]


def check_same(folder: Path, expected: Path) -> None:
    assert metrics_of(folder) == metrics_of(expected)
    assert differing(folder, expected) == []
    assert samples_of(folder) == samples_of(expected)


def samples_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the recorded completions and of the policy's values, which a repeated
    step must leave the same."""
    files = [*folder.glob("samples/*/completions.parquet"), *folder.glob("policy/*")]
    assert len(files) == 2 * STEPS
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with one rank and a colocated engine."""
    folder = finish(tmp_path_factory.mktemp("runs"), "undisturbed", *SMALL)
    assert any(row["groups/age_mean"] > 0 for row in metrics_of(folder)), "no group was carried"
    return folder


def test_a_separate_engine_gives_the_numbers_of_a_colocated_one(undisturbed: Path) -> None:
    folder = finish(undisturbed.parent, "separate", *SEPARATE)
    check_same(folder, undisturbed)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    weights = load_file(Path(TINY).parent / "tiny_qwen3" / "model.safetensors")
    num_bytes = sum(4 * weight.numel() for weight in weights.values())
    assert num_bytes <= rows[-1]["sync/bytes"] < 1.01 * num_bytes  # alignment
    config = tiny_config(
        policy__tensor_parallel=1, run__processes=1, engine__colocated=False, engine__replicas=1
    )
    planned = estimate_speed(estimate_memory(config, 1, NodeSpec())).sync_bytes
    assert rows[-1]["sync/bytes"] == pytest.approx(planned, rel=0.01)
    assert (folder / "logs/engine_0.log").exists()


def test_a_replay_repeats_every_update_without_an_engine(undisturbed: Path) -> None:
    """It ends where the next step, one more than was recorded, is missing."""
    folder, more = undisturbed.parent / "replayed", f"train.rollout_steps={STEPS + 1}"
    words = (*UNTRACKED, *SMALL, more, f"checkpoint.every={STEPS}", "--replay", str(undisturbed))
    done = run(*command(undisturbed.parent, "replayed", *words))
    assert done.returncode == 2, done.stdout + done.stderr
    missing = undisturbed / "samples" / f"step_{STEPS + 1:06d}"
    assert f"error: {missing}: not recorded" in done.stdout
    rows, expected = metrics_of(folder), metrics_of(undisturbed)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, original in zip(rows, expected, strict=True):
        names = {name for name in original if name.startswith("policy/")}
        assert {"policy/loss", "policy/grad_norm", "policy/entropy", "policy/tis_weight"} <= names
        assert {name: row[name] for name in names} == {name: original[name] for name in names}
    # Only the random state of the process differs, because the engine drew from it in one run.
    different = differing(folder, undisturbed)
    assert [name for name in different if not name.startswith("rng.")] == []
    assert not (folder / "tokenizer.json").exists()  # a replay needs no tokenizer
    assert "vllm" not in (folder / "logs" / "rank_0.log").read_text().lower()


LAYOUTS = {
    "tensor parallel": ("policy.tensor_parallel=2", "engine.tensor_parallel=2"),
    "pipeline parallel to two engines": (
        "policy.tensor_parallel=1", "policy.pipeline_parallel=2", "engine.replicas=2",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_separate_engines_give_the_numbers_of_colocated_ones(layout: str, tmp_path: Path) -> None:
    words = ("run.processes=2", "rollout.on_policy=true", *LAYOUTS[layout])
    both = finish(tmp_path, "colocated", *words)
    check_same(finish(tmp_path, "separate", *words, "engine.colocated=false"), both)


# ---------------------------------------------------------------------------- stopped and killed


@pytest.mark.long
def test_a_run_stopped_or_killed_resumes_to_the_same_weights(undisturbed: Path) -> None:
    """Stop before step 2. Kill it between the updates of that step, then in step 3."""
    directory, folder = undisturbed.parent, undisturbed.parent / "stopped"
    done = end_at("stop:2", directory, "stopped")
    assert (
        "stopped by SIGUSR1. Saved after step 1; to continue, start with resume=auto" in done.stdout
    )
    end_at("kill:2", directory, "stopped")
    assert (folder / "samples" / "step_000002").exists()
    done = end_at("kill:3", directory, "stopped")
    assert "trains again on what steps 2 to 2 recorded" in done.stdout
    check_same(finish(directory, "stopped", *SMALL), undisturbed)


@pytest.mark.long
def test_a_killed_run_with_a_separate_engine_resumes_and_leaves_nothing(
    undisturbed: Path, ids: Path
) -> None:
    """No engine survives the trainers, and nothing is left in shared memory."""
    before = set(os.listdir("/dev/shm"))
    folder = undisturbed.parent / "killed"
    words = command(undisturbed.parent, "killed", *UNTRACKED, *SEPARATE)
    with started(*words, new_session=True) as running:
        wait_for_row(folder, 1, running)
        assert len(servers(ids)) == 1
        os.killpg(running.pid, signal.SIGKILL)
        wait_for_the_end(ids)
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if "loky" not in name}  # of other tests
    check_same(finish(undisturbed.parent, "killed", *SEPARATE), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_killed_run_of_a_released_model_goes_on(family: str, tmp_path: Path) -> None:
    """Gated delta nets, from the folder of a model for images and text."""
    text = make_random_model(family, tmp_path / "text", seed=1)
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(64)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = "columns: {prompt: question, answer: answer}"
    source = f"{{name: sums, path: {path}, grader: tests.helpers.graders:near, {columns}}}"
    released = as_released(text, tmp_path / "released")
    words = (f"model.path={released}", "model.drop_mtp=true", f"data.train=[{source}]")
    expected = finish(tmp_path, "undisturbed", *SMALL, *words)
    end_at("kill:4", tmp_path, "killed", *words)
    check_same(finish(tmp_path, "killed", *SMALL, *words), expected)
    assert json.loads((expected / "summary.json").read_text(encoding="utf-8"))["max_gap"] < 2e-5


REGULARIZED = ("loss.kl={coefficient: 0.1, place: reward}", "loss.entropy_coefficient=0.01")


@pytest.mark.long
def test_a_step_with_a_reference_is_repeated_with_the_same_weights(tmp_path: Path) -> None:
    expected = finish(tmp_path, "undisturbed", *SMALL, *REGULARIZED)
    end_at("kill:4", tmp_path, "killed", *REGULARIZED)
    check_same(finish(tmp_path, "killed", *SMALL, *REGULARIZED), expected)
    metrics = metrics_of(expected)
    assert metrics[0]["kl/reference"] == metrics[0]["kl/reward_penalty"] == 0.0
    assert metrics[1]["kl/reference"] > 0.0 < metrics[1]["policy/entropy_bonus"]


ROUTES = (
    "model.path=model_configs/tiny_qwen3_moe",
    "policy.router_replay=engine",
    "tracking.record_routes=true",
)


@pytest.mark.long
def test_a_run_with_routes_of_the_engine_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """Stop between two steps with carried completions, then kill it after an update. Without
    recorded routes the step is sampled again, which gives the same in a deterministic run."""
    expected = finish(tmp_path, "undisturbed", *SMALL, *ROUTES)
    folder = tmp_path / "stopped"
    end_at("stop:2", tmp_path, "stopped", *ROUTES)
    assert list((folder / "checkpoints").glob("step_*/open.parquet"))
    end_at("kill:2", tmp_path, "stopped", *ROUTES)
    done = run(*command(tmp_path, "stopped", *UNTRACKED, *SMALL, *ROUTES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trains again on what steps 2 to 2 recorded" in done.stdout
    check_same(folder, expected)
    replayed = finish(tmp_path, "replayed", *SMALL, *ROUTES, "--replay", str(folder))
    different = differing(replayed, folder)
    assert [name for name in different if not name.startswith("rng.")] == []


@pytest.mark.long
def test_a_run_stopped_by_a_real_signal_resumes_to_the_same_weights(undisturbed: Path) -> None:
    """The signal arrives at any point. MLflow shows KILLED, then FINISHED, for the same run."""
    from mlflow import MlflowClient

    directory = undisturbed.parent
    folder, page = directory / "signalled", directory / "signalled" / "report.html"
    words = command(
        directory, "signalled", *SMALL, "tracking.mlflow=true", "tracking.wait_seconds=60"
    )
    with started(*words, environment=rank_environment()) as stopping:
        wait_for_row(folder, 0, stopping)
        stopping.send_signal(signal.SIGUSR1)
        code, out = stopping.wait(timeout=300), stopping.stdout
    assert code == STOPPED, out
    wait_until(lambda: "WARNING: report.html is not ready" not in out or page.exists())
    assert "asked to stop" in page.read_text(encoding="utf-8")
    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    run_id = json.loads((folder / "mlflow_run.json").read_text())["run_id"]
    if "dapo_megatron track" in out:  # MLflow took longer than a run that was stopped waits
        assert run("track", str(folder)).returncode == 0
    assert client.get_run(run_id).info.status == "KILLED"

    done = run(*words, environment=rank_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(folder, undisturbed)
    assert json.loads((folder / "mlflow_run.json").read_text())["run_id"] == run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    assert "asked to stop" not in page.read_text(encoding="utf-8")


@pytest.mark.long
def test_a_killed_asynchronous_run_repeats_its_recorded_steps(tmp_path: Path) -> None:
    """Killed after step 3. The checkpoints of steps 2 and 3 are taken away, so that the run repeats
    these steps from that of step 1."""
    words = command(
        tmp_path, "killed", *UNTRACKED, *SEPARATE, *FREE, "rollout.max_staleness=2",
        "train.rollout_steps=5", "checkpoint.keep=9",
    )  # fmt: skip
    folder, aside = tmp_path / "killed", tmp_path / "aside"
    with started(*words, new_session=True) as running:
        wait_for_row(folder, 2, running)
        os.killpg(running.pid, signal.SIGKILL)
    before = {row["step"]: row for row in metrics_of(folder)}
    assert sum(row["groups/token_age_mean"] for row in before.values()) > 0
    aside.mkdir()
    for path in sorted((folder / "checkpoints").glob("step_*"))[1:]:
        path.rename(aside / path.name)
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    [last] = re.findall(r"trains again on what steps 2 to (\d) recorded", done.stdout)
    rows = {row["step"]: row for row in metrics_of(folder)}
    assert [*rows] == [*range(1, 6)]
    assert max(row["groups/age_max"] for row in rows.values()) <= 2  # rollout.max_staleness
    for step in range(2, 1 + min(int(last), max(before))):
        assert without_syncs(rows[step]) == without_syncs(before[step])
    for path in aside.iterdir():
        tensors, others = (
            stored_tensors(where / path.name) for where in (aside, folder / "checkpoints")
        )
        assert not [name for name in others if not torch.equal(tensors[name], others[name])]
    check_ledger(folder, 5, samples_per_prompt=8)


def without_syncs(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("sync/")}
