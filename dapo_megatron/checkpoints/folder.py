"""The folder of a run's checkpoints, `checkpoints/step_000012/`. Published checkpoints stay
complete even if the run is killed at any time.

Next to published checkpoints there may be:
- `.partial/`: checkpoints that are being written or deleted
- `.step_000012.replaced`: the old version, until the new one is renamed to `step_000012`
- `step_000012.1`: a checkpoint from steps that a resumed run does again
- `step_000012.damaged`: a checkpoint that failed verification

The manifest.json of a checkpoint lists all its files with size and SHA-256:

    {"files": {"__0_0.distcp": [3216, "9f86d0..."], ...}, "sha256": "..."}

The last entry is the SHA-256 of `files` itself, as compact JSON with sorted keys.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.files import (
    read_json,
    recover,
    sha256,
    sync_to_disk,
    write_json,
)
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError, DapoError

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")

LAST_READER = "447d080"
"""Commit that reads the runs, checkpoints and folders of earlier versions."""
STATE = "state.json"
MANIFEST = "manifest.json"
Entry = tuple[int, str]
"""(bytes, SHA-256 in hexadecimal) of a file."""
PARTIAL = ".partial"
DAMAGED = ".damaged"
_NAME = re.compile(r"step_(\d{6,})")


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step`."""
    return f"step_{step:06d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name. Suffixes such as `.1` and `.damaged` are ignored.
    Other names give 0."""
    match = _NAME.match(name)
    return int(match[1]) if match else 0


def published(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) for all entries with a checkpoint's name, newest first."""
    if not checkpoints.exists():
        return []
    paths = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(((step_of(path.name), path) for path in paths), reverse=True)


def newest(checkpoints: Path) -> Path | None:
    """Return the newest published checkpoint, or None. It is not verified."""
    paths = (path for _, path in published(checkpoints) if (path / STATE).exists())
    return next(paths, None)


def recover_checkpoints(checkpoints: Path) -> None:
    """Clean up after a kill: delete partially written or deleted checkpoints, and rename a
    checkpoint back whose replacement was not completed."""
    for replaced in checkpoints.glob(".step_*.replaced"):
        recover(checkpoints / replaced.stem.removeprefix("."))
    if (checkpoints / PARTIAL).exists():
        shutil.rmtree(checkpoints / PARTIAL)


def prune(checkpoints: Path, graveyard: Path, *, keep: int, keep_every: int | None) -> None:
    """Delete all checkpoints except the newest `keep` and multiples of `keep_every` steps."""
    for step, path in published(checkpoints)[keep:]:
        if keep_every is None or step % keep_every:
            # Rename first, because a partially deleted folder must not look like a checkpoint.
            shutil.rmtree(path.rename(graveyard / f"{path.name}.old"))


def free_name(path: Path) -> Path:
    """Return `path`, or the first of PATH.1, PATH.2, ... that does not exist."""
    free, number = path, 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json. Raises CheckpointError naming the file."""
    return read_json(checkpoint / STATE, "not a checkpoint's state")


@contextmanager
def restoring(checkpoint: Path | None) -> Iterator[None]:
    """Convert errors of a block that restores a state into CheckpointError naming state.json.

    Such an error means that the file is valid JSON with unexpected content.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if checkpoint is None:
            raise
        raise CheckpointError(
            f"{checkpoint / STATE}: not a state that this version can restore ({error!r:.200}); "
            "resume from another checkpoint, or use the version that wrote it"
        ) from error


def guarded(folder: Path, action: Callable[[*Ts], Result], *arguments: *Ts) -> Result:
    """Run `action`, which writes into `folder`. Convert OSError and DapoError into CheckpointError,
    which fails this checkpoint only."""
    try:
        return action(*arguments)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from error
    except DapoError as error:
        raise CheckpointError(str(error)) from error


# ------------------------------------------------------------------ manifest.json


def entry_of(path: Path) -> Entry:
    """Return size and SHA-256 of a file. Raises OSError."""
    return path.stat().st_size, sha256(path)


def write_manifest(folder: Path, known: Mapping[str, Entry]) -> None:
    """Write manifest.json for all files in `folder`, and sync them to disk.

    Files whose entry is not in `known` are read to compute their SHA-256.
    """
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            files[name] = entry_of(path)
        sync_to_disk(path)
    write_json(folder / MANIFEST, {"files": files, "sha256": _sum_of(files)})


def read_manifest(checkpoint: Path) -> dict[str, Entry]:
    """Return entries by file name. Raises CheckpointError for a manifest that has changed."""
    path = checkpoint / MANIFEST
    manifest = read_json(path, "not a manifest")
    files = manifest.get("files")
    if not isinstance(files, dict) or _sum_of(files) != manifest.get("sha256"):
        raise CheckpointError(f"{path}: its own checksum differs")
    for name, entry in files.items():
        # Names with a folder, such as hf/model.safetensors, are valid.
        if not name.isprintable() or not name or name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(
                f"{path}: lists {name!r}, which is outside of the checkpoint or no name"
            )
        if not isinstance(entry, list) or [type(field) for field in entry] != [int, str]:
            raise CheckpointError(f"{path}: the entry of {name} is not [bytes, SHA-256]")
    return {name: (entry[0], entry[1]) for name, entry in files.items()}


def fault_of(checkpoint: Path, exchange: Exchange) -> str | None:
    """Return the first fault of a published checkpoint, as "file: fault", or None.

    Each rank reads and verifies a share of the files. Collective; all ranks return the same result.
    """
    try:
        files = on_rank0(exchange, _checked_entries, checkpoint)
    except CheckpointError as error:
        return str(error)
    files = exchange.broadcast(files or {}, dict[str, Entry])
    names = sorted(files)[exchange.rank :: exchange.world_size]
    faults = (_file_fault(checkpoint / name, files[name]) for name in names)
    first_faults = exchange.all_gather(next(filter(None, faults), None), str | None)
    return next(filter(None, first_faults), None)


def check_folder(folder: Path, exchange: Exchange) -> None:
    """Raise CheckpointError on all ranks naming a damaged file of a folder with weights, if it has
    a manifest. Collective."""
    has_manifest = exchange.broadcast((folder / MANIFEST).exists(), bool)
    if has_manifest and (fault := fault_of(folder, exchange)):
        raise CheckpointError(f"{folder} is damaged: {fault}")


def damaged_file(folder: Path) -> str | None:
    """Return what `fault_of` does, for a folder with a state and a manifest. Not collective."""
    try:
        files = _checked_entries(folder)
    except CheckpointError as error:
        return str(error)
    faults = (_file_fault(folder / name, entry) for name, entry in files.items())
    return next(filter(None, faults), None)


def _checked_entries(checkpoint: Path) -> dict[str, Entry]:
    """Return the manifest's entries, after checking that all files exist with the right size.
    Raises CheckpointError."""
    read_state(checkpoint)
    files = read_manifest(checkpoint)
    if STATE not in files:
        raise CheckpointError(f"{checkpoint / MANIFEST}: does not list {STATE}")
    for name, (num_bytes, _) in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if (size := path.stat().st_size) != num_bytes:
            raise CheckpointError(f"{path}: has {size:,} bytes, but {num_bytes:,} were written")
    return files


def _file_fault(path: Path, entry: Entry) -> str | None:
    try:
        is_same = entry_of(path) == entry
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None if is_same else f"{path}: its SHA-256 differs from the manifest"


def _sum_of(files: Mapping[str, object]) -> str:
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
