"""Test runs whose engines sample while the policy trains, and runs that lose engines and get them
back."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dapo_megatron.cluster.attempt import STOPPED
from dapo_megatron.report import derived, timeline
from dapo_megatron.report.reading import read_run
from tests.helpers.commands import Running, run, started
from tests.helpers.configs import TINY
from tests.helpers.runs import (
    FREE,
    PATIENCE_SECONDS,
    SEPARATE,
    SMALL,
    check_ledger,
    rank_environment,
    servers,
    wait_for_row,
    wait_for_the_end,
)

OVERRIDES = (
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4"),
    *("train.updates_per_step=2", "optimizer.warmup_rollout_steps=0"),
    *("evaluation.every=0", "evaluation.samples=1", "checkpoint.every=0"),
    *("tracking.mlflow=false", "resume=auto", "policy.sequence_parallel=false"),
)


def command(directory: Path, num_steps: int, *more: str) -> list[str]:
    where = (f"run.directory={directory}", "run.name=run", f"train.rollout_steps={num_steps}")
    return ["train", str(TINY), *OVERRIDES, *where, *more]


def lose_server(ids: Path, process: Running, number: signal.Signals, rng: random.Random) -> None:
    """Send a signal to a server."""
    while not (running := servers(ids)):
        assert process.poll() is None, process.stdout
        time.sleep(0.1)
    with suppress(psutil.Error):
        rng.choice(running).send_signal(number)


def wait_for_more_rows(folder: Path, number: int, process: Running) -> None:
    """Wait until the metrics have `number` more rows, or the run ends."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + PATIENCE_SECONDS
    rows = path.read_text().count("\n")
    while path.read_text().count("\n") < rows + number and process.poll() is None:
        assert time.monotonic() < deadline, process.stdout
        time.sleep(0.05)


# ---------------------------------------------------------------------------- separate engines


@pytest.mark.long
def test_engines_sample_while_the_policy_trains(tmp_path: Path) -> None:
    """With a high rollout.lookahead the engine always has work. The run is stopped after the
    training of step 2, and resumed. Its report shows how long each side waits."""
    program = command(
        tmp_path, 3, *SEPARATE, *FREE, "rollout.prompts_per_step=16", "rollout.lookahead=12",
        "rollout.samples_per_prompt=8", "train.updates_per_step=1", "tracking.timeline_every=1",
    )  # fmt: skip
    stopped = run("-m", "tests.helpers.stopper", "stop:3", *program, environment=rank_environment())
    assert stopped.returncode == STOPPED, stopped.stdout
    done, folder = run(*program), tmp_path / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    _, *steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert min(row["throughput/overlap"] for row in steps) > 0.95
    check_ledger(folder, 3, samples_per_prompt=8)

    run_data = read_run(folder)
    drawn, *_ = timeline.timelines(run_data)[0]
    names = {trace["name"] for trace in drawn.figure["data"][:-1]}
    assert names >= {timeline.WAITING, "update", "sync"} and "generate" not in names
    for name in (derived.POLICY_WAITS, derived.ENGINES_WAIT):
        assert all(0 <= share < 1 for share in run_data.values(name))
    assert "Waiting of each side" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("words", [("evaluate",), ("doctor", "sync")])
def test_other_commands_work_with_separate_engines(words: tuple[str, ...]) -> None:
    out = run(*words, str(TINY), "--overlay", "model_configs/separate/tiny_async.yaml")
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.long
def test_a_stopped_trainer_ends_the_run_and_is_named(tmp_path: Path, ids: Path) -> None:
    """Its engines end, too."""
    limits = ("generate", "logprobs", "update", "sync", "other", "evaluate", "checkpoint")
    words = command(tmp_path, 1000, *SEPARATE, *(f"watchdog.{phase}=15" for phase in limits))
    with started(*words, new_session=True) as running:
        wait_for_row(tmp_path / "run", 2, running)
        shown = run("doctor", "run", str(tmp_path / "run")).stdout
        assert re.search(r"engine 0 \(node .*, process \d+\): heard \d+ s ago", shown), shown
        pulse = json.loads((tmp_path / "run/.pulse/rank_00000.json").read_text())
        os.kill(pulse["pid"], signal.SIGSTOP)
        time.sleep(20)
        os.kill(pulse["pid"], signal.SIGCONT)
        code, out = running.wait(PATIENCE_SECONDS), running.stdout + running.stderr
    assert code == 1, out
    assert "noticed by rank 0: no sign of life for 15 s" in out
    wait_for_the_end(ids)


# ---------------------------------------------------------------------------- lost engines


