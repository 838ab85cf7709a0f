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
from typing import NoReturn

from dapo_megatron.types import ConfigError


class _Writers:
    """Users who may have created an entry: this user and root.

    If the umask lets the group write, these are also members of this user's groups. A file can have
    only a group of its owner, except in a folder that any user may write to.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._users = {os.geteuid(), 0}
        self._groups = {os.getegid(), *os.getgroups()} if _umask() & stat.S_IWGRP == 0 else set()
        self.open_folder = ""
        """The first folder to which any user may write; empty if there is none."""

    def check(self, path: str | Path, status: os.stat_result, parent: os.stat_result) -> None:
        """Raise ConfigError if another user may have created `path`."""
        mode, owner = status.st_mode, status.st_uid
        is_folder, is_file = stat.S_ISDIR(mode), stat.S_ISREG(mode)
        num_names = status.st_nlink if is_file else 1
        if is_folder and mode & stat.S_IWOTH and not self.open_folder:
            self.open_folder = str(path)
        is_of_group = (
            status.st_gid in self._groups
            and (is_folder or (is_file and num_names == 1))
            and not parent.st_mode & stat.S_IWOTH
        )
        # In a shared folder another user can give a file of this user a second name.
        is_single = num_names == 1 or not parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_trusted = owner in self._users or is_of_group or self._is_this_user(path, status)
        if not (is_single and is_trusted):
            self._refuse(path, status, num_names)

    def _refuse(self, path: str | Path, status: os.stat_result, num_names: int) -> NoReturn:
        mode = status.st_mode
        kind = "a folder" if stat.S_ISDIR(mode) else "a file"
        kind = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else kind
        names = f" with {num_names} names" if num_names > 1 else ""
        raise ConfigError(
            f"{self._key}: {path} is {kind}{names} that user {status.st_uid} has created. "
            "It could make this command write to other files. Delete it, or choose another folder "
            "(docs/cluster.md describes how a group shares a run)"
        )

    def _is_this_user(self, path: str | Path, status: os.stat_result) -> bool:
        """Return whether the file system shows a new file of this user as one of the same owner, as
        NFS does with root's."""
        if not stat.S_ISLNK(status.st_mode):
            folder = path if stat.S_ISDIR(status.st_mode) else Path(path).parent
            with suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
                self._users.add(os.fstat(probe.fileno()).st_uid)
        return status.st_uid in self._users


def check_entries(*paths: Path, key: str = "run.name") -> None:
    """Check entries, if they exist; a folder comes before its entries. Raises ConfigError naming
    `key`, or OSError."""
    writers = _Writers(key)
    for path in paths:
        with suppress(FileNotFoundError):
            writers.check(path, path.lstat(), path.parent.stat())


def check_tree(folder: Path, key: str = "run.name") -> str:
    """Check a folder and everything in it. Return a warning, or "". Raises ConfigError naming
    `key`, or OSError. Links are not followed, except `folder` itself."""
    writers = _Writers(key)
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
    if open_folder := writers.open_folder or next(map(str, above), ""):
        return (
            f"warning: {key}: any user may write to {open_folder}, and could replace files of "
            "this run. Use chmod o-w (above the run's folder, chmod +t is enough)"
        )
    return ""


def _may_rename(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX


def _umask() -> int:
    """Return the umask. os.umask would change it for a moment, for all threads."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)
    return 0o077
