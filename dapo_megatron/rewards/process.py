"""One worker process as the pool's thread sees it: start, ask, read, kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pickle import UnpicklingError
from typing import Any

from dapo_megatron.types import ConfigError

START_SECONDS = 120.0
"""Limit for a worker to start and import its graders; seconds."""

# A worker is not a rank, whatever launched its parent, and it has no business on a GPU.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class WorkerLost(Exception):
    """The worker is of no use any more; `why` is "timeout" or "crash"."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class PoolClosed(Exception):
    """The pool was closed while a thread waited for its worker."""


class WorkerProcess:
    """A running worker. Whoever makes one calls `stop`; all calls come from one thread.

    closing: readable once the pool is being closed.
    """

    def __init__(self, closing: Connection) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.rewards.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # graders print; stderr stays, for what goes wrong
                env=_environment(),
                start_new_session=True,  # its own group: what a grader starts is killed with it
            )
        self._connection = Connection(ours.detach())
        self._closing = closing

    def load(self, graders: Mapping[str, str]) -> None:
        """Have it import the graders. Raises WorkerLost, or ConfigError if it cannot."""
        self.send(dict(graders))
        refusal = self.receive(START_SECONDS)
        if refusal is not None:
            raise ConfigError(f"rewards: a grading worker refused to start: {refusal}")

    @property
    def alive(self) -> bool:
        """Whether it runs. It is not reaped here, so that its group id stays its own."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is None

    def send(self, message: Any) -> None:
        """Send to a worker that is waiting for work. Raises WorkerLost."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise WorkerLost("crash") from error

    def receive(self, timeout_seconds: float) -> Any:
        """Its next message. Raises WorkerLost or PoolClosed."""
        ready = wait([self._connection, self._closing], timeout_seconds)
        if self._closing in ready:
            raise PoolClosed
        if not ready:
            raise WorkerLost("timeout")
        try:
            return self._connection.recv()
        except (EOFError, OSError, UnpicklingError) as error:
            raise WorkerLost("crash") from error

    def stop(self) -> None:
        """Kill it with everything it started, and reap it. Idempotent."""
        if self._process.returncode is not None:  # reaped: its id may be another's by now
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


def _environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not _of_a_launcher(key)}
    # The same modules as here, however this process came to find them.
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"
    return environment


def _of_a_launcher(key: str) -> bool:
    return key in _LAUNCHER_VARIABLES or key.startswith("TORCHELASTIC_")
