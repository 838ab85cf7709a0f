"""Where metrics go: the run's own metrics.jsonl, a tracker made of several, and files of lines on a
disk that may be full (never half a line, never an error).

metrics.jsonl has one object per rollout step. It needs nothing but a file system, and is the truth
when a tracking server says otherwise.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from dapo_megatron.files import parse_json
from dapo_megatron.protocols import Tracker
from dapo_megatron.types import CheckpointError


class Lines:
    """Whole lines, in order, readable at once. What the disk does not take is kept in memory and
    written before the next line; `warn` hears of it once, and once when all is written again.

    Nothing is synced: a line survives the death of this process, not of the machine. One writer
    per file.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._waiting: deque[bytes] = deque()
        self._file: int | None = None
        self._end = 0
        """Where the last whole line ends."""
        self._is_full = False

    @property
    def num_waiting(self) -> int:
        """Lines that are only in memory."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write `line`, which has no newline, and all that waits before it."""
        self._waiting.append(line + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                self._warn(
                    f"{self._path}: {error.strerror}; what belongs there is kept in memory until "
                    "it can be written"
                )
            return
        if self._is_full:
            self._is_full = False
            self._warn(f"{self._path}: written again, nothing is missing")

    def close(self) -> None:
        """Try once more, then give up what waits."""
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
                os.ftruncate(self._file, self._end)  # the part that had room
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(line)
            self._waiting.popleft()


class CompositeTracker:
    """Hands everything to each of its trackers, in order: local files before servers.

    An error stops the ones behind it, so that what is local is written when a server fails;
    `finish` reaches all of them and raises afterwards.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.finish, status)


class JsonlTracker:
    """Appends `{"step": k, "accuracy/raw": ...}` per step to one file, flushed line by line.

    A non-finite value is written as null: JSON has no NaN. Opening the file drops a half-written
    last line, as a kill in mid-write leaves it, and the steps after `step`, if one is given: a
    resumed run does them again. What a full disk does not take is written when it does; `warn`
    hears of it.
    """

    def __init__(
        self, path: Path, step: int | None = None, warn: Callable[[str], None] = print
    ) -> None:
        self._path = path
        if path.exists():
            kept = (end for end, of_step in self._steps() if step is None or of_step <= step)
            os.truncate(path, max(kept, default=0))
        self._lines = Lines(path, warn)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""
        values = {name: _finite(value) for name, value in metrics.items()}
        self._lines.append(json.dumps({"step": step, **values}).encode())

    def finish(self, status: str) -> None:
        """Close the file."""
        self._lines.close()

    def _steps(self) -> Iterator[tuple[int, int]]:
        """(offset of its end, step) of every whole line; CheckpointError for one that is not."""
        end = 0
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return  # only the last line can be half-written
            try:
                step = parse_json(line)["step"]
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{self._path}, line {number}: not a metrics line; mend or move the file"
                ) from error
            end += len(line)
            yield end, step


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
