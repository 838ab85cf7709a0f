"""MLflow tracker: a thread of rank 0 sends a run's folder to MLflow while the run writes it.

Everything that is sent, including the time of a metric, depends only on the folder, and MLflow
stores a metric of the same time, step and value once. So sending again is the whole recovery: after
an outage, in a resumed run, and by `python -m dapo_megatron track RUN_FOLDER`.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.checkpoints.folder import newest
from dapo_megatron.cluster.attempt import end_attempt, read_attempts
from dapo_megatron.cluster.ownership import check_tree
from dapo_megatron.config.file import load_config
from dapo_megatron.files import open_lock, read_json, try_lock, write_json
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.provenance import flatten
from dapo_megatron.tracking.trackers import metrics_lines
from dapo_megatron.tracking.uri import hide_password, sqlite_uri, without_password
from dapo_megatron.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_FILE = "mlflow_run.json"
"""The MLflow run: {"server": .., "run_id": .., "experiment_id": ..}."""
RUN_TAG = "dapo_megatron.run"
"""Tag that identifies the run's folder, so that a run whose creation timed out is found."""
ARTIFACTS = {
    "samples/step_*/completions.parquet": True,
    "policy/*.parquet": True,
    "timeline/*.json": True,
    "data/*.report.json": False,
    "config.yaml": False,
    "summary.json": False,
    "report.html": False,
}
"""Pattern of files in the run's folder -> True: it is written once, and the artifact has its
folder; False: it may change, and the artifact has no folder."""
METRICS_PER_CALL = 500
MAX_NAME = 250
"""Maximum length of a metric or parameter name in MLflow."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the thread retries
    "MLFLOW_DISABLE_TELEMETRY": "true",  # telemetry may hang behind a firewall
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
MAX_DELAY_SECONDS = 30.0
"""Longest wait before the next attempt while MLflow cannot be reached."""
SHORT_WAIT_SECONDS = 3.0
"""Wait at the end of a KILLED or FAILED run: its launcher may kill this process soon."""


class Upload:
    """Sends a run's folder to its MLflow run, which is found or created first. `send` raises what
    MLflow's client raises; after an error the next call continues.

    uri   tracking URI, with a password if it has one
    """

    def __init__(self, folder: Path, uri: str) -> None:
        self._folder, self._uri = folder, uri
        self._config = load_config(folder / "config.yaml")
        modified = (folder / "config.yaml").stat().st_mtime
        self._starts = read_attempts(folder / "attempts.jsonl") or [
            {"attempt": folder.name, "step": 0, "began": modified}
        ]
        self._client: MlflowClient
        self._is_open, self._run_id = False, ""
        self._offset, self._time = 0, 0
        self._known: set[tuple[int, int]] = set()
        self._sent: dict[str, tuple[int, int]] = {}
        self._sizes: dict[str, dict[str, int]] = {}

    def send(self, status: str = "", ended: int | None = None) -> None:
        """Send everything that is new in the folder, and the run's end if it has a `status`.
        `ended` is its time in ms since the epoch (default: now)."""
        try:
            if not self._is_open:
                self._open(is_over=bool(status))
            self._send_metrics()
            if status:  # before the files, which are slower and fail more often
                self._client.set_terminated(self._run_id, status, ended)
            self._send_files()
        except Exception:
            self._is_open = False  # look the run up again, because it may be gone
            raise

    # ------------------------------------------------------------------------ the run

    def _open(self, *, is_over: bool) -> None:
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        run = self._find() or self._create()
        info = run.info
        if info.run_id != self._run_id:
            server = without_password(self._uri)
            entry = {"server": server, "run_id": info.run_id, "experiment_id": info.experiment_id}
            with suppress(OSError):  # the tag finds the run again
                write_json(self._folder / RUN_FILE, entry, durable=False)
            self._run_id, self._offset, self._time = info.run_id, 0, 0
            self._sent, self._sizes = {}, {}
            known = client.get_metric_history(info.run_id, "time/step")
            self._known = {(point.step, point.timestamp) for point in known}
        self._send_parameters(run)
        if not is_over and info.status != "RUNNING":
            client.update_run(info.run_id, status="RUNNING")
        self._is_open = True

    def _find(self) -> Run | None:
        """Return the run of an earlier start or attempt; None if this server does not have it."""
        from mlflow.exceptions import MlflowException

        if run_id := _read(self._folder / RUN_FILE).get("run_id"):
            try:
                run = self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
            else:
                if run.info.lifecycle_stage == "active":
                    return run
        if experiment := self._client.get_experiment_by_name(self._config.tracking.experiment):
            same = f"tags.`{RUN_TAG}` = '{self._tag()}'"
            return next(iter(self._client.search_runs([experiment.experiment_id], same)), None)
        return None

    def _create(self) -> Run:
        name = self._config.tracking.experiment
        if experiment := self._client.get_experiment_by_name(name):
            experiment_id = experiment.experiment_id
        else:
            # A server has an artifact location; a local database defaults to the working folder.
            is_local = self._uri.startswith("sqlite")
            artifacts = (self._folder.absolute().parent / "mlartifacts").as_uri()
            experiment_id = self._client.create_experiment(name, artifacts if is_local else None)
        description = (
            "report.html, among the artifacts, is this run's report: one page that needs no "
            f"network. On the run's machine it is {self._folder.absolute() / 'report.html'}"
        )
        return self._client.create_run(
            experiment_id,
            start_time=int(1000 * self._starts[0]["began"]),
            run_name=self._config.run.name,
            tags={RUN_TAG: self._tag(), "mlflow.note.content": description},
        )

    def _tag(self) -> str:
        first = self._starts[0]
        return f"{first['attempt']} {first['began']}".replace("'", "")

    def _send_parameters(self, run: Run) -> None:
        """Send the config and the tags of this start. MLflow's parameters cannot change: a value
        that differs from the first start's becomes a tag `resumed.<key>`."""
        from mlflow.entities import Param, RunTag

        config = dict(flatten(self._config.model_dump(mode="json")))
        known = {**config, **run.data.params}
        tags = _read(self._folder / "provenance.json").get("tags", {})
        tags |= {f"resumed.{key}": text for key, text in config.items() if known[key] != text}
        params = [Param(key[:MAX_NAME], config[key]) for key in config.keys() - run.data.params]
        items = [RunTag(key[:MAX_NAME], text) for key, text in tags.items()]
        self._client.log_batch(self._run_id, params=params, tags=items)

    # ------------------------------------------------------------------------ metrics and files

    def _send_metrics(self) -> None:
        """Send the new rows of metrics.jsonl. A row's time is the beginning of its start plus the
        duration of the start's steps so far."""
        from mlflow.entities import Metric

        points: list[Metric] = []
        end, milliseconds = self._offset, self._time
        for end, step, row in metrics_lines(self._folder / "metrics.jsonl", self._offset):
            values = {name: math.nan if v is None else float(v) for name, v in row.items()}
            began = [start["began"] for start in self._starts if (start["step"] or -1) < step]
            seconds = values.get("time/step", 0.0)
            milliseconds = max(milliseconds, int(1000 * began[-1]) if began else 0)
            milliseconds += int(1000 * seconds) if math.isfinite(seconds) else 0
            if (step, milliseconds) not in self._known:
                # time/step comes last: if MLflow has it, then it has the whole row.
                names = sorted(values, key="time/step".__eq__)
                points += (Metric(metric_name(n), values[n], milliseconds, step) for n in names)
            if len(points) >= METRICS_PER_CALL:
                self._client.log_batch(self._run_id, metrics=points)
                points, self._offset, self._time = [], end, milliseconds
        self._client.log_batch(self._run_id, metrics=points)
        self._offset, self._time = end, milliseconds

    def _send_files(self) -> None:
        if checkpoint := newest(self._folder / "checkpoints"):
            name = f"checkpoints/{checkpoint.name}"
            self._client.set_tag(self._run_id, "checkpoint.newest", name)
        for pattern, is_final in ARTIFACTS.items():
            for path in sorted(self._folder.glob(pattern)):
                name = path.relative_to(self._folder).as_posix()
                with suppress(FileNotFoundError):  # a start deletes what it samples again
                    if not (is_final and self._has(name, path)):
                        self._send_metrics()  # they do not wait for many or large files
                        self._send_file(name, path, posixpath.dirname(name) if is_final else None)

    def _send_file(self, name: str, path: Path, folder: str | None) -> None:
        status = path.stat()
        stamp = status.st_size, status.st_mtime_ns
        if self._sent.get(name) != stamp:
            self._client.log_artifact(self._run_id, str(path), folder)
            self._sent[name] = stamp

    def _has(self, name: str, path: Path) -> bool:
        """Return True if MLflow has a file of this name, sent by this process or of this size."""
        folder = posixpath.dirname(name)
        if name in self._sent:
            return True
        if folder not in self._sizes:
            listed = self._client.list_artifacts(self._run_id, folder)
            self._sizes[folder] = {item.path: item.file_size for item in listed}
        return self._sizes[folder].get(name) == path.stat().st_size


