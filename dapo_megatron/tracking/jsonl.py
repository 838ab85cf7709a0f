"""The run's own files: metrics.jsonl, one object per rollout step, and the rollouts of each step.

They need nothing but a file system, and are the truth when a tracking server says otherwise.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from dapo_megatron.codec import group_to_json
from dapo_megatron.tracking.lines import Lines
from dapo_megatron.types import CheckpointError, Group, Verdict


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
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{self._path}, line {number}: not a metrics line; mend or move the file"
                ) from error
            end += len(line)
            yield end, step


def write_samples(folder: Path, step: int, groups: Iterable[tuple[Group, str]]) -> Path:
    """Write `folder/step_000012.jsonl`, one group per line, exactly; whole or not at all.

    `groups` are those whose fate became final in the step, with it (trained, all_correct, ...).
    A line is codec.group_to_json and, before it, `fate`, `verdict` (of the grades alone; null
    without any) and the weight `versions` that sampled it. Returns the path. Raises OSError.
    """
    path = folder / f"step_{step:06d}.jsonl"
    partial = path.with_suffix(".partial")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file:
            for group, fate in groups:
                line = {
                    "fate": str(fate),
                    "verdict": _verdict(group),
                    "versions": sorted({s.version for c in group.completions for s in c.segments}),
                    **group_to_json(group),
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)  # it holds room that others need
        raise
    return path


def _verdict(group: Group) -> str | None:
    found = {c.grade.correct for c in group.completions if c.grade is not None}
    if not found:
        return None
    if found == {True, False}:
        return Verdict.MIXED.value
    return (Verdict.ALL_CORRECT if found == {True} else Verdict.ALL_WRONG).value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
