"""A run's folder: what is where, checkpoints that appear whole or not at all, resuming.

runs/<name>/config.yaml  metrics.jsonl  summary.json  samples/  data/  checkpoints/  logs/
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dapo_megatron.config import Config
from dapo_megatron.protocols import Exchange, Policy
from dapo_megatron.types import CheckpointError, ConfigError

_STEP = re.compile(r"^step_(\d{6,})$")


class RunFolder:
    """Paths of one run, and the lock that keeps a second one out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.samples = path / "samples"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.mlflow_run = path / "mlflow_run.json"
        self.is_continued = False
        """Whether `open` found this run's own earlier part: same MLflow run, same metrics file."""
        self._lock: TextIO | None = None

    def open(self, resume: str) -> Path | None:
        """Take the folder for a run; the checkpoint to resume from, or None for a fresh start.

        resume `never`: an older run of this name is kept beside it as NAME.1, NAME.2, ...; `auto`:
        the newest whole checkpoint of this folder, or its start; else the path of a checkpoint.
        Raises ConfigError if another process is in the folder, CheckpointError if the named
        checkpoint is not one.
        """
        self._take_lock()
        source = None
        if resume == "auto":
            source = newest(self.checkpoints)
        elif resume != "never":
            source = Path(resume)
            if not (source / "state.json").exists():
                raise CheckpointError(f"resume: {source} is not a checkpoint (no state.json)")
        self.is_continued = resume == "auto" or self._is_own(source)
        if self.is_continued:
            self._set_aside_after(source)
        elif any(self.path.glob("[!.]*")):
            self._move_aside()
        for folder in (self.samples, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        for partial in self.checkpoints.glob("*.partial"):
            shutil.rmtree(partial)
        return source

    def _is_own(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and checkpoint.resolve().parent == self.checkpoints.resolve()

    def _take_lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"run.directory: {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.name: another process is running in {self.path}; choose another name"
            ) from None

    def _move_aside(self) -> None:
        aside = _free_name(self.path)
        aside.mkdir()
        for entry in self.path.glob("[!.]*"):
            entry.rename(aside / entry.name)

    def _set_aside_after(self, source: Path | None) -> None:
        """Checkpoints newer than the one to resume from are of a past that is done again: a later
        `auto` must not find them, nor `checkpoint.keep` prefer them."""
        name = source.resolve().name if source else ""
        first = int(match[1]) if (match := re.match(r"step_(\d+)", name)) else 0
        for path, step in _published(self.checkpoints):
            if int(step[1]) > first:
                path.rename(_free_name(path))


def _free_name(path: Path) -> Path:
    """NAME.1, NAME.2, ... beside `path`: the first that is free."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


def newest(checkpoints: Path) -> Path | None:
    """The newest published checkpoint of a folder, or None."""
    found = [(int(m.group(1)), path) for path, m in _published(checkpoints)]
    return max(found)[1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state saved with a checkpoint. Raises CheckpointError naming the file."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: not a checkpoint's state")
    return state


@dataclass
class FolderCheckpoints:
    """loop.Checkpoints in a run's folder: every rank writes its part, rank 0 publishes."""

    config: Config
    folder: RunFolder
    exchange: Exchange
    policy: Policy
    export: Callable[[Path], None] | None = None
    """Writes an HF checkpoint into a folder; collective."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Saved with every checkpoint (the MLflow run id)."""
    describe: Callable[[Path], None] | None = None
    """Puts into a folder what goes with weights, config.json and tokenizer, so that a checkpoint
    can be read without the model it came from."""

    def due(self, step: int) -> bool:
        """Every `checkpoint.every` steps and after the last one."""
        every = self.config.checkpoint.every
        return step == self.config.train.rollout_steps or (every > 0 and step % every == 0)

    def save(self, step: int, state: Mapping[str, Any]) -> Callable[[], None]:
        """Write under a temporary name; what is returned makes it appear. Collective."""
        final = self.folder.checkpoints / f"step_{step:06d}"
        partial = final.with_name(f"{final.name}.partial")
        if self.exchange.rank == 0:
            partial.mkdir(parents=True)
        self.exchange.barrier()
        self.policy.save(partial)
        if self.export is not None:
            if self.exchange.rank == 0:
                (partial / "hf").mkdir()
            self.export(partial / "hf")
        if self.exchange.rank == 0:
            if self.describe is not None:
                self.describe(partial)
            write_json(partial / "state.json", {**state, **self.extra})
        self.exchange.barrier()

        def publish() -> None:
            if self.exchange.rank == 0:
                if final.exists():
                    shutil.rmtree(final)
                partial.rename(final)
                _sync_to_disk(self.folder.checkpoints)
                self._prune()

        return publish

    def _prune(self) -> None:
        steps = sorted((int(m.group(1)), p) for p, m in _published(self.folder.checkpoints))
        for _, path in steps[: -self.config.checkpoint.keep]:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            doomed = path.rename(path.with_name(f"{path.name}.partial"))
            shutil.rmtree(doomed)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _published(checkpoints: Path) -> list[tuple[Path, re.Match[str]]]:
    if not checkpoints.exists():
        return []
    matches = ((path, _STEP.match(path.name)) for path in checkpoints.iterdir())
    return [(path, match) for path, match in matches if match and (path / "state.json").exists()]


def _sync_to_disk(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
