"""Saving without waiting for the disk: a copy in memory, then a thread that writes it.

`copy` copies, and `save` returns a function that starts the thread. The thread of each rank writes
its part, all ranks agree, over an exchange of their own, that every part is on disk, and rank 0
publishes. A disk that is full, or fails, costs that one checkpoint: the run goes on with the older
ones.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dapo_megatron.checkpoints import folder as folders
from dapo_megatron.checkpoints.folder import Entry, entry_of, write_manifest
from dapo_megatron.cluster.collectives import on_all_ranks, on_rank0
from dapo_megatron.config import Config
from dapo_megatron.files import publish_folder, write_text
from dapo_megatron.protocols import Exchange, Snapshot
from dapo_megatron.types import CheckpointError, DapoError

Result = TypeVar("Result")
HF = "hf"


class Export(Protocol):
    """Another format of a checkpoint, made from its files. Methods raise OSError or DapoError."""

    num_bytes: int
    """Size of all its files together."""

    def create(self, target: Path) -> None:
        """Start it in an empty folder. Called on one rank."""
        ...

    def write(self, source: Path, target: Path, rank: int, num_ranks: int) -> None:
        """Write a rank's share of the checkpoint `source`. Called on all ranks at once."""
        ...

    def finish(self, target: Path) -> None:
        """Complete it when all ranks have written. Called on one rank."""
        ...


@dataclass(frozen=True)
class _Job:
    """A checkpoint to be."""

    step: int
    name: str
    part: Snapshot
    state: str
    """Text of state.json, made at once because the state goes on changing."""