class MlflowTracker:
    """protocols.Tracker that sends the folder of a run in a thread. Only `finish` waits for MLflow,
    and no method raises because of a server or a disk. Create it when the folder has its config,
    provenance and record of this start.

    wait_seconds  longest wait for MLflow at the end of a FINISHED run
    """

    def __init__(self, folder: Path, uri: str, console: RunConsole, wait_seconds: float) -> None:
        self.uri, self._wait_seconds = uri, wait_seconds
        self.is_complete = False
        """Whether MLflow has everything of the run, and its status."""
        self._folder, self._console = folder, console
        self._upload = Upload(folder, uri)
        self._end: tuple[str, int | None] = ("", None)
        self._error, self._has_warned = "", False
        self._wake = threading.Event()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Let the thread send the step, which is in metrics.jsonl. Warn once if MLflow cannot be
        reached."""
        if not self._error:  # otherwise the thread wakes up by itself
            self._wake.set()
        elif not self._has_warned:
            self._has_warned = True
            self._console.warn(
                f"MLflow at {without_password(self.uri)}: {self._error}; the run continues, and "
                "MLflow gets everything as soon as it can be reached"
            )

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED. Wait until MLflow has everything, at most
        `wait_seconds`, and SHORT_WAIT_SECONDS unless FINISHED."""
        seconds = self._wait_seconds
        if status != "FINISHED":
            seconds = min(seconds, SHORT_WAIT_SECONDS)
        end_attempt(self._folder / "attempts.jsonl", status=status)
        self.close(status, int(1000 * time.time()), seconds)

    def close(self, status: str, ended: int | None, seconds: float) -> None:
        """Close the run, which ended at `ended` (ms since the epoch). Wait at most `seconds` until
        MLflow has everything, and warn if it does not."""
        self._end = status, ended
        self._wake.set()
        self._thread.join(seconds)
        if not self.is_complete:
            self._console.warn(
                f"MLflow at {without_password(self.uri)} does not have everything yet: "
                f"{self._error or f'it did not finish in {seconds:g} s'}. All of it is in "
                f"{self._folder}; `python -m dapo_megatron track {self._folder}` sends it"
            )

    @property
    def ui(self) -> str:
        """URL of the run, or the command that starts MLflow's UI if there is no server. Contains no
        password."""
        if self.uri.lower().startswith("http"):
            server, run = without_password(self.uri), _read(self._folder / RUN_FILE)
            if run.get("server") != server:
                return server
            page = f"experiments/{run['experiment_id']}/runs/{run['run_id']}"
            return f"{server.rstrip('/')}/#/{page}"
        command = f"{Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri"
        if without_password(self.uri) != self.uri:
            return f'{command} "$MLFLOW_TRACKING_URI"'
        return f"{command} {shlex.quote(self.uri)}"

    def _work(self) -> None:
        delay = 1.0
        while True:
            status, ended = self._end  # read first: the run writes nothing after it is set
            try:
                self._upload.send(status, ended)
            except Exception as error:  # noqa: BLE001 - no error of MLflow may end the thread
                text = describe(error, self.uri)
                if text != self._error:
                    print(f"MLflow: {text}; retrying until it works", file=sys.stderr, flush=True)
                self._error = text
                self._wake.wait(1.0 if status else delay)
                delay = min(2 * delay, MAX_DELAY_SECONDS)
            else:
                if self._error:
                    print("MLflow works again", file=sys.stderr, flush=True)
                self._error, delay = "", 1.0
                if status:
                    self.is_complete = True
                    return
                self._wake.wait()
            self._wake.clear()


