"""All engines of a run, as one rank sees them: its own worker, and on rank 0 the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar, cast

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.protocols import Exchange
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.types import RankError

T = TypeVar("T")


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
    """This rank's worker, and on rank 0 the driver of all workers."""

    worker: Worker
    driver: EngineDriver | None
    exchange: Exchange

    def run(self, task: Callable[[EngineDriver], T], of: object) -> T:
        """Run `task` on rank 0 while the workers of all ranks obey the driver. Return its result,
        of type `of`, on every rank. Collective.

        A DapoError of `task` is raised on every rank. A RankError is raised on rank 0 only, because
        the rank that it names may not answer any more. The launcher then ends the others.
        """
        if self.driver is None:
            self.worker.serve()
            result = on_rank0(self.exchange, _nowhere)
        else:
            running = _Running(task, self.driver)
            self.worker.serve()
            running.thread.join()
            if isinstance(running.error, RankError):
                raise running.error
            result = on_rank0(self.exchange, running.outcome)
        return cast(T, self.exchange.broadcast(result, of))


class _Running(Generic[T]):
    """A task that runs in a thread, because rank 0 has a worker of its own."""

    def __init__(self, task: Callable[[EngineDriver], T], driver: EngineDriver) -> None:
        self._task, self._driver = task, driver
        self._result: list[T] = []
        self.error: BaseException | None = None
        # A daemon thread, so that a failing worker on this rank ends the process.
        self.thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self.thread.start()

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
            if not isinstance(self.error, RankError):
                self._driver.end()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self.error = error
        if isinstance(self.error, RankError):  # a lost rank cannot be told
            self._driver.end(only_here=True)


def _nowhere() -> NoReturn:
    raise AssertionError("runs on rank 0 only")
