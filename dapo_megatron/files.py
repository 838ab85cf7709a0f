"""Small files that are there whole or not at all, and reading JSON ones."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_megatron.types import CheckpointError


def read_json(path: Path, otherwise: str = "not a JSON object") -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file; `otherwise` is what other JSON is."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {otherwise}")
    return value


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write JSON whole or not at all; see `write_text`."""
    write_text(path, json.dumps(value), durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """A reader sees the old text or the new one; if `durable`, after a power cut too. Raises
    OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()  # it holds room that others need
        raise


def sync_to_disk(path: Path) -> None:
    """Make a file, or what was created or renamed in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
