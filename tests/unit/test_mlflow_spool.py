"""MLflow that never hurts: a real server that is down, killed, stopped or full of nonsense, real
senders, runs that are killed. And the spool between them, cut at any byte."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config
from dapo_megatron.tracking import mlflow_spool, spool
from dapo_megatron.tracking.mlflow_run import MAX_NAMES, Target, metric_name
from dapo_megatron.tracking.mlflow_spool import (
    MlflowSpool,
    deliver,
    deliver_rest,
    given_uri,
    why_waiting,
)
from dapo_megatron.tracking.provenance import commit, flatten, versions
from dapo_megatron.tracking.sender import Lane
from dapo_megatron.tracking.spool import Cursor, Place
from dapo_megatron.tracking.trackers import Lines
from tests.helpers.configs import tiny_config

STEP_LIMIT = 0.010
"""Seconds that logging may add to a step: the issue's bound."""


class Server:
    """`mlflow server` with a database of its own, on a port that stays the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """And wait until it answers."""
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                    *("--backend-store-uri", f"sqlite:///{self._folder}/server.db"),
                    *("--artifacts-destination", str(self._folder / "artifacts")),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                ],
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        wait_until(self._answers, 120)

    def send(self, number: signal.Signals) -> None:
        """A signal to all its processes."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """One that answers, whatever the test before did to it; MLFLOW_TRACKING_URI names it."""
    started.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", started.uri)
    return started


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """A run of its own name: an experiment of its own."""
    return config(tmp_path)


def config(folder: Path, **changes: Any) -> Config:
    place = {"run__directory": folder / "runs", "tracking__experiment": folder.name}
    return tiny_config(**place, tracking__wait_seconds=120.0, **changes)


def open_spool(made: Config, warn: Callable[[str], None] = pytest.fail) -> MlflowSpool:
    return MlflowSpool(made, "4711.0", None, warn)


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def stored(made: Config) -> Any:
    """The run as another program reads it."""
    return client().get_run(json.loads((made.folder / "mlflow_run.json").read_text())["run_id"])


def history(made: Config, name: str) -> list[tuple[int, float]]:
    points = client().get_metric_history(stored(made).info.run_id, name)
    return [(point.step, point.value) for point in points]


def all_runs(made: Config) -> list[Any]:
    found = client().get_experiment_by_name(made.tracking.experiment)
    return list(client().search_runs([found.experiment_id]))


FAKE_RANK_0 = """
import os, sys, time
from dapo_megatron.config.file import load_config
from dapo_megatron.tracking.mlflow_spool import MlflowSpool
tracker = MlflowSpool(load_config(sys.argv[1]), "4711.0", None, print)
for step in (1, 2, 3):
    tracker.log(step, {"reward/mean": float(step)})
