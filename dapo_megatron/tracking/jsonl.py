"""The run's own files: metrics.jsonl, one object per rollout step, and the rollouts of each step.

They need nothing but a file system, and are the truth when a tracking server says otherwise.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.types import CheckpointError, Completion, Group


class JsonlTracker:
    """Appends `{"step": k, "accuracy/raw": ...}` per step to one file, flushed line by line.

    A non-finite value is written as null: JSON has no NaN. Opening the file drops a half-written
    last line, as a kill in mid-write leaves it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(max((end for end, _ in self._lines()), default=0))

    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`: a resumed run does them again."""
        kept = (end for end, line_step in self._lines() if line_step <= step)
        self._file.truncate(max(kept, default=0))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""
        values = {name: _finite(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()

    def artifact(self, path: Path, folder: str = "") -> None:
        """Nothing: the file is in the run's folder."""

    def finish(self, status: str) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self) -> Iterator[tuple[int, int]]:
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
    """Write `folder/step_000012.jsonl`, one group per line with its verdict; whole or not at all.

    The verdict is a Verdict, or another word for the group's end (expired, carried, ...).
    Returns the path.
    """
    path = folder / f"step_{step:06d}.jsonl"
    partial = path.with_suffix(".partial")
    folder.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        for group, verdict in groups:
            file.write(json.dumps(_group(group, verdict), ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def _group(group: Group, verdict: str) -> dict[str, Any]:
    return {
        "ticket": group.ticket,
        "source": group.prompt.source,
        "index": group.prompt.index,
        "prompt": group.prompt.text,
        "truth": group.prompt.truth,
        "verdict": str(verdict),
        "versions": sorted({completion.version for completion in group.completions}),
        "completions": [_completion(completion) for completion in group.completions],
    }


def _completion(completion: Completion) -> dict[str, Any]:
    grade = completion.grade
    return {
        "sample": completion.sample,
        "text": completion.text,
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "finish": str(completion.finish),
        "version": completion.version,
        "score": None if grade is None else grade.score,
        "correct": None if grade is None else grade.correct,
        "pred": None if grade is None else grade.pred,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
