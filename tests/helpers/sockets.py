"""List processes of this machine and the addresses that they listen on, and find a free port."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil


def listening(pids: Iterable[int]) -> set[str]:
    """Return ADDRESS:PORT of the TCP sockets that these processes listen on."""
    addresses = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it may end at any time
            addresses |= {
                f"{connection.laddr.ip}:{connection.laddr.port}"
                for connection in psutil.Process(pid).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return addresses


def children(pid: int) -> list[int]:
    """Return the process id and those of all its descendants."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return [pid]
    return [pid, *(process.pid for process in descendants)]


def unused_port() -> int:
    """Return a free TCP port for a process that binds it later. The kernel gives no port of this
    range to one that asks for any."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
