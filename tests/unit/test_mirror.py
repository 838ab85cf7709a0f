"""The MLflow tracker and its mirror process, with real servers that are down, killed, stopped or
not MLflow, with killed runs, and with files cut at any byte."""

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
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.cluster.attempt import start_attempt
from dapo_megatron.cluster.versions import versions
from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config
from dapo_megatron.tracking import mirror_state, mlflow_tracker
from dapo_megatron.tracking.mirror import Mirror, describe
from dapo_megatron.tracking.mirror_state import (
    LOG,
    MetricsRow,
    MirrorState,
    lock_holder,
    read_cursor,
)
from dapo_megatron.tracking.mlflow_run import MAX_NAMES, MlflowRun, metric_name
from dapo_megatron.tracking.mlflow_tracker import (
    MlflowTracker,
    deliver,
    deliver_rest,
    why_waiting,
)
from dapo_megatron.tracking.provenance import commit, flatten, run_tags
from dapo_megatron.tracking.trackers import CompositeTracker, JsonlTracker
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.cores import own_seconds

STEP_LIMIT = 0.010
"""Seconds that logging may add to a step."""


class Server:
    """`mlflow server` with its own database, on the same port after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server if it is not running, and wait until it answers."""
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
        """Send a signal to all its processes."""
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
    """Return a running server, restarted if necessary, and set MLFLOW_TRACKING_URI."""
    started.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", started.uri)
    return started


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """Return a config whose experiment no other test uses."""
    return config(tmp_path)


def config(folder: Path, **changes: Any) -> Config:
    locations = {"run__directory": folder / "runs", "tracking__experiment": folder.name}
    return tiny_config(**locations, tracking__wait_seconds=120.0, **changes)


class Run(CompositeTracker):
    """Trackers and files of rank 0, for a start that continues after `step`."""

    def __init__(
        self, run_config: Config, warn: Callable[[str], None] = pytest.fail, step: int = 0
    ) -> None:
        folder = run_config.folder
        folder.mkdir(parents=True, exist_ok=True)
        start_attempt(folder / "attempts.jsonl", step)
        write(folder, "config.yaml", dump_config(run_config))
        write(folder, "provenance.json", json.dumps({"tags": run_tags(run_config, "4711.0")}))
        metrics = JsonlTracker(folder / "metrics.jsonl", step or -1, warn)
        self.mlflow = MlflowTracker(run_config, None, warn)
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
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.1)


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def stored_run(run_config: Config) -> Any:
    """Return the run as MLflow's client reads it."""
    return client().get_run(
        json.loads((run_config.folder / "mlflow_run.json").read_text())["run_id"]
    )


def history(run_config: Config, name: str) -> list[tuple[int, float]]:
    points = client().get_metric_history(stored_run(run_config).info.run_id, name)
    return [(point.step, point.value) for point in points]


