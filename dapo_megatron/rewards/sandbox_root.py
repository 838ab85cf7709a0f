"""Files that are visible in the sandbox: the interpreter, packages, system libraries."""

from __future__ import annotations

import functools
import os
import shutil
import site
import sys
import sysconfig
from pathlib import Path

FOLDER = "/program"
"""The program's folder. It is not /tmp, because the run's virtual environment may be in /tmp."""
DEVICES = ("null", "zero", "full", "random", "urandom")


def interpreter() -> str:
    """Return the path of the interpreter, with the links of a virtual environment resolved."""
    return os.path.realpath(sys.executable)


def tool(name: str) -> str:
    """Return the path of a program on this process's PATH (the PATH in the sandbox differs)."""
    return shutil.which(name) or f"/usr/bin/{name}"


@functools.cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of installed packages, without this project and without PYTHONPATH."""
    folders = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib")])
    return tuple(folder for folder in folders if os.path.isdir(folder))


@functools.cache
def _hidden_folder() -> str | None:
    """Return the package folder of the base interpreter of a virtual environment. It is hidden,
    because the run does not use its packages. None if it is in use or does not exist."""
    folder = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    return folder if folder not in package_folders() and os.path.isdir(folder) else None


def library_path() -> dict[str, str]:
    """Return LD_LIBRARY_PATH as environment, if set. An interpreter from environment modules may
    need it."""
    return {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}


def _library_folders() -> list[str]:
    """Return the entries of LD_LIBRARY_PATH that contain shared libraries, except the home folder
    and its parents."""
    entries = library_path().get("LD_LIBRARY_PATH", "").split(os.pathsep)
    home = Path.home()
    return [
        entry
        for entry in entries
        if any(Path(entry).glob("*.so*")) and Path(entry) not in (home, *home.parents)
    ]


@functools.cache
def _visible_paths() -> tuple[str, ...]:
    """Return the files and folders that a program can read, mounted at the same path. Parents come
    before their children."""
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
    """Return bwrap's options that mount the visible paths and DEVICES in the new root."""
    options: list[str] = []
    paths = _visible_paths()
    # bwrap creates the parents of a mount itself, but readable only by its own user.
    parents = {str(parent) for path in paths for parent in Path(path).parents[:-1]}
    if "/tmp" not in parents:
        options += ["--symlink", FOLDER, "/tmp"]
    for folder in sorted({*parents, "/dev"}):
        options += ["--dir", folder]
    for path in paths:
        if os.path.islink(path):  # /lib and /lib64 on a system with merged /usr
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
