"""Ending a process with everything below it, and the temporary files it left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, whatever it is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that no daemon gets away."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(root: int) -> None:
    """Kill every process below process `root`, which adopts orphans, but not `root` itself.

    All are stopped before the first is killed, because a stopped process cannot fork.
    """
    stopped: set[int] = set()
    while running := _descendants(root) - stopped:
        _signal(running, signal.SIGSTOP)
        stopped |= running
    _signal(stopped, signal.SIGKILL)


def remove_folder(folder: str) -> None:
    """Remove a folder of temporary files, however deep an adversary made it."""
    try:
        os.rmdir(folder)
    except OSError:
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _signal(process_ids: set[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, number)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    descendants: set[int] = set()
    generation = [root]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, ())]
        descendants.update(generation)
    return descendants
