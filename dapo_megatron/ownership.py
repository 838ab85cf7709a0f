"""Check that no other user can redirect what is written into a folder.

A folder that another user has prepared may contain links to private files of this user, which a run
would overwrite. So before anything is written, each entry must belong to this user or to root. Then
only trusted users can create entries later, and files are opened as usual.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from dapo_megatron.types import ConfigError


class Writers:
    """Users who may have created the entries of `folder`: this user and root.

    If the umask lets the group write, these are also members of this user's groups (a file can have
    only a group of its owner, except in a folder that any user may write to).
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._users = {os.geteuid(), 0}
        self._groups = {os.getegid(), *os.getgroups()} if _umask() & stat.S_IWGRP == 0 else set()
        self.open_folder = ""
        """A folder in which any user can replace entries of others; empty if there is none."""

    def check(self, path: str | Path, status: os.stat_result, parent: os.stat_result) -> None:
        """Raise ConfigError if `path` may be of another user."""
        mode, owner = status.st_mode, status.st_uid
        is_folder, is_link = stat.S_ISDIR(mode), stat.S_ISLNK(mode)
        is_plain = is_folder or (stat.S_ISREG(mode) and status.st_nlink == 1)
        is_shared = bool(parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        is_open = bool(parent.st_mode & stat.S_IWOTH)
        if is_folder and mode & stat.S_IWOTH and not self.open_folder:
            self.open_folder = str(path)
        if owner in self._users or self._is_this_user(owner):
            # Another user can give a file of this user a second name in a shared folder.
            if is_plain or not is_shared or not stat.S_ISREG(mode):
                return
        elif status.st_gid in self._groups and is_plain and not is_open:
            return
        kind = "a folder" if is_folder else "a file"
        kind = f"a link to {os.readlink(path)}" if is_link else kind
        names = f" with {status.st_nlink} names" if status.st_nlink > 1 and not is_folder else ""
        raise ConfigError(
            f"{self._key}: {path} is {kind}{names} that user {owner} has created. It could make "
            "this command write into other files. Delete it, or choose another folder "
            "(docs/cluster.md describes how a group shares a run)"
        )

    def _is_this_user(self, owner: int) -> bool:
        """Return whether the file system shows this user's files as those of `owner`, as NFS does
        with root's."""
        if self._folder.is_symlink() or self._folder.stat().st_uid != owner:
            return False
        with suppress(OSError), tempfile.TemporaryFile(dir=self._folder) as probe:
            self._users.add(os.fstat(probe.fileno()).st_uid)
        return owner in self._users


def check_entries(folder: Path, *names: str, key: str = "run.name") -> None:
    """Check a folder and some of its entries, if they exist; each name's folder comes before it.
    Raises ConfigError naming `key`, or OSError."""
    writers = Writers(folder, key)
    for path in (folder, folder.resolve(), *(folder / name for name in names)):
        with suppress(FileNotFoundError):
            writers.check(path, path.lstat(), path.parent.stat())


def check_tree(folder: Path, key: str = "run.name") -> str:
    """Check a folder and everything in it. Return a warning, or "". Raises ConfigError naming
    `key`, or OSError. Links are not followed."""
    writers = Writers(folder, key)
    for path in (folder, folder.resolve()):
        writers.check(path, path.lstat(), path.parent.stat())
    folders = [str(folder)]
    while folders:
        inside = folders.pop()
        with suppress(FileNotFoundError), os.scandir(inside) as entries:  # deleted meanwhile
            parent = os.stat(inside)
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                writers.check(entry.path, status, parent)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.path)
    above = (path for path in folder.resolve().parents if _may_rename(path.stat()))
    open_folder = writers.open_folder or next(map(str, above), "")
    return (
        f"warning: {key}: any user can replace files of this run, because {open_folder} can be "
        f"written by all: use chmod o-w, or chmod +t for a folder above the run"
        if open_folder
        else ""
    )


def _may_rename(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX


def _umask() -> int:
    """Return the umask. os.umask would change it for a moment, for all threads."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)
    return 0o077
