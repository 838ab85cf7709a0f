"""The MLflow tracker with real servers that are down, stopped or restarted, with killed runs, and
with errors at any call."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.cluster.attempt import start_attempt
from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config
from dapo_megatron.files import open_lock, try_lock
from dapo_megatron.tracking import mlflow_tracker
from dapo_megatron.tracking.mlflow_tracker import (
    MlflowTracker,
    Upload,
    metric_name,
    track,
    tracking_uri,
)
from dapo_megatron.tracking.provenance import run_tags
from dapo_megatron.tracking.trackers import JsonlTracker
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.console import Console
from tests.helpers.processes import PATIENCE_SECONDS, wait_until
from tests.helpers.sockets import unused_port

SAMPLE, POLICY = "samples/step_000001/completions.parquet", "policy/step_000001_00000.parquet"


class Server:
    """`mlflow server` with its own database, on the same port after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = unused_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server if it is not running, and wait until it answers."""
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                    *("--backend-store-uri", f"sqlite:///{self._folder}/server.db"),
                    *("--artifacts-destination", str(self.artifacts)),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                ],
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        wait_until(self._answers)

    @property
    def artifacts(self) -> Path:
        return self._folder / "artifacts"

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


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that a tracker sets."""
    for name, value in mlflow_tracker.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


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
    return tiny_config(**locations, **changes)


class Run:
    """Trackers and files of rank 0, for a start that continues after `step`."""

    def __init__(self, run_config: Config, step: int = 0, wait_seconds: float = 120.0) -> None:
        folder = run_config.folder
        folder.mkdir(parents=True, exist_ok=True)
        start_attempt(folder / "attempts.jsonl", step)
        write(folder, "config.yaml", dump_config(run_config))
        write(folder, "provenance.json", json.dumps({"tags": run_tags(run_config, "4711.0")}))
        self.console = Console()
        self._metrics = JsonlTracker(folder / "metrics.jsonl", self.console, step or -1)
        self.mlflow = MlflowTracker(folder, tracking_uri(folder), self.console, wait_seconds)

    def log(self, step: int, **metrics: float) -> None:
        values = {name.replace("__", "/"): value for name, value in metrics.items()}
        self._metrics.log(step, values)
        self.mlflow.log(step, values)

    def finish(self, status: str) -> list[str]:
        """Return the warnings of the run."""
        self.mlflow.finish(status)
        return self.console.warnings


def write(folder: Path, name: str, text: str = "{}") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def stored_run(run_config: Config) -> Any:
    """Return the run as MLflow's client reads it."""
    entry = json.loads((run_config.folder / "mlflow_run.json").read_text())
    return client().get_run(entry["run_id"])


def history(run_config: Config, name: str) -> list[tuple[int, float]]:
    points = client().get_metric_history(stored_run(run_config).info.run_id, name)
    return [(point.step, point.value) for point in points]


def all_runs(run_config: Config) -> list[Any]:
    experiment = client().get_experiment_by_name(run_config.tracking.experiment)
    return list(client().search_runs([experiment.experiment_id]))


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
    run = Run(run_config)
    files = (SAMPLE, POLICY, "samples/step_000001/open.parquet", "samples/.x.partial/y")
    for name in (*files, "checkpoints/step_000002/state.json"):
        write(run_config.folder, name)
    for step in (1, 2, 3):
        run.log(step, **{"eval__a__avg@4": step / 8, "time__step": float(step), "a//b": math.nan})
    write(run_config.folder, "report.html")
    assert run.finish("FINISHED") == []

    stored = stored_run(run_config)
    assert stored.info.status == "FINISHED"
    assert stored.info.run_name == run_config.run.name
    assert stored.data.params["loss.clip_high"] == "0.28"
    assert stored.data.params["data.train.0.name"] == "math"
    assert history(run_config, "eval/a/avg_at_4") == [(step, step / 8) for step in (1, 2, 3)]
    assert math.isnan(stored.data.metrics["a/b"])
    times = client().get_metric_history(stored.info.run_id, "time/step")
    assert times[2].timestamp - times[0].timestamp == 5000, "timestamps do not follow time/step"
    tags = stored.data.tags
    assert (tags["slurm.job_id"], tags["slurm.restart_count"]) == ("4711", "2")
    assert (tags["slurm.node_list"], tags["attempt"]) == ("n[1-4]", "4711.0")
    assert tags["data.math.sha256"] == hashlib.sha256(b"prompts").hexdigest()
    assert tags["checkpoint.newest"] == "checkpoints/step_000002"
    assert str(run_config.folder / "report.html") in tags["mlflow.note.content"]
    for folder, expected in (("samples/step_000001", SAMPLE), ("policy", POLICY)):
        listed = [item.path for item in client().list_artifacts(stored.info.run_id, folder)]
        assert listed == [expected]
    root = {item.path for item in client().list_artifacts(stored.info.run_id)}
    assert root == {"samples", "policy", "config.yaml", "report.html"}
    path = f"experiments/{stored.info.experiment_id}/runs/{stored.info.run_id}"
    assert run.mlflow.ui == f"{server.uri}/#/{path}"