@dataclass
class Checkpoints:
    """protocols.Checkpoints in a run's folder. Every method is called by all ranks."""

    config: Config
    folder: Path
    """<run>/checkpoints, which all ranks share."""
    exchange: Exchange
    background: Exchange
    """Exchange of the writing threads only."""
    snapshot: Callable[[], Snapshot]
    """Copies this rank's part."""
    attempt: str = "0"
    """Name of this start, on rank 0. Partial checkpoints are written under it."""
    check_owner: Callable[[], None] = lambda: None
    """Raises Fenced when another attempt has taken the run's folder. Called on rank 0."""
    note: Callable[[str], None] = lambda _: None
    """Shows a line to the user."""
    export: Export | None = None
    describe: Callable[[Path], None] = lambda _: None
    """Copies config.json and tokenizer into a folder, so that a checkpoint can be read without the
    model it came from."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Saved with every checkpoint (the MLflow run id)."""

    def __post_init__(self) -> None:
        self._begun = time.monotonic()
        self._thread: threading.Thread | None = None
        self._part: Snapshot | None = None
        self._failure: str | None = None
        self._error: BaseException | None = None

    def due(self, step: int) -> bool:
        """Return True every `checkpoint.every` steps, after the last step, and when rank 0's last
        save began `checkpoint.max_minutes` ago."""
        numbers = self.config.checkpoint
        if step == self.config.train.rollout_steps:
            return True
        if numbers.every and step % numbers.every == 0:
            return True
        if numbers.max_minutes is None:
            return False
        elapsed = time.monotonic() - self._begun
        return self.exchange.broadcast(elapsed >= 60 * numbers.max_minutes, bool)

    def copy(self) -> None:
        """Copy what a rank holds now, for the `save` that follows. By then the policy may have been
        offloaded. Waits first for a write still under way, and its memory."""
        self._join()
        self._part = self.snapshot()

    def save(
        self, step: int, state: Mapping[str, Any], *, is_open: bool = False
    ) -> Callable[[], None]:
        """Return a function that writes and publishes the copy, which is made now if there is none.
        `is_open`: the checkpoint is within the next step. It does not replace the one of `step`,
        and is kept until there is a newer one. Waits first for a write still under way.
        Collective."""
        self._join()
        part, self._part = self._part or self.snapshot(), None
        self._begun = time.monotonic()
        text = ""
        if self.exchange.rank == 0:
            text = json.dumps({**state, **self.extra, "manifest": True})
        job = _Job(step, folders.name_of(step, is_open=is_open), part, text)

        def start() -> None:
            # A daemon thread, because a run that fails must not wait for the disk.
            self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
            self._thread.start()

        return start

    def wait(self) -> None:
        """Wait at the end of a run until nothing is under way. Raises CheckpointError on all ranks
        if the last checkpoint could not be written."""
        self._join()
        if self._failure is not None:
            raise CheckpointError(
                f"{self._failure}. The run ends without it: once that is mended, resume=auto goes "
                "on from what there is"
            )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ in the thread

    def _run(self, job: _Job) -> None:
        try:
            self._failure = self._write(job)
        except BaseException as error:
            self._error = error  # raised again where the run can see it
            raise

    def _write(self, job: _Job) -> str | None:
        """Write and publish. Return what went wrong, the same on all ranks, or None."""
        needed = sum(self.background.all_gather(job.part.num_bytes, int))
        needed += self.export.num_bytes if self.export else 0
        partial = self.folder / folders.PARTIAL / self.attempt / job.name
        partial = self.background.broadcast(partial, Path)
        try:
            self._rank0(lambda: self._make_room(partial, needed))
            known = self._write_parts(job, partial)
            self._rank0(lambda: self._finish(job, partial, known))
            on_rank0(self.background, self.check_owner)
            self._rank0(lambda: publish_folder(partial, self.folder / partial.name))
        except CheckpointError as error:
            # A new owner deletes what others were writing. Unlike a full disk, that ends the run.
            on_rank0(self.background, self.check_owner)
            return self._give_up(partial, needed, "; ".join(str(error).splitlines()))
        if self.background.rank == 0:
            self._prune(partial.parent)
        return None

    def _make_room(self, partial: Path, needed: int) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if shutil.disk_usage(partial).free < needed:
            raise CheckpointError("no room")

    def _write_parts(self, job: _Job, partial: Path) -> dict[str, Entry]:
        """Write this rank's part, and its share of the export. Return the entries of all ranks'
        files."""

        def write() -> dict[str, Entry]:
            job.part(partial)
            sums = job.part.sums
            return {name: ((partial / name).stat().st_size, sums[name]) for name in sums}

        entries = self._all_ranks(write)
        if self.export is not None:
            self._rank0(lambda: self.describe(partial))
            entries |= self._export(self.export, partial)
        everyone = self.background.all_gather(entries, dict[str, Entry])
        return {name: entry for of_rank in everyone for name, entry in of_rank.items()}

    def _export(self, export: Export, partial: Path) -> dict[str, Entry]:
        """Write the other format. Return the entries of the files that this rank has read."""
        target, rank, num_ranks = partial / HF, self.background.rank, self.background.world_size

        def create() -> None:
            target.mkdir()
            export.create(target)

        def finish() -> list[str]:
            export.finish(target)
            return sorted(path.name for path in target.iterdir() if path.is_file())

        self._rank0(create)
        self._all_ranks(lambda: export.write(partial, target, rank, num_ranks))
        names = self.background.broadcast(self._rank0(finish) or [], list[str])
        mine = names[rank::num_ranks]
        return self._all_ranks(lambda: {f"{HF}/{name}": entry_of(target / name) for name in mine})

    def _finish(self, job: _Job, partial: Path, known: Mapping[str, Entry]) -> None:
        if self.export is None:
            self.describe(partial)
        write_text(partial / folders.STATE, job.state)
        write_manifest(partial, known)

    def _give_up(self, partial: Path, needed: int, why: str) -> str:
        situation = self._situation()
        if self.background.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        text = f"{partial.name} was NOT saved: {why}; it needs {needed:,} bytes, {situation}"
        text = self.background.broadcast(text, str)
        self._say(f"CHECKPOINT FAILED: {text}")
        return text

    def _say(self, text: str) -> None:
        """Write to this rank's log and to the user. The logs may be on the disk that is full, and
        an unheard message is no reason to end the run."""
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())
        with suppress(OSError):
            self.note(text)

    def _situation(self) -> str:
        try:
            free, kept = shutil.disk_usage(self.folder).free, folders.newest(self.folder)
        except OSError as error:
            return f"and {self.folder} cannot be looked at ({error.strerror})"
        newest = f"the newest checkpoint remains {kept}" if kept else "there is no older checkpoint"
        return f"{free:,} are free; {newest}"

    def _prune(self, graveyard: Path) -> None:
        numbers = self.config.checkpoint
        try:
            folders.prune(self.folder, graveyard, keep=numbers.keep, keep_every=numbers.keep_every)
        except OSError as error:
            self._say(f"an old checkpoint could not be deleted: {error}")

    def _rank0(self, action: Callable[[], Result]) -> Result | None:
        return on_rank0(self.background, lambda: self._guarded(action))

    def _all_ranks(self, action: Callable[[], Result]) -> Result:
        return on_all_ranks(self.background, lambda: self._guarded(action))

    def _guarded(self, action: Callable[[], Result]) -> Result:
        """Raise CheckpointError for every failure that costs only this checkpoint."""
        try:
            return action()
        except OSError as error:
            where = error.filename or self.folder
            raise CheckpointError(f"{where}: {error.strerror or error}") from error
        except DapoError as error:
            raise CheckpointError(str(error)) from error
