"""Private temporary folders of this node: other users can neither prepare nor read them.

$TMPDIR/dapo-UID, in a Slurm job dapo-UID-JOB   compile caches, which are code that this user runs;
                                                shared by the ranks of a node and later starts
$TMPDIR/dapo-UID-XXXXXXXX                       sockets of one process; the file through which the
                                                ranks that it starts meet
/dev/shm/dapo-UID-PORT                          lock of the shared memory dapo-UID-PORT-...

A process that uses such a folder holds a shared lock on it, which the kernel releases when the
process ends. A folder without a lock was left behind, and the next start deletes it.
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
"""Variable -> folder. Not in a home that nodes share, where ranks would wait for its locks."""
SOCKETS = "VLLM_RPC_BASE_PATH"
_MAX_SOCKET_FOLDER = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""A socket's address has 107 characters (unix(7)); vLLM appends a UUID."""

_held: list[int] = []
"""Open folders that are locked until this process ends."""


class _Refused(Exception):
    """A folder that another user has made or can write to; the text says why."""


def prepare_scratch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give compile caches and sockets of this process private folders. Variables that are set
    already stay as they are. Called on every rank, before a library reads the variables. Raises
    ConfigError if nothing can be written there."""
    try:
        _prepare(Path(tempfile.gettempdir()), environ)
    except OSError as error:
        where = error.filename or os.environ.get("TMPDIR", "/tmp")
        raise ConfigError(f"TMPDIR: {where}: {error.strerror}; name another folder") from error


def _prepare(parent: Path, environ: MutableMapping[str, str]) -> None:
    prefix, job = f"dapo-{os.geteuid()}", environ.get("SLURM_JOB_ID")
    if not environ.keys() >= CACHES.keys():
        caches = _hold_or_make(parent / (f"{prefix}-{job}" if job else prefix), prefix)
        for variable, name in CACHES.items():
            environ.setdefault(variable, str(caches / name))
    if SOCKETS not in environ:
        sockets = _make(parent, prefix)
        if len(str(sockets)) <= _MAX_SOCKET_FOLDER:
            environ[SOCKETS] = str(sockets)
    clear_abandoned(parent)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for this process only. If the process is killed, a later start deletes it."""
    folder = _make(Path(tempfile.gettempdir()), f"dapo-{os.geteuid()}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a private folder of this name, so that no start takes it for abandoned. The last process
    that holds it deletes it. No effect if it cannot be made, or another user has made it."""
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
    """Delete this user's folders in `parent` that no process holds any more, and the files
    FOLDER-... next to them."""
    for folder in parent.glob(f"dapo-{os.geteuid()}-*"):
        _clear(folder)


def _hold_or_make(folder: Path, prefix: str) -> Path:
    try:
        _held.append(_open(folder))
    except _Refused as refused:
        made = _make(folder.parent, prefix)
        print(f"warning: {folder}: {refused}. Compile caches are in {made}", file=sys.stderr)
        return made
    return folder


def _make(parent: Path, prefix: str) -> Path:
    """Make a new folder for this process only, deleted when it ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
        try:
            _held.append(_open(folder))
        except _Refused:  # deleted by another start before it was locked
            continue
        atexit.register(_remove_own, folder, os.getpid())
        return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path) -> int:
    """Make the folder if it is missing, check that only this user can write to it, and lock it,
    shared. Raises _Refused."""
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # deleted by another start, since nobody had locked it yet
            continue
        except OSError as error:
            raise _Refused(f"it is a link or no folder ({error.strerror})") from None
        about = os.fstat(handle)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            os.close(handle)
            raise _Refused(
                f"it belongs to user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}, "
                f"and must be of user {os.geteuid()}, mode 700"
            )
        with suppress(OSError):  # a file system without locks: nothing is cleared there
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_at(handle, folder):
            return handle
        os.close(handle)


def _clear(folder: Path) -> None:
    """Delete a folder of this user unless a process holds it, and the files FOLDER-..."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(handle, folder):
            return
        for path in folder.parent.glob(f"{folder.name}-*"):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                path.unlink()
        shutil.rmtree(folder)
    except OSError:  # held, or a file system without locks; or another start deletes it, too
        return
    finally:
        os.close(handle)


def _is_at(handle: int, folder: Path) -> bool:
    """Return True if the open folder still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), folder.lstat())
    except OSError:
        return False
