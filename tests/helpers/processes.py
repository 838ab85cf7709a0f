"""Wait for what other processes do, and find the processes that are left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE_SECONDS = 300.0
"""Time after which a test gives up. Only a failing test waits so long."""


def wait_until(condition: Callable[[], object], story: Callable[[], object] = str) -> None:
    """Wait until a condition holds. `story` tells what is the case if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. In a container without an init, a killed orphan stays as a
    zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def processes_with(mark: str) -> list[str]:
    """Return the command lines of live processes that have `mark` in their command line or
    environment. Forks of a program inherit both. Zombies have neither."""
    command_lines = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        command = environment = b""
        with suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            environment = Path(f"/proc/{name}/environ").read_bytes()
        if mark.encode() in command + environment:
            command_lines.append(command.replace(b"\0", b" ").decode())
    return command_lines
