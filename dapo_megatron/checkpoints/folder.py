"""The folder of a run's checkpoints, `checkpoints/step_000012/`. A kill at any moment leaves every
published checkpoint complete.

`step_000012_open/` belongs to a run that was stopped in the middle of step 13. It has groups of
that step, and maybe weights of some of its updates. The run resumes from it until there is a newer
checkpoint.

Next to published checkpoints there may be `.partial/` (being written, or being deleted),
`.step_000012.replaced` (until the new one has its name), `step_000012.1` (of a past that is done
again) and `step_000012.damaged`.

Its manifest.json has every file of a checkpoint with its size and SHA-256:

    {"files": {"rank_00000.safetensors": [3216, "9f86d0..."], ...}, "sha256": "..."}

The last is the sum of `files` itself, as compact JSON with sorted keys.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.files import read_json, recover, replaced_by, sync_to_disk, write_json
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError

STATE = "state.json"
MANIFEST = "manifest.json"
Entry = tuple[int, str]
"""(bytes, SHA-256 in hexadecimal) of a file."""
PARTIAL = ".partial"
DAMAGED = ".damaged"
_OPEN = "_open"
_NAME = re.compile(rf"step_(\d{{6,}})({_OPEN})?")


def name_of(step: int, *, is_open: bool = False) -> str:
    """Return the name of the checkpoint after a step; `is_open`: within the step that follows."""
    return f"step_{step:06d}{_OPEN if is_open else ''}"


def place_of(name: str) -> tuple[int, bool]:
    """Return (step, whether within the step that follows) for a checkpoint's name. Checkpoints are
    ordered by it. What is appended to the name of one set aside does not count."""
    match = _NAME.match(name)
    return (int(match[1]), match[2] is not None) if match else (0, False)


def published(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of everything with a checkpoint's name, newest first."""
    if not checkpoints.exists():
        return []
    paths = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name)]
    paths.sort(key=lambda path: place_of(path.name), reverse=True)
    return [(place_of(path.name)[0], path) for path in paths]


def newest(checkpoints: Path) -> Path | None:
    """Return the newest published checkpoint of a folder, or None. It is not verified."""
    paths = (path for _, path in published(checkpoints) if (path / STATE).exists())
    return next(paths, None)


def recover_checkpoints(checkpoints: Path) -> None:
    """Complete what a kill interrupted. Half-written and half-deleted checkpoints are deleted, and
    one that was about to be replaced gets its name back."""
    for replaced in checkpoints.glob("step_*.replaced"):  # as older versions named them
        replaced.rename(replaced_by(replaced.with_suffix("")))
    for replaced in checkpoints.glob(".step_*.replaced"):
        recover(checkpoints / replaced.stem.removeprefix("."))
    # The second: as older versions named them.
    for half in (checkpoints / PARTIAL, *checkpoints.glob("step_*.partial")):
        if half.exists():
            shutil.rmtree(half)


def prune(checkpoints: Path, graveyard: Path, *, keep: int, keep_every: int | None) -> None:
    """Delete all except the newest `keep` and those of steps that are multiples of `keep_every`.
    One within a step does not count, and is deleted unless it is the newest of all."""
    everything = published(checkpoints)
    between = [(step, path) for step, path in everything if not _is_open(path)]
    old = [path for step, path in between[keep:] if keep_every is None or step % keep_every]
    for path in (*old, *(path for _, path in everything[1:] if _is_open(path))):
        # Renamed first: a half-deleted folder must not look like a checkpoint.
        shutil.rmtree(path.rename(graveyard / f"{path.name}.old"))


def _is_open(path: Path) -> bool:
    return place_of(path.name)[1]


def free_name(path: Path) -> Path:
    """Return `path`, or the first of PATH.1, PATH.2, ... that is free."""
    free, number = path, 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state saved with a checkpoint. Raises CheckpointError naming the file."""
    return read_json(checkpoint / STATE, "not a checkpoint's state")


@contextmanager
def restoring(checkpoint: Path | None) -> Iterator[None]:
    """Name the file if its state, valid JSON, is not of the form that the caller restores."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if checkpoint is None:
            raise
        raise CheckpointError(
            f"{checkpoint / STATE}: not a state that this version can restore ({error!r:.200}); "
            "resume from another checkpoint, or with the version that wrote it"
        ) from error


# ------------------------------------------------------------------ manifest.json


def entry_of(path: Path) -> Entry:
    """Read a file through. Raises OSError."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, known: Mapping[str, Entry]) -> None:
    """Write manifest.json for all files in `folder`. Those not `known` are read for it, and all of
    them are synced to disk."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            files[name] = entry_of(path)
        sync_to_disk(path)
    write_json(folder / MANIFEST, {"files": files, "sha256": _sum_of(files)})


def has_manifest(checkpoint: Path) -> bool:
    """Return False for checkpoints of versions that wrote no manifest."""
    return (checkpoint / MANIFEST).exists() or bool(read_state(checkpoint).get("manifest"))


def read_manifest(checkpoint: Path) -> dict[str, Entry]:
    """Return entries by file name. Raises CheckpointError for a manifest that has changed."""
    path = checkpoint / MANIFEST
    manifest = read_json(path, "not a manifest")
    files = manifest.get("files")
    if not isinstance(files, dict) or _sum_of(files) != manifest.get("sha256"):
        raise CheckpointError(f"{path}: not as it was written (its own sum differs)")
    for name, entry in files.items():
        if not isinstance(entry, list) or [type(field) for field in entry] != [int, str]:
            raise CheckpointError(f"{path}: the entry of {name} is not [bytes, SHA-256]")
        # hf/model.safetensors is a name too.
        if not name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{path}: names {name!r}, which is not in the checkpoint")
    return {name: (entry[0], entry[1]) for name, entry in files.items()}


def fault_of(checkpoint: Path, exchange: Exchange) -> str | None:
    """Return what is wrong with a published checkpoint, as `file: what`, or None. All ranks read
    the files together, each its share. Collective, with the same answer everywhere."""
    try:
        files = on_rank0(exchange, lambda: _listed(checkpoint))
    except CheckpointError as error:
        return str(error)
    files = exchange.broadcast(files or {}, dict[str, Entry])
    mine = sorted(files)[exchange.rank :: exchange.world_size]
    faults = (_differs(checkpoint / name, files[name]) for name in mine)
    first_faults = exchange.all_gather(next(filter(None, faults), None), str | None)
    return next(filter(None, first_faults), None)


def _listed(checkpoint: Path) -> dict[str, Entry]:
    """Return the entries of a checkpoint whose files are all there, with their sizes. Without a
    manifest there are none. Raises CheckpointError."""
    read_state(checkpoint)
    if not has_manifest(checkpoint):
        return {}
    files = read_manifest(checkpoint)
    if STATE not in files:
        raise CheckpointError(f"{checkpoint / MANIFEST}: does not name {STATE}")
    for name, (num_bytes, _) in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if (size := path.stat().st_size) != num_bytes:
            raise CheckpointError(f"{path}: {size:,} bytes, {num_bytes:,} were written")
    return files


def _differs(path: Path, entry: Entry) -> str | None:
    try:
        is_same = entry_of(path) == entry
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None if is_same else f"{path}: not what was written (its SHA-256 differs)"


def _sum_of(files: Mapping[str, object]) -> str:
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
