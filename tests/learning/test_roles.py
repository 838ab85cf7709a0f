"""Test runs whose policy and engines run on dedicated ranks against runs in which all ranks have
both."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.cluster.attempt import HUNG, STOPPED
from dapo_megatron.cluster.launch import meeting_variables
from tests.helpers.commands import Running, run, started
from tests.helpers.configs import TINY

STEPS = 3
OVERRIDES = (
    f"train.rollout_steps={STEPS}",
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4"),
    *("train.updates_per_step=2", "optimizer.warmup_rollout_steps=0"),
    *("evaluation.every=0", "evaluation.samples=1", "checkpoint.every=0"),
    *("tracking.mlflow=false", "resume=auto"),
)
ONE = ("run.processes=1", "policy.tensor_parallel=1")
ONE_EACH = ("run.processes=2", "policy.tensor_parallel=1", "roles={policy: 1, engine: 1}")


def command(directory: Path, name: str, *more: str) -> list[str]:
    where = (f"run.directory={directory}", f"run.name={name}")
    return ["train", str(TINY), *OVERRIDES, *where, *more]


def finish(directory: Path, name: str, *more: str) -> Path:
    """Run to the end, and return the run's folder."""
    done = run(*command(directory, name, *more))
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / name


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without clocks, memory and the bytes of a sync."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("time/", "memory/", "throughput/", "sync/bytes")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


