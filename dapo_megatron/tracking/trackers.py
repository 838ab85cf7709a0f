"""metrics.jsonl in the run's folder: one object per rollout step. It needs only a file system. If a
tracking server disagrees with it, metrics.jsonl is right."""

from __future__ import annotations

import errno
import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_megatron.files import parse_json
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.types import CheckpointError


class JsonlTracker:
    """Appends `{"step": k, "accuracy/raw": ...}` per step to one file, unbuffered.

    A non-finite value is written as null, because JSON has no NaN. Lines that do not fit on a full
    disk wait in memory and are written before the next line, with a warning on `console`. There is
    no fsync: a line survives the death of this process, but not of the machine.

    Opening the file drops a partial last line (left by a kill in mid-write) and, if `step` is
    given, all later steps, which a resumed run repeats. Raises CheckpointError for a corrupt line.
    """

    def __init__(self, path: Path, console: RunConsole, step: int | None = None) -> None:
        self._path, self._console = path, console
        self._waiting: list[bytes] = []
        if path.exists():
            kept = [end for end, its, _ in metrics_lines(path) if step is None or its <= step]
            os.truncate(path, max(kept, default=0))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a rollout step."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        was_waiting = bool(self._waiting)
        self._waiting.append(json.dumps({"step": step, **values}).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not was_waiting:
                self._console.warn(
                    f"{self._path}: {error.strerror}; its lines are kept in memory until they can "
                    "be written"
                )
        else:
            if was_waiting:
                self._console.warn(f"{self._path}: all waiting lines are written")

    def finish(self, status: str) -> None:
        """Try once more to write the waiting lines, then drop them with a warning."""
        with suppress(OSError):
            self._write()
        if self._waiting:
            self._console.warn(f"{self._path}: {len(self._waiting)} lines could not be written")

    def _write(self) -> None:
        if not self._waiting:
            return
        with self._path.open("ab", buffering=0) as file:
            while self._waiting:
                end, line = file.tell(), self._waiting[0]
                if file.write(line) < len(line):
                    file.truncate(end)  # remove the partial line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                del self._waiting[0]


def metrics_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (end offset, step, metrics) of every complete line from byte `offset`; nothing if the
    file is missing. Raises CheckpointError for a line that is not of metrics."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while (line := file.readline()).endswith(b"\n"):  # only the last one can be partial
                row = parse_json(line)
                yield file.tell(), operator.index(row.pop("step")), row
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); move it away") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a metrics line: {line[:80]!r}; fix or move the file"
        ) from error
