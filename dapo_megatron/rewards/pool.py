"""Pool of grading processes, which may hang, crash or raise without affecting the run.

A thread of the parent waits for each process, so that grading continues while the engine decodes.
If an answer is late, or the process dies or runs out of memory, only that grading fails, and a new
process takes over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Self

from dapo_megatron.rewards.process import Answer, Worker
from dapo_megatron.rewards.registry import check_grader, grader_names, is_built_in
from dapo_megatron.types import DataError, Grade, Prompt

logger = logging.getLogger(__name__)

CAUSES = ("timeout", "crash", "memory", "error")
"""Reasons for a missing grade: time limit exceeded, process died, memory limit exceeded, grader
raised."""


_Graders = Mapping[str, str | Mapping[str, str]]


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
        graders: _Graders,
        workers: int,
        timeout_seconds: float,
        memory_mib: int = 2048,
        environment: Collection[str] = (),
    ) -> None:
        if workers < 1 or timeout_seconds <= 0:
            raise ValueError(f"need workers >= 1 and a timeout > 0: {workers}, {timeout_seconds}")
        names = {name for grader in graders.values() for name in grader_names(grader)}
        for name in names:
            check_grader(name)
        self.last_errors = {}
        self._graders = dict(graders)
        self._logged: set[tuple[str, str]] = set()  # (source, cause)
        self._submitted: dict[Future[Answer], tuple[Any, str]] = {}  # key, source
        self._finished: SimpleQueue[Future[Answer]] = SimpleQueue()
        self._workers = [
            Worker(names, timeout_seconds, memory_mib, environment) for _ in range(workers)
        ]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grading")

    @property
    def pending(self) -> int:
        """Number of gradings submitted but not yet collected."""
        return len(self._submitted)

    def submit(
        self, key: Any, source: str, response: str, truth: str, extra: Mapping[str, Any]
    ) -> None:
        """Queue one grading and return. `collect` returns `key`, any object, with the result.

        Raises ValueError for an unknown source or data_source, TypeError or ValueError if `extra`
        contains values that JSON does not support, RuntimeError if the pool is closed.
        """
        task = json.dumps([_grader_of(self._graders, source, extra), response, truth, dict(extra)])
        future = self._threads.submit(self._grade, task.encode())
        self._submitted[future] = key, source
        future.add_done_callback(self._finished.put)

    def collect(self, wait: bool) -> list[tuple[Any, Grade | None, str]]:
        """Return (key, grade, why) of the gradings finished since the last call, in any order.

        If the grader abstained, the grade is None and `why` is one of CAUSES; the first failure of
        each cause and source is logged. Otherwise `why` is "graded".

        wait: block until something finishes, unless nothing is pending.
        Raises ConfigError or DapoError if workers cannot start.
        """
        results: list[tuple[Any, Grade | None, str]] = []
        while self._submitted:
            try:
                future = self._finished.get(block=wait and not results)
            except Empty:
                break
            if future in self._submitted:  # else it was dropped
                key, source = self._submitted.pop(future)
                answer = future.result()
                if answer.grade is None:
                    self._note_failure(key, source, answer)
                results.append((key, answer.grade, answer.cause))
        return results

    def drop_queued(self) -> None:
        """Forget the gradings that no worker has got yet."""
        for future in list(self._submitted):
            if future.cancel():
                del self._submitted[future]

    def close(self) -> None:
        """Kill the workers. Queued, running and uncollected gradings are dropped. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()
        self._submitted.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade(self, task: bytes) -> Answer:
        """Grade a task with an idle worker. Runs in as many threads as there are workers."""
        worker = self._idle.get()
        try:
            return worker.grade(task)
        finally:
            self._idle.put(worker)

    def _note_failure(self, key: Any, source: str, answer: Answer) -> None:
        if (source, answer.cause) not in self._logged:
            self._logged.add((source, answer.cause))
            logger.warning(
                "grading of %r abstained (%s), source %r; further ones are only counted. %s",
                *(key, answer.cause, source, answer.detail),
            )
        self.last_errors[source] = answer.detail.strip().rpartition("\n")[2]


def _grader_of(graders: _Graders, source: str, extra: Mapping[str, Any]) -> str:
    """Return the grader of a row."""
    grader = graders.get(source)
    if isinstance(grader, str):
        return grader
    if grader is None:
        raise ValueError(f"no grader for source {source!r}; known: {sorted(graders)}")
    kind = str(extra.get("data_source"))
    if kind not in grader:
        raise ValueError(
            f"source {source!r}: no grader for data_source {kind!r}; known: {sorted(grader)}"
        )
    return grader[kind]


def try_graders(
    graders: _Graders,
    prompts: Iterable[Prompt],
    timeout_seconds: float,
    memory_mib: int,
    environment: Collection[str],
) -> None:
    """Grade the truth of a prompt, as a response, with each grader that is not built in.

    A grader whose result is not understood would otherwise end a run after engine and policy are
    built and the first groups are sampled. Arguments: see `GradingPool`.

    Raises DataError naming row and grader if there is no grade, and ConfigError for a grader that
    cannot be imported.
    """
    chosen: dict[str, Prompt] = {}
    for prompt in prompts:
        name = _grader_of(graders, prompt.source, prompt.extra)
        if not is_built_in(name):
            chosen.setdefault(name, prompt)
    if not chosen:
        return
    sources = {name: name for name in chosen}
    with GradingPool(sources, 1, timeout_seconds, memory_mib, environment) as pool:
        for name, prompt in chosen.items():
            turns = [{"role": "assistant", "content": prompt.truth}]
            extra = {**prompt.extra, "turns": turns} if prompt.environment else prompt.extra
            pool.submit(name, name, prompt.truth, prompt.truth, extra)
        while pool.pending:
            for name, grade, why in pool.collect(wait=True):
                if grade is None:
                    raise DataError(
                        f"source {chosen[name].source!r}, row {chosen[name].index}: the grader "
                        f"{name!r} gave no grade ({why}) in a trial call, with the row's answer as "
                        f"response: {pool.last_errors.get(name, why)}"
                    )
