"""Interpreters of Python as tools, in the sandbox of the grader `code` (docs/rewards.md).

The tool is named `code_interpreter`, as in the data of ReTool, in verl, in slime and in Qwen-Agent.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from dapo_megatron.environments import notebook
from dapo_megatron.rewards.code import SHARE_OF_LIMIT, last_program
from dapo_megatron.rewards.sandbox import Sandbox, SandboxError

MAX_TEXT = 8192
"""Number of characters that are kept of a call's text: half from its start, half from its end."""
MAX_REPLY_BYTES = 2**16
GRACE = 0.1
"""Time in which an interrupted call may end, as a share of its limit."""


class Python:
    """Environment `python`: every call is a separate program, as in verl, slime and SimpleTIR.

    timeout_seconds   the pool's limit of one answer, of which a call gets SHARE_OF_LIMIT
    """

    stateless = True

    def __init__(self, timeout_seconds: float) -> None:
        self._seconds = SHARE_OF_LIMIT * timeout_seconds

    def code_interpreter(self, code: str) -> str:
        """Run a Python program and return what it prints. No variables are kept for the next call.

        Args:
            code: The program. Print what you want to see.
        """
        deadline = time.monotonic() + self._seconds
        with _Interpreter(self._seconds) as interpreter:
            return interpreter.run(code, deadline, is_last=True)


class PythonNotebook(Python):
    """Environment `python_notebook`: the calls of a completion share one namespace.

    It is repeatable, because code has no effect outside of the sandbox: the calls of a lost
    instance run again. Their answers are the same, unless they depend on the clock, on random
    numbers or on addresses of objects.
    """

    stateless = False
    repeatable = True

    _interpreter: _Interpreter | None = None

    def code_interpreter(self, code: str) -> str:
        """Run Python code and return what it prints. Variables are kept for the next call.

        Args:
            code: The code. Print what you want to see.
        """
        deadline = time.monotonic() + self._seconds
        if self._interpreter is None:
            self._interpreter = _Interpreter(self._seconds)
        text = self._interpreter.run(code, deadline)
        if self._interpreter.has_ended:
            self._interpreter.close()
            self._interpreter = None
            text += "\nThe interpreter was restarted: all variables are lost."
        return text


class _Interpreter:
    """A process in the sandbox that runs notebook.py. It is stopped between calls, so that threads
    that a call has left take no time.

    seconds   wall-clock limit of a call

    If the sandbox does not start, the instance ends, because no code can change that.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.has_ended = False
        program = Path(notebook.__file__).read_text(encoding="utf-8")
        with ExitStack() as resources:
            self._socket, other = socket.socketpair()
            resources.enter_context(self._socket)
            with other:
                try:
                    sandbox = Sandbox(program, other, with_stderr=True)
                except SandboxError as error:
                    print(f"code_interpreter: {error}", file=sys.stderr, flush=True)
                    raise SystemExit(1) from error
            self._sandbox = resources.enter_context(sandbox)
            self._resources = resources.pop_all()

    def __enter__(self) -> _Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process."""
        self._resources.close()

    def run(self, code: str, deadline: float, is_last: bool = False) -> str:
        """Run code. Return what it prints, and why it fails. `has_ended` is then whether no more
        code can follow."""
        if code.lstrip().startswith("```"):
            code = last_program(code) or code
        self._sandbox.signal(signal.SIGCONT)
        self._send(code, is_last)
        reply = self._reply(deadline)
        if is_last and reply is not None:  # threads may still run
            self.has_ended = self._sandbox.wait(deadline)
        is_late = time.monotonic() >= deadline
        if reply is None and not self.has_ended:
            self._sandbox.signal(signal.SIGINT)
            reply = self._reply(deadline + GRACE * self._seconds)
        self._sandbox.signal(signal.SIGSTOP)
        output = self._sandbox.take_output().decode("utf-8", "replace")
        if reply is None:
            self.has_ended = True
            reply = "" if is_late else self._sandbox.result().failure
        late = f"stopped: it took longer than {self._seconds:g} s" if is_late else ""
        text = "\n".join(filter(None, map(str.rstrip, (output, reply, late))))
        return _cut(text) or "(no output)"

    def _send(self, code: str, is_last: bool) -> None:
        content = code.encode("utf-8", "surrogatepass")
        self._socket.settimeout(self._seconds)
        with suppress(OSError):  # it has ended or does not read: there will be no reply
            self._socket.sendall(b"%d\n" % len(content) + content)
            if is_last:
                self._socket.shutdown(socket.SHUT_WR)

    def _reply(self, deadline: float) -> str | None:
        """Return the traceback of the code, "" if it has ended well, None if there is no reply."""
        self._socket.setblocking(False)
        reply = b""
        while not reply.endswith(b"\0") and len(reply) < MAX_REPLY_BYTES:
            self.has_ended = self._sandbox.wait(deadline, self._socket)
            try:
                block = self._socket.recv(MAX_REPLY_BYTES)
            except OSError:
                return None
            if not block:
                return None
            reply += block
        return reply.rstrip(b"\0").decode("utf-8", "replace")


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters) ...\n{text[-half:]}"
