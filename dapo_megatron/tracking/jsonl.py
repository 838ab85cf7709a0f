"""The run's own metrics.jsonl, one object per rollout step.

It needs nothing but a file system, and is the truth when a tracking server says otherwise.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dapo_megatron.files import parse_json
from dapo_megatron.tracking.lines import Lines
from dapo_megatron.types import CheckpointError


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

    def artifact(self, path: Path, folder: str = "") -> None:
        """Nothing: the file is in the run's folder."""

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
