"""Addresses that processes of this machine listen on, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """ADDRESS:PORT of the TCP sockets that these processes listen on."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    return {
        address
        for name in ("tcp", "tcp6")
        for address, inode in _listeners(Path("/proc/self/net") / name)
        if inode in inodes
    }


def children(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    direct: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            direct += map(int, task.read_text().split())
    return [pid, *(one for child in direct for one in children(child))]


def _sockets(pid: int) -> Iterable[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                    yield match[1]


def _listeners(table: Path) -> Iterable[tuple[str, str]]:
    for line in table.read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTEN:
            host, port = words[1].split(":")
            # Words of four bytes, each as this machine has it in memory.
            packed = b"".join(
                bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)
            )
            yield f"{ip_address(packed)}:{int(port, 16)}", words[9]