def all_runs(run_config: Config) -> list[Any]:
    experiment = client().get_experiment_by_name(run_config.tracking.experiment)
    return list(client().search_runs([experiment.experiment_id]))


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
def fake_rank_0(run_config: Config) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that has logged three steps and is still training. Yield the process and the
    pid of its mirror."""
    write(run_config.folder, "config.yaml", dump_config(run_config))
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_RANK_0, str(run_config.folder / "config.yaml")],
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


# ---------------------------------------------------------------------------- normal delivery


def test_mlflow_gets_metrics_parameters_tags_and_files(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("prompts")
    source = f"[{{kind: jsonl, name: math, path: {data}, grader: dapo_math}}]"
    run_config = config(tmp_path, data__train=source)
    for name, value in {"JOB_ID": "4711", "RESTART_COUNT": "2", "JOB_NODELIST": "n[1-4]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    tracker = Run(run_config)
    sample, policy = "samples/step_000001/completions.parquet", "policy/step_000001_00000.parquet"
    for name in (sample, policy, "samples/step_000001/open.parquet", "samples/.x.partial/y"):
        write(run_config.folder, name)
    write(run_config.folder, "checkpoints/step_000002/manifest.json")
    for step in (1, 2, 3):
        tracker.log(step, {"eval/a/avg@4": step / 8, "time/step": float(step), "nan": math.nan})
    write(run_config.folder, "report.html")
    tracker.finish("FINISHED")

    mlflow_run = stored_run(run_config)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.info.run_name == run_config.run.name
    assert mlflow_run.data.params["loss.clip_high"] == "0.28"
    assert mlflow_run.data.params["data.train.0.name"] == "math"
    assert history(run_config, "eval/a/avg_at_4") == [(step, step / 8) for step in (1, 2, 3)]
    tags = mlflow_run.data.tags
    assert (tags["slurm.job_id"], tags["slurm.restart_count"]) == ("4711", "2")
    assert (tags["slurm.node_list"], tags["attempt"]) == ("n[1-4]", "4711.0")
    assert tags["config.sha256"] == hashlib.sha256(dump_config(run_config).encode()).hexdigest()
    assert tags["data.math.sha256"] == hashlib.sha256(b"prompts").hexdigest()
    assert tags["checkpoint.newest"] == "checkpoints/step_000002"
    assert {f"version.{name}" for name in versions()} <= set(tags)
    if commit() is not None:  # its value may change while the test runs
        assert len(tags["git.commit"]) == 40
        assert tags["git.dirty"] in ("true", "false")
    for folder, name in (("samples/step_000001", sample), ("policy", policy)):
        files = [item.path for item in client().list_artifacts(mlflow_run.info.run_id, folder)]
        assert files == [name]
    assert len(client().list_artifacts(mlflow_run.info.run_id, "samples")) == 1
    downloaded = client().download_artifacts(
        mlflow_run.info.run_id, "checkpoints.json", str(tmp_path)
    )
    (entry,) = json.loads(Path(downloaded).read_text())["checkpoints"]
    assert (entry["step"], entry["bytes"], entry["hf_export"]) == (2, 2, None)
    assert entry["manifest_sha256"] == hashlib.sha256(b"{}").hexdigest()
    times = client().get_metric_history(mlflow_run.info.run_id, "time/step")
    assert times[2].timestamp - times[0].timestamp == 5000, "timestamps do not follow time/step"
    assert math.isnan(mlflow_run.data.metrics["nan"])
    assert str(run_config.folder / "report.html") in tags["mlflow.note.content"]
    path = f"experiments/{mlflow_run.info.experiment_id}/runs/{mlflow_run.info.run_id}"
    assert tracker.mlflow.ui == f"{server.uri}/#/{path}"


def test_a_resumed_run_continues_the_same_mlflow_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "SHORT_WAIT_SECONDS", 120.0)
    first = config(tmp_path)
    tracker = Run(first)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": float(step)})
    write(first.folder, "report.html", "first")
    tracker.finish("KILLED")
    assert stored_run(first).info.status == "KILLED"
    client().set_tag(stored_run(first).info.run_id, "mlflow.note.content", "a person's")

    longer = config(tmp_path, train__rollout_steps=99, resume="auto")
    tracker = Run(longer, step=2)
    wait_until(lambda: stored_run(longer).info.status == "RUNNING")
    tracker.log(3, {"reward/mean": 30.0})
    tracker.log(4, {"reward/mean": 4.0})
    write(first.folder, "report.html", "second")
    tracker.finish("FAILED")
    mlflow_run = stored_run(longer)
    assert mlflow_run.info.status == "FAILED"
    assert mlflow_run.data.tags["resumed.train.rollout_steps"] == "99"
    assert mlflow_run.data.tags["mlflow.note.content"] == "a person's"
    assert "resumed.loss.clip_high" not in mlflow_run.data.tags
    assert len(all_runs(longer)) == 1
    assert history(longer, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0)]
    assert mlflow_run.data.metrics["reward/mean"] == 4.0
    downloaded = client().download_artifacts(mlflow_run.info.run_id, "report.html", str(tmp_path))
    assert Path(downloaded).read_text() == "second"


def test_a_rejected_metric_or_damaged_line_loses_no_other_metric(
    server: Server, run: Config
) -> None:
    warnings: list[str] = []
    tracker = Run(run, warnings.append)
    tracker.log(1, {"x" * 251: 1.0, "a//b": 1.0, "reward/mean": 0.5})
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")
    tracker.log(2, {f"prompt/{number}": 1.0 for number in range(MAX_NAMES + 10)})
    tracker.log(3, {"reward/mean": 0.75, "late": 1.0})
    tracker.finish("FINISHED")
    metrics = stored_run(run).data.metrics
    assert metrics["reward/mean"] == 0.75
    assert len(metrics) == MAX_NAMES - 1  # MLflow rejected one of the names
    assert "late" not in metrics
    assert len(warnings) == 1
    assert "mlflow.log" in warnings[0]
    log = (run.folder / "logs" / "mlflow.log").read_text()
    assert log.count("NOT SENT: prompt/") == 2
    assert log.count("not a line of metrics") == 1
    assert "a//b" in log


def test_a_lost_mlflow_run_is_found_by_its_tag_or_created_again(
    server: Server, run: Config
) -> None:
    tracker = Run(run)
    tracker.log(1, {"reward/mean": 1.0})
    tracker.mirror.kill()
    tracker.mirror.wait()
    tracker.finish("FINISHED")  # finish starts another mirror
    (first,) = all_runs(run)

    # The mirror died before it recorded its run id, and the recorded id is unknown to the server.
    name = read_cursor(run.folder).run
    write(run.folder, mirror_state.CURSOR, json.dumps({"run": name}))
    write(run.folder, "mlflow_run.json", json.dumps({"run_id": "0" * 32}))
    tracker = Run(run, lambda _: None, step=1)
    wait_until(lambda: read_cursor(run.folder).begun == 2)
    assert stored_run(run).info.run_id == first.info.run_id
    assert stored_run(run).info.status == "RUNNING"

    client().delete_run(first.info.run_id)
    tracker.log(2, {"reward/mean": 2.0})
    tracker.finish("FINISHED")
    (second,) = all_runs(run)
    assert second.info.run_id != first.info.run_id
    assert second.info.status == "FINISHED"
    assert second.data.params["loss.clip_high"] == "0.28"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
def test_a_new_server_gets_all_metrics_and_files(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_config, other = config(tmp_path), f"sqlite:///{tmp_path}/other.db"
    tracker = Run(run_config)
    write(run_config.folder, "samples/step_000001/completions.parquet")
    tracker.log(1, {"reward/mean": 1.0})
    tracker.finish("FINISHED")
    (first,) = all_runs(run_config)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    tracker = Run(run_config, step=1)
    tracker.log(2, {"reward/mean": 2.0})
    tracker.finish("FINISHED")
    assert history(run_config, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert stored_run(run_config).data.params["loss.clip_high"] == "0.28"
    assert client().list_artifacts(stored_run(run_config).info.run_id, "samples")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)  # back to the first server
    assert deliver(run_config.folder, 120)
    assert stored_run(run_config).info.run_id == first.info.run_id
    assert history(run_config, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
def test_runs_that_start_together_share_one_local_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    configs = [config(tmp_path, run__name=name) for name in ("a", "b")]
    trackers = [Run(each) for each in configs]
    for tracker in trackers:
        tracker.log(1, {"reward/mean": 0.5})
    for tracker in trackers:
        tracker.finish("FINISHED")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert trackers[0].mlflow.ui.endswith(f"mlflow ui --backend-store-uri {uri}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert [stored_run(each).info.status for each in configs] == ["FINISHED", "FINISHED"]
    assert len(all_runs(configs[0])) == 2


# ---------------------------------------------------------------------------- a server in trouble


def log_steps(tracker: Run, steps: Sequence[int]) -> tuple[list[float], list[float]]:
    """Log 60 metrics per step. Return the wall-clock seconds of each call, and the seconds without
    waiting for a core (another program may use it for longer than the limit)."""
    by_clock: list[float] = []
    without_waiting: list[float] = []
    for step in steps:
        metrics = {f"policy/m{number}": step + number / 64 for number in range(60)}
        start = time.perf_counter()
        with own_seconds(without_waiting):
            tracker.log(step, metrics)
        by_clock.append(time.perf_counter() - start)
    return by_clock, without_waiting


def test_a_dead_server_delays_no_step_and_gets_everything_later(
    server: Server, run: Config
) -> None:
    """The limit applies to the time of a call without waiting for a core. Both are printed."""
    server.stop()
    tracker = Run(run, lambda _: None)
    log = run.folder / "logs" / "mlflow.log"
    first = log_steps(tracker, range(1, 501))  # while the mirror imports MLflow
    wait_until(lambda: "retrying until it works" in log.read_text())
    second = log_steps(tracker, range(501, 1001))  # while it tries to reach the server
    by_clock, without_waiting = (early + late for early, late in zip(first, second))
    print(
        "1000 steps, dead server, longest call: "
        f"{max(without_waiting) * 1e3:.2f} ms without waiting for a core "
        f"(limit {STEP_LIMIT * 1e3:g} ms), "
        f"{max(by_clock) * 1e3:.2f} ms by the clock; sum of all {sum(by_clock):.3f} s by the clock"
    )
    assert max(without_waiting) < STEP_LIMIT

    server.start()
    tracker.finish("FINISHED")
    assert stored_run(run).info.status == "FINISHED"
    for number in (0, 59):
        expected = [(step, step + number / 64) for step in range(1, 1001)]
        assert history(run, f"policy/m{number}") == expected


@pytest.mark.long
def test_a_hung_server_delays_only_the_end_by_at_most_wait_seconds(
    server: Server, tmp_path: Path
) -> None:
    run_config = config(tmp_path).model_copy(deep=True)
    tracking = run_config.tracking.model_copy(update={"wait_seconds": 1.0})
    run_config = run_config.model_copy(update={"tracking": tracking})
    warnings: list[str] = []
    tracker = Run(run_config, warnings.append)
    tracker.log(0, {"reward/mean": 0.0})
    wait_until(lambda: read_cursor(run_config.folder).step == 0)
    server.send(signal.SIGSTOP)
    try:
        assert max(log_steps(tracker, range(1, 101))[1]) < STEP_LIMIT
        start = time.monotonic()
        tracker.finish("FINISHED")
        assert time.monotonic() - start < 60  # the server stays stopped until then
    finally:
        server.send(signal.SIGCONT)
    assert len(warnings) == 1
    assert f"python -m dapo_megatron track {run_config.folder}" in warnings[0]
    assert deliver(run_config.folder, 60)
    assert stored_run(run_config).info.status == "FINISHED"
    assert len(history(run_config, "policy/m0")) == 100


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_failed_or_stopped_run_exits_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no server listens there
    tracker = Run(config(tmp_path), lambda _: None)
    start = time.monotonic()
    tracker.finish(status)
    seconds = time.monotonic() - start
    assert tracker.mirror.poll() is None, "the mirror continues to try for a while"
    tracker.mirror.kill()
    tracker.mirror.wait()
    print(f"{status}, dead server: {seconds:.2f} s")
    assert mlflow_tracker.SHORT_WAIT_SECONDS < 5
    assert seconds < 60  # not the 120 s of tracking.wait_seconds


def test_a_stopped_mirror_process_is_reported_and_killed_when_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no server listens there
    run_config, warnings = config(tmp_path), list[str]()
    tracker = Run(run_config, warnings.append)
    mirror = tracker.mirror
    wait_until(lambda: lock_holder(run_config.folder) is not None)
    mirror.send_signal(signal.SIGSTOP)
    wait_until(lambda: mirror_state.is_stopped(mirror.pid))
    holder = f"process {mirror.pid} (stopped; to end it: kill -9 {mirror.pid})"
    for wait_seconds in (8.0, 60.0):  # the second only on a busy machine
        assert not deliver(run_config.folder, wait_seconds)
        if f"waiting for {holder}" in read_log(run_config.folder):
            break
    assert why_waiting(run_config.folder).startswith(f"{holder} holds the lock of ")
    assert f"waiting for {holder}" in (run_config.folder / LOG).read_text()
    tracker.finish("FAILED")
    assert mirror.poll() == -signal.SIGKILL
    assert f"killed its mirror, process {mirror.pid}, which was stopped (SIGSTOP)" in warnings[0]
    assert "holds the lock" not in why_waiting(run_config.folder)


def test_the_mirror_log_contains_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, uri in enumerate(
        ("http://127.0.0.1:9/?token=hunter2", "http://user:hun/ter2@127.0.0.1:9")
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        warnings: list[str] = []
        run_config = config(tmp_path / f"run{number}")
        tracker = Run(run_config, warnings.append)
        wait_until(lambda folder=run_config.folder: "Error" in read_log(folder))
        tracker.finish("KILLED")
        files = [path for path in run_config.folder.rglob("*") if path.is_file()]
        text = "".join([*warnings, *(path.read_text(errors="replace") for path in files)])
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
def test_the_ui_command_contains_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, shown: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(MlflowTracker, "_start", lambda _: None)
    ui = Run(config(tmp_path)).mlflow.ui
    assert ui.endswith(shown) and "hunter2" not in ui


class NonsenseHandler(BaseHTTPRequestHandler):
    """HTTP handler that answers, but is not MLflow."""

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
        """Log nothing."""


@pytest.fixture(scope="module")
def nonsense_port() -> Iterator[int]:
    """Yield the port of a server that answers nonsense."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NonsenseHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "uri",
    [
        "http://user:secret@127.0.0.1:{real}/elsewhere",
        "http://127.0.0.1:{nonsense_port}",
        pytest.param("nonsense://server", marks=pytest.mark.long),
    ],
)
def test_a_wrong_address_is_reported_and_does_not_end_the_run(
    server: Server, nonsense_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", uri.format(real=server.port, nonsense_port=nonsense_port)
    )
    run_config = config(tmp_path)
    run_config = run_config.model_copy(
        update={"tracking": run_config.tracking.model_copy(update={"wait_seconds": 0.1})}
    )
    warnings: list[str] = []
    tracker = Run(run_config, warnings.append)
    wait_until(lambda: read_cursor(run_config.folder).error != "")
    tracker.log(1, {"reward/mean": 0.5})
    tracker.finish("FINISHED")
    assert "the run continues" in warnings[0]
    assert "track" in warnings[1]
    written = "".join(path.read_text() for path in (run_config.folder / "mlflow").iterdir())
    assert "secret" not in "".join([*warnings, written])

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert deliver(run_config.folder, 60)
    assert history(run_config, "reward/mean") == [(1, 0.5)]


