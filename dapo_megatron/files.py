"""Write files and folders atomically, recover after a kill, read files of others, lock files, and
compute their checksums."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dapo_megatron.types import CheckpointError, ConfigError, DapoError

MAX_DEPTH = 64
"""Deepest nesting of lists and objects in a file. Python's own recursion limit is not enough: a
value just below that limit parses here, and raises RecursionError in later code that walks it."""

MAX_FILE_BYTES = 256 << 20
"""Largest file to read whole."""

_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


TOO_DEEP = f"nested more than {MAX_DEPTH} deep"


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse JSON.

    Raises ValueError for invalid JSON, bytes that are not UTF-8, a number with too many digits and
    nesting deeper than MAX_DEPTH. With `unique_keys` a repeated key is an error too.
    """
    if isinstance(text, bytes):
        text = text.decode()  # json.loads accepts UTF-16 bytes, which other readers refuse
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (json.JSONDecodeError, _RepeatedKeyError):
        raise
    except ValueError as error:
        raise ValueError("a number has too many digits; write it as a string") from error
    check_depth(value)
    return value


class _RepeatedKeyError(ValueError):
    """A JSON object has two values for the same key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise _RepeatedKeyError(f"the key {repeated!r:.60} is given twice; remove one of them")
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and dicts are nested deeper than MAX_DEPTH, or contain themselves.

    Each container of a level is visited once, because YAML aliases can repeat a container
    exponentially often.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = {id(item): item for item in level if isinstance(item, dict | list)}
        if not containers:
            return
        level = [
            child
            for item in containers.values()
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    raise ValueError(TOO_DEEP)


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading that another user may have made.

    Raises OSError if it is not a regular file: opening a FIFO would wait, and a device may have no
    end. Also raises it for another user's link to a file that is not his, because it may be a
    private file of this user.
    """
    return open(path, "rb", buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    try:
        status, link = os.fstat(handle), os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)
        owners = (os.geteuid(), 0, status.st_uid)
        if stat.S_ISLNK(link.st_mode) and link.st_uid not in owners:
            raise PermissionError(
                errno.EPERM, f"A link of user {link.st_uid} to a file of user {status.st_uid}", path
            )
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file that another user may have made; see `open_regular`. Raises OSError, also
    if it is longer than `max_bytes`."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= max_bytes:
            data = file.read(max_bytes + 1)
            if len(data) <= max_bytes:
                return data
    raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", str(path))


def read_json(
    path: Path,
    otherwise: str = "not a JSON object",
    error: type[DapoError] = CheckpointError,
) -> dict[str, Any]:
    """Read a JSON object.

    Raises `error` naming the file. `otherwise` is its message for JSON that is not an object.
    """
    try:
        value = parse_json(read_file(path))
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else fault
        raise error(f"{path}: cannot be read ({reason})") from fault
    if not isinstance(value, dict):
        raise error(f"{path}: {otherwise}")
    return value


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write JSON atomically; see `atomic_write`."""
    write_text(path, json.dumps(value), durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write text atomically; see `atomic_write`. Raises OSError."""
    with atomic_write(path, durable=durable) as file:
        file.write(text.encode())


def check_result(path: Path | None) -> Path | None:
    """Raise ConfigError if `path`, of the option --json, cannot be written. Return it."""
    if path is None:
        return None
    folder, is_new = path.absolute().parent, not path.exists()
    if not folder.is_dir():
        raise ConfigError(f"--json: {folder} is not a folder; make it first")
    try:
        path.open("ab").close()  # root may write everywhere, but not in /proc
    except OSError as error:
        raise ConfigError(f"--json: {path}: {error.strerror}; name another file") from error
    if is_new:
        path.unlink(missing_ok=True)
    return path


def write_result(path: Path | None, text: str) -> None:
    """Write the results of a command to the file of its option --json. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path}: {error.strerror}") from error


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that is renamed to `path` when the block ends, so a reader sees either the old
    file or the new one. With `durable` this also holds after a power cut. If the block raises, the
    partial file is deleted to free its disk space."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _remove(partial)  # left by a killed process that had the same pid
    with ExitStack() as undo:
        undo.callback(_remove, partial)
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


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder to write in, and delete it when the block ends. A folder that a killed
    process left under this name is deleted first."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_folder(partial: Path, final: Path) -> None:
    """Rename a complete folder to its final name. A folder that already has this name is moved to
    `replaced_by(final)` first and deleted at the end."""
    sync_to_disk(partial)
    try:
        if final.exists():
            final.rename(replaced_by(final))
        partial.rename(final)
        sync_to_disk(final.parent)
    finally:
        recover(final)


def replaced_by(final: Path) -> Path:
    """Return the temporary path of a folder while another folder takes its name."""
    return final.with_name(f".{final.name}.replaced")


def recover(final: Path) -> None:
    """Complete or undo an interrupted `publish_folder`. If the new folder has the final name, the
    old folder is deleted. Otherwise the old folder gets its name back."""
    replaced = replaced_by(final)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        replaced.rename(final)


def sync_to_disk(path: Path) -> None:
    """Call fsync on a file, or on a folder so that new and renamed entries survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, or create it if it is missing. Existing content is kept.

    Raises ConfigError for a symbolic link: in a folder that other users may write to, it could
    point to any file of this user. Raises OSError for other failures.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(
            f"{path}: a link to {os.readlink(path)}. dapo_megatron never creates a link there. "
            "Find out who did, and remove it"
        ) from None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as a hexadecimal string."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def try_lock(file: BinaryIO, path: Path) -> bool:
    """Lock an open file. Return False if another process has locked it.

    Raises ConfigError if the file system has no locks: a retry would not help, and without a lock
    two runs could overwrite each other's files.
    """
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
            "(for a run: set run.directory)"
        ) from None
    return True
