"""Test runs whose engines share the policy's devices or have their own, and runs that lose engines
and get them back."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.cluster.attempt import STOPPED
from tests.helpers.commands import Running, run, started
from tests.helpers.configs import TINY
from tests.helpers.training_state import stored_tensors
from tests.helpers.warm import SERVERS

STEPS = 3
OVERRIDES = (
    f"train.rollout_steps={STEPS}",
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4"),
    *("train.updates_per_step=2", "optimizer.warmup_rollout_steps=0"),
    *("evaluation.every=0", "evaluation.samples=1", "checkpoint.every=0"),
    *("tracking.mlflow=false", "resume=auto", "policy.sequence_parallel=false"),
)
SMALL = ("run.processes=1", "policy.tensor_parallel=1")
SEPARATE = (*SMALL, "engine.colocated=false")
FREE = (
    *("rollout.on_policy=false", "rollout.deterministic=false", "loss.tis_cap=2.0"),
    *("engine.max_sequences=8", "engine.silence_seconds=8"),
)
SILENCE_SECONDS = 8


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
    """Return weights, optimizer state and random states of the policy."""
    return stored_tensors(folder / "checkpoints" / f"step_{STEPS:06d}")


def check_same(folder: Path, expected: Path) -> None:
    assert metrics_of(folder) == metrics_of(expected)
    tensors, others = policy_file(folder), policy_file(expected)
    assert tensors.keys() == others.keys()
    assert not [name for name in others if not torch.equal(tensors[name], others[name])]


def wait_for_row(folder: Path, number: int, process: Running) -> None:
    """Wait until the metrics have more than `number` rows."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not path.exists() or path.read_text().count("\n") <= number:
        assert time.monotonic() < deadline and process.poll() is None, process.stdout
        time.sleep(0.05)


def seconds_for_rows(folder: Path, number: int, process: Running) -> float:
    """Return the seconds until the metrics have `number` more rows, or the run ends."""
    began, path = time.monotonic(), folder / "metrics.jsonl"
    rows = path.read_text().count("\n")
    while path.read_text().count("\n") < rows + number and process.poll() is None:
        assert time.monotonic() - began < 200, process.stdout
        time.sleep(0.05)
    return time.monotonic() - began


def servers(folder: Path) -> list[psutil.Process]:
    """Return the engine servers of a run that write their process ids to `folder`."""
    running = []
    for path in folder.iterdir():
        with suppress(psutil.Error):
            process = psutil.Process(int(path.name))
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                running.append(process)
    return running


