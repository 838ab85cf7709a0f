"""Handles of worker processes for the pool's threads: start, send, receive, kill, replace."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from dapo_megatron.cluster.processes import helper_environment, kill_descendants, remove_folder
from dapo_megatron.rewards.worker_messages import (
    MAX_MESSAGE_BYTES,
    Failure,
    decode_answer,
    decode_refusal,
    encode,
    encode_batch,
)
from dapo_megatron.types import ConfigError, DapoError, Grade

START_SECONDS = 120.0
"""Time limit for a worker to start and import its graders."""

MAX_FAILED_STARTS = 3
"""Number of workers in a row that may die while starting before the pool gives up."""

END_SECONDS = 5.0
"""Time limit for a killed worker to exit. A process that waits for a dead disk exits later."""

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
"""Environment variables passed to workers. Tokens, passwords and launcher variables are withheld,
because graders are untrusted code that reads the output of a model."""


Message = TypeVar("Message")


class WorkerLost(Exception):
    """Raised if a worker must be replaced. `why` is "timeout", "crash" or "memory"."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(why)
        self.why = why
        self.detail = detail


class PoolClosed(Exception):
    """Raised if the pool is closed while a thread waits for its worker."""


class WorkerProcess:
    """A running worker process with a temporary folder. The owner must call `stop`, which removes
    the folder. Call all methods from one thread.

    closing       becomes readable when the pool closes
    memory_mib    limit of the worker's address space
    environment   names of environment variables passed to the worker besides INHERITED
    """

    def __init__(
        self, closing: Connection, memory_mib: int, environment: Collection[str] = ()
    ) -> None:
        self._socket, worker_socket = socket.socketpair()
        self._socket.setblocking(False)
        self._received = bytearray()
        self._closing = closing
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(closing, select.POLLIN)
        self._folder = tempfile.mkdtemp(prefix="grading-")
        module = "dapo_megatron.rewards.worker"
        with worker_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(worker_socket.fileno()), str(memory_mib)],
                pass_fds=(worker_socket.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # graders print; stderr is inherited, for errors
                env=helper_environment((*INHERITED, *environment)) | {"TMPDIR": self._folder},
                start_new_session=True,  # a process group, so that a grader's children are killed
            )

    def load(self, names: Collection[str], timeout_seconds: float) -> None:
        """Make the worker import the graders, without waiting. Raises WorkerLost."""
        order = encode({"graders": sorted(names), "timeout_seconds": timeout_seconds})
        self._send(order, time.monotonic() + START_SECONDS)

    def wait_until_loaded(self) -> None:
        """Wait until the worker has imported its graders. Raises ConfigError if the worker refuses,
        WorkerLost or PoolClosed."""
        refusal = self._decoded(decode_refusal, time.monotonic() + START_SECONDS)
        if refusal is not None:
            raise ConfigError(f"rewards: a grading worker refused to start: {refusal}")

    @property
    def alive(self) -> bool:
        """Whether the worker runs. A dead worker is not reaped here, so that its group id cannot be
        reused before `stop`."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is None

    def send_batch(self, tasks: Iterable[bytes], timeout_seconds: float) -> float:
        """Send gradings to an idle worker. Return the deadline of the first answer. The time spent
        sending counts towards it, because a stopped worker reads nothing.

        Raises WorkerLost or PoolClosed.
        """
        deadline = time.monotonic() + timeout_seconds
        self._send(encode_batch(tasks), deadline)
        return deadline

    def answer(
        self, deadline: float, halfway: Callable[[], object] = lambda: None
    ) -> Grade | Failure:
        """Return the worker's answer to the next grading. `halfway` is called if half of the time
        until the deadline passes without an answer. Raises WorkerLost or PoolClosed."""
        return self._decoded(decode_answer, deadline, halfway)

    def stop(self) -> None:
        """Kill the worker and everything it started, reap it, remove its files. Idempotent."""
        if self._process.returncode is not None:  # already reaped: its id may be reused
            return
        self._kill_all()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._socket.close()
        remove_folder(self._folder)

    def _send(self, message: bytes, deadline: float) -> None:
        unsent = memoryview(message)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    raise WorkerLost("timeout", "it did not read its message") from None
            except OSError as error:
                raise WorkerLost("crash", self._death()) from error

    def _decoded(
        self,
        decode: Callable[[bytes], Message],
        deadline: float,
        halfway: Callable[[], object] = lambda: None,
    ) -> Message:
        now = time.monotonic()
        try:
            message = self._receive(now + (deadline - now) / 2)
            if message is None:
                halfway()
                message = self._receive(deadline)
            if message is None:
                raise WorkerLost("timeout", f"no grade within {deadline - now:.3g} s")
            return decode(message)
        except ValueError as error:
            raise WorkerLost("crash", f"it sent an invalid message: {error}") from error

    def _receive(self, deadline: float) -> bytes | None:
        """Return the worker's next message, or None if none is complete before the deadline."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > MAX_MESSAGE_BYTES:
                raise WorkerLost("crash", f"it sent a message above {MAX_MESSAGE_BYTES} bytes")
            # Check the clock too: a worker that sends single bytes keeps the socket readable.
            if time.monotonic() >= deadline or not self._wait(select.POLLIN, deadline):
                return None
            try:
                block = self._socket.recv(2**16)
            except OSError as error:
                raise WorkerLost("crash", self._death()) from error
            if not block:
                raise WorkerLost("crash", self._death())
            self._received += block
        message = bytes(self._received[:end])
        del self._received[: end + 1]
        return message

    def _wait(self, event: int, deadline: float) -> bool:
        """Wait until the socket is ready. Return True if it was before the deadline."""
        self._poll.modify(self._socket, event)
        seconds_left = max(0.0, deadline - time.monotonic())
        ready = self._poll.poll(1000 * seconds_left)
        if any(descriptor == self._closing.fileno() for descriptor, _ in ready):
            raise PoolClosed
        return bool(ready)

    def _kill_all(self) -> None:
        """Kill the worker and all its descendants. The worker adopts orphans (it is a subreaper).
        It is stopped first, so that it starts no new process meanwhile."""
        if sys.platform == "linux":
            os.kill(self._process.pid, signal.SIGSTOP)
            kill_descendants(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _death(self) -> str:
        """Return how the worker ended, without reaping it. Waits up to 1 s, because the connection
        may close before the process ends."""
        for _ in range(100):
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                verb = "exited with" if exited else "was killed by signal"
                return f"its process {verb} {ended.si_status}"
            time.sleep(0.01)
        return "its process closed the connection"


class Workers:
    """The current worker of one pool thread, and its successor.

    closing          becomes readable when the pool closes
    names            names of the graders that each worker imports
    timeout_seconds  limit of one grading
    memory_mib       limit of a worker's address space
    environment      names of environment variables passed to workers besides INHERITED
    """

    def __init__(
        self,
        closing: Connection,
        names: Collection[str],
        timeout_seconds: float,
        memory_mib: int,
        environment: Collection[str] = (),
    ) -> None:
        self._closing = closing
        self._names = names
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        self._environment = environment
        self._current: WorkerProcess | None = None
        self._successor: WorkerProcess | None = None

    def ready(self) -> WorkerProcess:
        """Return the current worker if it is alive, else a new one that has imported its graders.

        Raises PoolClosed, ConfigError if a worker refuses to start, or DapoError if
        MAX_FAILED_STARTS workers in a row die while starting.
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
        """Start a worker to take over, without waiting, unless one is already started."""
        if self._successor is not None and not self._successor.alive:
            self._successor.stop()
            self._successor = None
        if self._successor is None:
            self._successor = WorkerProcess(self._closing, self._memory_mib, self._environment)
            with suppress(WorkerLost):  # wait_until_loaded raises it again
                self._successor.load(self._names, self._timeout_seconds)
        return self._successor

    def replace(self) -> None:
        """Stop the current worker."""
        if self._current is not None:
            self._current.stop()
            self._current = None

    def stop(self) -> None:
        """Stop the current worker and its successor."""
        self.replace()
        if self._successor is not None:
            self._successor.stop()