# ---------------------------------------------------------------------------- processes that die


def test_killing_rank_0_makes_the_run_killed(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, mirror):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(mirror, number)  # like Slurm, which signals the whole job step
        rank_0.kill()
        wait_until(lambda: is_gone(mirror))
    assert stored_run(run).info.status == "KILLED"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_next_start_sends_what_a_killed_job_step_left(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, mirror):
        os.kill(mirror, signal.SIGKILL)
        rank_0.kill()
    assert not (run.folder / "mlflow_run.json").exists()
    tracker = Run(run, step=3)
    tracker.log(4, {"reward/mean": 4.0})
    wait_until(lambda: read_cursor(run.folder).step == 4)
    assert len(history(run, "reward/mean")) == 4
    assert stored_run(run).info.status == "RUNNING"
    tracker.finish("FINISHED")
    assert stored_run(run).info.status == "FINISHED"


def test_a_run_that_was_moved_aside_is_reported_as_killed(server: Server, run: Config) -> None:
    with fake_rank_0(run) as (rank_0, mirror):
        os.kill(mirror, signal.SIGKILL)
        rank_0.kill()
    aside = run.folder.with_name(f"{run.folder.name}.1")
    run.folder.rename(aside)
    deliver_rest(aside)
    wait_until(lambda: is_complete(aside))
    assert [mlflow_run.info.status for mlflow_run in all_runs(run)] == ["KILLED"]
    assert not run.folder.exists()