def test_a_resumed_run_continues_the_same_mlflow_run(server: Server, tmp_path: Path) -> None:
    first = config(tmp_path)
    run = Run(first)
    for step in (1, 2, 3):
        run.log(step, reward__mean=float(step), time__step=0.01)
    write(first.folder, SAMPLE, "sample")
    write(first.folder, "report.html", "first")
    wait_until(lambda: (first.folder / "mlflow_run.json").exists())
    wait_until(lambda: len(history(first, "reward/mean")) == 3)
    assert stored_run(first).info.status == "RUNNING"
    run.finish("KILLED")
    wait_until(lambda: run.mlflow.is_complete)
    assert stored_run(first).info.status == "KILLED"
    client().set_tag(stored_run(first).info.run_id, "mlflow.note.content", "a person's")
    [sample] = server.artifacts.rglob(f"{stored_run(first).info.run_id}/**/completions.parquet")
    sample.write_text("SAMPLE")

    longer = config(tmp_path, train__rollout_steps=99, resume="auto")
    run = Run(longer, step=2)
    wait_until(lambda: stored_run(longer).info.status == "RUNNING")
    run.log(3, reward__mean=30.0, time__step=0.01)
    run.log(4, reward__mean=4.0, time__step=0.01)
    write(first.folder, "report.html", "second")
    run.finish("FAILED")
    wait_until(lambda: run.mlflow.is_complete)
    [stored] = all_runs(longer)
    assert stored.info.status == "FAILED"
    assert stored.data.tags["resumed.train.rollout_steps"] == "99"
    assert "resumed.loss.clip_high" not in stored.data.tags
    assert stored.data.tags["mlflow.note.content"] == "a person's"
    assert history(longer, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0)]
    downloaded = client().download_artifacts(stored.info.run_id, "report.html", str(tmp_path))
    assert Path(downloaded).read_text() == "second"
    assert sample.read_text() == "SAMPLE", "samples that MLflow has are sent again"


def test_a_lost_mlflow_run_is_found_by_its_tag_or_created_again(
    server: Server, run: Config
) -> None:
    tracked = Run(run)
    tracked.log(1, reward__mean=1.0)
    tracked.finish("FINISHED")
    [first] = all_runs(run)
    write(run.folder, "mlflow_run.json", json.dumps({"run_id": "0" * 32}))
    tracked = Run(run, step=1)
    wait_until(lambda: first.info.run_id in (run.folder / "mlflow_run.json").read_text())
    client().delete_run(first.info.run_id)  # by a person, while the run goes on
    tracked.log(2, reward__mean=2.0)
    tracked.finish("FINISHED")
    [second] = all_runs(run)
    assert second.info.run_id != first.info.run_id
    assert second.info.status == "FINISHED"
    assert second.data.params["loss.clip_high"] == "0.28"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
def test_runs_that_start_together_share_one_local_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    parent = tmp_path / "100% a?b#c"
    configs = [config(parent, run__name=name) for name in ("a", "b")]
    runs = [Run(each) for each in configs]
    for each in runs:
        each.log(1, reward__mean=0.5)
    assert [each.finish("FINISHED") for each in runs] == [[], []]
    assert (parent / "runs/mlflow.db").exists()
    assert not Path("mlruns").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", runs[0].mlflow.uri)
    assert [stored_run(each).info.status for each in configs] == ["FINISHED", "FINISHED"]
    assert len(all_runs(configs[0])) == 2