print(tracker._sender.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def fake_rank_0(made: Config) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has logged three steps and trains on; the id of its sender."""
    made.folder.mkdir(parents=True, exist_ok=True)
    (made.folder / "config.yaml").write_text(dump_config(made))
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_RANK_0, str(made.folder / "config.yaml")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------------------- what arrives


def test_mlflow_gets_all_there_is(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("prompts")
    source = f"[{{kind: jsonl, name: math, path: {data}, grader: dapo_math}}]"
    made = config(tmp_path, data__train=source)
    for name, value in {"JOB_ID": "4711", "RESTART_COUNT": "2", "JOB_NODELIST": "n[1-4]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    tracker = open_spool(made)
    samples = made.folder / "samples" / "step_000001.jsonl"
    manifest = made.folder / "checkpoints" / "step_000002" / "manifest.json"
    for path in (samples, manifest):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    tracker.artifact(samples, "samples")
    for step in (1, 2, 3):
        tracker.log(step, {"eval/a/avg@4": step / 8, "time/step": float(step)})
    tracker.checkpoint(manifest.parent, 2)
    tracker.finish("FINISHED")

    found = stored(made)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == made.run.name
    assert found.data.params["loss.clip_high"] == "0.28"
    assert found.data.params["data.train.0.name"] == "math"
    assert history(made, "eval/a/avg_at_4") == [(step, step / 8) for step in (1, 2, 3)]
    tags = found.data.tags
    assert (tags["slurm.job_id"], tags["slurm.restart_count"]) == ("4711", "2")
    assert (tags["slurm.node_list"], tags["attempt"]) == ("n[1-4]", "4711.0")
    assert tags["config.sha256"] == hashlib.sha256(dump_config(made).encode()).hexdigest()
    assert tags["data.math.sha256"] == hashlib.sha256(b"prompts").hexdigest()
    assert tags["checkpoint.newest"] == "checkpoints/step_000002"
    assert {f"version.{name}" for name in versions()} <= set(tags)
    if commit() is not None:  # who commits meanwhile changes it
        assert len(tags["git.commit"]) == 40
        assert tags["git.dirty"] in ("true", "false")
    files = {item.path for item in client().list_artifacts(found.info.run_id, "samples")}
    assert files == {"samples/step_000001.jsonl"}
    copy = client().download_artifacts(found.info.run_id, "checkpoints.json", str(tmp_path))
    (entry,) = json.loads(Path(copy).read_text())["checkpoints"]
    assert (entry["step"], entry["bytes"], entry["hf_export"]) == (2, 2, None)
    assert entry["manifest_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert tracker.ui == f"{server.uri}/#/experiments/{found.info.experiment_id}/runs/" + (
        found.info.run_id
    )


def test_a_description_of_a_persons_stays(server: Server, run: Config) -> None:
    def described(text: str) -> str:
        tracker = open_spool(run)
        tracker.log(1, {"m": 1.0})
        tracker.describe(text)
        tracker.finish("FINISHED")
        return str(stored(run).data.tags["mlflow.note.content"])

    assert described("ours") == "ours"
    assert described("ours, later") == "ours, later"
    client().set_tag(stored(run).info.run_id, "mlflow.note.content", "theirs")
    assert described("ours again") == "theirs"


def test_a_resumed_run_is_the_same_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_spool, "SHORT_WAIT_SECONDS", 120.0)
    first = config(tmp_path)
    tracker = open_spool(first)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": float(step)})
    tracker.finish("KILLED")
    assert stored(first).info.status == "KILLED"

    longer = config(tmp_path, train__rollout_steps=99, resume="auto")
    tracker = open_spool(longer)
    wait_until(lambda: stored(longer).info.status == "RUNNING")
    tracker.log(3, {"reward/mean": 30.0})
    tracker.log(4, {"reward/mean": 4.0})
    tracker.finish("FAILED")
    found = stored(longer)
    assert found.info.status == "FAILED"
    assert found.data.tags["resumed.train.rollout_steps"] == "99"
    assert "resumed.loss.clip_high" not in found.data.tags
    assert len(all_runs(longer)) == 1
    assert history(longer, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0)]


def test_names_are_bounded_and_a_refused_metric_costs_no_other(server: Server, run: Config) -> None:
    said: list[str] = []
    tracker = open_spool(run, said.append)
    tracker.log(1, {"x" * 251: 1.0, "a//b": 1.0, "reward/mean": 0.5})
    tracker.log(2, {f"prompt/{number}": 1.0 for number in range(MAX_NAMES + 10)})
    tracker.log(3, {"reward/mean": 0.75, "late": 1.0})
    tracker.finish("FINISHED")
    metrics = stored(run).data.metrics
    assert metrics["reward/mean"] == 0.75
    assert len(metrics) == MAX_NAMES - 1  # one of the names it took, MLflow refused
    assert "late" not in metrics
    assert len(said) == 1
    assert "mlflow.log" in said[0]
    log = (run.folder / "logs" / "mlflow.log").read_text()
    assert log.count("LEFT OUT: prompt/") == 1
    assert "a//b" in log


def test_a_run_that_is_gone_is_found_by_its_tag_or_made_anew(server: Server, run: Config) -> None:
    tracker = open_spool(run)
    tracker.log(1, {"reward/mean": 1.0})
    tracker.finish("FINISHED")
    (first,) = all_runs(run)

    known = run.folder / "mlflow_run.json"
    known.write_text(json.dumps({"run_id": "0" * 32}))  # this server has no such run
    tracker = open_spool(run, lambda _: None)
    wait_until(lambda: json.loads(known.read_text())["run_id"] == first.info.run_id)
    wait_until(lambda: stored(run).info.status == "RUNNING")

    client().delete_run(first.info.run_id)
    tracker.log(2, {"reward/mean": 2.0})
    tracker.finish("FINISHED")
    (second,) = all_runs(run)
    assert second.info.run_id != first.info.run_id
    assert second.info.status == "FINISHED"
    assert second.data.params["loss.clip_high"] == "0.28"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
def test_another_server_gets_everything(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = config(tmp_path), f"sqlite:///{tmp_path}/other.db"
    samples = made.folder / "samples" / "step_000001.jsonl"
    samples.parent.mkdir(parents=True)
    samples.write_text("{}")
    tracker = open_spool(made)
    tracker.artifact(samples, "samples")
    tracker.log(1, {"reward/mean": 1.0})
    tracker.finish("FINISHED")
    (first,) = all_runs(made)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    tracker = open_spool(made)
    tracker.log(2, {"reward/mean": 2.0})
    tracker.finish("FINISHED")
    assert history(made, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert stored(made).data.params["loss.clip_high"] == "0.28"
    assert client().list_artifacts(stored(made).info.run_id, "samples")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)  # and back
    assert deliver(made.folder, 120) == 0
    assert stored(made).info.run_id == first.info.run_id
    assert history(made, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
def test_a_local_database_is_made_once_by_runs_that_start_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = [config(tmp_path, run__name=name) for name in ("a", "b")]
    trackers = [open_spool(one) for one in made]
    for tracker in trackers:
        tracker.log(1, {"reward/mean": 0.5})
    for tracker in trackers:
        tracker.finish("FINISHED")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert trackers[0].ui.endswith(f"mlflow ui --backend-store-uri {uri}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert [stored(one).info.status for one in made] == ["FINISHED", "FINISHED"]
    assert len(all_runs(made[0])) == 2


# ---------------------------------------------------------------------------- a server in trouble


def waited_seconds() -> float:
    """Seconds for which this thread was ready to run and another had its core."""
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def log_steps(tracker: MlflowSpool, steps: Sequence[int]) -> tuple[list[float], list[float]]:
    """Log 60 metrics per step; seconds of each call by the clock, and those that are its own doing.
    (Another program of this machine may take the core away for longer than the bound.)"""
    by_clock, own = [], []
    for step in steps:
        metrics = {f"policy/m{number}": step + number / 64 for number in range(60)}
        waited, start = waited_seconds(), time.perf_counter()
        tracker.log(step, metrics)
        taken = time.perf_counter() - start
        by_clock.append(taken)
        own.append(taken - (waited_seconds() - waited))
    return by_clock, own


def test_a_dead_server_delays_no_step_but_for_waiting_for_a_core_and_gets_everything_later(
    server: Server, run: Config
) -> None:
    """The bound holds for the time of a call less the time for which it waited for a core, which
    other programs had. Both are printed."""
    server.stop()
    tracker = open_spool(run, lambda _: None)
    log = run.folder / "logs" / "mlflow.log"
    first = log_steps(tracker, range(1, 501))  # while the sender imports MLflow
    wait_until(lambda: "tried again until it goes" in log.read_text())
    second = log_steps(tracker, range(501, 1001))  # while it tries to reach the server
    by_clock, own = (one + other for one, other in zip(first, second))
    print(
        "1000 steps, dead server, longest call: "
        f"{max(own) * 1e3:.2f} ms without waiting for a core (bound {STEP_LIMIT * 1e3:g} ms), "
        f"{max(by_clock) * 1e3:.2f} ms by the clock; sum of all {sum(by_clock):.3f} s by the clock"
    )
    assert max(own) < STEP_LIMIT

    server.start()
    tracker.finish("FINISHED")
    assert stored(run).info.status == "FINISHED"
    for number in (0, 59):
        expected = [(step, step + number / 64) for step in range(1, 1001)]
        assert history(run, f"policy/m{number}") == expected


@pytest.mark.long
def test_a_hung_server_delays_no_step_and_the_end_only_as_long_as_configured(
    server: Server, tmp_path: Path
) -> None:
    made = config(tmp_path).model_copy(deep=True)
    tracking = made.tracking.model_copy(update={"wait_seconds": 1.0})
    made = made.model_copy(update={"tracking": tracking})
    said: list[str] = []
    tracker = open_spool(made, said.append)
    tracker.log(0, {"reward/mean": 0.0})
    wait_until(lambda: (made.folder / "mlflow" / "facts.json").exists())
    server.send(signal.SIGSTOP)
    try:
        assert max(log_steps(tracker, range(1, 101))[1]) < STEP_LIMIT
        start = time.monotonic()
        tracker.finish("FINISHED")
        assert time.monotonic() - start < 5
    finally:
        server.send(signal.SIGCONT)
    assert len(said) == 1
    assert f"python -m dapo_megatron track {made.folder}" in said[0]
    assert deliver(made.folder, 60) == 0
    assert stored(made).info.status == "FINISHED"
    assert len(history(made, "policy/m0")) == 100


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_fails_or_is_stopped_leaves_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody is there
    tracker = open_spool(config(tmp_path), lambda _: None)
    start = time.monotonic()
    tracker.finish(status)
    taken = time.monotonic() - start
    assert tracker._sender is not None
    assert tracker._sender.poll() is None, "it goes on trying for a moment"
    tracker._sender.kill()
    tracker._sender.wait()
    print(f"{status}, dead server: {taken:.2f} s")
    assert taken < 5


def test_a_sender_that_is_stopped_is_killed_and_named_when_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody is there
    said: list[str] = []
    tracker = open_spool(config(tmp_path), said.append)
    sender = stopped_sender(tracker)
    tracker.finish("FAILED")
    assert sender.poll() == -signal.SIGKILL
    assert f"MLflow: its sender, process {sender.pid}, was stopped (SIGSTOP)" in said[0]


def test_who_keeps_the_events_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a later sender of the same folder, `track`'s, when the first one never ends."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody is there
    made = config(tmp_path)
    sender = stopped_sender(open_spool(made))
    try:
        assert deliver(made.folder, wait_seconds=8.0) > 0
        holder = f"process {sender.pid} (stopped; end it: kill -9 {sender.pid})"
        assert why_waiting(made.folder / "mlflow") == (
            f"{holder} has locked the events and delivers none"
        )
        assert f"waits for {holder}" in (made.folder / spool.LOG).read_text()
    finally:
        sender.kill()
        sender.wait()
    assert "has locked" not in why_waiting(made.folder / "mlflow")


def stopped_sender(tracker: MlflowSpool) -> subprocess.Popen[bytes]:
    """Stop the sender of a run, which then holds the lock of the spool for ever."""
    wait_until(lambda: spool.lock_holder(tracker._folder) is not None)
    sender = tracker._sender
    assert sender is not None
    sender.send_signal(signal.SIGSTOP)
    wait_until(lambda: spool.is_stopped(sender.pid))
    return sender


def test_the_log_of_the_sender_has_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, uri in enumerate(
        ("http://127.0.0.1:9/?token=hunter2", "http://user:hun/ter2@127.0.0.1:9")
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        said: list[str] = []
        made = config(tmp_path / f"run{number}")
        tracker = open_spool(made, said.append)
        wait_until(lambda folder=made.folder: "Error" in read_log(folder))
        tracker.finish("KILLED")
        files = [path for path in made.folder.rglob("*") if path.is_file()]
        text = "".join([*said, *(path.read_text(errors="replace") for path in files)])
        for secret in ("hunter2", "ter2", "user:"):
            assert secret not in text, [line for line in text.splitlines() if secret in line]
        assert tracker._sender is not None
        tracker._sender.kill()
        tracker._sender.wait()


def read_log(folder: Path) -> str:
    log = folder / spool.LOG
    return log.read_text(errors="replace") if log.exists() else ""


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://u:hunter2@db/mlflow", '"$MLFLOW_TRACKING_URI"'),
        ("postgresql://db/mlflow", "postgresql://db/mlflow"),
        ("https://u:hunter2@host/", "https://host"),
    ],
)
def test_where_to_look_shows_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, shown: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(MlflowSpool, "_put", lambda *_, **__: None)
    ui = open_spool(config(tmp_path)).ui
    assert ui.endswith(shown) and "hunter2" not in ui


class Nonsense(BaseHTTPRequestHandler):
    """Answers, but is no MLflow."""

    answers = itertools.cycle(
        [(200, b"<html>please log in</html>"), (200, b"{}"), (400, b"no"), (500, b""), (200, b"[]")]
    )

    def answer(self) -> None:
        code, body = next(self.answers)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def nonsense() -> Iterator[int]:
    """The port of a server that answers nonsense."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "uri",
    [
        "http://user:secret@127.0.0.1:{real}/elsewhere",
        "http://127.0.0.1:{nonsense}",
        pytest.param("nonsense://server", marks=pytest.mark.long),
    ],
)
def test_a_wrong_address_does_not_end_the_run_and_is_told_of(
    server: Server, nonsense: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(real=server.port, nonsense=nonsense))
    made = config(tmp_path)
    made = made.model_copy(
        update={"tracking": made.tracking.model_copy(update={"wait_seconds": 0.1})}
    )
    said: list[str] = []
    tracker = open_spool(made, said.append)
    wait_until(lambda: spool.read_cursor(made.folder / "mlflow", "facts").error is not None)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.finish("FINISHED")
    assert "the run goes on" in said[0]
    assert "track" in said[1]
    written = "".join(path.read_text() for path in (made.folder / "mlflow").glob("spool*"))
    assert "secret" not in "".join([*said, written])

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert deliver(made.folder, 60) == 0
    assert history(made, "reward/mean") == [(1, 0.5)]


