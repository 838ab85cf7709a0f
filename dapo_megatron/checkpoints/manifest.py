"""manifest.json: every file of a checkpoint with its size and SHA-256, and proof that they are so.

    {"files": {"rank_00000.safetensors": [3216, "9f86d0..."], ...}, "sha256": "..."}

The last is the sum of `files` itself, as compact JSON with sorted keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from dapo_megatron.checkpoints.folder import STATE, read_state
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.files import read_json, sync_to_disk, write_json
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import CheckpointError

MANIFEST = "manifest.json"
Entry = tuple[int, str]
"""(bytes, SHA-256 in hexadecimal) of a file."""


def entry_of(path: Path) -> Entry:
    """Read a file through. Raises OSError."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, known: Mapping[str, Entry]) -> None:
    """Write manifest.json for all files in `folder`; those not `known` are read for it, and all of
    them brought to the disk."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            files[name] = entry_of(path)
        sync_to_disk(path)
    write_json(folder / MANIFEST, {"files": files, "sha256": _sum_of(files)})


def has_manifest(checkpoint: Path) -> bool:
    """False for checkpoints of versions that wrote none."""
    return (checkpoint / MANIFEST).exists() or bool(read_state(checkpoint).get("manifest"))


def read_manifest(checkpoint: Path) -> dict[str, Entry]:
    """Entries by file name. Raises CheckpointError for what is not as it was written."""
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
