"""Trackers: metrics.jsonl in the run's folder, a composite, and line files that survive a full disk
(never a partial line, never an error).

metrics.jsonl has one object per rollout step. It needs only a file system. If a tracking server
disagrees with it, metrics.jsonl is right.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from dapo_megatron.files import parse_json
from dapo_megatron.protocols import Tracker
from dapo_megatron.types import CheckpointError


class Lines:
    """File of complete lines, in order, readable as soon as they are written.

    Lines that do not fit on a full disk wait in memory and are written before the next line. `warn`
    is called when lines start to wait, and again when all are written. There is no fsync: a line
    survives the death of this process, but not of the machine. One writer per file.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._waiting: deque[bytes] = deque()
        self._file: int | None = None
        self._end = 0
        """Byte offset of the end of the last complete line."""
        self._is_full = False

    @property
    def num_waiting(self) -> int:
        """Number of lines that are only in memory."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write the waiting lines, then `line`, which must not contain a newline."""
        self._waiting.append(line + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                self._warn(
                    f"{self._path}: {error.strerror}; its lines are kept in memory until they can "
                    "be written"
                )
            return
        if self._is_full:
            self._is_full = False
            self._warn(f"{self._path}: all waiting lines are written, nothing is missing")

    def close(self) -> None:
        """Try once more to write the waiting lines, then drop them with a warning."""
        with suppress(OSError):
            self._write()
        if self._waiting:
            self._warn(f"{self._path}: the last {len(self._waiting)} lines could not be written")
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._end = os.fstat(self._file).st_size
        while self._waiting:
            line = self._waiting[0]
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, self._end)  # remove the partial line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(line)
            self._waiting.popleft()


class CompositeTracker:
    """Calls each of its trackers in order. Put local files before servers.

    An error in `log` skips the remaining trackers, so local files are written even if a server
    fails. `finish` calls all trackers and raises afterwards.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a rollout step."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.finish, status)


class JsonlTracker:
    """Appends `{"step": k, "accuracy/raw": ...}` per step to one file, unbuffered.

    A non-finite value is written as null, because JSON has no NaN. Opening the file drops a partial
    last line (left by a kill in mid-write) and, if `step` is given, all later steps, which a
    resumed run repeats. Lines that do not fit on a full disk are written later; `warn` is called.
    Raises CheckpointError for a corrupt line.
    """

    def __init__(
        self, path: Path, step: int | None = None, warn: Callable[[str], None] = print
    ) -> None:
        self._path = path
        self.steps: list[int] = []
        """Steps that the file had, until `step`."""
        if path.exists():
            lines = [line for line in self._lines_of_file() if step is None or line[1] <= step]
            os.truncate(path, max((end for end, _ in lines), default=0))
            self.steps = [line_step for _, line_step in lines]
        self._lines = Lines(path, warn)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a rollout step."""
        values = {name: _finite(value) for name, value in metrics.items()}
        self._lines.append(json.dumps({"step": step, **values}).encode())

    def finish(self, status: str) -> None:
        """Close the file."""
        self._lines.close()

    def _lines_of_file(self) -> Iterator[tuple[int, int]]:
        """Yield (end offset, step) of every complete line. Raises CheckpointError for one that is
        not a metrics line."""
        end = 0
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be read ({error.strerror}); move it away"
            ) from error
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return  # only the last line can be partial
            try:
                step = operator.index(parse_json(line)["step"])
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{self._path}, line {number}: not a metrics line; fix or move the file"
                ) from error
            end += len(line)
            yield end, step


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
