"""Small files that are there whole or not at all, reading JSON ones, and lock files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dapo_megatron.types import CheckpointError, ConfigError

_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


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
    _remove(partial)  # of a process that had this number and was killed
    with ExitStack() as undo:
        undo.callback(_remove, partial)
        # "x": in a folder that others may write to, the name could be a link by now.
        with partial.open("xb") as file:
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


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, and create it if it is missing. Its content stays. Raises ConfigError for a
    link: in a folder that others may write to, it could lead to any file of this user. Else raises
    OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(
            f"{path}: a link to {os.readlink(path)}; this program makes no such link. Find out who "
            "did, and remove it"
        ) from None


def try_lock(file: BinaryIO, path: Path) -> bool:
    """Lock an open file; False if another process has locked it. Raises ConfigError where the file
    system has no locks: a retry would not help, and two runs would write over each other."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        raise ConfigError(
            f"{path}: the file system of {path.parent.absolute()} has no flock "
            f"({error.strerror}). Mount it with flock (Lustre: -o flock), or use another folder "
            "(of a run: run.directory)"
        ) from None
    return True
