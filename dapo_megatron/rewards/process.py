"""Handle of a grading process, which is replaced when it hangs, dies or runs out of memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Annotated, Literal

import msgspec

from dapo_megatron.cluster.processes import (
    END_SECONDS,
    has_ended,
    helper_environment,
    kill_group,
    remove_folder,
)
from dapo_megatron.rewards.registry import MAX_PRED, MAX_SCORE
from dapo_megatron.types import ConfigError, DapoError, Grade

START_SECONDS = 120.0
"""Time limit for a worker to start and import its graders."""

MAX_FAILED_STARTS = 3
"""Number of workers in a row that may die while starting before the pool gives up."""

MAX_MESSAGE_BYTES = 2**20
"""Maximum size of a worker's message. A longer one counts as a crash of the worker."""

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
"""Environment variables passed to workers. Tokens, passwords and launcher variables are withheld,
because graders are untrusted code that reads the output of a model."""

MAX_DETAIL = 2000
"""Maximum length of `Answer.detail` in characters."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a grading ended, or the start of a worker.

    cause    "graded", the reason why there is no grade, or how the start ended
    grade    None unless the cause is "graded"
    detail   the end of the grader's traceback, or how the process ended
    """

    cause: Literal["graded", "timeout", "crash", "memory", "error", "started", "refused"]
    grade: Grade | None = None
    detail: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL)] = ""


class ChildProcess(subprocess.Popen[bytes]):
    """A process that runs untrusted code. It leads a process group, so that what it starts is
    killed with it.

    module     that it runs, with the descriptor of its socket as first argument
    variables  names of environment variables passed to it besides INHERITED
    """

    def __init__(self, module: str, arguments: Sequence[str], variables: Collection[str]) -> None:
        self.socket, other_end = socket.socketpair()
        self.folder = tempfile.mkdtemp(prefix=f"{module.split('.')[1]}-")
        """Its temporary files."""
        with other_end:
            super().__init__(
                [sys.executable, "-m", module, str(other_end.fileno()), *arguments],
                pass_fds=(other_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # user's code prints; stderr is inherited, for errors
                env=helper_environment((*INHERITED, *variables)) | {"TMPDIR": self.folder},
                start_new_session=True,
            )

    def end(self) -> None:
        """Kill it and everything it started, reap it, remove its files. Idempotent."""
        if self.returncode is not None:  # already reaped: its id may be reused
            return
        kill_group(self.pid)
        with suppress(subprocess.TimeoutExpired):  # if it waits for a dead disk
            self.wait(END_SECONDS)
        self.socket.close()
        remove_folder(self.folder)


class WorkerClosed(Exception):
    """Raised by a worker that was closed."""


class Worker:
    """A grading process. The owner calls `close` and `stop`.

    names            names of the graders that it imports
    timeout_seconds  wall-clock limit of one grading; the start of the process does not count
    memory_mib       limit of its address space
    environment      names of environment variables passed to it besides INHERITED
    """

    def __init__(
        self,
        names: Collection[str],
        timeout_seconds: float,
        memory_mib: int,
        environment: Collection[str],
    ) -> None:
        self._arguments = [str(memory_mib), str(timeout_seconds), *sorted(names)]
        self._timeout_seconds = timeout_seconds
        self._environment = environment
        self._lock = threading.Lock()  # of the flag and the socket, for `close`
        self._is_closed = False
        self._start()

    def grade(self, task: bytes) -> Answer:
        """Grade a task, one line of JSON. A grading without a grade costs at most the time limit.

        Raises ConfigError if the process refuses its graders, DapoError if MAX_FAILED_STARTS
        processes in a row die while starting, and WorkerClosed.
        """
        self._wait_until_started()
        answer = self._ask(task + b"\n", self._timeout_seconds)
        if answer.cause in ("timeout", "crash", "memory"):  # it may keep the memory
            self.stop()
            self._start()  # imports its graders while this thread reports the answer
        return answer

    def close(self) -> None:
        """Make `grade`, which another thread may have called, return at once."""
        with self._lock:
            self._is_closed = True
            with suppress(OSError):
                self._process.socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End the process. Idempotent."""
        self._process.end()

    def _start(self) -> None:
        self._has_started = False
        with self._lock:
            if self._is_closed:
                raise WorkerClosed
            module = "dapo_megatron.rewards.worker"
            self._process = ChildProcess(module, self._arguments, self._environment)

    def _wait_until_started(self) -> None:
        """Wait until the process has imported its graders. Replace one that died while idle."""
        for _ in range(MAX_FAILED_STARTS):
            if has_ended(self._process):
                self.stop()
                self._start()
            if self._has_started:
                return
            answer = self._ask(b"", START_SECONDS)
            if answer.cause == "refused":
                raise ConfigError(f"rewards: a grading worker refused to start: {answer.detail}")
            self._has_started = answer.cause == "started"
            if self._has_started:
                return
            self.stop()
            self._start()
        raise DapoError(
            f"rewards: {MAX_FAILED_STARTS} grading workers in a row died or hung while importing "
            f"the graders {self._arguments[2:]} ({answer.detail}); see their stderr"
        )

    def _ask(self, message: bytes, seconds: float) -> Answer:
        """Send a message and return the answer. The time limit covers both, because a stopped
        process reads nothing."""
        deadline = time.monotonic() + seconds
        received = b""
        try:
            self._process.socket.settimeout(seconds)
            self._process.socket.sendall(message)
            while not received.endswith(b"\n"):
                # Check the clock too: a process that sends single bytes keeps the socket readable.
                if (seconds_left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self._process.socket.settimeout(seconds_left)
                block = self._process.socket.recv(2**16)
                received += block
                if not block or len(received) > MAX_MESSAGE_BYTES:
                    raise ConnectionError
        except TimeoutError:
            return Answer("timeout", None, f"no grade within {seconds:.3g} s")
        except OSError:
            self.stop()
            return Answer("crash", None, _end(self._process.returncode))
        return checked(received)


def checked(message: bytes) -> Answer:
    """Return a worker's answer. An invalid one is a crash."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = msgspec.json.decode(message, type=Answer)
        grade = answer.grade
        is_consistent = (answer.cause == "graded") == (grade is not None)
        # The registry checks these too, but a grader may have taken over its process.
        is_bounded = not grade or (abs(grade.score) <= MAX_SCORE and len(grade.pred) <= MAX_PRED)
        if is_consistent and is_bounded:
            return answer
    return Answer("crash", None, f"it sent an invalid message: {message[:100]!r}")


def _end(code: int | None) -> str:
    if code is None:
        return "its process does not exit"
    verb = "exited with" if code >= 0 else "was killed by signal"
    return f"its process {verb} {abs(code)}"