# ---------------------------------------------------------------------------- a server in trouble


def log_steps(run: Run, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.log(step, **{f"policy__m{number}": step + number / 64 for number in range(60)})


def test_steps_do_not_wait_for_a_server_that_never_answers(
    run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        tracked = Run(run, wait_seconds=0.1)
        connection, _ = listening.accept()
        log_steps(tracked, 1, 100)
        assert not tracked.mlflow._error, "the steps took as long as the first call to the server"
        assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 100
        [warning] = tracked.finish("FINISHED")
        connection.close()
    assert "did not finish in 0.1 s" in warning


def test_a_dead_server_gets_everything_later(
    server: Server, run: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    server.stop()
    tracked, errors = Run(run), ""
    log_steps(tracked, 1, 100)
    while "retrying until it works" not in errors:
        errors += capfd.readouterr().err
        time.sleep(0.05)
    log_steps(tracked, 101, 200)
    [warning] = tracked.console.warnings
    assert "Connection refused; the run continues" in warning
    server.start()
    tracked.finish("FINISHED")
    assert len(tracked.console.warnings) == 1
    assert stored_run(run).info.status == "FINISHED"
    for number in (0, 59):
        expected = [(step, step + number / 64) for step in range(1, 201)]
        assert history(run, f"policy/m{number}") == expected


FAKE_RANK_0 = """
import sys, time
from dapo_megatron.config.file import load_config
from tests.unit.test_mlflow import Run
run = Run(load_config(sys.argv[1]), wait_seconds=1.0)
for step in (1, 2, 3):
    run.log(step, reward__mean=float(step))
print("logged", flush=True)
end = sys.stdin.readline().strip()
print(*run.finish(end), sep="\\n", flush=True)
"""


def start_rank_0(run_config: Config) -> subprocess.Popen[str]:
    """Start a process that has logged three steps, and ends with the status on its input."""
    write(run_config.folder.parent, "given.yaml", dump_config(run_config))
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_RANK_0, str(run_config.folder.parent / "given.yaml")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "logged\n"
    return process


def test_a_hung_server_does_not_stop_the_end_and_track_sends_the_rest(
    server: Server, run: Config
) -> None:
    process = start_rank_0(run)
    wait_until(lambda: (run.folder / "mlflow_run.json").exists())
    server.send(signal.SIGSTOP)
    try:
        output, _ = process.communicate("FINISHED\n", timeout=PATIENCE_SECONDS)
    finally:
        server.send(signal.SIGCONT)
    assert process.returncode == 0
    assert output.count("\n") == 1
    assert f"`python -m dapo_megatron track {run.folder}` sends it" in output
    assert track(run.folder, PATIENCE_SECONDS)
    assert stored_run(run).info.status == "FINISHED"
    assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_after_a_kill_track_completes_the_run(server: Server, run: Config) -> None:
    with start_rank_0(run) as process:
        with open_lock(run.folder / ".lock") as lock:
            assert try_lock(lock, run.folder / ".lock")
            with pytest.raises(ConfigError, match=r"^RUN_FOLDER: .* still runs"):
                track(run.folder, 1.0)
        process.kill()
    write(run.folder, SAMPLE)
    for _ in range(2):
        assert track(run.folder, PATIENCE_SECONDS)
        [stored] = all_runs(run)
        assert stored.info.status == "KILLED"
        assert history(run, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]
        assert client().list_artifacts(stored.info.run_id, "samples")


class Unreliable:
    """MLflow's client, whose calls fail before or after they reach the server."""

    def __init__(self, real: Any, faults: list[str]) -> None:
        self._real, self._faults = real, faults

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            fault = self._faults.pop(0) if self._faults else ""
            if fault == "before":
                raise ConnectionError(name)
            result = getattr(self._real, name)(*arguments, **options)
            if fault == "after":
                raise ConnectionError(name)
            return result

        return call


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/mlflow.db"


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(["", "", "before", "after"]), max_size=20),
    st.integers(0, 6),
    st.booleans(),
)
def test_errors_at_any_call_lose_and_repeat_nothing(
    database: str,
    tmp_path_factory: pytest.TempPathFactory,
    faults: list[str],
    rows_at_first: int,
    restarts: bool,
) -> None:
    import mlflow

    real = mlflow.MlflowClient(database)
    run_config = config(tmp_path_factory.mktemp("run"))
    folder = run_config.folder
    write(folder, "config.yaml", dump_config(run_config))
    write(folder, SAMPLE)
    start_attempt(folder / "attempts.jsonl", 0)
    rows = [json.dumps({"step": k, "a": k / 4, "time/step": 1.0}) + "\n" for k in range(1, 7)]
    write(folder, "metrics.jsonl", "".join(rows[:rows_at_first]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow, "MlflowClient", lambda **_: Unreliable(real, faults))
        upload = Upload(folder, database)
        while True:
            try:
                upload.send()
                write(folder, "metrics.jsonl", "".join(rows))
                upload.send("FINISHED", 0)
                break
            except ConnectionError:
                if restarts:
                    upload = Upload(folder, database)
    experiment = real.get_experiment_by_name(run_config.tracking.experiment)
    [stored] = real.search_runs([experiment.experiment_id])
    assert stored.info.status == "FINISHED"
    points = real.get_metric_history(stored.info.run_id, "a")
    assert [(point.step, point.value) for point in points] == [(k, k / 4) for k in range(1, 7)]
    assert real.list_artifacts(stored.info.run_id, "samples")


# ---------------------------------------------------------------------------- addresses, names


@pytest.mark.parametrize("address", ["?token=hunter2", "user:hun/ter2@", "user:hunter2@"])
def test_no_password_is_shown_or_stored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    address: str,
) -> None:
    uri = f"http://{address}127.0.0.1:9" if "@" in address else f"http://127.0.0.1:9/{address}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run_config = config(tmp_path)
    run = Run(run_config, wait_seconds=0.1)
    wait_until(lambda: run.mlflow._error)
    run.log(1)
    warnings = run.finish("KILLED")
    assert len(warnings) == 2
    files = [path for path in run_config.folder.rglob("*") if path.is_file()]
    printed = capfd.readouterr()
    text = "".join([*warnings, run.mlflow.ui, printed.out, printed.err])
    text += "".join(path.read_text(errors="replace") for path in files)
    for secret in ("hunter2", "ter2", "user:"):
        assert secret not in text, [line for line in text.splitlines() if secret in line]


FOREIGN_SERVERS: tuple[Any, ...] = (
    *("http://127.0.0.1:1", "http://u:hunter2@x", "databricks", "postgresql://u:hunter2@x/db"),
    *("sqlite:////srv/cookies.db", "/srv/mlruns", "http://x; touch owned", 5, {"a": 1}),
)


@pytest.mark.parametrize("server", FOREIGN_SERVERS, ids=str)
def test_a_server_that_only_the_run_folder_names_gets_nothing(
    run: Config, monkeypatch: pytest.MonkeyPatch, server: Any
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(run.folder, "config.yaml", dump_config(run))
    write(run.folder, "mlflow_run.json", json.dumps({"server": server, "run_id": "x"}))
    monkeypatch.setattr(mlflow_tracker, "MlflowTracker", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_URI=") as raised:
        track(run.folder, 1.0)
    assert "hunter2" not in str(raised.value)
    assert "=http://x; touch" not in str(raised.value)  # quoted for a shell


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")
def test_a_run_folder_of_another_user_is_not_sent(run: Config) -> None:
    write(run.folder, "config.yaml", dump_config(run))
    write(run.folder, "report.html", "")
    os.chown(run.folder / "report.html", 65534, 65534)
    with pytest.raises(ConfigError, match=r"^RUN_FOLDER: .*report.html is a file that user 65534"):
        track(run.folder, 1.0)


@given(st.text(min_size=1, max_size=300) | st.text("./a@:", min_size=1, max_size=9))
def test_mlflow_accepts_every_metric_name(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_name(name))
    assert metric_name("eval/a/avg@4") == "eval/a/avg_at_4"
    assert metric_name("time/step") == "time/step"
