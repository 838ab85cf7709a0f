"""The part of a run that MLflow lacks, computed from the run's folder. Nothing here imports MLflow.

`<run>/mlflow/` holds the cursor (mirror.json), the lock of the mirror process, and
checkpoints.json, which lists the checkpoints for MLflow. Everything that is sent, including the
timestamp of a metric, depends only on the run's folder, so sending it twice gives the same result.
"""

from __future__ import annotations

import io
import math
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dapo_megatron.checkpoints.folder import published
from dapo_megatron.cluster.attempt import read_attempts
from dapo_megatron.config import Config, FileSource
from dapo_megatron.files import open_lock, parse_json, read_json, sha256, try_lock, write_json
from dapo_megatron.tracking.provenance import flatten
from dapo_megatron.types import CheckpointError, ConfigError

CONFIG = "config.yaml"
PROVENANCE = "provenance.json"
METRICS = "metrics.jsonl"
REPORT = "report.html"
SUMMARY = "summary.json"
ATTEMPTS = "attempts.jsonl"
FOLDER = "mlflow"
CURSOR = f"{FOLDER}/mirror.json"
LOCK = f"{FOLDER}/lock"
"""Lock file of the mirror process. It contains the process id and host."""
RUN_FILE = "mlflow_run.json"
"""The MLflow run: {"server": .., "run_id": .., "experiment_id": ..}."""
LOG = "logs/mlflow.log"
CHECKPOINTS = f"{FOLDER}/checkpoints.json"
ARTIFACTS = {
    "samples/step_*/completions.parquet": True,
    "policy/*.parquet": True,
    "timeline/*.json": True,
    "data/*.report.json": False,
    CHECKPOINTS: False,
    SUMMARY: False,
    REPORT: False,
}
"""Pattern of files in the run's folder -> whether the artifact has their folder, or none."""
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that reach all processes of a job step. The mirror process ignores them."""
MISSING = [0, 0]
MAX_METRICS = 1000
"""Metrics per call: MLflow's limit."""


@dataclass
class Cursor:
    """How much of a run MLflow has. Written after each delivery, so a crash repeats at most one
    delivery."""

    run: str = ""
    """This project's id of the run (tag dapo_megatron.run). It exists before the MLflow run."""
    uri: str = ""
    """Address of the server, without a password."""
    params: dict[str, str] = field(default_factory=dict)
    """Parameters of the run's first start."""
    server: str = ""
    run_id: str = ""
    """The MLflow run that the fields below refer to. A different run gets everything from the
    start."""
    begun: int = 0
    """Number of the last start that was reported to MLflow."""
    closed: int = 0
    """Number of the last start whose metrics and end MLflow has."""
    offset: int = 0
    """Bytes of metrics.jsonl already read."""
    step: int = -1
    """Last rollout step that MLflow has."""
    time: int = 0
    """Time of that step in ms."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size and modification time of each file when it was sent."""
    left_out: int = 0
    """Number of metrics and lines not sent: too many names, refused by MLflow, or corrupt."""
    error: str = ""
    """Error of the last attempt to deliver, "" after a success."""


class MetricsRow(NamedTuple):
    """Metrics of a rollout step. `time` is in ms since the epoch."""

    step: int
    time: int
    values: dict[str, float]


class Superseded(Exception):
    """Raised when a later start has taken over the run's folder."""


