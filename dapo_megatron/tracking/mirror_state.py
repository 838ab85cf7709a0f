"""What MLflow lacks of a run, found in the run's folder. Nothing here imports MLflow.

`<run>/mlflow/` holds the cursor (mirror.json), the lock of the process that sends, and
checkpoints.json, which lists the checkpoints for MLflow. Everything sent is a function of the run's
folder, the time of a metric included, so that whatever is sent again is the same.
"""

from __future__ import annotations

import hashlib
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
from dapo_megatron.files import open_lock, parse_json, read_json, try_lock, write_json
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
"""Held by the process that sends. Its id and host are written in it."""
RUN_FILE = "mlflow_run.json"
"""Which MLflow run it is: {"server": .., "run_id": .., "experiment_id": ..}."""
LOG = "logs/mlflow.log"
CHECKPOINTS = f"{FOLDER}/checkpoints.json"
ARTIFACTS = {
    "samples/*.jsonl": "samples",
    "samples/index/*.json": "samples/index",
    "samples/policy/*.jsonl": "samples/policy",
    "timeline/*.json": "timeline",
    "data/*.report.json": "",
    CHECKPOINTS: "",
    SUMMARY: "",
    REPORT: "",
}
"""Files of a run's folder, and the folder of the MLflow run that they go to."""
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals to a whole job step. The process that sends ignores them."""
MISSING = [0, 0]
MAX_METRICS = 1000
"""Metrics of one call: MLflow's own limit."""


@dataclass
class Cursor:
    """How much of a run MLflow has. Written after each delivery: a crash repeats at most one."""

    run: str = ""
    """Our own name of the MLflow run, known before there is one."""
    uri: str = ""
    """Address of the server without a password."""
    params: dict[str, str] = field(default_factory=dict)
    """Parameters of the run's first start."""
    server: str = ""
    run_id: str = ""
    """The MLflow run that the rest is about. Another run gets everything from the beginning."""
    begun: int = 0
    """Number of the last start that MLflow was told of."""
    closed: int = 0
    """Number of the last start whose metrics and end MLflow has."""
    offset: int = 0
    """Bytes of metrics.jsonl that need not be read again."""
    step: int = -1
    """Last rollout step that MLflow has."""
    time: int = 0
    """Time of that step in ms."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size and modification time of each file when it was sent."""
    left_out: int = 0
    """Metrics and lines that MLflow does not get: too many names, refused, or damaged."""
    error: str = ""
    """Why nothing is delivered at the moment."""


class Row(NamedTuple):
    """Metrics of a rollout step."""

    step: int
    time: int
    values: dict[str, float]


class Superseded(Exception):
    """A later start has taken the run's folder."""


