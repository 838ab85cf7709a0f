"""All engines of a run, as one rank sees them: its own worker, and on rank 0 the driver.

A rank without an engine (separate roles) has no worker. It waits for the end of the phase.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

from dapo_megatron.cluster.collectives import EnginesChanged, on_rank0
from dapo_megatron.protocols import Exchange
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.types import DapoError, RankError

T = TypeVar("T")
WAIT_SECONDS = 1.0
"""Interval at which ranks without an engine show each other that they are alive."""


class Worker(Protocol):
    """Engine worker of a rank; see worker.py."""

    def serve(self) -> None:
        """Run the engine until the coordinator ends the phase."""
        ...

    def in_flight(self) -> str:
        """Return the unanswered requests as text, for the report of a hang."""
        ...


@dataclass(frozen=True)
class Engines:
    """This rank's worker, and on rank 0 the driver of all workers.

    exchange  between all ranks
    waiting   between the ranks without a worker; None on ranks with one
    stop      name of the stop signal that this rank got, or empty
    """

    worker: Worker | None
    driver: EngineDriver | None
    exchange: Exchange
    waiting: Exchange | None = None
    stop: Callable[[], str] = lambda: ""

    def run(self, task: Callable[[EngineDriver], T], of: object) -> T:
        """Run `task` on rank 0 while the workers of all ranks obey the driver. Return its result,
        of type `of`, on every rank. Collective.

        A DapoError of `task` is raised on every rank. A RankError is raised on rank 0 only, because
        the rank that it names may not answer any more. The launcher then ends the others.
        EnginesChanged, after a replica was lost, is raised on every rank that is left.
        """
        if self.driver is None:
            self._serve(None)
            result = on_rank0(self.exchange, _nowhere)
        else:
            running = Running(task, self.driver)
            self._serve(running)
            running.join()
            result = on_rank0(self.exchange, running.outcome)
        return cast(T, self.exchange.broadcast(result, of))

    def _serve(self, running: Running[T] | None) -> None:
        """Run this rank's engine until the end of the phase, or wait for it."""
        if self.worker is not None:
            self.worker.serve()
            return
        assert self.waiting is not None
        is_over = False
        while not is_over:
            is_over = self.waiting.broadcast(running is not None and running.wait(), bool)
            # Only at the end, because until then the thread of the task uses the sockets.
            is_broken = running is not None and isinstance(running.error, EnginesChanged)
            if is_over and self.waiting.broadcast(is_broken, bool):
                raise lost_error(running)
            signals = self.waiting.all_gather(self.stop(), str)
            if self.driver is not None:
                self.driver.stop_signal = next(filter(None, signals), "")


class Running(Generic[T]):
    """A task that uses the engines, in a thread of rank 0: its main thread has other work."""

    def __init__(self, task: Callable[[EngineDriver], T], driver: EngineDriver) -> None:
        self._task, self._driver = task, driver
        self._result: list[T] = []
        self.error: BaseException | None = None
        # A daemon thread, so that a failing worker on this rank ends the process.
        self.thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self.thread.start()

    def wait(self) -> bool:
        """Wait for the end of the task, but not for long: until a replica shows a sign of life.
        Return whether the task has ended."""
        num_messages = self._driver.num_messages
        self.thread.join(WAIT_SECONDS)
        while self.thread.is_alive() and self._driver.num_messages == num_messages:
            self.thread.join(WAIT_SECONDS)
        return not self.thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the task. Raises its RankError."""
        self.thread.join()
        if isinstance(self.error, RankError):
            raise self.error

    @property
    def failure(self) -> DapoError | None:
        """The task's DapoError, if it raised one. Raises any other error."""
        if self.error is None or isinstance(self.error, DapoError):
            return self.error
        raise self.error

    def outcome(self) -> T:
        """Return the task's result, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._task(self._driver))
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self.error = error
        try:
            if not isinstance(self.error, RankError) or isinstance(self.error, EnginesChanged):
                self._driver.end()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self.error = error
        if isinstance(self.error, RankError):  # a lost rank cannot be told
            self._driver.end(only_here=True)


def lost_error(running: Running[Any] | None) -> EnginesChanged:
    """Return the error of a task that lost a replica; without the task, one that refers to it."""
    if running is not None and isinstance(running.error, EnginesChanged):
        return running.error
    return EnginesChanged("an engine was lost; see the log of rank 0")


def _nowhere() -> NoReturn:
    raise AssertionError("runs on rank 0 only")
