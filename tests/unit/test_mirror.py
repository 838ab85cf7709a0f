"""MLflow that never hurts: a real server that is down, killed, stopped or full of nonsense, real
mirrors, runs that are killed. And what MLflow lacks of a run's folder, cut at any byte."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
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

from dapo_megatron.cluster.attempt import begin_attempt
from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config
from dapo_megatron.tracking import mirror_state, mlflow_tracker
from dapo_megatron.tracking.mirror import Mirror
from dapo_megatron.tracking.mirror_state import LOG, MirrorState, Row, lock_holder, read_cursor
from dapo_megatron.tracking.mlflow_run import MAX_NAMES, metric_name
from dapo_megatron.tracking.mlflow_tracker import (
    MlflowTracker,
    deliver,
    deliver_rest,
    given_uri,
    why_waiting,
)
from dapo_megatron.tracking.provenance import commit, flatten, run_tags, versions
from dapo_megatron.tracking.trackers import CompositeTracker, JsonlTracker
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.cores import own_seconds

STEP_LIMIT = 0.010
"""Seconds that logging may add to a step."""


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


class Run(CompositeTracker):
    """Rank 0 of a start that goes on after `step`: it writes what a run writes."""

    def __init__(
        self, made: Config, warn: Callable[[str], None] = pytest.fail, step: int = 0
    ) -> None:
        folder = made.folder
        folder.mkdir(parents=True, exist_ok=True)
        begin_attempt(folder / "attempts.jsonl", step)
        write(folder, "config.yaml", dump_config(made))
        write(folder, "provenance.json", json.dumps({"tags": run_tags(made, "4711.0")}))
        metrics = JsonlTracker(folder / "metrics.jsonl", step or -1, warn)
        self.mlflow = MlflowTracker(made, None, warn)
        super().__init__(metrics, self.mlflow)

    @property
    def mirror(self) -> subprocess.Popen[bytes]:
        assert self.mlflow._mirror is not None
        return self.mlflow._mirror


def write(folder: Path, name: str, text: str = "{}") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def is_complete(folder: Path) -> bool:
    return MirrorState(folder).is_complete()


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
import sys, time
from dapo_megatron.config.file import load_config
from tests.unit.test_mirror import Run
run = Run(load_config(sys.argv[1]), print)
for step in (1, 2, 3):
    run.log(step, {"reward/mean": float(step)})
print(run.mirror.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def fake_rank_0(made: Config) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has logged three steps and trains on; the id of its mirror."""
    write(made.folder, "config.yaml", dump_config(made))
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_RANK_0, str(made.folder / "config.yaml")],
        cwd=REPOSITORY,
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
    tracker = Run(made)
    write(made.folder, "samples/step_000001.jsonl")
    write(made.folder, "checkpoints/step_000002/manifest.json")
    for step in (1, 2, 3):
        tracker.log(step, {"eval/a/avg@4": step / 8, "time/step": float(step), "nan": math.nan})
    write(made.folder, "report.html")
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
    times = client().get_metric_history(found.info.run_id, "time/step")
    assert times[2].timestamp - times[0].timestamp == 5000, "not the seconds of its steps"
    assert math.isnan(found.data.metrics["nan"])
    assert str(made.folder / "report.html") in tags["mlflow.note.content"]
    assert tracker.mlflow.ui == f"{server.uri}/#/experiments/{found.info.experiment_id}/runs/" + (
        found.info.run_id
    )


def test_a_resumed_run_is_the_same_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "SHORT_WAIT_SECONDS", 120.0)
    first = config(tmp_path)
    tracker = Run(first)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": float(step)})
    write(first.folder, "report.html", "first")
    tracker.finish("KILLED")
    assert stored(first).info.status == "KILLED"
    client().set_tag(stored(first).info.run_id, "mlflow.note.content", "a person's")

    longer = config(tmp_path, train__rollout_steps=99, resume="auto")
    tracker = Run(longer, step=2)
    wait_until(lambda: stored(longer).info.status == "RUNNING")
    tracker.log(3, {"reward/mean": 30.0})
    tracker.log(4, {"reward/mean": 4.0})
    write(first.folder, "report.html", "second")
    tracker.finish("FAILED")
    found = stored(longer)
    assert found.info.status == "FAILED"
    assert found.data.tags["resumed.train.rollout_steps"] == "99"
    assert found.data.tags["mlflow.note.content"] == "a person's"
    assert "resumed.loss.clip_high" not in found.data.tags
    assert len(all_runs(longer)) == 1
    assert history(longer, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0)]
    assert found.data.metrics["reward/mean"] == 4.0
    copy = client().download_artifacts(found.info.run_id, "report.html", str(tmp_path))
    assert Path(copy).read_text() == "second"


