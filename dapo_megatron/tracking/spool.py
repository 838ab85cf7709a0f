"""What a run has to say to MLflow, on disk until MLflow has it: the format both sides know.

`<run>/mlflow/` has a file per attempt, spool_000001.jsonl, ..., written by rank 0 alone: an older
attempt that a requeue left running somewhere cannot spoil the newer one's. A line is an event:

    {"kind": "begin", "time": ms, "run": ..., "attempt": ..., "uri": ..., "directory": ...,
     "experiment": ..., "name": ..., "params": {...}, "tags": {...}}      always the first
    {"kind": "metrics", "time": ms, "step": 3, "values": {...}}
    {"kind": "artifact", "time": ms, "path": "samples/step_000003.jsonl", "folder": "samples"}
    {"kind": "checkpoint", "time": ms, "path": "checkpoints/step_000003", "step": 3}
    {"kind": "data", "time": ms, "name": ..., "path": ...}
    {"kind": "describe", "time": ms, "text": ...}
    {"kind": "end", "time": ms, "status": "FINISHED"}

Paths are relative to the run's folder. An attempt without an end, and with a later attempt behind
it, was killed. There are two lanes of delivery, so that no file ever holds up a metric: each has a
cursor, facts.json and files.json.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dapo_megatron.files import open_lock, parse_json, read_json, try_lock, write_json
from dapo_megatron.types import CheckpointError, ConfigError

FOLDER = "mlflow"
"""In a run's folder."""
RUN_FILE = "mlflow_run.json"
"""In a run's folder: which MLflow run it is, {"server": .., "run_id": .., "experiment_id": ..}."""
LOG = "logs/mlflow.log"
LOCK = "lock"
"""In the spool's folder: held by its sender, whose process and host are written in it."""
LANES = {
    "facts": frozenset({"begin", "metrics", "describe", "end"}),
    "files": frozenset({"artifact", "checkpoint", "data"}),
}

Event = Mapping[str, Any]
_NAME = re.compile(r"^spool_(\d{6,})\.jsonl$")


class Place(NamedTuple):
    """Behind an event: the attempt's number, and bytes into its file."""

    number: int = 0
    offset: int = 0


class Holder(NamedTuple):
    """The process that has locked a spool."""

    pid: int
    host: str

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        if self.host != socket.gethostname():
            return f"process {self.pid} on {self.host}"
        cure = f" (stopped; end it: kill -9 {self.pid})" if is_stopped(self.pid) else ""
        return f"process {self.pid}{cure}"


@dataclass
class Cursor:
    """How far one lane is. Written after each delivery: a crash repeats at most one."""

    server: str = ""
    run_id: str = ""
    """Of the run that has it all up to here. Any other run gets it all from the beginning."""
    number: int = 0
    offset: int = 0
    begun: int = 0
    """Number of the attempt that MLflow knows as RUNNING; 0: none."""
    time: int = 0
    """Of the last event; ms."""
    left_out: int = 0
    """Metrics and files that MLflow does not get: too many names, refused, or gone."""
    error: str | None = None
    """Why it does not get on; None: it does."""

    @property
    def place(self) -> Place:
        """Behind the last event that was delivered."""
        return Place(self.number, self.offset)


def spool_path(folder: Path, number: int) -> Path:
    """The file of an attempt."""
    return folder / f"spool_{number:06d}.jsonl"


def attempts(folder: Path) -> list[int]:
    """Numbers of the attempts that have a file, ascending."""
    names = (_NAME.match(name) for name in (os.listdir(folder) if folder.is_dir() else ()))
    return sorted(int(name[1]) for name in names if name)


def events(folder: Path, after: Place = Place()) -> Iterator[tuple[Event, Place]]:  # noqa: B008
    """Every whole event behind a place, attempt by attempt, with the place behind it. A line that
    a kill or a crash of the machine left half-written is passed over."""
    for number in (number for number in attempts(folder) if number >= after.number):
        offset = after.offset if number == after.number else 0
        with spool_path(folder, number).open("rb") as file:
            file.seek(offset)
            while (line := file.readline()).endswith(b"\n"):
                offset += len(line)
                if (event := _parse(line)) is not None:
                    yield event, Place(number, offset)


def beginning(folder: Path, number: int | None = None) -> Event | None:
    """How attempt `number` began; without a number, the last one that has begun."""
    numbers = attempts(folder) if number is None else [number]
    for one in reversed(numbers):
        for event, place in events(folder, Place(one)):
            if place.number == one and event["kind"] == "begin":
                return event
            break
    return None


def read_cursor(folder: Path, lane: str) -> Cursor:
    """A lane's cursor; one that was never written, or spoilt, is at the start: to deliver twice
    does no harm."""
    found = known(folder / f"{lane}.json")
    names = {field.name for field in fields(Cursor)}
    return Cursor(**{key: value for key, value in found.items() if key in names})


def write_cursor(folder: Path, lane: str, cursor: Cursor) -> None:
    """Raises OSError."""
    write_json(folder / f"{lane}.json", asdict(cursor), durable=False)


def num_waiting(folder: Path) -> int:
    """Events that MLflow does not have yet: all of them, if the last start goes elsewhere."""
    begin, num = beginning(folder), 0
    for lane, kinds in LANES.items():
        cursor = read_cursor(folder, lane)
        known = begin is None or cursor.server == begin["uri"]
        after = cursor.place if known else Place()
        num += sum(event["kind"] in kinds for event, _ in events(folder, after))
    return num


def known(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is none."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def lock_holder(folder: Path) -> Holder | None:
    """Return who has locked a spool; None if nobody has, or if its file system has no locks."""
    path = folder / LOCK
    try:
        with open_lock(path) as lock:
            if try_lock(lock, path):
                return None
            pid, _, host = lock.read(300).decode(errors="replace").strip().partition(" ")
    except (OSError, ConfigError):
        return None
    return Holder(int(pid) if pid.isdecimal() else 0, host)


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


def _parse(line: bytes) -> Event | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None