def test_a_run_folder_of_an_earlier_version_is_sent(server: Server, run: Config) -> None:
    """Its folder has a spool but no cursor, and its MLflow run has another name."""
    mlflow_run = client().create_run(client().create_experiment(run.tracking.experiment))
    write(run.folder, "mlflow_run.json", json.dumps({"run_id": mlflow_run.info.run_id}))
    write(run.folder, "mlflow/facts.json")
    write(run.folder, "config.yaml", dump_config(run))
    write(run.folder, "metrics.jsonl", '{"step": 1, "reward/mean": 0.5}\n')
    write(run.folder, "summary.json")
    assert deliver(run.folder, 120)
    assert stored_run(run).info.run_id == mlflow_run.info.run_id
    assert stored_run(run).info.status == "FINISHED"
    assert history(run, "reward/mean") == [(1, 0.5)]


# ---------------------------------------------------------------------------- the run's folder


def line(step: int) -> bytes:
    return json.dumps({"step": step, "time/step": float(step)}).encode() + b"\n"


def record_start(folder: Path, number: int, step: int) -> None:
    """Record start `number` after a step, at a different time for each number."""
    (folder / "mlflow").mkdir(exist_ok=True)
    start = {"attempt": str(number), "job": None, "step": step, "time": 1e6 * number}
    with (folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")


class Killed(BaseException):
    """Raised where the mirror process is killed."""


class FakeMlflow:
    """MLflow run in memory, with the methods that a mirror calls."""

    def __init__(self, state: MirrorState, sent: list[Any], deaths: list[str]) -> None:
        self.state, self.sent, self.deaths = state, sent, deaths

    def open(self) -> None:
        self.state.aim("server", "run")
        if self.state.cursor.begun < self.state.number:
            self.state.begin()

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        death = self.deaths.pop() if self.deaths else ""
        if death == "before":
            raise Killed
        self.sent += [(row.step, row.time, row.values["time/step"]) for row in rows]
        if death == "after":
            raise Killed

    def end(self) -> None:
        self.state.save(closed=self.state.number)

    def file(self, name: str, folder: str) -> None:
        """Ignore the file."""


def send_all(folder: Path, number: int, sent: list[Any], deaths: list[str]) -> None:
    """Send like a mirror process. When it is killed, start another one."""
    while True:
        state = MirrorState(folder, number)
        state.prepare("run", "server", {})
        memory = FakeMlflow(state, sent, deaths)
        try:
            Mirror(state, memory).send(is_last=True)  # type: ignore[arg-type]
        except Killed:
            continue
        return


@settings(max_examples=50, deadline=None)
@given(
    starts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=4),
    deaths=st.lists(st.sampled_from(["before", "after", ""]), max_size=12),
    batch_size=st.integers(1, 5),
)
def test_mirrors_killed_at_any_moment_send_exactly_the_metrics_of_the_folder(
    tmp_path_factory: pytest.TempPathFactory,
    starts: list[tuple[int, int]],
    deaths: list[str],
    batch_size: int,
) -> None:
    """Starts may resume from any checkpoint. A metric that is sent twice is identical, and only the
    batch in flight is repeated. The newest value of each step is that of the folder."""
    folder = tmp_path_factory.mktemp("run")
    expected_steps: list[int] = []
    sent: list[Any] = []
    num_deaths = sum(map(bool, deaths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror_state, "MAX_METRICS", batch_size)
        for number, (back_to, num_steps) in enumerate(starts, start=1):
            expected_steps = [step for step in expected_steps if step <= back_to]
            first = expected_steps[-1] if expected_steps else 0
            record_start(folder, number, first)
            expected_steps += range(first + 1, first + 1 + num_steps)
            (folder / "metrics.jsonl").write_bytes(b"".join(map(line, expected_steps)))
            send_all(folder, number, sent, deaths)
    newest: dict[int, int] = {}
    for step, time_, _ in sent:
        newest[step] = max(time_, newest.get(step, 0))
    rows, _ = MirrorState(folder, len(starts)).rows()
    assert rows == []
    assert is_complete(folder)
    write(folder, mirror_state.CURSOR)
    rows, _ = MirrorState(folder, len(starts)).rows()
    assert [row.step for row in rows] == expected_steps
    assert [row.time for row in rows] == [newest[step] for step in expected_steps]
    assert len(sent) - len(set(sent)) <= batch_size * num_deaths


@given(junk=st.binary(max_size=8), cut=st.integers(0, 200))
def test_a_metrics_file_cut_anywhere_loses_only_its_last_line(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, cut: int
) -> None:
    """A line is read when it is complete, and a damaged line is skipped."""
    folder = tmp_path_factory.mktemp("run")
    record_start(folder, 1, 0)
    complete = b"".join(line(step) for step in range(1, 5))
    (folder / "metrics.jsonl").write_bytes(complete[:cut])
    warnings: list[str] = []
    state = MirrorState(folder, 1, warnings.append)
    rows, changes = state.rows()
    assert [row.step for row in rows] == list(range(1, 1 + complete[:cut].count(b"\n")))
    state.save(**changes)
    damaged = b"" if cut >= len(complete) else junk.replace(b"\n", b"") + b"{\n"
    (folder / "metrics.jsonl").write_bytes(complete[:cut] + damaged + complete)
    for _ in range(2):
        more, _ = state.rows()
        assert [row.step for row in rows + more] == [1, 2, 3, 4]
    assert len(warnings) == bool(damaged)


def test_another_server_or_a_damaged_cursor_sends_everything_again(tmp_path: Path) -> None:
    record_start(tmp_path, 1, 0)
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


def test_a_later_start_supersedes_the_mirror_of_an_earlier_one(tmp_path: Path) -> None:
    record_start(tmp_path, 1, 0)
    (tmp_path / "metrics.jsonl").write_bytes(line(1))
    record_start(tmp_path, 2, 0)
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
def test_the_status_of_a_run_comes_from_its_last_start(
    tmp_path: Path, notes: dict[str, str], has_summary: bool, status: str
) -> None:
    record_start(tmp_path, 1, 0)
    if notes:
        end = {"attempt": "1", "step": 0, "time": 2e6, "closed": 2e6, **notes}
        with (tmp_path / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(end) + "\n")
    if has_summary:
        write(tmp_path, "summary.json")
    state = MirrorState(tmp_path)
    state.save(begun=1)
    assert state.end() == (status, 2_000_000_000 if notes else 1_000_000_000)


def test_deleted_checkpoints_remain_listed(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------------------- names and URIs


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("eval/aime/avg@32", "eval/aime/avg_at_32"),
        ("response_tokens/clipped_fraction", "response_tokens/clipped_fraction"),
        ("eval/AIME (2024)/cons@4", "eval/AIME _2024_/cons_at_4"),
    ],
)
def test_metric_names_are_converted_for_mlflow(name: str, accepted: str) -> None:
    assert metric_name(name) == accepted


