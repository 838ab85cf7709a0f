"""Worker processes as the pool's thread sees them: start, ask, read, kill, replace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pickle import UnpicklingError
from typing import Any, NamedTuple

from dapo_megatron.rewards.jail import kill_descendants
from dapo_megatron.rewards.sandbox import remove
from dapo_megatron.types import ConfigError, DapoError

START_SECONDS = 120.0
"""Limit for a worker to start and import its graders; seconds."""

MAX_FAILED_STARTS = 3
"""Workers in a row that may die while starting before the pool gives up."""

# A worker is not a rank, whatever launched its parent, and it has no business on a GPU.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Failure(NamedTuple):
    """A worker's answer to a grading without a grade: "error" (the end of the traceback says
    which) or "memory"."""

    why: str
    detail: str


class WorkerLost(Exception):
    """The worker is of no use any more; `why` is "timeout", "crash" or "memory"."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(why)
        self.why = why
        self.detail = detail


class PoolClosed(Exception):
    """The pool was closed while a thread waited for its worker."""


class WorkerProcess:
    """A running worker. Whoever makes one calls `stop`; all calls come from one thread.

    closing: readable once the pool is being closed. Its temporary folder ends with it.
    """

    def __init__(self, closing: Connection, memory_mib: int) -> None:
        ours, theirs = socket.socketpair()
        self._folder = tempfile.mkdtemp(prefix="grading-")
        module = "dapo_megatron.rewards.worker"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(memory_mib)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # graders print; stderr stays, for what goes wrong
                env=_environment() | {"TMPDIR": self._folder},
                start_new_session=True,  # its own group: what a grader starts is killed with it
            )
        self._connection = Connection(ours.detach())
        self._closing = closing

    def load(self, names: Collection[str], timeout_seconds: float) -> None:
        """Have it import the graders, and do not wait for it. Raises WorkerLost."""
        self.send((sorted(names), timeout_seconds))

    def wait_until_loaded(self) -> None:
        """Raises WorkerLost, PoolClosed, or ConfigError if it refuses."""
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
            raise WorkerLost("crash", self._death()) from error

    def receive(self, timeout_seconds: float, halfway: Callable[[], object] = lambda: None) -> Any:
        """Its next message; `halfway` is called when half the time is over. Raises WorkerLost or
        PoolClosed."""
        ready = wait([self._connection, self._closing], timeout_seconds / 2)
        if not ready:
            halfway()
            ready = wait([self._connection, self._closing], timeout_seconds / 2)
        if self._closing in ready:
            raise PoolClosed
        if not ready:
            raise WorkerLost("timeout", f"no grade within {timeout_seconds:g} s")
        try:
            return self._connection.recv()
        except (EOFError, OSError, UnpicklingError) as error:
            raise WorkerLost("crash", self._death()) from error

    def stop(self) -> None:
        """Kill it with everything it started, reap it, remove its files. Idempotent."""
        if self._process.returncode is not None:  # reaped: its id may be another's by now
            return
        self._kill_all()
        self._process.wait()
        self._connection.close()
        remove(self._folder)

    def _kill_all(self) -> None:
        """It adopts the orphans among what it started; while it stands still, none gets away."""
        if sys.platform == "linux":
            os.kill(self._process.pid, signal.SIGSTOP)
            kill_descendants(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _death(self) -> str:
        """How it ended; it is not reaped. Its connection may be gone a moment before it."""
        for _ in range(100):
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                how = "exited with" if exited else "was killed by signal"
                return f"its process {how} {ended.si_status}"
            time.sleep(0.01)
        return "its process closed the connection"


class Workers:
    """One worker after the other, all of one thread of the pool.

    closing          readable once the pool is being closed
    names            graders that each of them imports
    timeout_seconds  of one grading
    memory_mib       of one worker
    """

    def __init__(
        self, closing: Connection, names: Collection[str], timeout_seconds: float, memory_mib: int
    ) -> None:
        self._closing = closing
        self._names = names
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        self._current: WorkerProcess | None = None
        self._successor: WorkerProcess | None = None

    def ready(self) -> WorkerProcess:
        """The current one if it lives, else the next that has imported its graders.

        Raises PoolClosed; ConfigError if it refuses to start; DapoError if several die of it.
        """
        if self._current is not None and not self._current.alive:
            self.replace()
        failed_starts = 0
        while self._current is None:
            self._current, self._successor = self.prepare_successor(), None
            try:
                self._current.wait_until_loaded()
            except WorkerLost as error:
                self.replace()
                failed_starts += 1
                if failed_starts == MAX_FAILED_STARTS:
                    raise DapoError(
                        f"rewards: {MAX_FAILED_STARTS} grading workers in a row died or hung while "
                        f"importing the graders {sorted(self._names)}; see their stderr"
                    ) from error
        return self._current

    def prepare_successor(self) -> WorkerProcess:
        """Start one to take over, without waiting, unless there is one already."""
        if self._successor is not None and not self._successor.alive:
            self._successor.stop()
            self._successor = None
        if self._successor is None:
            self._successor = WorkerProcess(self._closing, self._memory_mib)
            with suppress(WorkerLost):  # heard again when it is waited for
                self._successor.load(self._names, self._timeout_seconds)
        return self._successor

    def replace(self) -> None:
        """End the current one."""
        if self._current is not None:
            self._current.stop()
            self._current = None

    def stop(self) -> None:
        """End all of them."""
        self.replace()
        if self._successor is not None:
            self._successor.stop()


def _environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not _of_a_launcher(key)}
    # The same modules as here, however this process came to find them.
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"
    return environment


def _of_a_launcher(key: str) -> bool:
    return key in _LAUNCHER_VARIABLES or key.startswith("TORCHELASTIC_")
