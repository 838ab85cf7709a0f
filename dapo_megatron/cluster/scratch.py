"""Private temporary folders on this node, which other users can neither create in advance nor read.

$TMPDIR/dapo-UID, in a Slurm job dapo-UID-JOB   compile caches, which contain code that this user
                                                runs; shared by the ranks of a node and later starts
$TMPDIR/dapo-UID-XXXXXXXX                       sockets of one process, and the store file of the
                                                ranks that it starts
/dev/shm/dapo-UID-PID                           lock of an engine's shared memory, dapo-UID-PID-...

A process that uses such a folder holds a shared lock on it. The kernel releases the lock when the
process ends. The next start deletes folders without a lock.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dapo_megatron.types import ConfigError

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Environment variable -> folder name. The caches are not in a home that nodes share, because ranks
would wait for file locks there."""
SOCKETS = "VLLM_RPC_BASE_PATH"
_MAX_SOCKET_FOLDER = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""Maximum length of the folder's path: a socket address has at most 107 characters (unix(7)), and
vLLM appends a UUID."""

_PREFIX = f"dapo-{os.geteuid()}"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_locked_folders: list[int] = []
"""Descriptors of folders that are locked until this process ends."""


class _Refused(Exception):
    """A folder is not private to this user; the text gives the reason."""


def prepare_scratch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of compile caches and sockets to private folders, unless they are set.

    Called on every rank before a library reads the variables. Raises ConfigError if the temporary
    directory is not writable.
    """
    try:
        _prepare(Path(tempfile.gettempdir()), environ)
    except OSError as error:
        where = error.filename or os.environ.get("TMPDIR", "/tmp")
        raise ConfigError(f"TMPDIR: {where}: {error.strerror}; choose another folder") from error


def _prepare(parent: Path, environ: MutableMapping[str, str]) -> None:
    if not environ.keys() >= CACHES.keys():
        job = environ.get("SLURM_JOB_ID")
        caches = parent / (f"{_PREFIX}-{job}" if job else _PREFIX)
        try:
            _locked_folders.append(_open(caches))
        except _Refused as refused:
            warning, caches = f"warning: {caches}: {refused}", private_folder(parent)
            print(f"{warning}. Compile caches are in {caches}", file=sys.stderr)
        for variable, name in CACHES.items():
            environ.setdefault(variable, str(caches / name))
    if SOCKETS not in environ:
        sockets = private_folder(parent)
        if len(str(sockets)) <= _MAX_SOCKET_FOLDER:
            environ[SOCKETS] = str(sockets)
    clear_abandoned(parent)


def socket_folder() -> Path:
    """Return a folder for sockets of this process."""
    if SOCKETS not in os.environ:
        prepare_scratch()
    return Path(os.environ[SOCKETS])


def private_folder(parent: Path | None = None) -> Path:
    """Create a folder for this process, by default in the temporary directory. It is deleted when
    the process ends, or by a later start if the process is killed."""
    parent = parent or Path(tempfile.gettempdir())
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-", dir=parent))
        try:
            _locked_folders.append(_open(folder))
        except _Refused:  # deleted by another start before it was locked
            continue
        atexit.register(_remove_at_exit, folder, os.getpid())
        return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create and lock a private folder of this name, so that no start deletes it as abandoned.

    The last process to release the lock deletes the folder. No effect if the folder cannot be
    created or belongs to another user.
    """
    try:
        handle = _open(folder)
    except (_Refused, OSError):
        yield
        return
    try:
        yield
    finally:
        os.close(handle)
        _clear(folder)


def clear_abandoned(parent: Path) -> None:
    """Delete this user's unlocked folders in `parent`, and the files FOLDER-... next to them."""
    for folder in parent.glob(f"{_PREFIX}-*"):
        _clear(folder)


def _remove_at_exit(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path) -> int:
    """Create the folder if it is missing, check that it is private to this user, and take a shared
    lock. Return its descriptor. Raises _Refused."""
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            handle = os.open(folder, _FLAGS)
        except FileNotFoundError:  # deleted by another start before it was locked
            continue
        except OSError as error:
            raise _Refused(f"it is a link or not a folder ({error.strerror})") from None
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(handle)
            mode = stat.S_IMODE(status.st_mode)
            raise _Refused(f"it is not private to you (user {status.st_uid}, mode {mode:o})")
        with suppress(OSError):  # a file system without locks, where `_clear` deletes nothing
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_at(handle, folder):
            return handle
        os.close(handle)


def _clear(folder: Path) -> None:
    """Delete a folder of this user, and the files FOLDER-..., unless a process has locked it."""
    with suppress(OSError):  # a link, locked, without locks, or deleted by another start
        handle = os.open(folder, _FLAGS)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_uid != os.geteuid() or not _is_at(handle, folder):
                return
            for path in folder.parent.glob(f"{folder.name}-*"):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    path.unlink()
            shutil.rmtree(folder)
        finally:
            os.close(handle)


def _is_at(handle: int, folder: Path) -> bool:
    """Return whether the open folder still has this path."""
    try:
        return os.path.samestat(os.fstat(handle), folder.lstat())
    except OSError:
        return False
