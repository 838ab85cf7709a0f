"""Pool of grading processes, which may hang, crash or raise without affecting the run.

One thread of the parent serves one worker. It sends an idle worker a batch of gradings and reads
the answers one by one. If an answer is late, or the worker dies or runs out of memory, only the
first unanswered grading fails. The rest of the batch returns to the head of the queue, and a new
worker takes over. Threads are used so that grading continues while the engine decodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

from dapo_megatron.rewards.process import PoolClosed, WorkerLost, WorkerProcess, Workers
from dapo_megatron.rewards.registry import check_grader, grader_names
from dapo_megatron.rewards.sandbox import missing_layers
from dapo_megatron.rewards.worker_messages import Failure, encode_task
from dapo_megatron.types import Grade

logger = logging.getLogger(__name__)

CAUSES = ("timeout", "crash", "memory", "error")
"""Reasons for a missing grade: time limit exceeded, process died, memory limit exceeded, grader
raised."""

MAX_BATCH = 16
"""Maximum gradings sent to a worker at once. One slow grading delays at most these."""


class _Task(NamedTuple):
    key: Any
    source: str
    payload: bytes


class _Result(NamedTuple):
    task: _Task
    grade: Grade | None
    why: str
    detail: str = ""


class GradingPool:
    """Grades responses in `workers` child processes. Use it as a context manager.

    graders          source -> grader's name (see `registry.resolve`), or source -> data_source of a
                     row -> grader's name
    timeout_seconds  wall-clock limit of one grading; a worker's start does not count
    memory_mib       limit of a worker's address space
    environment      names of environment variables passed to workers besides INHERITED (PATH, HOME
                     and similar)

    Raises ConfigError at once for a grader that cannot be resolved. Call all methods from one
    thread. Workers start in the background and die with the pool or with this process.

    Example:
        with GradingPool({"math": "dapo_math"}, workers=2, timeout_seconds=10.0) as pool:
            pool.submit((12, 3), "math", "Answer: 7", "7", {})
            while pool.pending:
                for key, grade, why in pool.collect(wait=True): ...
    """

    last_errors: dict[str, str]
    """Source -> last failure: the last line of the grader's exception, or how its process ended.
    Sources without a failure are missing."""

    def __init__(
        self,
        graders: Mapping[str, str | Mapping[str, str]],
        workers: int,
        timeout_seconds: float,
        memory_mib: int = 2048,
        environment: Collection[str] = (),
    ) -> None:
        if workers < 1 or timeout_seconds <= 0:
            raise ValueError(f"need workers >= 1 and a timeout > 0: {workers}, {timeout_seconds}")
        self._names = {name for grader in graders.values() for name in grader_names(grader)}
        for name in self._names:
            check_grader(name)
        if "code" in self._names:
            _warn_of_missing_layers()
        self.last_errors = {}
        self._logged: set[tuple[str, str]] = set()  # (source, cause)
        self._pending = 0
        self._graders = dict(graders)
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        self._environment = tuple(environment)
        self._queue: deque[_Task] = deque()
        self._closed = False
        self._changed = threading.Condition()  # guards the queue and the flag
        self._closing, self._close_signal = Pipe(duplex=False)
        self._finished: SimpleQueue[_Result | Exception] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"grading-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Number of gradings submitted but not yet collected."""
        return self._pending

    def submit(
        self, key: Any, source: str, response: str, truth: str, extra: Mapping[str, Any]
    ) -> None:
        """Queue one grading and return. `collect` returns `key`, any object, with the result.

        Raises ValueError for an unknown source or data_source, or if the pool is closed. Raises
        TypeError or ValueError if `extra` contains values that JSON does not support.
        """
        name = self._grader_of(source, extra)
        task = _Task(key, source, encode_task(name, response, truth, extra))
        with self._changed:
            if self._closed:
                raise ValueError("the grading pool is closed")
            self._queue.append(task)
            self._changed.notify()
        self._pending += 1

    def collect(self, wait: bool) -> list[tuple[Any, Grade | None, str]]:
        """Return (key, grade, why) of the gradings finished since the last call, in any order.

        If the grader abstained, the grade is None and `why` is one of CAUSES; the first failure of
        each cause and source is logged. Otherwise `why` is "graded".

        wait: block until something finishes, unless nothing is pending.
        Raises ConfigError or DapoError if workers cannot start.
        """
        results: list[tuple[Any, Grade | None, str]] = []
        while self._pending:
            try:
                item = self._finished.get(block=wait and not results)
            except Empty:
                break
            if isinstance(item, Exception):
                self._finished.put(item)  # the next call raises it again
                raise item
            self._pending -= 1
            self._log_failure(item)
            results.append((item.task.key, item.grade, item.why))
        return results

    def drop_queued(self) -> None:
        """Forget the gradings that no worker has got yet."""
        with self._changed:
            self._pending -= len(self._queue)
            self._queue.clear()

    def close(self) -> None:
        """Kill the workers. Queued, running and uncollected gradings are dropped. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._close_signal.send(None)  # never received, so every thread sees it
        for thread in self._threads:
            thread.join()
        self._pending = 0
        self._close_signal.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _grader_of(self, source: str, extra: Mapping[str, Any]) -> str:
        if source not in self._graders:
            raise ValueError(f"no grader for source {source!r}; known: {sorted(self._graders)}")
        grader = self._graders[source]
        if isinstance(grader, str):
            return grader
        kind = str(extra.get("data_source"))
        if kind not in grader:
            raise ValueError(
                f"source {source!r}: no grader for data_source {kind!r}; known: {sorted(grader)}"
            )
        return grader[kind]

    def _log_failure(self, result: _Result) -> None:
        if result.grade is not None:
            return
        source = result.task.source
        if (source, result.why) not in self._logged:
            self._logged.add((source, result.why))
            logger.warning(
                "grading of %r abstained (%s), source %r; further ones are only counted. %s",
                *(result.task.key, result.why, source, result.detail),
            )
        self.last_errors[source] = result.detail.strip().rpartition("\n")[2]

    # ------------------------------------------------------------------ in the threads

    def _serve(self) -> None:
        """Serve one worker at a time until the pool is closed."""
        workers = Workers(
            *(self._closing, self._names, self._timeout_seconds),
            *(self._memory_mib, self._environment),
        )
        try:
            workers.ready()  # start a worker before there is work
            while batch := self._next_batch():
                worker = workers.ready()  # a new worker if it died while idle; no grading fails
                try:
                    self._grade(worker, batch, workers.prepare_successor)
                except WorkerLost as lost:
                    self._finished.put(_Result(batch.popleft(), None, lost.why, lost.detail))
                    self._give_back(batch)
                    workers.replace()
                    workers.ready()
        except PoolClosed:
            pass
        except Exception as error:  # noqa: BLE001 - collect raises it in the caller's thread
            self._finished.put(error)
        finally:
            workers.stop()

    def _grade(
        self, worker: WorkerProcess, batch: deque[_Task], prepare_successor: Callable[[], object]
    ) -> None:
        """Grade the tasks of `batch`, removing each when it is answered. Raises WorkerLost."""
        deadline = worker.send_batch([task.payload for task in batch], self._timeout_seconds)
        while batch:
            answer = worker.answer(deadline, halfway=prepare_successor)
            deadline = time.monotonic() + self._timeout_seconds
            if not isinstance(answer, Failure):
                self._finished.put(_Result(batch.popleft(), answer, "graded"))
            elif (
                answer.cause == "memory"
            ):  # the worker may not free it: the next grading would fail
                raise WorkerLost(*answer)
            else:
                self._finished.put(_Result(batch.popleft(), None, *answer))

    def _next_batch(self) -> deque[_Task]:
        """Wait for work and return a batch, leaving a share for the other workers. Empty once the
        pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            share = max(1, len(self._queue) // (2 * len(self._threads)))
            size = min(share, MAX_BATCH, len(self._queue))
            return deque(self._queue.popleft() for _ in range(size))

    def _give_back(self, batch: deque[_Task]) -> None:
        with self._changed:
            self._queue.extendleft(reversed(batch))
            self._changed.notify_all()


def _warn_of_missing_layers() -> None:
    for layer, why in missing_layers().items():
        logger.warning(
            "grader 'code': its sandbox has no %s on this machine (%s); see docs/rewards.md",
            *(layer, why),
        )
