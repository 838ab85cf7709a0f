"""A run's folder: what is where, who is in it, what it goes on from.

runs/<name>/config.yaml  metrics.jsonl  summary.json  samples/  data/  checkpoints/  logs/
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import BinaryIO

from dapo_megatron.checkpoints.folder import (
    DAMAGED,
    STATE,
    fault_of,
    free_name,
    has_manifest,
    place_of,
    published,
    recover_checkpoints,
)
from dapo_megatron.cluster.attempt import OWNER, attempt, check_owner
from dapo_megatron.files import open_lock, read_json, try_lock, write_json
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError, ConfigError

LOCK_SECONDS = 15.0
"""Ranks that were just killed take a moment to go, and their lock with them."""


class RunFolder:
    """Paths of one run, the lock that keeps a second one out of it, and the name of its owner, by
    which a run that was cut off from the lock finds that it is no longer it."""

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
        self.attempts = path / "attempts.jsonl"
        self.owner = path / OWNER
        self.attempt = attempt()
        self.is_continued = False
        """Whether this run's own earlier part is in the folder: same MLflow run, same metrics
        file."""
        self.aside: Path | None = None
        """Where `enter` put an older run of this name; on rank 0."""
        self.notes: list[str] = []
        """What `find` has to say to the user; the same on all ranks."""
        self._lock: BinaryIO | None = None

    # ------------------------------------------------------------------ opening: in this order

    def take(self, lock_seconds: float = LOCK_SECONDS) -> None:
        """Lock the folder, and become its owner. On rank 0.

        Raises ConfigError if another process still has it after `lock_seconds`, for links that
        another user has put there, and for a file system without locks; CheckpointError if the
        other process belongs to another job, which may be a start whose node Slurm has given up. An
        earlier start of this very job has no right to it any more, whatever its lock says.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _check_links(self.path)
            self._lock = open_lock(self.path / ".lock")
            if not self._wait_for_lock(lock_seconds):
                self._take_over()
            write_json(self.owner, {"attempt": self.attempt})
            recover_checkpoints(self.checkpoints)
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise ConfigError(f"run.directory: {self.path}: {error.strerror}") from error
        except OSError as error:  # a disk that is full or away: may be mended by the next start
            raise CheckpointError(f"{self.path}: {error.strerror}") from error

    def find(self, resume: str, exchange: Exchange) -> Path | None:
        """The checkpoint to resume from, or None for a fresh start. Collective: every file of it is
        read, by all ranks together.

        resume `auto`: the newest of this folder that is as it was written; a damaged one is set
        aside and told of in `notes`. A path: that checkpoint and no other. Raises CheckpointError,
        on all ranks, for a path that is no checkpoint or a damaged one, and if all are damaged.
        """
        if resume == "never":
            return None
        if resume != "auto":
            source = Path(resume)
            if exchange.broadcast(not (source / STATE).exists(), bool):
                raise CheckpointError(f"resume: {source} is not a checkpoint (no {STATE})")
            if fault := fault_of(source, exchange):
                raise CheckpointError(f"resume: {source} is damaged: {fault}")
            self._note_age(source, exchange)
            return source
        found = exchange.broadcast([path for _, path in published(self.checkpoints)], list[Path])
        for source in found:
            fault = fault_of(source, exchange)
            if fault is None:
                self._note_age(source, exchange)
                return source
            aside = exchange.broadcast(free_name(source.with_name(source.name + DAMAGED)), Path)
            if exchange.rank == 0:
                source.rename(aside)
            self.notes.append(f"CHECKPOINT DAMAGED: {fault}. It is kept as {aside}")
        damaged = sorted(self.checkpoints.glob(f"*{DAMAGED}*"))
        if damaged := exchange.broadcast(damaged, list[Path]):
            raise CheckpointError(
                f"resume: no checkpoint in {self.checkpoints} can be trusted. Mend one of "
                f"{', '.join(path.name for path in damaged)}, or start again (resume=never)"
            )
        return None

    def enter(self, resume: str, source: Path | None) -> None:
        """Make the folder ready for what `find` found. On rank 0.

        With `never`, or a checkpoint of another run, an older run of this name is kept beside it
        as NAME.1, NAME.2, ...; checkpoints after `source` are set aside.
        """
        self.is_continued = resume == "auto" or self._is_own(source)
        if self.is_continued:
            self._set_aside_after(source)
        elif any(self.path.glob("[!.]*")):
            self._move_aside()
        for folder in (self.samples, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def check_owner(self) -> None:
        """Raise Fenced if another attempt has taken the folder."""
        check_owner(self.path, self.attempt)

    # ------------------------------------------------------------------ inside

    def _wait_for_lock(self, seconds: float) -> bool:
        assert self._lock is not None
        deadline, path = time.monotonic() + seconds, self.path / ".lock"
        while not (is_ours := try_lock(self._lock, path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return is_ours

    def _take_over(self) -> None:
        """The lock is another's: on a file system that shares locks, perhaps a node's that was cut
        off. By its name the owner finds that it is the owner no longer (`check_owner`)."""
        owner = str(read_json(self.owner, "not an owner")["attempt"])
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise ConfigError(
                f"run.name: another process is running in {self.path}; choose another name"
            )
        if owner.partition(".")[0] != job:
            raise CheckpointError(
                f"{self.path} is held by attempt {owner}. If that job is at an end, a node of it "
                "that was cut off still runs: have it taken down; else choose another run.name"
            )
        self.notes.append(f"taken over from attempt {owner}, which still holds the lock")

    def _note_age(self, source: Path, exchange: Exchange) -> None:
        if not exchange.broadcast(exchange.rank == 0 and has_manifest(source), bool):
            self.notes.append(f"{source}: of a version that wrote no sums: it was not verified")

    def _is_own(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and checkpoint.resolve().parent == self.checkpoints.resolve()

    def _move_aside(self) -> None:
        self.aside = free_name(self.path)
        self.aside.mkdir()
        for entry in self.path.glob("[!.]*"):
            entry.rename(self.aside / entry.name)

    def _set_aside_after(self, source: Path | None) -> None:
        """Checkpoints newer than the one to resume from are of a past that is done again: a later
        `auto` must not find them, nor `checkpoint.keep` prefer them."""
        first = place_of(source.resolve().name if source else "")
        for _, path in published(self.checkpoints):
            if place_of(path.name) > first:
                path.rename(free_name(path))


def _check_links(folder: Path) -> None:
    """Refuse links that another user has put into the folder: what a run writes there would go into
    a file of the other user's choice. The user's own links (checkpoints/ on another disk) pass."""
    for path in filter(Path.is_symlink, folder.iterdir()):
        owner = path.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            raise ConfigError(
                f"run.name: {path} is a link to {os.readlink(path)} that user {owner} has put "
                "there. Remove it, or choose another name"
            )