def test_parameters_are_flattened() -> None:
    tree = {"a": {"b": None, "c": [1, {"d": "x"}]}, "e": [], "f": True}
    flat = [("a.b", "null"), ("a.c.0", "1"), ("a.c.1.d", "x"), ("e", "[]"), ("f", "True")]
    assert list(flatten(tree)) == flat


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("htp://x", "unsupported URI 'htp://x'.*change MLFLOW_TRACKING_URI"),
        ("sqlit:///x.db", "unsupported URI.*change MLFLOW_TRACKING_URI"),
        ("file:x", "MLFLOW_TRACKING_URI to sqlite.*MLFLOW_ALLOW_FILE_STORE=true"),
        ("./x", "MLFLOW_TRACKING_URI to sqlite.*MLFLOW_ALLOW_FILE_STORE=true"),
        ("postgresql+nodriver://h/d", "nodriver.*change MLFLOW_TRACKING_URI"),
        ("sqlite+a+b:///x", "Invalid database URI.*change MLFLOW_TRACKING_URI"),
        ("postgresql:x", "Could not parse.*change MLFLOW_TRACKING_URI"),
        ("401", "change MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("403", "change MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("400", "change MLFLOW_TRACKING_URI or tracking.experiment"),
    ],
)
def test_permanent_errors_name_the_key(
    run: Config, monkeypatch: pytest.MonkeyPatch, uri: str, message: str
) -> None:
    run.folder.mkdir(parents=True)
    monkeypatch.chdir(run.folder)
    with answering(int(uri)) if uri.isdigit() else nullcontext(uri) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        mlflow_run = MlflowRun(MirrorState(run.folder), run.folder, run)
        with pytest.raises(ConfigError, match=message) as raised:
            mlflow_run.open()
    assert f"experiment '{run.tracking.experiment}' at " in str(raised.value)
    assert "hunter2" not in describe(raised.value)