def lose_server(folder: Path, process: Running, number: signal.Signals, rng: random.Random) -> None:
    """Send a signal to a server."""
    while not (running := servers(folder)):
        assert process.poll() is None, process.stdout
        time.sleep(0.1)
    with suppress(psutil.Error):
        rng.choice(running).send_signal(number)


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder to which engine servers write their process ids."""
    folder = tmp_path / "ids"
    folder.mkdir()
    monkeypatch.setenv(SERVERS, str(folder))
    return folder


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
    for path in (folder / "policy").glob("step_*.parquet"):
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


def wait_for_the_end(ids: Path) -> None:
    """Wait some seconds for the end of all engine servers."""
    deadline = time.monotonic() + 15
    while left := servers(ids):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def colocated(directory: Path) -> Path:
    return finish(directory, "colocated", *SMALL, "rollout.on_policy=true")


def test_a_separate_engine_gives_the_numbers_of_a_colocated_one(
    directory: Path, colocated: Path
) -> None:
    folder = finish(directory, "separate", *SEPARATE, "rollout.on_policy=true")
    check_same(folder, colocated)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    weights = load_file(Path(TINY).parent / "tiny_qwen3" / "model.safetensors")
    num_bytes = sum(4 * weight.numel() for weight in weights.values())
    assert num_bytes <= rows[-1]["sync/bytes"] < 1.01 * num_bytes  # alignment
    assert (folder / "logs/engine_0.log").exists()


LAYOUTS = {
    "data parallel, two engines": (
        "policy.tensor_parallel=1", "engine.replicas=2", "rollout.on_policy=true",
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
def test_separate_engines_give_the_numbers_of_colocated_ones(layout: str, tmp_path: Path) -> None:
    """A deterministic run carries groups without on_policy, but samples nothing in training."""
    words = ("run.processes=2", *LAYOUTS[layout])
    both = finish(tmp_path, "colocated", *words)
    folder = finish(tmp_path, "separate", *words, "engine.colocated=false")
    check_same(folder, both)


@pytest.mark.long
@pytest.mark.parametrize("form", [SMALL, SEPARATE])
def test_a_killed_run_resumes_to_the_same_weights_and_leaves_nothing(
    form: tuple[str, ...], directory: Path, colocated: Path, ids: Path
) -> None:
    """No engine survives the trainers, and nothing is left in shared memory."""
    before = set(os.listdir("/dev/shm"))
    name = f"killed{len(form)}"
    words = (*form, "rollout.on_policy=true", "checkpoint.every=1")
    with started(*command(directory, name, *words), new_session=True) as running:
        wait_for_row(directory / name, 1, running)
        assert len(servers(ids)) == 1
        os.killpg(running.pid, signal.SIGKILL)
        wait_for_the_end(ids)
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if "loky" not in name}  # of other tests
    folder = finish(directory, name, *words)
    tensors, others = policy_file(folder), policy_file(colocated)
    assert not [name for name in others if not torch.equal(tensors[name], others[name])]
    rows, expected = metrics_of(folder), metrics_of(colocated)
    assert rows == expected


@pytest.mark.long
def test_engines_sample_while_the_policy_trains(tmp_path: Path) -> None:
    """With a high rollout.lookahead the engine always has work. The run is stopped after the
    training of step 2, and resumed."""
    words = (
        *(*SEPARATE, *FREE, "engine.max_sequences=8", "rollout.prompts_per_step=16"),
        *("rollout.samples_per_prompt=8", "rollout.lookahead=12"),
        *("train.updates_per_step=1", "tracking.timeline_every=1"),
    )
    program = command(tmp_path, "ahead", *words)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        stopper = ("-m", "tests.helpers.stopper", "stop:3", *program)
        rank = stack.enter_context(started(*stopper, environment={**os.environ, **world, **where}))
        assert rank.wait(300) == STOPPED, rank.stdout
    folder = finish(tmp_path, "ahead", *words)
    _, *steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    overlaps = [row["throughput/overlap"] for row in steps]
    print(f"overlap by step: {overlaps}")
    assert min(overlaps) > 0.95
    check_ledger(folder, STEPS, samples_per_prompt=8)


@pytest.mark.long
def test_a_killed_asynchronous_run_repeats_its_recorded_steps(tmp_path: Path) -> None:
    """Killed after step 3. The checkpoints of steps 2 and 3 are taken away, so that the run repeats
    these steps from that of step 1."""
    words = (
        *(*SEPARATE, *FREE, "rollout.max_staleness=2", "train.rollout_steps=5"),
        *("checkpoint.every=1", "checkpoint.keep=9"),
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
    [last] = re.findall(r"trains again on what steps 2 to (\d) recorded", done.stdout)
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
            stored_tensors(where / path.name) for where in (aside, folder / "checkpoints")
        )
        assert not [name for name in others if not torch.equal(tensors[name], others[name])]
    check_ledger(folder, 5)


@pytest.mark.long
@pytest.mark.parametrize("words", [("evaluate",), ("doctor", "sync")])
def test_other_commands_work_with_separate_engines(words: tuple[str, ...]) -> None:
    out = run(*words, str(TINY), "--overlay", "model_configs/separate/tiny_async.yaml")
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.long
def test_a_stopped_trainer_ends_the_run_and_is_named(tmp_path: Path, ids: Path) -> None:
    """Its engines end, too."""
    limits = ("generate", "logprobs", "update", "sync", "other", "evaluate", "checkpoint")
    words = (*SEPARATE, *(f"watchdog.{phase}=15" for phase in limits), "train.rollout_steps=1000")
    with started(*command(tmp_path, "hung", *words), new_session=True) as running:
        wait_for_row(tmp_path / "hung", 2, running)
        shown = run("doctor", "run", str(tmp_path / "hung")).stdout
        assert re.search(r"engine 0 \(node .*, process \d+\): heard \d+ s ago", shown), shown
        pulse = json.loads((tmp_path / "hung/.pulse/rank_00000.json").read_text())
        os.kill(pulse["pid"], signal.SIGSTOP)
        time.sleep(20)
        os.kill(pulse["pid"], signal.SIGCONT)
        code, out = running.wait(200), running.stdout + running.stderr
    assert code == 1, out
    assert "noticed by rank 0: no sign of life for 15 s" in out
    wait_for_the_end(ids)


# ---------------------------------------------------------------------------- lost engines


@pytest.mark.parametrize("form", [SMALL, SEPARATE])
def test_a_run_waits_for_its_only_engine_which_died(
    form: tuple[str, ...], tmp_path: Path, ids: Path
) -> None:
    """The engine dies while it is built, and again during the third step."""
    folder = tmp_path / "run"
    rng = random.Random(0)
    words = command(tmp_path, "run", *form, *FREE, "train.rollout_steps=6")
    with started(*words, new_session=True) as running:
        lose_server(ids, running, signal.SIGKILL, rng)
        wait_for_row(folder, 2, running)
        lose_server(ids, running, signal.SIGKILL, rng)
        assert running.wait(300) == 0, running.stdout
        out = running.stdout
    assert out.count("its connection has ended; what it was working on is sampled again") >= 1
    check_ledger(folder, 6)


@pytest.mark.long
@pytest.mark.parametrize("end", ["SIGTERM", "too few engines"])
def test_a_run_that_ends_while_it_waits_for_engines_saves(
    end: str, tmp_path: Path, ids: Path
) -> None:
    """It resumes from what it had."""
    folder, num_steps = tmp_path / "run", 12
    words = command(
        tmp_path, "run", *SEPARATE, *FREE, f"train.rollout_steps={num_steps}", "engine.replicas=2",
        "engine.min_replicas=2",
    )  # fmt: skip
    with started(*words, "watchdog.start=12", new_session=True) as running:
        wait_for_row(folder, 3, running)
        if end == "SIGTERM":
            lose_server(ids, running, signal.SIGKILL, random.Random(1))
            time.sleep(3.0)
            running.send_signal(signal.SIGTERM)
        while end != "SIGTERM" and running.poll() is None:  # they never get ready again
            for server in servers(ids):
                with suppress(psutil.Error):
                    server.kill()
            time.sleep(0.5)
        code, out = running.wait(300), running.stdout
    reason, expected = {
        "SIGTERM": ("stopped by SIGTERM", STOPPED),
        "too few engines": (r"\d of at least 2 engines \(engine.min_replicas\) are there", 1),
    }[end]
    assert code == expected, out
    assert re.search(rf"error: {reason}.*Saved after step \d+; to continue", out), out
    done = run(*words, "resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    check_ledger(folder, num_steps)


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
    """Engines are killed or stopped (SIGSTOP). Each time two more steps are done within 15 s and
    the limit of silence; an engine of two workers takes longer to start."""
    rng = random.Random(form)
    num_steps, folder = 120, tmp_path / "run"
    words = (*FORMS[form], *FREE, f"train.rollout_steps={num_steps}", "checkpoint.every=20")
    waits = []
    with started(*command(tmp_path, "run", *words), new_session=True) as running:
        wait_for_row(folder, 1, running)
        for _ in range(7):
            time.sleep(rng.uniform(0, 6))
            if running.poll() is not None:
                break
            number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
            lose_server(ids, running, number, rng)
            waits.append((number.name, seconds_for_rows(folder, 2, running)))
        assert running.wait(400) == 0, running.stdout
    print(waits, check_ledger(folder, num_steps), (folder / "summary.json").read_text())
    limit = 15 + SILENCE_SECONDS + (20 if "workers" in form else 0)
    assert len(waits) == 7 and all(seconds < limit for _, seconds in waits), waits


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_its_grades_are_awaited_returns(
    number: signal.Signals, tmp_path: Path, ids: Path
) -> None:
    num_steps, folder, gate = 150, tmp_path / "run", tmp_path / "gate"
    rows = tmp_path / "rows.jsonl"
    prompts = [[{"role": "user", "content": f"{a} + 7 ="}] for a in range(60)]
    rules = {"ground_truth": str(gate), "style": "rule"}
    lines = [{"data_source": "a", "prompt": prompt, "reward_model": rules} for prompt in prompts]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"{{kind: jsonl, name: a, path: {rows}, grader: 'tests.helpers.graders:patient'}}"
    words = (
        *(*SEPARATE, *FREE, "engine.replicas=2", f"train.rollout_steps={num_steps}"),
        *(f"data.train=[{source}]", "evaluation.sets=[]", "optimizer.lr=1e-8"),
    )
    with started(*command(tmp_path, "run", *words), new_session=True) as running:
        wait_for_row(folder, 2, running)
        gate.touch()
        time.sleep(5.0)  # all that was to be sampled is sampled
        lose_server(ids, running, number, random.Random(1))
        gate.unlink()
        seconds = seconds_for_rows(folder, 2, running)
        assert running.wait(300) == 0, running.stdout
    print(seconds, check_ledger(folder, num_steps))
    check_both_sampled(folder)
    assert seconds < 15 + SILENCE_SECONDS