def test_names_are_bounded_and_a_refused_metric_or_damaged_line_costs_no_other(
    server: Server, run: Config
) -> None:
    said: list[str] = []
    tracker = Run(run, said.append)
    tracker.log(1, {"x" * 251: 1.0, "a//b": 1.0, "reward/mean": 0.5})
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")
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
    assert log.count("NOT SENT: prompt/") == 2
    assert log.count("not a line of metrics") == 1
    assert "a//b" in log


def test_a_run_that_is_gone_is_found_by_its_tag_or_made_anew(server: Server, run: Config) -> None:
    tracker = Run(run)
    tracker.log(1, {"reward/mean": 1.0})
    tracker.mirror.kill()
    tracker.mirror.wait()
    tracker.finish("FINISHED")  # by another mirror
    (first,) = all_runs(run)

    # It died before it noted which run it had made, and the server does not know what is noted.
    name = read_cursor(run.folder).run
    write(run.folder, mirror_state.CURSOR, json.dumps({"run": name}))
    write(run.folder, "mlflow_run.json", json.dumps({"run_id": "0" * 32}))
    tracker = Run(run, lambda _: None, step=1)
    wait_until(lambda: read_cursor(run.folder).begun == 2)
    assert stored(run).info.run_id == first.info.run_id
    assert stored(run).info.status == "RUNNING"

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
    tracker = Run(made)
    write(made.folder, "samples/step_000001.jsonl")
    tracker.log(1, {"reward/mean": 1.0})
    tracker.finish("FINISHED")
    (first,) = all_runs(made)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    tracker = Run(made, step=1)
    tracker.log(2, {"reward/mean": 2.0})
    tracker.finish("FINISHED")
    assert history(made, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert stored(made).data.params["loss.clip_high"] == "0.28"
    assert client().list_artifacts(stored(made).info.run_id, "samples")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)  # and back
    assert deliver(made.folder, 120)
    assert stored(made).info.run_id == first.info.run_id
    assert history(made, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
def test_a_local_database_is_made_once_by_runs_that_start_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = [config(tmp_path, run__name=name) for name in ("a", "b")]
    trackers = [Run(one) for one in made]
    for tracker in trackers:
        tracker.log(1, {"reward/mean": 0.5})
    for tracker in trackers:
        tracker.finish("FINISHED")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert trackers[0].mlflow.ui.endswith(f"mlflow ui --backend-store-uri {uri}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert [stored(one).info.status for one in made] == ["FINISHED", "FINISHED"]
    assert len(all_runs(made[0])) == 2


# ---------------------------------------------------------------------------- a server in trouble


def log_steps(tracker: Run, steps: Sequence[int]) -> tuple[list[float], list[float]]:
    """Log 60 metrics per step; seconds of each call by the clock, and those that are its own doing.
    (Another program of this machine may take the core away for longer than the bound.)"""
    by_clock: list[float] = []
    own: list[float] = []
    for step in steps:
        metrics = {f"policy/m{number}": step + number / 64 for number in range(60)}
        start = time.perf_counter()
        with own_seconds(own):
            tracker.log(step, metrics)
        by_clock.append(time.perf_counter() - start)
    return by_clock, own


def test_a_dead_server_delays_no_step_but_for_waiting_for_a_core_and_gets_everything_later(
    server: Server, run: Config
) -> None:
    """The bound holds for the time of a call less the time for which it waited for a core, which
    other programs had. Both are printed."""
    server.stop()
    tracker = Run(run, lambda _: None)
    log = run.folder / "logs" / "mlflow.log"
    first = log_steps(tracker, range(1, 501))  # while the mirror imports MLflow
    wait_until(lambda: "retrying until it works" in log.read_text())
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
    tracker = Run(made, said.append)
    tracker.log(0, {"reward/mean": 0.0})
    wait_until(lambda: read_cursor(made.folder).step == 0)
    server.send(signal.SIGSTOP)
    try:
        assert max(log_steps(tracker, range(1, 101))[1]) < STEP_LIMIT
        start = time.monotonic()
        tracker.finish("FINISHED")
        assert time.monotonic() - start < 60  # without its own limit of 1 s it would wait for ever
    finally:
        server.send(signal.SIGCONT)
    assert len(said) == 1
    assert f"python -m dapo_megatron track {made.folder}" in said[0]
    assert deliver(made.folder, 60)
    assert stored(made).info.status == "FINISHED"
    assert len(history(made, "policy/m0")) == 100


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_fails_or_is_stopped_leaves_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody is there
    tracker = Run(config(tmp_path), lambda _: None)
    start = time.monotonic()
    tracker.finish(status)
    taken = time.monotonic() - start
    assert tracker.mirror.poll() is None, "it goes on trying for a moment"
    tracker.mirror.kill()
    tracker.mirror.wait()
    print(f"{status}, dead server: {taken:.2f} s")
    assert mlflow_tracker.SHORT_WAIT_SECONDS < 5
    assert taken < 60  # not the 120 s of tracking.wait_seconds


def test_a_mirror_that_is_stopped_is_named_and_killed_when_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody is there
    made, said = config(tmp_path), list[str]()
    tracker = Run(made, said.append)
    mirror = tracker.mirror
    wait_until(lambda: lock_holder(made.folder) is not None)
    mirror.send_signal(signal.SIGSTOP)
    wait_until(lambda: mirror_state.is_stopped(mirror.pid))
    holder = f"process {mirror.pid} (stopped; to end it: kill -9 {mirror.pid})"
    for wait_seconds in (8.0, 60.0):  # the second only on a busy machine
        assert not deliver(made.folder, wait_seconds)
        if f"waiting for {holder}" in read_log(made.folder):
            break
    assert why_waiting(made.folder).startswith(f"{holder} holds the lock of ")
    assert f"waiting for {holder}" in (made.folder / LOG).read_text()
    tracker.finish("FAILED")
    assert mirror.poll() == -signal.SIGKILL
    assert f"killed its mirror, process {mirror.pid}, which was stopped (SIGSTOP)" in said[0]
    assert "holds the lock" not in why_waiting(made.folder)


def test_the_log_of_the_mirror_has_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, uri in enumerate(
        ("http://127.0.0.1:9/?token=hunter2", "http://user:hun/ter2@127.0.0.1:9")
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        said: list[str] = []
        made = config(tmp_path / f"run{number}")
        tracker = Run(made, said.append)
        wait_until(lambda folder=made.folder: "Error" in read_log(folder))
        tracker.finish("KILLED")
        files = [path for path in made.folder.rglob("*") if path.is_file()]
        text = "".join([*said, *(path.read_text(errors="replace") for path in files)])
        for secret in ("hunter2", "ter2", "user:"):
            assert secret not in text, [line for line in text.splitlines() if secret in line]
            tracker.mirror.kill()
        tracker.mirror.wait()


def read_log(folder: Path) -> str:
    log = folder / LOG
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
    monkeypatch.setattr(MlflowTracker, "_start", lambda _: None)
    ui = Run(config(tmp_path)).mlflow.ui
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
    tracker = Run(made, said.append)
    wait_until(lambda: read_cursor(made.folder).error != "")
    tracker.log(1, {"reward/mean": 0.5})
    tracker.finish("FINISHED")
    assert "the run continues" in said[0]
    assert "track" in said[1]
    written = "".join(path.read_text() for path in (made.folder / "mlflow").iterdir())
    assert "secret" not in "".join([*said, written])

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert deliver(made.folder, 60)
    assert history(made, "reward/mean") == [(1, 0.5)]


# ---------------------------------------------------------------------------- processes that die


def test_rank_0_killed_is_a_killed_run(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, mirror):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(mirror, number)  # as Slurm does to the whole job step
        rank_0.kill()
        wait_until(lambda: is_gone(mirror))
    assert stored(run).info.status == "KILLED"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_next_start_tells_of_a_killed_job_step(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, mirror):
        os.kill(mirror, signal.SIGKILL)
        rank_0.kill()
    assert not (run.folder / "mlflow_run.json").exists()
    tracker = Run(run, step=3)
    tracker.log(4, {"reward/mean": 4.0})
    wait_until(lambda: read_cursor(run.folder).step == 4)
    assert len(history(run, "reward/mean")) == 4
    assert stored(run).info.status == "RUNNING"
    tracker.finish("FINISHED")
    assert stored(run).info.status == "FINISHED"


def test_a_run_that_is_moved_aside_is_killed_where_it_is(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, mirror):
        os.kill(mirror, signal.SIGKILL)
        rank_0.kill()
    aside = run.folder.with_name(f"{run.folder.name}.1")
    run.folder.rename(aside)
    deliver_rest(aside)
    wait_until(lambda: is_complete(aside))
    assert [one.info.status for one in all_runs(run)] == ["KILLED"]
    assert not run.folder.exists()


def test_a_folder_of_an_earlier_version_is_tracked(server: Server, run: Config) -> None:
    """It has a spool, no cursor, and its MLflow run has another name."""
    made = client().create_run(client().create_experiment(run.tracking.experiment))
    write(run.folder, "mlflow_run.json", json.dumps({"run_id": made.info.run_id}))
    write(run.folder, "mlflow/facts.json")
    write(run.folder, "config.yaml", dump_config(run))
    write(run.folder, "metrics.jsonl", '{"step": 1, "reward/mean": 0.5}\n')
    write(run.folder, "summary.json")
    assert deliver(run.folder, 120)
    assert stored(run).info.run_id == made.info.run_id
    assert stored(run).info.status == "FINISHED"
    assert history(run, "reward/mean") == [(1, 0.5)]


# ---------------------------------------------------------------------------- the run's folder


def line(step: int) -> bytes:
    return json.dumps({"step": step, "time/step": float(step)}).encode() + b"\n"


def begin(folder: Path, number: int, step: int) -> None:
    """Begin start `number` after a step, at a time of its own."""
    (folder / "mlflow").mkdir(exist_ok=True)
    start = {"attempt": str(number), "job": None, "step": step, "time": 1e6 * number}
    with (folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")


class Killed(BaseException):
    """The mirror dies, at any moment."""


class Memory:
    """What MLflow was told: enough of a run for a mirror."""

    def __init__(self, state: MirrorState, sent: list[Any], deaths: list[str]) -> None:
        self.state, self.sent, self.deaths = state, sent, deaths

    def open(self) -> None:
        self.state.aim("server", "run")
        if self.state.cursor.begun < self.state.number:
            self.state.begin()

    def metrics(self, rows: Sequence[Row]) -> None:
        death = self.deaths.pop() if self.deaths else ""
        if death == "before":
            raise Killed
        self.sent += [(row.step, row.time, row.values["time/step"]) for row in rows]
        if death == "after":
            raise Killed

    def end(self) -> None:
        self.state.save(closed=self.state.number)

    def file(self, name: str, folder: str) -> None:
        """Nothing."""


def send_all(folder: Path, number: int, sent: list[Any], deaths: list[str]) -> None:
    """Send as a new mirror does, and as another one when that one dies."""
    while True:
        state = MirrorState(folder, number)
        state.prepare("run", "server", {})
        memory = Memory(state, sent, deaths)
        try:
            Mirror(state, memory).send(is_last=True)  # type: ignore[arg-type]
        except Killed:
            continue
        return


@settings(max_examples=50, deadline=None)
@given(
    starts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=4),
    deaths=st.lists(st.sampled_from(["before", "after", ""]), max_size=12),
    at_once=st.integers(1, 5),
)
def test_a_mirror_killed_at_any_moment_sends_what_the_folder_has(
    tmp_path_factory: pytest.TempPathFactory,
    starts: list[tuple[int, int]],
    deaths: list[str],
    at_once: int,
) -> None:
    """Over starts that go back to any checkpoint. Sent again is the same to the last bit, and only
    what was being sent; the newest of a step is what the folder has."""
    folder = tmp_path_factory.mktemp("run")
    truth: list[int] = []
    sent: list[Any] = []
    num_deaths = sum(map(bool, deaths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror_state, "MAX_METRICS", at_once)
        for number, (back_to, num_steps) in enumerate(starts, start=1):
            truth = [step for step in truth if step <= back_to]
            first = truth[-1] if truth else 0
            begin(folder, number, first)
            truth += range(first + 1, first + 1 + num_steps)
            (folder / "metrics.jsonl").write_bytes(b"".join(map(line, truth)))
            send_all(folder, number, sent, deaths)
    newest: dict[int, int] = {}
    for step, time_, _ in sent:
        newest[step] = max(time_, newest.get(step, 0))
    rows, _ = MirrorState(folder, len(starts)).rows()
    assert rows == []
    assert is_complete(folder)
    write(folder, mirror_state.CURSOR)
    rows, _ = MirrorState(folder, len(starts)).rows()
    assert [row.step for row in rows] == truth
    assert [row.time for row in rows] == [newest[step] for step in truth]
    assert len(sent) - len(set(sent)) <= at_once * num_deaths


@given(junk=st.binary(max_size=8), cut=st.integers(0, 200))
def test_a_file_cut_anywhere_costs_its_last_line_alone(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, cut: int
) -> None:
    """A line is read once it is whole, and one that is damaged is skipped."""
    folder = tmp_path_factory.mktemp("run")
    begin(folder, 1, 0)
    whole = b"".join(line(step) for step in range(1, 5))
    (folder / "metrics.jsonl").write_bytes(whole[:cut])
    said: list[str] = []
    state = MirrorState(folder, 1, said.append)
    rows, changes = state.rows()
    assert [row.step for row in rows] == list(range(1, 1 + whole[:cut].count(b"\n")))
    state.save(**changes)
    damaged = b"" if cut >= len(whole) else junk.replace(b"\n", b"") + b"{\n"
    (folder / "metrics.jsonl").write_bytes(whole[:cut] + damaged + whole)
    for _ in range(2):
        more, _ = state.rows()
        assert [row.step for row in rows + more] == [1, 2, 3, 4]
    assert len(said) == bool(damaged)


def test_another_server_gets_everything_and_a_damaged_cursor_starts_again(tmp_path: Path) -> None:
    begin(tmp_path, 1, 0)
    (tmp_path / "metrics.jsonl").write_bytes(line(1) + line(2))
    sent: list[Any] = []
    write(tmp_path, mirror_state.CURSOR, json.dumps({"uri": "server"}))
    send_all(tmp_path, 1, sent, [])
    assert is_complete(tmp_path)
    state = MirrorState(tmp_path)
    state.prepare("", "another", {})
    assert not is_complete(tmp_path)
    state.aim("another", "run")
    assert [row.step for row in state.rows()[0]] == [1, 2]
    write(tmp_path, mirror_state.CURSOR, '{"offset": 3')
    assert read_cursor(tmp_path) == mirror_state.Cursor()
    write(tmp_path, mirror_state.CURSOR, '{"offset": 3, "of a later version": 1}')
    assert read_cursor(tmp_path).offset == 3


def test_a_later_start_ends_the_mirror_of_an_earlier_one(tmp_path: Path) -> None:
    begin(tmp_path, 1, 0)
    (tmp_path / "metrics.jsonl").write_bytes(line(1))
    begin(tmp_path, 2, 0)
    sent: list[Any] = []
    with pytest.raises(mirror_state.Superseded):
        send_all(tmp_path, 1, sent, [])
    assert sent == []


@pytest.mark.parametrize(
    ("notes", "has_summary", "status"),
    [
        ({"end": "crashed"}, True, "FAILED"),
        ({"end": "stopped"}, True, "KILLED"),
        ({"end": "hung", "status": "FAILED"}, False, "FAILED"),
        ({"status": "FINISHED"}, False, "FINISHED"),
        ({}, True, "FINISHED"),
        ({}, False, "KILLED"),
    ],
)
def test_the_status_of_a_run_is_that_of_its_last_start(
    tmp_path: Path, notes: dict[str, str], has_summary: bool, status: str
) -> None:
    begin(tmp_path, 1, 0)
    if notes:
        end = {"attempt": "1", "step": 0, "time": 2e6, "closed": 2e6, **notes}
        with (tmp_path / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(end) + "\n")
    if has_summary:
        write(tmp_path, "summary.json")
    state = MirrorState(tmp_path)
    state.save(begun=1)
    assert state.end() == (status, 2_000_000_000 if notes else 1_000_000_000)


def test_checkpoints_that_are_gone_stay_listed(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write(tmp_path, f"checkpoints/step_00000{number}/manifest.json")
    (tmp_path / "mlflow").mkdir()
    state = MirrorState(tmp_path)
    state.list_checkpoints()
    (tmp_path / "checkpoints/step_000001").rename(tmp_path / "gone")
    (tmp_path / "checkpoints/step_000003").rename(tmp_path / "checkpoints/step_000003.1")
    state.list_checkpoints()
    listed = json.loads((tmp_path / "mlflow/checkpoints.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in listed] == [1, 2]


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
def test_the_mirror_finds_files_from_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, taken: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert given_uri() == taken.format(here=tmp_path)


def test_a_status_is_one_of_three(run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlflowTracker, "_start", lambda _: None)
    with pytest.raises(ValueError, match="'DONE': must be one of FINISHED, FAILED, KILLED"):
        Run(run).finish("DONE")


def test_rank_0_does_not_import_mlflow() -> None:
    check = "import dapo_megatron.run.record, sys; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