def track(folder: Path, seconds: float) -> bool:
    """Send everything of a run that has ended; return True if MLflow has it within `seconds`.

    A run without a recorded status was killed. Raises ConfigError if the folder has no config that
    this version can read, if the run still runs, if another user may have created an entry of the
    folder, or if only the folder names the server.
    """
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"RUN_FOLDER: {folder} is not the folder of a run (no config.yaml)")
    check_tree(folder, "RUN_FOLDER")
    with open_lock(folder / ".lock") as lock:
        if not try_lock(lock, folder / ".lock"):
            raise ConfigError(f"RUN_FOLDER: {folder} still runs, and sends its data itself")
        tracker = MlflowTracker(folder, _known_uri(folder), RunConsole(), seconds)
        starts = read_attempts(folder / "attempts.jsonl") or [{}]
        status = starts[-1].get("status")
        if status is None:
            status = "FAILED" if starts[-1].get("end") == "crashed" else "KILLED"
        ended = starts[-1].get("time")
        tracker.close(status, ended and int(1000 * ended), seconds)
        return tracker.is_complete


def tracking_uri(folder: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else the URI of a SQLite file next to a run's folder."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    return given or sqlite_uri(folder.absolute().parent / "mlflow.db")


def _known_uri(folder: Path) -> str:
    """Return the tracking URI of a run. An address that only its folder names is not used, because
    the user's password would be sent there."""
    uri = tracking_uri(folder)
    last = _read(folder / RUN_FILE).get("server", uri)
    if os.environ.get("MLFLOW_TRACKING_URI", "").strip() or last == uri:
        return uri
    raise ConfigError(
        f"RUN_FOLDER: the data of {folder} went to another MLflow. If you trust this address, set "
        f"MLFLOW_TRACKING_URI={shlex.quote(without_password(str(last)))}"
    )


def metric_name(name: str) -> str:
    """Return `name` as MLflow accepts it: `@` becomes `_at_`, other invalid characters `_`."""
    valid = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
    return posixpath.normpath(valid).lstrip("./")[:MAX_NAME] or "_"


def describe(error: BaseException, uri: str) -> str:
    """Return an error as one line without passwords. The innermost OSError of the chain, if any,
    replaces the library's message."""
    text, inner = f"{type(error).__name__}: {error}", error
    while cause := inner.__cause__ or inner.__context__:
        inner = cause
        if isinstance(inner, OSError) and inner.strerror:
            text = f"{type(inner).__name__}: {inner.strerror}"
    return hide_password(text.splitlines()[0], uri)[:300]


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or corrupt."""
    with suppress(CheckpointError):
        return read_json(path)
    return {}
