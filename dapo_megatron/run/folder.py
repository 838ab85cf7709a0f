"""A run's folder: its paths, its lock, and the checkpoint to resume from.

runs/<name>/config.yaml  metrics.jsonl  summary.json  samples/  data/  checkpoints/  logs/
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dapo_megatron.checkpoints.folder import (
    DAMAGED,
    STATE,
    fault_of,
    free_name,
    published,
    recover_checkpoints,
    step_of,
)
from dapo_megatron.cluster.attempt import ATTEMPTS, attempt
from dapo_megatron.cluster.heartbeat import HEARTBEATS
from dapo_megatron.cluster.launch import GRACE_SECONDS
from dapo_megatron.cluster.ownership import check_entries, check_tree
from dapo_megatron.cluster.servers import process_name
from dapo_megatron.files import open_lock, try_lock
from dapo_megatron.protocols import Exchange
from dapo_megatron.rollout.record import forget_after
from dapo_megatron.text import visible
from dapo_megatron.types import CheckpointError, ConfigError, DapoError

_NOT_WRITABLE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)


class RunFolder:
    """Paths of a run, and its lock, which keeps a second start out. The lock file names the
    attempt, the node and the process that hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.samples = path / "samples"
        self.timeline = path / "timeline"
        self.plan = path / "plan.json"
        self.provenance = path / "provenance.json"
        self.tokenizer = path / "tokenizer.json"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.attempts = path / ATTEMPTS
        self.attempt = attempt()
        self.is_continued = False
        """Whether the folder has an earlier part of this run. The run then continues its MLflow run
        and its metrics file."""
        self.notes: list[str] = []
        """Notes of `find_checkpoint` for the user; the same on all ranks."""
        self._lock: BinaryIO | None = None

    # ------------------------------------------------------------------ opening: in this order

    def create(self, *, whole: bool = False) -> None:
        """Create the folder if it is missing. Raises ConfigError if it cannot be written, or if
        another user may have made the entries that a rank writes before rank 0 has acquired the
        folder. With `whole` everything in it is checked."""
        with self._config_errors():
            beside = (self.path.with_name(name) for name in ("mlflow.db", "mlartifacts"))
            check_entries(
                *filter(Path.is_symlink, beside),
                *(self.path, Path(os.path.realpath(self.path)), self.path / HEARTBEATS),
            )
            self.path.mkdir(parents=True, exist_ok=True)
            if whole and (warning := check_tree(self.path)):
                self.notes.append(warning)
            if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, "Cannot be written")

    def acquire(self, lock_seconds: float = GRACE_SECONDS) -> None:
        """Lock the folder. Called on rank 0.

        Ranks that were just killed hold the lock until they have exited. If another start still
        holds it after `lock_seconds`, raises ConfigError naming it, or
        CheckpointError under Slurm, where its node may have been cut off: a later start may find
        the folder free. Raises ConfigError if another user may have created an entry, and for a
        file system without locks.
        """
        self.create(whole=True)
        with self._config_errors():
            self._lock = open_lock(self.path / ".lock")
            if not self._wait_for_lock(lock_seconds):
                raise self._held()
            self._lock.truncate(0)
            self._lock.write(f"attempt {self.attempt}, {process_name(os.getpid())}".encode())
            recover_checkpoints(self.checkpoints)

    def find_checkpoint(self, resume: str, exchange: Exchange) -> Path | None:
        """Return the checkpoint to resume from, or None to start from step 0. Collective: all ranks
        together read and verify every file of it.

        resume `auto` selects the newest checkpoint of this folder that is intact; damaged ones are
        renamed and reported in `notes`. A path selects only that checkpoint. Raises
        CheckpointError, on all ranks, if the path is no checkpoint or is damaged, or if all
        checkpoints of the folder are damaged.
        """
        if resume == "never":
            return None
        if resume != "auto":
            source = Path(resume)
            if exchange.broadcast(not (source / STATE).exists(), bool):
                raise CheckpointError(f"resume: {source} is not a checkpoint (no {STATE})")
            if fault := fault_of(source, exchange):
                raise CheckpointError(f"resume: {source} is damaged: {fault}")
            return source
        candidates = [path for _, path in published(self.checkpoints)]
        for source in exchange.broadcast(candidates, list[Path]):
            fault = fault_of(source, exchange)
            if fault is None:
                return source
            aside = exchange.broadcast(free_name(source.with_name(source.name + DAMAGED)), Path)
            if exchange.rank == 0:
                source.rename(aside)
            self.notes.append(f"CHECKPOINT DAMAGED: {fault}. It was renamed to {aside}")
        damaged = sorted(self.checkpoints.glob(f"*{DAMAGED}*"))
        if damaged := exchange.broadcast(damaged, list[Path]):
            raise CheckpointError(
                f"resume: all checkpoints in {self.checkpoints} are damaged. Fix one of "
                f"{', '.join(path.name for path in damaged)}, or start again (resume=never)"
            )
        return None

    def prepare(self, resume: str, source: Path | None) -> None:
        """Prepare the folder for a run that resumes from `source` or starts from step 0. Called on
        rank 0.

        With resume `never`, or a checkpoint of another run, an older run of this name is moved to
        NAME.1, NAME.2, ... Otherwise checkpoints newer than `source` are renamed.
        """
        self.is_continued = resume == "auto" or self._is_own(source)
        if self.is_continued:
            self._set_aside_after(source)
            if resume != "auto":  # a later `auto` must not repeat what this run leaves behind
                forget_after(self.samples, step_of(source.name) if source else 0)
        elif any(self.path.glob("[!.]*")):
            self._move_aside()
        for folder in (self.samples, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ internals

    @contextmanager
    def _config_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self.path}: {error.strerror}"
            if error.errno not in _NOT_WRITABLE:  # a full or missing disk may be fixed later
                raise CheckpointError(problem) from error
            raise ConfigError(
                f"run.directory: {problem}; name a folder that you can write to"
            ) from error

    def _wait_for_lock(self, seconds: float) -> bool:
        assert self._lock is not None
        deadline, path = time.monotonic() + seconds, self.path / ".lock"
        while not (is_locked := try_lock(self._lock, path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return is_locked

    def _held(self) -> DapoError:
        """Return the error that names the start which holds the lock."""
        assert self._lock is not None
        self._lock.seek(0)
        holder = visible(self._lock.read(200).decode(errors="replace")) or "another process"
        problem = f"run.name: {self.path} is in use by {holder}"
        if "SLURM_JOB_ID" not in os.environ:
            return ConfigError(f"{problem}; choose another name")
        return CheckpointError(
            f"{problem}. If that job still runs, choose another run.name. If it has ended, its "
            "node was cut off and still runs: ask your administrator to shut it down"
        )

    def _is_own(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and checkpoint.resolve().parent == self.checkpoints.resolve()

    def _move_aside(self) -> None:
        aside = free_name(self.path)
        aside.mkdir()
        for entry in self.path.glob("[!.]*"):
            entry.rename(aside / entry.name)

    def _set_aside_after(self, source: Path | None) -> None:
        """Rename checkpoints newer than `source`, because their steps will be repeated. Otherwise a
        later `auto` would resume from them, and `checkpoint.keep` would keep them."""
        resumed = step_of(source.resolve().name if source else "")
        for step, path in published(self.checkpoints):
            if step > resumed:
                path.rename(free_name(path))