# ---------------------------------------------------------------------------- processes that die


def test_rank_0_killed_is_a_killed_run(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, sender):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(sender, number)  # as Slurm does to the whole job step
        rank_0.kill()
        wait_until(lambda: is_gone(sender))
    assert stored(run).info.status == "KILLED"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_next_start_tells_of_a_killed_job_step(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, sender):
        os.kill(sender, signal.SIGKILL)
        rank_0.kill()
    assert not (run.folder / "mlflow_run.json").exists()
    tracker = open_spool(run)
    tracker.log(4, {"reward/mean": 4.0})
    wait_until(lambda: (run.folder / "mlflow_run.json").exists())
    wait_until(lambda: len(history(run, "reward/mean")) == 4)
    assert stored(run).info.status == "RUNNING"
    assert stored(run).info.end_time is not None, "it was not KILLED before"
    tracker.finish("FINISHED")
    assert stored(run).info.status == "FINISHED"


def test_a_run_that_is_moved_aside_is_killed_where_it_is(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, sender):
        os.kill(sender, signal.SIGKILL)
        rank_0.kill()
    aside = run.folder.with_name(f"{run.folder.name}.1")
    run.folder.rename(aside)
    deliver_rest(aside)
    wait_until(lambda: spool.num_waiting(aside / "mlflow") == 0)
    wait_until(lambda: [one.info.status for one in all_runs(run)] == ["KILLED"])
    assert not run.folder.exists()