def test_a_run_waits_for_its_only_engine_which_died(tmp_path: Path, ids: Path) -> None:
    """The engine dies while it is built, and again during the third step."""
    rng = random.Random(0)
    with started(*command(tmp_path, 5, *SMALL, *FREE), new_session=True) as running:
        lose_server(ids, running, signal.SIGKILL, rng)
        wait_for_row(tmp_path / "run", 2, running)
        lose_server(ids, running, signal.SIGKILL, rng)
        assert running.wait(PATIENCE_SECONDS) == 0, running.stdout
        out = running.stdout
    assert out.count("its connection has ended; what it was working on is sampled again") >= 1
    check_ledger(tmp_path / "run", 5)


@pytest.mark.long
@pytest.mark.parametrize("end", ["SIGTERM", "too few engines"])
def test_a_run_that_ends_while_it_waits_for_engines_saves(
    end: str, tmp_path: Path, ids: Path
) -> None:
    """It resumes from what it had."""
    two = ("engine.replicas=2", "engine.min_replicas=2")
    words = command(tmp_path, 12, *SEPARATE, *FREE, *two)
    with started(*words, "watchdog.start=12", new_session=True) as running:
        wait_for_row(tmp_path / "run", 3, running)
        if end == "SIGTERM":
            lose_server(ids, running, signal.SIGKILL, random.Random(1))
            time.sleep(3.0)
            running.send_signal(signal.SIGTERM)
        while end != "SIGTERM" and running.poll() is None:  # they never get ready again
            for server in servers(ids):
                with suppress(psutil.Error):
                    server.kill()
            time.sleep(0.5)
        code, out = running.wait(PATIENCE_SECONDS), running.stdout
    reason, expected = {
        "SIGTERM": ("stopped by SIGTERM", STOPPED),
        "too few engines": (r"\d of at least 2 engines \(engine.min_replicas\) are there", 1),
    }[end]
    assert code == expected, out
    assert re.search(rf"error: {reason}.*Saved after step \d+; to continue", out), out
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    check_ledger(tmp_path / "run", 12)


FORMS = {
    "two separate engines": (*SEPARATE, "engine.replicas=2"),
    "two colocated engines": (
        "run.processes=2", "policy.tensor_parallel=1", "engine.replicas=2",
    ),
    "a colocated engine of two workers": (
        "run.processes=2", "policy.tensor_parallel=2", "engine.tensor_parallel=2",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_run_survives_losses_at_random_moments(form: str, tmp_path: Path, ids: Path) -> None:
    """Engines are killed or stopped (SIGSTOP), and the run goes on each time."""
    rng = random.Random(form)
    words = command(tmp_path, 80, *FORMS[form], *FREE, "checkpoint.every=20")
    num_losses, folder = 0, tmp_path / "run"
    with started(*words, new_session=True) as running:
        wait_for_row(folder, 1, running)
        while num_losses < 5 and running.poll() is None:
            time.sleep(rng.uniform(0, 6))
            lose_server(ids, running, rng.choice([signal.SIGKILL, signal.SIGSTOP]), rng)
            wait_for_more_rows(folder, 2, running)
            num_losses += 1
        assert running.wait(PATIENCE_SECONDS) == 0, running.stdout
    print(check_ledger(folder, 80), (folder / "summary.json").read_text())
    assert num_losses == 5


@pytest.mark.long
def test_an_engine_that_stops_while_its_grades_are_awaited_returns(
    tmp_path: Path, ids: Path
) -> None:
    folder, gate, rows = tmp_path / "run", tmp_path / "gate", tmp_path / "rows.jsonl"
    prompts = [[{"role": "user", "content": f"{a} + 7 ="}] for a in range(60)]
    rules = {"ground_truth": str(gate), "style": "rule"}
    lines = [{"data_source": "a", "prompt": prompt, "reward_model": rules} for prompt in prompts]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"{{kind: jsonl, name: a, path: {rows}, grader: 'tests.helpers.graders:patient'}}"
    words = command(
        tmp_path, 100, *SEPARATE, *FREE, "engine.replicas=2", f"data.train=[{source}]",
        "evaluation.sets=[]", "optimizer.lr=1e-8",
    )  # fmt: skip
    with started(*words, new_session=True) as running:
        wait_for_row(folder, 2, running)
        gate.touch()
        time.sleep(5.0)  # all that was to be sampled is sampled
        lose_server(ids, running, signal.SIGSTOP, random.Random(1))
        gate.unlink()
        assert running.wait(PATIENCE_SECONDS) == 0, running.stdout
    check_ledger(folder, 100)
    last = max((folder / "timeline").glob("step_*.json"))
    replicas = json.loads(last.read_text())["replicas"]
    assert len(replicas) == 2
    assert all(any(running for _, running in replica["running"]) for replica in replicas)
