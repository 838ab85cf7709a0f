"""Small files that are there whole or not at all, and reading JSON ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

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
    """Write a text whole or not at all; see `whole`. Raises OSError."""
    with whole(path, durable=durable) as file:
        file.write(text.encode())


@contextmanager
def whole(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes its name when all is written: a reader sees the old one or the
    new one; if `durable`, after a power cut too. A part that was written goes, for it holds room
    that others need."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with ExitStack() as undo:
        undo.callback(_remove, partial)
        with partial.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
        undo.pop_all()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def sync_to_disk(path: Path) -> None:
    """Make a file, or what was created or renamed in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
