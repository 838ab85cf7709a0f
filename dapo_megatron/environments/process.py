"""Processes of environments. `python -m dapo_megatron.environments.process FD MIB SECONDS NAME...`

The first process, the *nursery*, imports the environments once and describes them. For each
completion it forks an *instance*, which answers messages on its own socket. So a start takes
milliseconds, and an instance that hangs, dies or takes too much memory is lost alone. Only the pool
starts a nursery. Instances run untrusted code on text from a model, so nothing that they send is
unpickled, and the pool checks every field.

All messages are lines of JSON.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from dapo_megatron.cluster.processes import (
    adopt_orphans,
    ignore_stop_signals,
    kill_group,
    limit_memory,
    obey_parent,
    remove_folder,
)
from dapo_megatron.environments.interface import Described, Environment, Reply, load_environment
from dapo_megatron.rewards.registry import as_grade
from dapo_megatron.types import ConfigError

MAX_TEXT = 2**16
"""Maximum length of an answer's text in characters. A longer one is cut, with a note."""
MAX_MESSAGE_BYTES = 8 * MAX_TEXT
"""Maximum size of an instance's message. A longer one counts as a crash."""
REAP_SECONDS = 0.2
"""Interval at which a nursery looks for instances that have ended."""


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First message of a nursery: the environments, or why one cannot be used."""

    environments: list[Described] = []
    refusal: str = ""


class Order(msgspec.Struct, frozen=True):
    """Message to a nursery: fork an instance of an environment with the socket that comes with it,
    or kill one. `number` names it from then on."""

    kind: Literal["fork", "kill"]
    number: int
    name: str = ""


class Request(msgspec.Struct, frozen=True):
    """Message to an instance: reset it with a row, call a tool, or answer a turn."""

    kind: Literal["reset", "call", "step"]
    row: dict[str, Any] = {}
    tool: str = ""
    arguments: dict[str, Any] = {}
    turn: str = ""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Message of an instance.

    cause   "ok"; "error" if the environment raised, which the model may read; or why the instance
            is lost
    text    the answer of the environment, or the error
    done    whether the completion ends
    reward, numbers  of `Reply`
    """

    cause: Literal["ok", "error", "timeout", "crash", "memory"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""
    done: bool = False
    reward: float | None = None
    numbers: dict[str, float] = {}


def main() -> None:
    """Import the environments, then fork and kill instances until the pool is gone."""
    ignore_stop_signals()
    adopt_orphans()  # it does not die with its parent, so that it can kill what instances started
    descriptor, memory_mib, seconds, *names = sys.argv[1:]
    with suppress(OSError), socket.socket(fileno=int(descriptor)) as pool:  # OSError: it is gone
        try:
            environments = {name: load_environment(name, float(seconds)) for name in names}
        except ConfigError as error:
            pool.sendall(encoded(Started(refusal=str(error))))
            return
        if not os.fork():
            # This imports transformers, which would make every fork slow.
            pool.sendall(encoded(_described(environments)))
            os._exit(0)
        os.wait()
        _Nursery(pool, environments, int(memory_mib)).serve()


def _described(environments: Mapping[str, Environment]) -> Started:
    try:
        return Started([each.described() for each in environments.values()])
    except ConfigError as error:
        return Started(refusal=str(error))


class _Nursery:
    def __init__(
        self, pool: socket.socket, environments: Mapping[str, Environment], memory_mib: int
    ) -> None:
        self._pool, self._environments, self._memory_mib = pool, environments, memory_mib
        self._instances: dict[int, int] = {}
        """Process ids by number. Only this process reaps them, so no id is another process's."""

    def serve(self) -> None:
        received = b""
        sockets: list[int] = []
        poll = select.poll()  # select takes no file above 1023
        poll.register(self._pool, select.POLLIN)
        while True:
            is_readable = poll.poll(int(1000 * REAP_SECONDS))
            self._reap()
            if not is_readable:
                continue
            block, files, _, _ = socket.recv_fds(self._pool, 2**16, 64)
            if not block:
                for number in list(self._instances):
                    self._kill(number)
                remove_folder(os.environ["TMPDIR"])
                return
            sockets += files
            *lines, received = (received + block).split(b"\n")
            for line in lines:
                order = msgspec.json.decode(line, type=Order)
                if order.kind == "kill":
                    self._kill(order.number)
                else:
                    self._fork(order, sockets.pop(0))

    def _fork(self, order: Order, file: int) -> None:
        process_id = os.fork()
        if process_id:
            os.close(file)
            self._instances[order.number] = process_id
            return
        code = 1
        try:
            self._pool.close()
            with socket.socket(fileno=file) as connection:
                os.setsid()  # a process group: what it starts is killed with it
                obey_parent()
                limit_memory(self._memory_mib)
                _Instance(self._environments[order.name]).serve(connection)
            code = 0
        finally:  # never return into the nursery's loop
            os._exit(code)

    def _reap(self) -> None:
        """Reap what has ended: instances, with everything that they started, and orphans."""
        with suppress(ChildProcessError):  # no child is left
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                numbers = (n for n, pid in self._instances.items() if pid == ended.si_pid)
                if (number := next(numbers, None)) is not None:
                    self._kill(number)
                else:
                    os.waitpid(ended.si_pid, 0)

    def _kill(self, number: int) -> None:
        """Kill an instance and everything that it started, and reap it."""
        process_id = self._instances.pop(number, None)
        if process_id is None:
            return
        kill_group(process_id)
        os.waitpid(process_id, 0)


class _Instance:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._object: Any = None

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the pool closes the connection."""
        for line in connection.makefile("rb"):
            connection.sendall(encoded(self._answer(msgspec.json.decode(line, type=Request))))

    def _answer(self, request: Request) -> Answer:
        """Return what the environment answers. What it raises is an answer, too."""
        try:
            value = self._value(request)
            if isinstance(value, Reply):
                return _reply(value)
            return Answer("ok", cut("" if value is None else str(value)))
        except MemoryError:  # formatting an exception might need memory that is not there
            return Answer("memory", "more memory than rewards.memory_mib")
        except ValueError as error:  # also of wrong arguments, whose text is enough
            return Answer("error", cut(str(error)))
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            return Answer("error", cut("".join(traceback.format_exception_only(error)).strip()))

    def _value(self, request: Request) -> object:
        if request.kind == "reset":
            self._object = self._environment.kind()
            reset = getattr(self._object, "reset", None)
            return reset(request.row) if reset else None
        if request.kind == "step":
            return self._object.step(request.turn)
        return self._environment.call(self._object, request.tool, request.arguments)


def _reply(reply: Reply) -> Answer:
    try:
        reward = None if reply.reward is None else as_grade(reply.reward).score
        numbers = {str(name): as_grade(number).score for name, number in reply.numbers.items()}
    except (TypeError, ValueError, OverflowError) as error:  # not for the model
        return Answer("crash", f"its reward: {error}")
    return Answer("ok", cut(str(reply.text)), bool(reply.done), reward, numbers)


def cut(text: str, length: int = MAX_TEXT) -> str:
    """Return a text without halves of characters, and of at most `length` characters."""
    text = text.encode(errors="replace").decode()
    if len(text) <= length:
        return text
    note = f" ... ({len(text):,} characters)"
    return text[: length - len(note)] + note


def encoded(message: msgspec.Struct) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


if __name__ == "__main__":
    main()
