"""Check that no other user can redirect what is written into a folder.

A folder that another user has prepared may contain links to private files of this user, which a run
would overwrite. So before anything is written, each entry must belong to this user or to root. Then
only trusted users can create entries later, and files are opened as usual.

If the umask lets the group write, members of this user's groups are trusted too: for folders, and
for files with one name, outside of folders to which any user may write.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from dapo_megatron.types import ConfigError


def check_entries(*paths: Path, key: str = "run.name") -> None:
    """Check entries, if they exist; a folder comes before its entries. Raises ConfigError naming
    `key`, or OSError."""
    groups = _trusted_groups()
    for path in paths:
        with suppress(FileNotFoundError):
            _check(path, path.lstat(), path.parent.stat(), groups, key)


def check_tree(folder: Path, key: str = "run.name") -> str:
    """Check a folder and everything in it. Return a warning, or "". Raises ConfigError naming
    `key`, or OSError. Links are not followed, except `folder` itself."""
    check_entries(folder, folder.resolve(), key=key)
    groups = _trusted_groups()
    above = (path for path in folder.resolve().parents if _may_rename(path.stat()))
    open_folder = str(next(above, ""))
    folders = [str(folder)]
    while folders:
        inside = folders.pop()
        with suppress(FileNotFoundError), os.scandir(inside) as entries:  # deleted meanwhile
            parent = os.stat(inside)
            if parent.st_mode & stat.S_IWOTH:
                open_folder = inside
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                _check(entry.path, status, parent, groups, key)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.path)
    if not open_folder:
        return ""
    return (
        f"warning: {key}: any user may write to {open_folder}, and could replace files of "
        "this run. Use chmod o-w (above the run's folder, chmod +t is enough)"
    )


def _check(
    path: str | Path, entry: os.stat_result, parent: os.stat_result, groups: set[int], key: str
) -> None:
    """Raise ConfigError if another user may have created `path`."""
    is_file = stat.S_ISREG(entry.st_mode)
    # In a shared folder another user can give a file of this user a second name.
    is_single = not is_file or entry.st_nlink == 1
    is_shared = bool(parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    is_of_group = (
        entry.st_gid in groups
        and (stat.S_ISDIR(entry.st_mode) or (is_file and is_single))
        and not parent.st_mode & stat.S_IWOTH
    )
    is_trusted = entry.st_uid in (os.geteuid(), 0) or is_of_group
    if not is_trusted and not stat.S_ISLNK(entry.st_mode):
        folder = path if stat.S_ISDIR(entry.st_mode) else Path(path).parent
        is_trusted = entry.st_uid == _shown_owner(folder)
    if is_trusted and (is_single or not is_shared):
        return
    kind = "a folder" if stat.S_ISDIR(entry.st_mode) else "a file"
    kind = f"a link to {os.readlink(path)}" if stat.S_ISLNK(entry.st_mode) else kind
    names = "" if is_single else f" with {entry.st_nlink} names"
    raise ConfigError(
        f"{key}: {path} is {kind}{names} that user {entry.st_uid} has created. It could make this "
        "command write to other files. Delete it, or choose another folder (docs/cluster.md "
        "describes how a group shares a run)"
    )


def _shown_owner(folder: str | Path) -> int | None:
    """Return the owner that the file system shows for a new file: NFS may squash users."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_uid
    return None


def _trusted_groups() -> set[int]:
    """Return this user's groups if the umask lets the group write."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        # os.umask would change it for a moment, for all threads.
        umask = next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)
        return set() if umask & stat.S_IWGRP else {os.getegid(), *os.getgroups()}
    return set()


def _may_rename(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