class MirrorState:
    """A run's folder and its cursor, as start `number` (by default the newest) sees them."""

    def __init__(
        self,
        run_folder: Path,
        number: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = run_folder
        self.number = len(self.starts()) if number is None else number
        self.cursor = read_cursor(run_folder)
        self.say = say
        """Write a line to the log."""
        self._damaged: set[int] = set()

    def save(self, **changes: Any) -> None:
        """Change the cursor and write it. On a full disk the next write will do."""
        self.cursor = replace(self.cursor, **changes)
        with suppress(OSError):
            write_json(self.folder / CURSOR, asdict(self.cursor), durable=False)

    def prepare(self, run: str, uri: str, params: dict[str, str]) -> None:
        """Write down at once what only this start knows."""
        known = self.cursor
        self.save(run=known.run or run or uuid.uuid4().hex, uri=uri, params=known.params or params)

    def aim(self, server: str, run_id: str) -> None:
        """Begin from the beginning if MLflow's run is another than the cursor's."""
        if (server, run_id) != (self.cursor.server, self.cursor.run_id):
            known = self.cursor
            self.cursor = Cursor(known.run, known.uri, known.params, server, run_id)

    def starts(self) -> list[dict[str, Any]]:
        """All starts of the run; a made-up one for a folder that has no record of them."""
        made_up = {"step": 0, "began": stamp_of(self.folder / CONFIG)[1] / 1e9}
        return read_attempts(self.folder / ATTEMPTS) or [made_up]

    def check_newest(self) -> None:
        """Raise Superseded if a later start has the folder. Its own process sends the rest."""
        if len(self.starts()) > self.number:
            raise Superseded(f"a later start than number {self.number} sends this run")

    def begin(self) -> None:
        """Note that MLflow was told of this start. It cut metrics.jsonl back to its checkpoint, as
        those before it did, and the steps after it are sent anew."""
        starts = self.starts()[self.cursor.begun : self.number]
        step = min([self.cursor.step, *(start["step"] or -1 for start in starts)])
        self.save(begun=self.number, offset=0, step=step, time=0)

    def rows(self) -> tuple[list[Row], dict[str, int]]:
        """Return the next rows of metrics.jsonl, and the changes of the cursor once MLflow has
        them."""
        cursor, starts, path = self.cursor, self.starts()[: self.number], self.folder / METRICS
        place = {"offset": cursor.offset, "step": cursor.step, "time": cursor.time}
        size, _ = stamp_of(path)
        if size < cursor.offset:  # cut back without a note of it
            place = {"offset": 0, "step": -1, "time": 0}
        rows: list[Row] = []
        num_values = 0
        with path.open("rb") if size else nullcontext(io.BytesIO()) as file:
            file.seek(place["offset"])
            while num_values < MAX_METRICS and (line := file.readline()).endswith(b"\n"):
                if (row := self._parse(line, place, starts)) is not None:
                    place["time"] = row.time
                    if row.step > place["step"]:
                        rows.append(row)
                        place["step"] = row.step
                        num_values += len(row.values)
                place["offset"] += len(line)
        return rows, place

    def _parse(
        self, line: bytes, place: dict[str, int], starts: list[dict[str, Any]]
    ) -> Row | None:
        """Return the row of a line. Its time is the start's, and the seconds of the start's steps
        up to it. None for a damaged line."""
        try:
            values = parse_json(line)
            step = values.pop("step")
            values = {k: math.nan if v is None else float(v) for k, v in values.items()}
            began = [start["began"] for start in starts if (start["step"] or -1) < step]
        except (ValueError, TypeError, KeyError, AttributeError):
            if place["offset"] not in self._damaged:
                self._damaged.add(place["offset"])
                self.cursor.left_out += 1
                self.say(f"LEFT OUT: {METRICS}, byte {place['offset']}: not a line of metrics")
            return None
        time = max(place["time"], int(1000 * began[-1]) if began else 0)
        seconds = values.get("time/step", 0.0)
        return Row(step, time + int(1000 * seconds) if math.isfinite(seconds) else time, values)

    def files(self, *, known: bool) -> Iterator[tuple[str, str, list[int]]]:
        """Yield (name, folder at MLflow, stamp) of each file that MLflow lacks. Those that it has
        are looked at again only if `known`."""
        for pattern, folder in ARTIFACTS.items():
            for path in sorted(self.folder.glob(pattern)):
                name = str(path.relative_to(self.folder))
                if known or name not in self.cursor.files:
                    stamp = stamp_of(path)
                    if stamp not in (MISSING, self.cursor.files.get(name)):
                        yield name, folder, stamp

    def list_checkpoints(self) -> None:
        """Bring checkpoints.json up to date. It lists deleted checkpoints too, and the newest is
        the last."""
        path = self.folder / CHECKPOINTS
        old = {entry["path"]: entry for entry in known(path).get("checkpoints", [])}
        present: dict[str, dict[str, Any]] = {}
        for step, checkpoint in published(self.folder / "checkpoints"):
            name = str(checkpoint.relative_to(self.folder))
            time = stamp_of(checkpoint / "manifest.json")[1] // 1_000_000
            is_known = name in old and old[name]["time"] == time
            present[name] = old[name] if is_known else _entry(name, step, time, checkpoint)
        # By name: of one step there may be one from the middle of the next (step_000002_open).
        listed = {name: old[name] for name in old if name < max(present, default="~")} | present
        if listed != old:
            entries = [listed[name] for name in sorted(listed)]
            with suppress(OSError):  # a full disk
                write_json(path, {"checkpoints": entries}, durable=False)

    def end(self) -> tuple[str, int]:
        """Return the status of the last start that MLflow was told of, and the time of its end in
        ms. A run that ended without a note was killed."""
        starts = self.starts()
        start = starts[min(self.cursor.begun, len(starts)) - 1]
        began, time = start["began"], start.get("closed") or ("end" in start and start["time"])
        summarized = start is starts[-1] and stamp_of(self.folder / SUMMARY)[1] > began * 1e9
        by_end = {None: "FINISHED" if summarized else "KILLED", "crashed": "FAILED"}
        status = start.get("status") or by_end.get(start.get("end"), "KILLED")
        return status, int(1000 * time) if time else max(self.cursor.time, int(1000 * began))

    def is_complete(self) -> bool:
        """Return True if MLflow has all of the run."""
        cursor = self.cursor
        is_closed = cursor.closed >= self.number and cursor.server == cursor.uri
        return is_closed and not any(self.files(known=True))


def read_cursor(run_folder: Path) -> Cursor:
    """Return a run's cursor. One that is missing or damaged is at the beginning."""
    names = {one.name for one in fields(Cursor)}
    stored = known(run_folder / CURSOR)
    return Cursor(**{name: value for name, value in stored.items() if name in names})


def known(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is none."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def data_files(config: Config, cwd: Path) -> dict[str, Path]:
    """Return the tag of each data file of a config, and its path; relative ones are below `cwd`."""
    sources = (*config.data.train, *config.evaluation.sets)
    return {
        f"data.{source.name}.sha256": cwd / source.path
        for source in sources
        if isinstance(source, FileSource)
    }


def parameters(config: Config) -> dict[str, str]:
    """Return a config as MLflow's parameters."""
    return dict(flatten(config.model_dump(mode="json")))


def stamp_of(path: Path) -> list[int]:
    """Return size and modification time in ns of a file, or MISSING."""
    try:
        status = path.stat()
    except OSError:
        return MISSING
    return [status.st_size, status.st_mtime_ns]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


# ---------------------------------------------------------------------------- who sends


def lock_holder(run_folder: Path) -> tuple[int, str] | None:
    """Return the process that sends for a run and how to name it; None if nobody does, or if its
    file system has no locks."""
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
    remedy = f" (stopped; end it: kill -9 {pid})" if is_stopped(pid) else ""
    return pid, f"process {pid}{remedy}"


def write_holder(lock: BinaryIO) -> None:
    """Note in the lock file, which this process has locked, who holds it. Raises OSError."""
    lock.truncate(0)
    os.pwrite(lock.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def is_stopped(pid: int) -> bool:
    """Return True for a process of this machine that is stopped, by SIGSTOP or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