def test_a_sender_that_dies_early_makes_no_second_run(server: Server, run: Config) -> None:
    tracker = open_spool(run)
    tracker.log(1, {"reward/mean": 0.5})
    assert tracker._sender is not None
    tracker._sender.kill()
    tracker._sender.wait()
    tracker.finish("FINISHED")  # by another
    assert history(run, "reward/mean") == [(1, 0.5)]
    for name in ("mlflow_run.json", "mlflow/facts.json"):  # it died before it wrote them
        (run.folder / name).unlink()
    tracker = open_spool(run)
    tracker.log(2, {"reward/mean": 0.75})
    tracker.finish("FINISHED")
    assert len(all_runs(run)) == 1
    assert history(run, "reward/mean") == [(1, 0.5), (2, 0.75)]


# ---------------------------------------------------------------------------- the spool


def metrics(step: int) -> dict[str, Any]:
    return {"kind": "metrics", "time": step, "step": step, "values": {"m": float(step)}}


def line(event: Any) -> bytes:
    return json.dumps(event).encode() + b"\n"


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    cut=st.integers(0, 400),
    junk=st.binary(max_size=8),
)
def test_a_file_cut_anywhere_costs_its_last_line_alone(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    expected = []
    for number, length in enumerate(lengths, start=1):
        whole = b"".join(line(metrics(number * 10 + step)) for step in range(length))
        kept = whole[:cut]
        (folder / f"spool_{number:06d}.jsonl").write_bytes(kept + junk.replace(b"\n", b""))
        num_whole = kept.count(b"\n")
        expected += [number * 10 + step for step in range(num_whole)]
    found = list(spool.events(folder))
    assert [event["step"] for event, _ in found] == expected
    for index, (_, place) in enumerate(found):  # any place is one to go on from
        rest = [event["step"] for event, _ in spool.events(folder, place)]
        assert rest == expected[index + 1 :]


class Killed(BaseException):
    """The sender dies, at any moment."""


class Memory:
    """What MLflow was told: enough of a run for a lane."""

    def __init__(self, deaths: list[str]) -> None:
        self.steps: list[int] = []
        self.deaths = deaths
        self.now = Target("server", "run")

    def target(self) -> Target:
        return self.now

    def forget(self) -> None:
        """Nothing."""

    def deliver(self, chunk: Sequence[Any], number: int, cursor: Cursor) -> None:
        death = self.deaths.pop() if self.deaths else ""
        if death == "before":
            raise Killed
        self.steps += [event["step"] for event in chunk if event["kind"] == "metrics"]
        if death == "after":
            raise Killed


@settings(max_examples=50)
@given(
    kinds=st.lists(
        st.lists(st.sampled_from(["metrics", "artifact", "end"]), max_size=8), max_size=3
    ),
    deaths=st.lists(st.sampled_from(["before", "after", ""]), max_size=12),
)
def test_a_sender_killed_at_any_moment_repeats_at_most_what_it_was_delivering(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[list[str]], deaths: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    step = 0
    for number, attempt in enumerate(kinds, start=1):
        with (folder / f"spool_{number:06d}.jsonl").open("wb") as file:
            for kind in attempt:
                step += kind == "metrics"
                file.write(line({**metrics(step), "kind": kind}))
    closing = threading.Event()
    closing.set()
    memory = Memory([*deaths])
    num_deaths = sum(death != "" for death in deaths)
    for _ in range(num_deaths + 1):
        try:
            Lane(folder, "facts", memory, closing).work()  # type: ignore[arg-type]
        except Killed:
            continue
        break
    assert list(dict.fromkeys(memory.steps)) == list(range(1, step + 1)), "lost, or out of order"
    assert sorted(set(memory.steps)) == list(range(1, step + 1))
    if "after" not in deaths:
        assert memory.steps == list(range(1, step + 1)), "repeated without need"
    assert spool.num_waiting(folder) == sum(attempt.count("artifact") for attempt in kinds)


@given(
    runs=st.lists(
        st.builds(Target, st.sampled_from("ab"), st.sampled_from("xy")), min_size=1, max_size=5
    )
)
def test_a_cursor_counts_for_one_run_on_one_server(
    tmp_path_factory: pytest.TempPathFactory, runs: list[Target]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    closing = threading.Event()
    closing.set()
    before = None
    for number, target in enumerate(runs, start=1):
        begin = {"kind": "begin", "time": 0, "uri": target.server}
        path = folder / f"spool_{number:06d}.jsonl"
        path.write_bytes(line(begin) + line(metrics(number)))
        is_elsewhere = before is None or before.server != target.server
        assert spool.num_waiting(folder) == (2 * number if is_elsewhere else 2)
        memory = Memory([])
        memory.now = target
        Lane(folder, "facts", memory, closing).work()  # type: ignore[arg-type]
        assert memory.steps == [*range(1 if target != before else number, number + 1)]
        assert spool.num_waiting(folder) == 0
        before = target


@given(cut=st.integers(0, 60))
def test_a_line_is_read_once_it_is_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    whole = line(metrics(1))
    cut = min(cut, len(whole) - 1)
    with (folder / "spool_000001.jsonl").open("wb", buffering=0) as file:
        file.write(whole[:cut])
        assert list(spool.events(folder)) == []
        file.write(whole[cut:])
        assert list(spool.events(folder)) == [(metrics(1), Place(1, len(whole)))]


def test_a_spoilt_cursor_starts_again(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"number": 3')
    assert spool.read_cursor(tmp_path, "facts") == Cursor()
    (tmp_path / "facts.json").write_text('{"number": 3, "of a later version": 1}')
    assert spool.read_cursor(tmp_path, "facts").place == Place(3, 0)


# ---------------------------------------------------------------------------- a full disk


@contextmanager
def disk_with_room(num_bytes: int) -> Iterator[None]:
    """Files of this process end at `num_bytes`: a write is cut short there, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(
    texts=st.lists(st.text("abc", max_size=30), min_size=1, max_size=10),
    room=st.integers(0, 120),
    full_for=st.integers(0, 10),
)
def test_a_full_disk_costs_no_line_and_never_leaves_half_a_one(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], room: int, full_for: int
) -> None:
    path = tmp_path_factory.mktemp("disk") / "lines"
    said: list[str] = []
    lines = Lines(path, said.append)
    whole = [text.encode() + b"\n" for text in texts]
    with disk_with_room(room):
        for text in texts[:full_for]:
            lines.append(text.encode())
    found = path.read_bytes() if path.exists() else b""
    assert found in [b"".join(whole[:number]) for number in range(len(whole) + 1)]
    for text in texts[full_for:]:
        lines.append(text.encode())
    lines.close()
    assert path.read_bytes() == b"".join(whole)
    assert len(said) <= 2, "one loud line, and one when it is over"


# ---------------------------------------------------------------------------- small things


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("eval/aime/avg@32", "eval/aime/avg_at_32"),
        ("response_tokens/clipped_fraction", "response_tokens/clipped_fraction"),
        ("eval/AIME (2024)/cons@4", "eval/AIME _2024_/cons_at_4"),
    ],
)
def test_metric_names_mlflow_takes(name: str, taken: str) -> None:
    assert metric_name(name) == taken


def test_parameters_are_flat() -> None:
    tree = {"a": {"b": None, "c": [1, {"d": "x"}]}, "e": [], "f": True}
    flat = [("a.b", "null"), ("a.c.0", "1"), ("a.c.1.d", "x"), ("e", "[]"), ("f", "True")]
    assert list(flatten(tree)) == flat


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("", ""),
        ("sqlite:///runs/mlflow.db", "sqlite:///{here}/runs/mlflow.db"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("mlruns", "{here}/mlruns"),
        ("http://server:5000", "http://server:5000"),
        ("databricks", "databricks"),
    ],
)
def test_the_sender_finds_files_from_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, taken: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert given_uri() == taken.format(here=tmp_path)


def test_a_status_is_one_of_three(run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlflowSpool, "_put", lambda *_, **__: None)
    with pytest.raises(ValueError, match="'DONE': must be one of FINISHED, FAILED, KILLED"):
        open_spool(run).finish("DONE")


def test_rank_0_does_not_import_mlflow() -> None:
    check = "import dapo_megatron.tracking, sys; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
