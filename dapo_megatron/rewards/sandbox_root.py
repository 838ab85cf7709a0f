"""The files that a program in the sandbox sees: the interpreter, packages, system libraries."""

from __future__ import annotations

import functools
import os
import shutil
import site
import sys
import sysconfig
from pathlib import Path

FOLDER = "/program"
"""The folder of a program. Not /tmp, where the run's own environment may lie."""
DEVICES = ("null", "zero", "full", "random", "urandom")


def interpreter() -> str:
    """The interpreter itself: the links of a virtual environment lead to it."""
    return os.path.realpath(sys.executable)


def tool(name: str) -> str:
    """Return the path of a program, found on this process's PATH and not on the sandbox's."""
    return shutil.which(name) or f"/usr/bin/{name}"


@functools.cache
def package_folders() -> tuple[str, ...]:
    """Folders of installed packages, without the modules of this project or of a user's path."""
    folders = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib")])
    return tuple(folder for folder in folders if os.path.isdir(folder))


@functools.cache
def _hidden_folder() -> str | None:
    """Packages of the interpreter under a virtual environment, which are not those of the run."""
    folder = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    return folder if folder not in package_folders() and os.path.isdir(folder) else None


def library_path() -> dict[str, str]:
    """LD_LIBRARY_PATH, which the interpreter of a module system may need."""
    return {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}


def _library_folders() -> list[str]:
    """Entries of LD_LIBRARY_PATH that hold shared libraries, and neither a home nor above one."""
    entries = library_path().get("LD_LIBRARY_PATH", "").split(os.pathsep)
    home = Path.home()
    return [
        entry
        for entry in entries
        if any(Path(entry).glob("*.so*")) and Path(entry) not in (home, *home.parents)
    ]


@functools.cache
def _visible_paths() -> tuple[str, ...]:
    """Files and folders that a program can read, each under its own name. Outer ones come first."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, "/usr"}
    paths = {
        *(f"{prefix}/{name}" for prefix in prefixes for name in ("lib", "lib64")),
        *package_folders(),
        *(folder for folder in _library_folders() if os.path.isabs(folder)),
        *("/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/usr/share/zoneinfo"),
        *(interpreter(), tool("prlimit"), tool("setpriv")),
    }
    return tuple(sorted(path for path in paths if os.path.exists(path)))


def mounts() -> list[str]:
    """Return bwrap's options that put the visible paths and some devices into the new root."""
    options: list[str] = []
    paths = _visible_paths()
    # bwrap makes the folders above a mount by itself, but for its own user only.
    parents = {str(parent) for path in paths for parent in Path(path).parents[:-1]}
    if "/tmp" not in parents:
        options += ["--symlink", FOLDER, "/tmp"]
    for folder in sorted({*parents, "/dev"}):
        options += ["--dir", folder]
    for path in paths:
        if os.path.islink(path):  # /lib and /lib64, where /usr holds everything
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind", path, path]
    if _hidden_folder() is not None:
        options += ["--size", "4096", "--tmpfs", str(_hidden_folder())]
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return options
