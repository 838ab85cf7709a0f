"""Graders for tests, named as module:function, and a look at the processes they leave."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def moody(response: str, truth: str, extra: Mapping[str, Any]) -> bool:
    """Hangs on "hang", dies on "die", raises on "raise"; else compares."""
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os._exit(1)
    if response == "raise":
        raise ValueError(response)
    return response == truth


def processes_with(mark: str) -> list[str]:
    """Command lines of live processes with `mark` in command line or environment; forks of a
    program have both. Zombies have neither."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        command = environment = b""
        with suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            environment = Path(f"/proc/{name}/environ").read_bytes()
        if mark.encode() in command + environment:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def broken(response: str, truth: str, extra: object) -> bool:
    """Raises at every call."""
    raise LookupError("no such table")


def never(response: str, truth: str, extra: object) -> bool:
    """Nothing is right."""
    return False


def near(response: str, truth: str, extra: object) -> bool:
    """Right by the parity of the answer's length: mixed groups from any model."""
    return sum(map(ord, response)) % 2 == 0
