"""Pool of environment instances, one process per completion, each with limits of time and memory.

An instance answers one request at a time. If an answer is late, or the process dies or runs out of
memory, only this instance is lost.
"""

from __future__ import annotations

import heapq
import selectors
import socket
import time
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from dapo_megatron.environments.interface import Described
from dapo_megatron.environments.process import (
    MAX_MESSAGE_BYTES,
    Answer,
    Order,
    Request,
    Started,
    encoded,
)
from dapo_megatron.rewards.process import START_SECONDS, ChildProcess
from dapo_megatron.types import ConfigError, DapoError

FORK_SECONDS = 30.0
"""Time that an instance may take to start, besides its first answer. Many may start at once."""
LOST = ("timeout", "crash", "memory")
"""Causes after which an instance is gone."""


@dataclass
class _Instance:
    number: int
    connection: socket.socket
    received: bytes = b""
    asked: int = 0
    """Number of the request that it has not answered; 0 if there is none."""
    waiting: bytes = b""
    """The part of a request that it has not read yet."""


class EnvironmentPool:
    """Instances of environments, by key.

    names            environments, as `module:Class`, or built-in ones
    timeout_seconds  wall-clock limit of one answer
    memory_mib       limit of the address space of an instance
    environment      names of environment variables passed to them besides INHERITED

    Raises ConfigError for an environment that cannot be used. Call all methods from one thread. All
    processes die with the pool or with this process.

    Example:
        with EnvironmentPool({"my_env:Calculator"}, 10.0, 2048) as pool:
            pool.start((12, 3), "my_env:Calculator", row)
            pool.ask((12, 3), Request("call", tool="calculate", arguments={"expression": "3 * 4"}))
            for key, answer in pool.collect(1.0): ...
    """

    def __init__(
        self,
        names: Collection[str],
        timeout_seconds: float,
        memory_mib: int,
        environment: Collection[str] = (),
    ) -> None:
        self._names, self._timeout_seconds = sorted(names), timeout_seconds
        self._memory_mib, self._variables = memory_mib, environment
        self._instances: dict[Hashable, _Instance] = {}
        self._answers: list[tuple[Hashable, Answer]] = []
        self._deadlines: list[tuple[float, int, Hashable]] = []
        """(time, number of the request, key), a heap."""
        self._numbers = count(1)
        self._selector = selectors.DefaultSelector()
        self.described = self._start_nursery()
        """Environments by name."""

    def start(self, key: Hashable, name: str, row: Mapping[str, Any]) -> None:
        """Start an instance, and reset it with a row. The answer has the text that follows the
        prompt."""
        if key in self._instances:
            raise ValueError(f"{key}: has an instance already")
        number = next(self._numbers)
        own, other = socket.socketpair()
        own.setblocking(False)
        self._instances[key] = _Instance(number, own)
        self._selector.register(own, selectors.EVENT_READ, key)
        with other:
            self._order(Order("fork", number, name), [other.fileno()])
        self.ask(key, Request("reset", row=dict(row)))

    def ask(self, key: Hashable, request: Request) -> None:
        """Send a request to an instance. `collect` returns the answer."""
        instance = self._instances[key]
        if instance.asked:
            raise ValueError(f"{key}: has not answered yet")
        instance.asked = next(self._numbers)
        deadline = time.monotonic() + self._timeout_seconds
        if request.kind == "reset":
            deadline += FORK_SECONDS
        heapq.heappush(self._deadlines, (deadline, instance.asked, key))
        instance.waiting = encoded(request)
        self._write(key, instance)

    def suspend(self, key: Hashable) -> None:
        """Give an instance that waits for the caller all the time it needs, until `resume`."""
        instance = self._instances.get(key)
        if instance is not None and instance.asked:
            instance.asked = next(self._numbers)

    def resume(self, key: Hashable) -> None:
        """Limit the time of an instance again, from now on."""
        self.suspend(key)
        instance = self._instances.get(key)
        if instance is not None and instance.asked:
            deadline = time.monotonic() + self._timeout_seconds
            heapq.heappush(self._deadlines, (deadline, instance.asked, key))

    def collect(self, seconds: float = 0.0) -> list[tuple[Hashable, Answer]]:
        """Return the answers that have arrived since the last call, by key, waiting up to `seconds`
        for the first one. After a cause in LOST the instance is gone."""
        if self._deadlines:
            seconds = min(seconds, max(0.0, self._deadlines[0][0] - time.monotonic()))
        ready = self._selector.select(0.0 if self._answers else seconds)
        now = time.monotonic()  # of what is not ready by now, a later call decides
        for selected, events in ready:
            key, instance = selected.data, self._instances.get(selected.data)
            if instance is None or instance.connection is not selected.fileobj:
                continue
            if events & selectors.EVENT_WRITE:
                self._write(key, instance)
            if events & selectors.EVENT_READ:
                self._read(key, instance)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request, key = heapq.heappop(self._deadlines)
            if key in self._instances and self._instances[key].asked == request:
                text = f"no answer within {self._timeout_seconds:g} s"
                self._lose(key, Answer("timeout", text))
        answers, self._answers = self._answers, []
        return answers

    def stop(self, key: Hashable) -> None:
        """Kill an instance, if there is one, without an answer."""
        instance = self._instances.pop(key, None)
        if instance is not None:
            self._selector.unregister(instance.connection)
            instance.connection.close()
            self._order(Order("kill", instance.number), [])

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        for key in list(self._instances):
            self.stop(key)
        self._nursery.end()
        self._selector.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_nursery(self) -> dict[str, Described]:
        arguments = [str(self._memory_mib), str(self._timeout_seconds), *self._names]
        module = "dapo_megatron.environments.process"
        self._nursery = ChildProcess(module, arguments, self._variables)
        self._nursery.socket.settimeout(START_SECONDS)
        received = b""
        with suppress(OSError):
            while not received.endswith(b"\n") and (block := self._nursery.socket.recv(2**16)):
                received += block
        if not received.endswith(b"\n"):
            self._nursery.end()
            names = ", ".join(self._names)
            raise DapoError(f"environments: the process died while it imported {names}; see stderr")
        started = msgspec.json.decode(received, type=Started)
        if started.refusal:
            self._nursery.end()
            raise ConfigError(started.refusal)
        return {described.name: described for described in started.environments}

    def _order(self, order: Order, files: list[int]) -> None:
        """Send an order to the nursery. If it has died, so have all instances, and another one is
        started for the next."""
        try:
            socket.send_fds(self._nursery.socket, [encoded(order)], files)
        except OSError:
            if order.kind == "fork":
                self._nursery.end()
                self._start_nursery()
                socket.send_fds(self._nursery.socket, [encoded(order)], files)

    def _write(self, key: Hashable, instance: _Instance) -> None:
        """Send what waits, as far as the instance reads."""
        try:
            while instance.waiting:
                sent = instance.connection.send(instance.waiting)
                instance.waiting = instance.waiting[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(key, Answer("crash", "its process has ended"))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if instance.waiting else 0)
        self._selector.modify(instance.connection, events, key)

    def _read(self, key: Hashable, instance: _Instance) -> None:
        block = b""
        try:
            while block := instance.connection.recv(2**16):
                instance.received += block
                if len(instance.received) > MAX_MESSAGE_BYTES:
                    break
        except BlockingIOError:
            if not instance.received:
                return
            block = instance.received
        except OSError:
            block = b""
        if not block:
            self._lose(key, Answer("crash", "its process has ended"))
        elif len(instance.received) > MAX_MESSAGE_BYTES:
            self._lose(key, Answer("crash", "its message is too long"))
        elif instance.received.endswith(b"\n"):
            line, instance.received = instance.received, b""
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                answer = Answer("crash", f"it sent an invalid message: {line[:100]!r}")
            if not instance.asked:
                self._lose(key, Answer("crash", "it answered without a request"))
            elif answer.cause in LOST:
                self._lose(key, answer)
            else:
                instance.asked = 0
                self._answers.append((key, answer))

    def _lose(self, key: Hashable, answer: Answer) -> None:
        self.stop(key)
        self._answers.append((key, answer))