@pytest.mark.parametrize("status", [404, 408, 409, 429, 500, 502, 503, 504])
def test_errors_of_a_busy_server_are_retried(
    run: Config, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    from mlflow.exceptions import MlflowException

    run.folder.mkdir(parents=True)
    with answering(status) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(MlflowException):
            MlflowRun(MirrorState(run.folder), run.folder, run).open()


def test_a_deleted_experiment_ends_the_mirror_until_the_end_of_the_run(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/x.db")
    name = run.tracking.experiment
    client().delete_experiment(experiment := client().create_experiment(name))
    message = f"tracking.experiment: '{name}' was deleted in MLflow"
    warnings: list[str] = []
    tracker = Run(run, warnings.append)
    assert tracker.mirror.wait(60) == 1
    tracker.log(1, {"reward/mean": 1.0})
    assert message in warnings[0]
    assert not deliver(run.folder, 1000.0)  # returns at once
    assert message in why_waiting(run.folder)
    client().restore_experiment(experiment)
    tracker.finish("FINISHED")
    assert history(run, "reward/mean") == [(1, 1.0)]


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Yield the address of a server that answers every request with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            code = {400: "INVALID_PARAMETER_VALUE"}.get(status)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"error_code": code}).encode() if code else b"refused")

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://somebody:hunter2@127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


