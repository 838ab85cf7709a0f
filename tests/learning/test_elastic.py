"""Test runs that lose engines and get them back."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo_megatron.cluster.attempt import STOPPED
from dapo_megatron.cluster.launch import STARTS
from dapo_megatron.cluster.members import MAX_FAULTS
from tests.helpers.commands import Running, run, started
from tests.learning.test_roles import command, wait_for_row

APART = (
    *("policy.tensor_parallel=1", "rollout.on_policy=false", "rollout.deterministic=false"),
    *("loss.tis_cap=2.0", "engine.max_sequences=8"),
)
LIMIT_SECONDS = 15
PHASES = ("generate", "logprobs", "update", "sync", "other", "evaluate", "checkpoint")


def heartbeat(folder: Path, rank: int) -> dict[str, Any]:
    heartbeat: dict[str, Any] = json.loads((folder / f".pulse/rank_{rank:05d}.json").read_text())
    return heartbeat


def check_ledger(folder: Path, num_steps: int, samples_per_prompt: int = 4) -> dict[str, float]:
    """Check that every ticket is counted once, and none was trained on twice. Return counts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    steps = [row for row in rows if "groups/issued" in row]
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    ended = ("trained", "all_correct", "all_wrong", "overlong", "abstained", "expired")
    closed = sum(row[f"groups/{outcome}"] for row in steps for outcome in ended)
    issued = sum(row["groups/issued"] for row in steps)
    assert issued == closed + steps[-1]["groups/carried"]
    trained: Counter[tuple[int, int]] = Counter()
    # Written by the policy. A killed engine may not have written its record of the last step.
    for path in (folder / "samples").glob("step_*/policy_*.parquet"):
        table = pq.read_table(path, columns=["ticket", "sample"])
        trained.update(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert set(trained.values()) == {1}
    assert len(trained) == samples_per_prompt * sum(row["groups/trained"] for row in steps)
    resampled = sum(row.get("groups/resampled", 0) for row in steps)
    return {"issued": issued, "resampled": resampled, "sequences": len(trained)}


def check_both_sampled(folder: Path) -> None:
    """Check that two engines had requests in the last step with a timeline."""
    last = max((folder / "timeline").glob("step_*.json"))
    replicas = json.loads(last.read_text())["replicas"]
    assert len(replicas) == 2
    assert all(any(running for _, running in replica["running"]) for replica in replicas)


def test_a_run_waits_for_its_only_engine_which_died(tmp_path: Path) -> None:
    """The engine dies while it is built, and again during the third step."""
    folder = tmp_path / "run"
    roles = ("run.processes=2", "roles={policy: 1, engine: 1}", "train.rollout_steps=5")
    with started(*command(tmp_path, "run", *APART, *roles), new_session=True) as running:
        wait_for_file(folder / "logs/rank_1.log", running)
        os.kill(heartbeat(folder, 1)["pid"], signal.SIGKILL)
        wait_for_row(folder, 2, running)
        os.kill(heartbeat(folder, 1)["pid"], signal.SIGKILL)
        assert running.wait(300) == 0, running.stdout
        restarts = running.stdout.count("(exit code -9); it is started again")
        assert restarts == 2, running.stdout
    check_ledger(folder, 5)
    assert not (folder / ".pulse" / "alarm").read_text()


@pytest.mark.long
@pytest.mark.parametrize("end", ["SIGTERM", "too few engines", "no engines"])
def test_a_run_that_ends_while_it_waits_for_engines_saves(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes from what it had, with the step in progress."""
    folder, num_steps = tmp_path / "run", 12
    roles: tuple[str, ...] = ("roles={policy: 1, engine: 2}", "engine.min_replicas=2")
    if end == "no engines":
        roles = ("roles={policy: 2, engine: 1}",)
    roles = ("run.processes=3", *roles)
    words = command(tmp_path, "run", *APART, *roles, f"train.rollout_steps={num_steps}")
    monkeypatch.setenv(STARTS, "1")
    with started(*words, "watchdog.start=30", new_session=True) as running:
        wait_for_row(folder, 3, running)
        os.kill(heartbeat(folder, 2)["pid"], signal.SIGKILL)
        if end == "SIGTERM":
            while "waits for engines" not in heartbeat(folder, 0)["sign"]:
                assert running.poll() is None, running.stdout
                time.sleep(0.05)
            running.send_signal(signal.SIGTERM)
        code = running.wait(300)
        out = running.stdout
    reason, expected = {
        "SIGTERM": ("stopped by SIGTERM while it waited for engines", STOPPED),
        "too few engines": ("1 engines are left, fewer than engine.min_replicas = 2", 1),
        "no engines": ("0 engines are left, fewer than engine.min_replicas = 1", 1),
    }[end]
    assert code == expected, out
    assert re.search(rf"error: {reason}.*Saved after step \d+; to continue", out), out
    [name] = {path.name for path in (folder / "checkpoints").glob("step_*")}
    done = run(*words, "resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"checkpoints/{name}" in done.stdout
    check_ledger(folder, num_steps)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_survives_ten_losses_at_random_moments(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are killed or stopped (SIGSTOP). Each time the run goes on, within the watchdog's
    limit and ten seconds, and the time of a step."""
    monkeypatch.setenv(STARTS, "20")  # more than there are losses, which all are quick ends
    rng = random.Random(seed)
    num_steps, folder = 150, tmp_path / "run"
    words = (
        *("run.processes=3", "roles={policy: 1, engine: 2}", f"train.rollout_steps={num_steps}"),
        *(f"watchdog.{phase}={LIMIT_SECONDS}" for phase in PHASES),
        "checkpoint.every=5",
    )
    waits = []
    with started(*command(tmp_path, "run", *APART, *words), new_session=True) as running:
        wait_for_row(folder, 1, running)
        for _ in range(10):
            time.sleep(rng.uniform(0, 12))
            number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
            pulse = send_signal(folder, number, rng, running)
            waits.append((number.name, pulse["phase"], seconds_to_next_row(folder, running)))
        assert running.wait(300) == 0, running.stdout
    print(waits, check_ledger(folder, num_steps), (folder / "summary.json").read_text())
    limits = {"SIGKILL": 0, "SIGSTOP": LIMIT_SECONDS}
    step_seconds = 5  # the wait ends with the next step
    assert all(seconds < limits[name] + 10 + step_seconds for name, _, seconds in waits)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_its_grades_are_awaited_returns(
    number: signal.Signals, tmp_path: Path
) -> None:
    num_steps, folder, gate = 80, tmp_path / "run", tmp_path / "gate"
    rows = tmp_path / "rows.jsonl"
    prompts = [[{"role": "user", "content": f"{a} + 7 ="}] for a in range(60)]
    rules = {"ground_truth": str(gate), "style": "rule"}
    lines = [{"data_source": "a", "prompt": prompt, "reward_model": rules} for prompt in prompts]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"{{kind: jsonl, name: a, path: {rows}, grader: 'tests.helpers.graders:patient'}}"
    words = (
        *("run.processes=3", "roles={policy: 1, engine: 2}", f"train.rollout_steps={num_steps}"),
        *(f"watchdog.{phase}={LIMIT_SECONDS}" for phase in PHASES),
        *(f"data.train=[{source}]", "evaluation.sets=[]", "optimizer.lr=1e-8"),
    )
    with started(*command(tmp_path, "run", *APART, *words), new_session=True) as running:
        wait_for_row(folder, 2, running)
        gate.touch()
        time.sleep(5.0)  # all that was to be sampled is sampled
        pulse = send_signal(folder, number, random.Random(1), running)
        gate.unlink()
        seconds = seconds_to_next_row(folder, running)
        assert running.wait(300) == 0, running.stdout
        out = running.stdout
    print(pulse["phase"], pulse["sign"], seconds)
    assert out.count("it is started again") == 1
    check_ledger(folder, num_steps)
    check_both_sampled(folder)
    assert seconds < 30.0


def send_signal(
    folder: Path, number: signal.Signals, rng: random.Random, running: Running
) -> dict[str, Any]:
    """Send a signal to an engine that runs. Return its last heartbeat."""
    while running.poll() is None:
        pulse = heartbeat(folder, rng.choice([1, 2]))
        with suppress(ProcessLookupError):  # it has died, and is not started again yet or no more
            os.kill(pulse["pid"], number)
            return pulse
        time.sleep(0.1)
    raise AssertionError(running.stdout)


def wait_for_file(path: Path, running: Running) -> None:
    while not path.exists():
        assert running.poll() is None, running.stdout
        time.sleep(0.05)


def seconds_to_next_row(folder: Path, running: Running) -> float:
    began = time.monotonic()
    rows = (folder / "metrics.jsonl").read_text().count("\n")
    wait_for_row(folder, rows, running)
    return time.monotonic() - began


def faulty_run(helper: str, rank: int, directory: Path, marks: Path, *more: str) -> tuple[str, ...]:
    """Return the command of a run with two engines, in which tests/helpers/`helper`.py lets `rank`
    fail as often as there are files in `marks`."""
    marks.mkdir()
    roles = ("run.processes=3", "roles={policy: 1, engine: 2}")
    words = command(directory, "run", *APART, *roles, *more)
    return ("-m", f"tests.helpers.{helper}", str(rank), str(marks), *words)


@pytest.mark.long
@pytest.mark.parametrize(
    "when",
    [
        *("run-before-SIGKILL", "run-before-SIGSTOP", "run-after-SIGSTOP"),
        *("second-before-SIGKILL", "second-after-SIGSTOP"),
        *("channel-before-SIGKILL", "channel-before-SIGSTOP"),
    ],
)
def test_an_engine_that_is_lost_while_it_joins_returns(when: str, tmp_path: Path) -> None:
    """It is lost before or after it has connected to the others, in the group of the run or in
    that for writing checkpoints."""
    folder, marks = tmp_path / "run", tmp_path / "marks"
    words = (f"watchdog.other={LIMIT_SECONDS}", "train.rollout_steps=60")
    with started(*faulty_run("joiner", 1, tmp_path, marks, *words), new_session=True) as running:
        (marks / when).touch()
        assert running.wait(300) == 0, running.stdout
        out = running.stdout
    print(out)
    assert out.count("it is started again") == 1
    assert "(exit code -9); it is started again" in out
    check_ledger(folder, 60)
    check_both_sampled(folder)


@pytest.mark.long
def test_an_engine_that_fails_a_sync_is_taken_out_and_returns(tmp_path: Path) -> None:
    folder, marks = tmp_path / "run", tmp_path / "marks"
    words = faulty_run(
        "spoiler", 2, tmp_path, marks, "train.rollout_steps=25", "checkpoint.every=1"
    )
    with started(*words, new_session=True) as running:
        wait_for_row(folder, 2, running)
        (marks / "once").touch()
        assert running.wait(300) == 0, running.stdout
        out = running.stdout
    print(out)
    [line] = re.findall(r"replica 1 \(rank 2\): failed the check of a sync.*\n.*", out)
    assert "fingerprints differ" in line
    assert "model.norm.weight[0:128]: engine ranks 2 hold other values than the policy" in line
    assert out.count("rank 2 ended with exit code 1; it is started again") == 1
    assert "error: weights 3: fingerprints differ" in (folder / "logs" / "rank_2.log").read_text()
    assert out.index("an engine joins") > out.index(line)
    check_ledger(folder, 25)
    check_both_sampled(folder)


@pytest.mark.long
def test_an_engine_that_fails_every_sync_stays_out(tmp_path: Path) -> None:
    folder, marks = tmp_path / "run", tmp_path / "marks"
    words = faulty_run("spoiler", 2, tmp_path, marks, "train.rollout_steps=80")
    with started(*words, new_session=True) as running:
        wait_for_row(folder, 2, running)
        for number in range(100):
            (marks / str(number)).touch()
        assert running.wait(500) == 0, running.stdout
        out = running.stdout
    print(out)
    assert out.count("it is started again") == MAX_FAULTS
    assert out.count("failed the check of a sync") == MAX_FAULTS
    assert f"(rank 2; {MAX_FAULTS} times, does not join again): failed" in out
    assert len(list(marks.iterdir())) == 100 - MAX_FAULTS
    check_ledger(folder, 80)
