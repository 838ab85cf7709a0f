"""Background saving: copy the state to host memory, then write it in a thread.

`stage` makes the copy. `commit` returns a function that starts the thread. The thread of each rank
writes its part. The threads have their own exchange, with which all ranks confirm that every part
is on disk; rank 0 then publishes the checkpoint. If the disk is full or fails, only this checkpoint
is lost, and the run continues with the older ones.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.checkpoints import folder as folders
from dapo_megatron.checkpoints.folder import (
    Entry,
    Result,
    Ts,
    entry_of,
    guarded,
    write_manifest,
)
from dapo_megatron.checkpoints.formats.export import HfExport
from dapo_megatron.checkpoints.formats.peft import write_peft
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.cluster.collectives import on_all_ranks, on_rank0
from dapo_megatron.config import Config
from dapo_megatron.files import publish_folder, write_text
from dapo_megatron.protocols import Exchange, Policy, Recorder, Snapshot
from dapo_megatron.types import CheckpointError


@dataclass
class CheckpointSaver:
    """Saves checkpoints in the background. All ranks call every method."""

    config: Config
    folder: Path
    """<run>/checkpoints, on a file system that all ranks share."""
    exchange: Exchange
    background: Exchange
    """Exchange for the writing threads."""
    policy: Policy
    recorder: Recorder
    """Shows lines to the user. Its records of the steps are flushed before a checkpoint is
    published, because a resumed run does not sample the steps of a checkpoint again."""
    companions: Companions
    """config.json and tokenizer, with which a checkpoint is read without the original model."""
    export: HfExport | None = None
    """Export to write with each checkpoint."""
    attempt: str = "0"
    """Name of this attempt; used on rank 0. Checkpoints are written to `.partial/<attempt>/`."""

    def __post_init__(self) -> None:
        self._last_save = time.monotonic()
        self._thread: threading.Thread | None = None
        self._part: Snapshot | None = None
        self._failure: str | None = None
        self._error: BaseException | None = None

    def due(self, step: int) -> bool:
        """Return whether to save after `step`: every `checkpoint.every` steps, after the last step,
        and if rank 0's last save started at least `checkpoint.max_minutes` ago. Collective."""
        numbers = self.config.checkpoint
        if step == self.config.train.rollout_steps:
            return True
        if numbers.every and step % numbers.every == 0:
            return True
        if numbers.max_minutes is None:
            return False
        elapsed = time.monotonic() - self._last_save
        return self.exchange.broadcast(elapsed >= 60 * numbers.max_minutes, bool)

    def stage(self) -> None:
        """Copy this rank's state for the following `commit`, before the policy is offloaded.

        First waits for the previous write, whose copy still occupies host memory.
        """
        self._join()
        self._part = self.policy.snapshot()

    def commit(
        self, step: int, state: Mapping[str, Any], parts: Sequence[Snapshot] = ()
    ) -> Callable[[], None]:
        """Return a function that starts writing and publishing the copy, this rank's other `parts`,
        and `state` (rank 0's). Collective. `state` is encoded in the background and must not
        change.

        The copy is made now if `stage` was not called. First waits for the previous write.
        """
        self._join()
        part, self._part = self._part or self.policy.snapshot(), None
        self._last_save = time.monotonic()
        job = step, state, (part, *parts)

        def start() -> None:
            # A daemon thread, so that a failing run does not wait for the disk.
            self._thread = threading.Thread(target=self._run, args=job, daemon=True)
            self._thread.start()

        return start

    def wait(self) -> None:
        """Wait until the last checkpoint is written, at the end of a run.

        Raises CheckpointError on all ranks if it could not be written.
        """
        self._join()
        if self._failure is not None:
            raise CheckpointError(
                f"{self._failure}. The run ends without this checkpoint. Fix the cause, then "
                "resume=auto continues from the newest checkpoint"
            )

    def settle(self) -> None:
        """Wait until nothing is being written, also if the last save failed. Not collective."""
        if self._thread is not None:
            self._thread.join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ in the thread

    def _run(self, step: int, state: Mapping[str, Any], parts: Sequence[Snapshot]) -> None:
        try:
            self._failure = self._write(step, state, parts)
        except BaseException as error:
            self._error = error  # `_join` raises it again in the main thread
            raise

    def _write(self, step: int, state: Mapping[str, Any], parts: Sequence[Snapshot]) -> str | None:
        """Write and publish a checkpoint. Return the reason of a failure, the same on all ranks, or
        None."""
        num_bytes = sum(part.num_bytes for part in parts)
        needed = sum(self.background.all_gather(num_bytes, int))
        needed += self.export.num_bytes if self.export else 0
        partial = self.folder / folders.PARTIAL / self.attempt / folders.name_of(step)
        partial = self.background.broadcast(partial, Path)
        try:
            self._rank0(self._make_room, partial, needed)
            known = self._write_parts(parts, partial)
            self._rank0(write_text, partial / folders.STATE, json.dumps(state))
            self._rank0(write_manifest, partial, known)
            self._rank0(publish_folder, partial, self.folder / partial.name)
        except CheckpointError as error:
            return self._give_up(partial, needed, "; ".join(str(error).splitlines()))
        if self.background.rank == 0:
            self._prune(partial.parent)
        return None

    def _make_room(self, partial: Path, needed: int) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if shutil.disk_usage(partial).free < needed:
            raise CheckpointError("no room")

    def _write_parts(self, parts: Sequence[Snapshot], partial: Path) -> dict[str, Entry]:
        """Write this rank's parts, and its share of the export. Return the entries of all ranks'
        files."""

        def write() -> dict[str, Entry]:
            self.recorder.flush()
            for part in parts:
                part.write(partial)
            return {
                name: ((partial / name).stat().st_size, checksum)
                for part in parts
                for name, checksum in part.checksums.items()
            }

        entries = self._all_ranks(write)
        for part in parts:
            part.finish(partial, self.background)
        self._rank0(self.companions.copy, partial)
        if self.config.policy.lora is not None:
            self._rank0(write_peft, partial, self.config)
        if self.export is not None:
            entries |= self._export(self.export, partial)
        by_rank = self.background.all_gather(entries, dict[str, Entry])
        return {name: entry for rank_entries in by_rank for name, entry in rank_entries.items()}

    def _export(self, export: HfExport, partial: Path) -> dict[str, Entry]:
        """Write the export. Return the manifest entries of this rank's share of its files."""
        target = partial / export.FOLDER
        rank, num_ranks = self.background.rank, self.background.world_size

        self._rank0(export.create, target)
        self._all_ranks(export.write, partial, target, rank, num_ranks)
        names = self.background.broadcast(self._rank0(export.finish, target) or [], list[str])
        share = [f"{export.FOLDER}/{name}" for name in names[rank::num_ranks]]
        return self._all_ranks(_entries, partial, share)

    def _give_up(self, partial: Path, needed: int, why: str) -> str:
        disk_status = self._disk_status()
        if self.background.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        text = f"{partial.name} was NOT saved: {why}; it needs {needed:,} bytes, {disk_status}"
        text = self.background.broadcast(text, str)
        self._report(f"CHECKPOINT FAILED: {text}")
        return text

    def _report(self, text: str) -> None:
        """Write to this rank's log and to the user. Ignores errors, because the log may be on the
        full disk, and a lost message is no reason to end the run."""
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())
        with suppress(OSError):
            self.recorder.note(text)

    def _disk_status(self) -> str:
        try:
            free, newest = shutil.disk_usage(self.folder).free, folders.newest(self.folder)
        except OSError as error:
            return f"and {self.folder} cannot be read ({error.strerror})"
        if newest is None:
            return f"{free:,} are free; there is no older checkpoint"
        return f"{free:,} are free; the newest checkpoint remains {newest}"

    def _prune(self, graveyard: Path) -> None:
        numbers = self.config.checkpoint
        try:
            folders.prune(self.folder, graveyard, keep=numbers.keep, keep_every=numbers.keep_every)
        except OSError as error:
            self._report(f"an old checkpoint could not be deleted: {error}")

    def _rank0(self, action: Callable[[*Ts], Result], *arguments: *Ts) -> Result | None:
        return on_rank0(self.background, guarded, self.folder, action, *arguments)

    def _all_ranks(self, action: Callable[[*Ts], Result], *arguments: *Ts) -> Result:
        return on_all_ranks(self.background, guarded, self.folder, action, *arguments)


def _entries(folder: Path, names: Sequence[str]) -> dict[str, Entry]:
    return {name: entry_of(folder / name) for name in names}