FOREIGN_SERVERS: tuple[Any, ...] = (
    *("http://127.0.0.1:1", "https://127.0.0.1:1", "HTTP://127.0.0.1:1", "http://u:hunter2@x"),
    *("databricks", "databricks://profile", "uc:databricks", "postgresql://u:hunter2@x/db"),
    *("sqlite:////srv/cookies.db", "sqlite://", "file:///srv", "/srv/mlruns", "../mlruns"),
    *("http://x; touch owned", "http://x\x1b[2J", 5, ["http://x"], {"a": 1}),
)


@pytest.mark.parametrize("recorded", ["mlflow_run.json", "mlflow/mirror.json"])
@pytest.mark.parametrize("server", FOREIGN_SERVERS, ids=str)
def test_a_server_that_only_the_run_folder_names_gets_nothing(
    run: Config, monkeypatch: pytest.MonkeyPatch, recorded: str, server: Any
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(run.folder, "config.yaml", dump_config(run))
    key = "server" if recorded == "mlflow_run.json" else "uri"
    write(run.folder, recorded, json.dumps({key: server, "run_id": "x", "experiment_id": "1"}))
    monkeypatch.setattr(mlflow_tracker, "_start_mirror", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_URI=") as raised:
        deliver(run.folder, 1.0)
    assert "hunter2" not in str(raised.value)
    assert "=http://x; touch" not in str(raised.value)  # quoted for a shell
    write(run.folder, "mlflow/left", "")
    deliver_rest(run.folder)


def test_the_database_next_to_a_run_is_used_unasked(
    run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(run.folder, "config.yaml", dump_config(run))
    local = f"sqlite:///{run.folder.parent}/mlflow.db"
    for recorded in ({}, {"server": local}):
        write(run.folder, "mlflow_run.json", json.dumps(recorded))
        uris: list[str] = []
        monkeypatch.setattr(
            mlflow_tracker, "_start_mirror", lambda *given, uris=uris, **_: uris.append(given[3])
        )
        assert not deliver(run.folder, 1.0)
        assert uris == [local]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")
def test_a_run_folder_of_another_user_is_not_written_to(run: Config) -> None:
    write(run.folder, "config.yaml", dump_config(run))
    write(run.folder, "logs/mlflow.log", "")
    os.chown(run.folder / "logs" / "mlflow.log", 65534, 65534)
    with pytest.raises(ConfigError, match=r"^RUN_FOLDER: .*mlflow.log is a file that user 65534"):
        deliver(run.folder, 1.0)
    assert not (run.folder / ".lock").exists()


def test_an_unknown_status_is_rejected(run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlflowTracker, "_start", lambda _: None)
    with pytest.raises(ValueError, match="'DONE': must be one of FINISHED, FAILED, KILLED"):
        Run(run).finish("DONE")


def test_rank_0_does_not_import_mlflow() -> None:
    check = "import dapo_megatron.run.record, sys; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