def policy_file(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights, optimizer state and random states of rank 0's policy."""
    return load_file(folder / "checkpoints" / f"step_{STEPS:06d}" / "rank_00000.safetensors")


def check_same(folder: Path, expected: Path) -> None:
    assert metrics_of(folder) == metrics_of(expected)
    tensors, others = policy_file(folder), policy_file(expected)
    assert tensors.keys() == others.keys()
    assert not [name for name in others if not torch.equal(tensors[name], others[name])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def hybrid(directory: Path) -> Path:
    return finish(directory, "hybrid", *ONE, "rollout.on_policy=true")


def test_one_rank_of_each_role_gives_the_numbers_of_one_rank_with_both(
    directory: Path, hybrid: Path
) -> None:
    folder = finish(directory, "separate", *ONE_EACH, "rollout.on_policy=true")
    check_same(folder, hybrid)
    [last] = [row for row in map(json.loads, (folder / "metrics.jsonl").open()) if row["step"] == 3]
    weights = load_file(Path(TINY).parent / "tiny_qwen3" / "model.safetensors")
    num_bytes = sum(4 * weight.numel() for weight in weights.values())
    assert num_bytes <= last["sync/bytes"] < 1.01 * num_bytes  # alignment
    assert {path.name for path in (folder / "samples" / "step_000001").iterdir()} == {
        "completions_00000.parquet", "policy_00000.parquet", "index.json",
    }  # fmt: skip
    assert "roles" in json.loads((folder / "provenance.json").read_text())["facts"]
    pulses = [json.loads(path.read_text()) for path in sorted(folder.glob(".pulse/rank_*.json"))]
    assert [pulse["role"] for pulse in pulses] == ["policy", "engine"]


LAYOUTS = {
    "data parallel": (
        "policy.tensor_parallel=1", "engine.tensor_parallel=1", "rollout.on_policy=true",
    ),
    "tensor parallel, carrying": (
        "policy.tensor_parallel=2", "engine.tensor_parallel=2", "rollout.on_policy=false",
    ),
    "pipeline to tensor parallel": (
        "policy.tensor_parallel=1", "policy.pipeline_parallel=2", "engine.tensor_parallel=2",
        "rollout.on_policy=true",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_of_each_role_give_the_numbers_of_two_ranks_with_both(
    layout: str, tmp_path: Path
) -> None:
    """A deterministic run carries groups without on_policy, but samples nothing in training."""
    both = finish(tmp_path, "both", "run.processes=2", *LAYOUTS[layout])
    roles = ("run.processes=4", "roles={policy: 2, engine: 2}")
    folder = finish(tmp_path, "separate", *roles, *LAYOUTS[layout])
    check_same(folder, both)


def ranks_that_stop(stack: ExitStack, words: list[str], stop_at: int) -> list[Running]:
    """Start one rank of each role. Rank 0 acts as if signalled at its stop check `stop_at`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = Path(stack.enter_context(TemporaryDirectory(prefix="dapo-roles-")))
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared = {**os.environ, **meeting_variables(store), **world, **where}
    ranks = []
    for rank, at in enumerate((stop_at, 0)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        program = ("-m", "tests.helpers.stopper", at, *words)
        ranks.append(stack.enter_context(started(*program, environment=shared | own)))
    return ranks


@pytest.mark.long
def test_a_run_stopped_between_two_updates_resumes_to_the_same_weights(
    directory: Path, hybrid: Path
) -> None:
    """In each step the policy's rank has a check at the start, before the old log-probs, and for
    each of two updates one before it and one in its micro-batch."""
    words = command(directory, "stopped", *ONE_EACH, "rollout.on_policy=true")
    with ExitStack() as stack:
        ranks = ranks_that_stop(stack, words, stop_at=6 + 5)
        assert [rank.wait(200) for rank in ranks] == [STOPPED] * 2, ranks[0].stdout
        assert "stopped by SIGUSR1. Saved after step 1" in ranks[0].stdout
    folder = directory / "stopped"
    state = json.loads((folder / "checkpoints" / "step_000001_open" / "state.json").read_text())
    assert len(state["open_step"]["updates"]) == 1
    finish(directory, "stopped", *ONE_EACH, "rollout.on_policy=true")
    check_same_after_resume(folder, hybrid)


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_weights(directory: Path, hybrid: Path) -> None:
    words = (*ONE_EACH, "rollout.on_policy=true", "checkpoint.every=1")
    with started(*command(directory, "killed", *words), new_session=True) as running:
        wait_for_row(directory / "killed", 1, running)
        os.killpg(running.pid, signal.SIGKILL)
    folder = finish(directory, "killed", *words)
    check_same_after_resume(folder, hybrid)


def check_same_after_resume(folder: Path, expected: Path) -> None:
    """Compare as `check_same`, without the checks that the sync of each start repeats."""
    tensors, others = policy_file(folder), policy_file(expected)
    assert not [name for name in others if not torch.equal(tensors[name], others[name])]
    rows, others = metrics_of(folder), metrics_of(expected)
    for row in (*rows, *others):
        row.pop("sync/canary_gap", None)
    assert rows == others


@pytest.mark.long
def test_engines_sample_while_the_policy_trains(tmp_path: Path) -> None:
    """With a high rollout.lookahead the engine always has work. The run is stopped in the training
    of step 2."""
    words = (
        *ONE_EACH,
        *("rollout.on_policy=false", "rollout.deterministic=false", "loss.tis_cap=2.0"),
        *("engine.max_sequences=8", "rollout.prompts_per_step=16", "rollout.samples_per_prompt=8"),
        "rollout.lookahead=12",
        *("train.updates_per_step=1", "tracking.timeline_every=1"),
    )
    with ExitStack() as stack:  # each step has four checks
        ranks = ranks_that_stop(stack, command(tmp_path, "ahead", *words), stop_at=4 + 3)
        assert [rank.wait(300) for rank in ranks] == [STOPPED] * 2, ranks[0].stdout
    folder = finish(tmp_path, "ahead", *words)
    _, *steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    overlaps = [row["throughput/overlap"] for row in steps]
    print(f"overlap by step: {overlaps}")
    assert min(overlaps) > 0.95
    check_ledger(steps)
    timeline = json.loads((folder / "timeline" / "step_000003.json").read_text())
    policy, engine = ([name for name, _, _ in rank["spans"]] for rank in timeline["ranks"])
    assert "update" in policy and "update" not in engine
    assert engine.count("generate") == 2  # for the step, and during its training


@pytest.mark.long
def test_a_killed_asynchronous_run_repeats_its_journaled_steps(tmp_path: Path) -> None:
    """Killed after step 3. The checkpoints of steps 2 and 3 are taken away, so that the run repeats
    these steps from that of step 1."""
    words = (
        *ONE_EACH,
        *("rollout.on_policy=false", "rollout.deterministic=false", "loss.tis_cap=2.0"),
        *("rollout.max_staleness=2", "train.rollout_steps=5"),
        *("checkpoint.rollouts=true", "checkpoint.every=1", "checkpoint.keep=9"),
    )
    folder, aside = tmp_path / "killed", tmp_path / "aside"
    with started(*command(tmp_path, "killed", *words), new_session=True) as running:
        wait_for_row(folder, 3, running)
        os.killpg(running.pid, signal.SIGKILL)
    before = {row["step"]: row for row in metrics_of(folder)}
    assert sum(row["groups/token_age_mean"] for row in before.values() if row["step"]) > 0
    aside.mkdir()
    for path in sorted((folder / "checkpoints").glob("step_*"))[1:]:
        path.rename(aside / path.name)
    done = run(*command(tmp_path, "killed", *words))
    assert done.returncode == 0, done.stdout + done.stderr
    [last] = re.findall(r"repeats steps 2 to (\d) with their journaled rollouts", done.stdout)
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [*range(6)]
    assert max(row["groups/age_max"] for row in rows[1:]) <= 2  # rollout.max_staleness
    for row in rows[2 : 1 + min(int(last), max(before))]:
        expected = before[row["step"]]
        assert {k: v for k, v in row.items() if not k.startswith("sync/")} == {
            k: v for k, v in expected.items() if not k.startswith("sync/")
        }
    for path in aside.iterdir():
        tensors, others = (
            load_file(where / path.name / "rank_00000.safetensors")
            for where in (aside, folder / "checkpoints")
        )
        assert not [name for name in others if not torch.equal(tensors[name], others[name])]
    check_ledger(rows[1:])


def check_ledger(steps: list[dict[str, Any]]) -> None:
    """Check that every prompt of a run was issued once, and ended once or is carried."""
    ended = ("trained", "all_correct", "all_wrong", "overlong", "abstained", "expired")
    closed = sum(row[f"groups/{outcome}"] for row in steps for outcome in ended)
    assert sum(row["groups/issued"] for row in steps) == closed + steps[-1]["groups/carried"]


@pytest.mark.long
@pytest.mark.parametrize("words", [("evaluate",), ("doctor", "sync")])
def test_other_commands_work_with_roles(words: tuple[str, ...]) -> None:
    out = run(*words, str(TINY), "--overlay", "model_configs/separate/tiny_async.yaml")
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.long
def test_a_stopped_policy_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """A stopped engine does not: see test_elastic.py."""
    limits = ("generate", "logprobs", "update", "sync", "other", "evaluate", "checkpoint")
    words = (*ONE_EACH, *(f"watchdog.{phase}=15" for phase in limits), "train.rollout_steps=1000")
    with started(*command(tmp_path, "hung", *words), new_session=True) as running:
        wait_for_row(tmp_path / "hung", 2, running)
        pulse = json.loads((tmp_path / "hung/.pulse/rank_00000.json").read_text())
        os.kill(pulse["pid"], signal.SIGSTOP)
        code, out = running.wait(200), running.stdout + running.stderr
    assert code == HUNG, out
    assert "rank 0 (policy, " in out
    shown = run("doctor", "run", str(tmp_path / "hung")).stdout
    assert "policy" in shown and "engine" in shown and "rank 0: missing" in shown


def wait_for_row(folder: Path, number: int, process: Running) -> None:
    """Wait until the metrics have more than `number` rows."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not path.exists() or path.read_text().count("\n") <= number:
        assert time.monotonic() < deadline and process.poll() is None, process.stdout
        time.sleep(0.05)