class MirrorState:
    """A run's folder and its cursor, as of start `number` (default: the newest)."""

    def __init__(
        self,
        run_folder: Path,
        number: int | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = run_folder
        self.number = len(self.starts()) if number is None else number
        self.cursor = read_cursor(run_folder)
        self.log = log
        self._damaged: set[int] = set()

    def save(self, **changes: Any) -> None:
        """Change the cursor and write it. A failed write (full disk) is ignored: the next one
        catches up."""
        self.cursor = replace(self.cursor, **changes)
        with suppress(OSError):
            write_json(self.folder / CURSOR, asdict(self.cursor), durable=False)

    def prepare(self, run: str, uri: str, params: dict[str, str]) -> None:
        """Store the run's id, the server and the parameters. The id and the parameters of an
        earlier start are kept."""
        old = self.cursor
        self.save(run=old.run or run or uuid.uuid4().hex, uri=uri, params=old.params or params)

    def aim(self, server: str, run_id: str) -> None:
        """Set the MLflow run to send to. If it differs from the cursor's, everything is resent."""
        if (server, run_id) != (self.cursor.server, self.cursor.run_id):
            old = self.cursor
            self.cursor = Cursor(old.run, old.uri, old.params, server, run_id)

    def starts(self) -> list[dict[str, Any]]:
        """Return all starts of the run. A folder without a record gets one start, dated by the
        modification time of its config."""
        default = {"step": 0, "began": stamp_of(self.folder / CONFIG)[1] / 1e9}
        return read_attempts(self.folder / ATTEMPTS) or [default]

    def check_newest(self) -> None:
        """Raise Superseded if a later start has the folder. The mirror of that start sends the
        rest."""
        if len(self.starts()) > self.number:
            raise Superseded(f"start {self.number} was superseded: a later start sends this run")

    def begin(self) -> None:
        """Record that this start was reported to MLflow. Each start truncates metrics.jsonl to its
        checkpoint, so the cursor moves back and the steps after the checkpoint are resent."""
        starts = self.starts()[self.cursor.begun : self.number]
        step = min([self.cursor.step, *(start["step"] or -1 for start in starts)])
        self.save(begun=self.number, offset=0, step=step, time=0)

    def rows(self) -> tuple[list[MetricsRow], dict[str, int]]:
        """Return the next rows of metrics.jsonl, and the cursor changes to apply after MLflow has
        received them."""
        cursor, starts, path = self.cursor, self.starts()[: self.number], self.folder / METRICS
        position = {"offset": cursor.offset, "step": cursor.step, "time": cursor.time}
        size, _ = stamp_of(path)
        if size < cursor.offset:  # truncated without a recorded start
            position = {"offset": 0, "step": -1, "time": 0}
        rows: list[MetricsRow] = []
        num_values = 0
        with path.open("rb") if size else nullcontext(io.BytesIO()) as file:
            file.seek(position["offset"])
            while num_values < MAX_METRICS and (line := file.readline()).endswith(b"\n"):
                if (row := self._parse(line, position, starts)) is not None:
                    position["time"] = row.time
                    if row.step > position["step"]:
                        rows.append(row)
                        position["step"] = row.step
                        num_values += len(row.values)
                position["offset"] += len(line)
        return rows, position

    def _parse(
        self, line: bytes, position: dict[str, int], starts: list[dict[str, Any]]
    ) -> MetricsRow | None:
        """Return the row of a line; None, with a log line, if the line is corrupt.

        A row's time is the beginning of its start plus the duration of the start's steps so far.
        """
        try:
            values = parse_json(line)
            step = values.pop("step")
            values = {k: math.nan if v is None else float(v) for k, v in values.items()}
            began = [start["began"] for start in starts if (start["step"] or -1) < step]
        except (ValueError, TypeError, KeyError, AttributeError):
            if position["offset"] not in self._damaged:
                self._damaged.add(position["offset"])
                self.cursor.left_out += 1
                self.log(f"NOT SENT: {METRICS}, byte {position['offset']}: not a line of metrics")
            return None
        time = max(position["time"], int(1000 * began[-1]) if began else 0)
        seconds = values.get("time/step", 0.0)
        return MetricsRow(
            step, time + int(1000 * seconds) if math.isfinite(seconds) else time, values
        )

    def files(self, *, known: bool) -> Iterator[tuple[str, str, list[int]]]:
        """Yield (name, artifact folder, stamp) of each file that MLflow lacks. Files that were sent
        before are checked for changes only if `known`."""
        for pattern, has_folder in ARTIFACTS.items():
            for path in sorted(self.folder.glob(pattern)):
                name = str(path.relative_to(self.folder))
                folder = name.rpartition("/")[0] if has_folder else ""
                if known or name not in self.cursor.files:
                    stamp = stamp_of(path)
                    if stamp not in (MISSING, self.cursor.files.get(name)):
                        yield name, folder, stamp

    def list_checkpoints(self) -> None:
        """Update checkpoints.json. It lists deleted checkpoints too; the newest is last."""
        path = self.folder / CHECKPOINTS
        old = {entry["path"]: entry for entry in read_or_empty(path).get("checkpoints", [])}
        present: dict[str, dict[str, Any]] = {}
        for step, checkpoint in published(self.folder / "checkpoints"):
            name = str(checkpoint.relative_to(self.folder))
            time = stamp_of(checkpoint / "manifest.json")[1] // 1_000_000
            is_known = name in old and old[name]["time"] == time
            present[name] = old[name] if is_known else _entry(name, step, time, checkpoint)
        listed = {name: old[name] for name in old if name < max(present, default="~")} | present
        if listed != old:
            entries = [listed[name] for name in sorted(listed)]
            with suppress(OSError):  # full disk
                write_json(path, {"checkpoints": entries}, durable=False)

    def end(self) -> tuple[str, int]:
        """Return the status of the last start that was reported to MLflow, and its end time in ms.
        A run that ended without a record was killed."""
        starts = self.starts()
        start = starts[min(self.cursor.begun, len(starts)) - 1]
        began, time = start["began"], start.get("closed") or ("end" in start and start["time"])
        summarized = start is starts[-1] and stamp_of(self.folder / SUMMARY)[1] > began * 1e9
        by_end = {None: "FINISHED" if summarized else "KILLED", "crashed": "FAILED"}
        status = start.get("status") or by_end.get(start.get("end"), "KILLED")
        return status, int(1000 * time) if time else max(self.cursor.time, int(1000 * began))

    def is_complete(self) -> bool:
        """Return True if MLflow has everything of the run."""
        cursor = self.cursor
        is_closed = cursor.closed >= self.number and cursor.server == cursor.uri
        return is_closed and not any(self.files(known=True))


def read_cursor(run_folder: Path) -> Cursor:
    """Return a run's cursor. If it is missing or corrupt, return one at the start of the run."""
    names = {field.name for field in fields(Cursor)}
    stored = read_or_empty(run_folder / CURSOR)
    return Cursor(**{name: value for name, value in stored.items() if name in names})


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or corrupt."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def data_files(config: Config, cwd: Path) -> dict[str, Path]:
    """Return MLflow tag -> path of each data file of a config. Relative paths are resolved against
    `cwd`."""
    sources = (*config.data.train, *config.evaluation.sets)
    return {
        f"data.{source.name}.sha256": cwd / source.path
        for source in sources
        if isinstance(source, FileSource)
    }


def parameters(config: Config) -> dict[str, str]:
    """Return a config as MLflow parameters: dotted key -> value."""
    return dict(flatten(config.model_dump(mode="json")))


def stamp_of(path: Path) -> list[int]:
    """Return [size in bytes, modification time in ns] of a file, or MISSING."""
    try:
        status = path.stat()
    except OSError:
        return MISSING
    return [status.st_size, status.st_mtime_ns]


def _entry(name: str, step: int, time: int, path: Path) -> dict[str, Any]:
    manifest = path / "manifest.json"
    return {
        "step": step,
        "time": time,
        "path": name,
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "manifest_sha256": sha256(manifest) if manifest.exists() else None,
        "hf_export": f"{name}/hf" if (path / "hf").exists() else None,
    }


# ---------------------------------------------------------------------------- lock of the mirror


def lock_holder(run_folder: Path) -> tuple[int, str] | None:
    """Return (process id, description) of the mirror that holds a run's lock. The id is 0 if it is
    not known. Return None if no process holds the lock or the file system has no locks."""
    path = run_folder / LOCK
    try:
        with open_lock(path) as lock:
            if try_lock(lock, path):
                return None
            written, _, host = lock.read(300).decode(errors="replace").strip().partition(" ")
    except (OSError, ConfigError):
        return None
    pid = int(written) if written.isdecimal() else 0
    if host != socket.gethostname():
        return pid, f"process {written} on {host}" if pid else "another process"
    remedy = f" (stopped; to end it: kill -9 {pid})" if is_stopped(pid) else ""
    return pid, f"process {pid}{remedy}"


def write_holder(lock: BinaryIO) -> None:
    """Write this process's id and host to the lock file, which it has locked. Raises OSError."""
    lock.truncate(0)
    os.pwrite(lock.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine is stopped, by SIGSTOP or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
