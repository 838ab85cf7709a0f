"""Runs the engines of all replicas, and exchanges finished completions and grades between ranks.

No replica waits for a batch. Each one runs a few engine steps at its own pace, then all ranks
exchange finished completions and grades (`advance`). The coordinator decides from these events
only. Every rank gets the events in the same order, so all ranks make the same decisions, and the
ranks of one engine submit the same requests between the same engine steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dapo_megatron.protocols import Exchange, RolloutEngine
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.types import Completion, Grade, Prompt, SampleRequest

STEPS = 8
"""Engine steps between two exchanges in a deterministic run."""
EXCHANGE_SHARE = 0.05
"""Target share of the time spent in exchanges."""
MIN_SECONDS, MAX_SECONDS = 0.02, 2.0
"""Bounds of the time between two exchanges, in seconds."""
NUM_SHOWN = 20
"""Number of requests in flight that the report of a hanging rank lists."""

Graded = tuple[int, int, Grade | None, str]
"""(ticket, sample, grade or None, "graded" or why there is no grade)."""


@dataclass(frozen=True, slots=True)
class Events:
    """Events of all replicas since the last exchange. The same on every rank."""

    sampled: list[tuple[int, Completion]]
    """(ticket, finished completion), not graded yet."""
    graded: list[Graded]
    stop: str = ""
    """Name of the stop signal, or empty. If there is one, `graded` is empty: the signal may also
    have killed graders, so these completions are graded again after a resume."""


class Driver(Protocol):
    """All engines of a run. Collective: every rank makes the same calls."""

    num_replicas: int
    max_sequences: int
    """Maximum number of requests that one replica runs at once."""
    grade_seconds: float
    """Total seconds that this rank waited for graders while its engine was idle."""
    last_errors: dict[str, str]
    """Last error of a grader, by data set."""

    def advance(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> Events:
        """Submit `requests[replica]` to each replica, run all engines for a while, and return the
        events.

        `grade` are finished completions of a resumed run to be graded again. `use` separates
        training from evaluation: a grade that arrives during another use is kept until the next
        call with its own `use`.
        """
        ...

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Interrupt all engines. Return (ticket, unfinished completion), sorted by ticket and
        sample."""
        ...


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's message in an exchange. Only the leader rank of a replica sends events."""

    replica: int
    sampled: list[tuple[int, Completion]]
    graded: list[Graded]
    errors: Mapping[str, str]
    """Last error of a grader, by data set."""
    step_seconds: float
    exchange_seconds: float
    stop: str


class EngineDriver:
    """Driver of this rank's engine and of the exchange with all other ranks.

    `grading` is None on ranks that do not lead a replica.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        grading: GradingPool | None,
        exchange: Exchange,
        *,
        deterministic: bool,
        stop: Callable[[], str] = lambda: "",
    ) -> None:
        self.num_replicas = engine.num_replicas
        self.max_sequences = engine.max_sequences
        self.grade_seconds = 0.0
        self.last_errors: dict[str, str] = {}
        self.on_running: Callable[[int], None] = lambda num_requests: None
        """Called with the number of this replica's requests whenever it may have changed."""
        self._engine = engine
        self._grading = grading
        self._exchange = exchange
        self._deterministic = deterministic
        self._stop = stop
        self._grades: defaultdict[str, list[Graded]] = defaultdict(list)
        self._num_steps = STEPS if deterministic else 1
        self._period = MIN_SECONDS
        self._step_seconds = MIN_SECONDS  # until the first measurement
        self._exchange_seconds = 0.0

    def advance(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> Events:
        """See `Driver`."""
        self._engine.submit(requests[self._engine.replica])
        self.on_running(len(self._engine.requests))
        for ticket, prompt, completion in grade:
            if ticket % self.num_replicas == self._engine.replica:
                self._grade(use, ticket, prompt, completion)
        sampled = self._run(use)
        reports = self._exchange_reports(sampled, self._graded(use))
        stop = next((report.stop for report in reports if report.stop), "")
        return Events(
            sampled=[item for report in reports for item in report.sampled],
            graded=[] if stop else [item for report in reports for item in report.graded],
            stop=stop,
        )

    def in_flight(self) -> str:
        """Return the unanswered requests of this replica as text, for the report of a hang."""
        requests = list(self._engine.requests)  # a copy: called from another thread
        shown = ", ".join(f"{request.ticket}/{request.sample}" for request in requests[:NUM_SHOWN])
        gradings = 0 if self._grading is None else self._grading.pending
        return (
            f"{len(requests)} completions of replica {self._engine.replica} "
            f"(ticket/sample: {shown}); {gradings} gradings"
        )

    def interrupt(self) -> list[tuple[int, Completion]]:
        """See `Driver`."""
        unfinished = self._engine.interrupt()
        self.on_running(0)
        self._set_pace(1)  # the next engine steps may be much slower: full engines, long prompts
        local = [(request.ticket, completion) for request, completion in unfinished]
        by_rank = self._exchange.all_gather(
            local if self._engine.is_leader else [], list[tuple[int, Completion]]
        )
        return sorted(
            (item for items in by_rank for item in items),
            key=lambda item: (item[0], item[1].sample),
        )

    def _run(self, use: str) -> list[tuple[int, Completion]]:
        """Run some engine steps. Return (ticket, completion) of finished completions."""
        sampled: list[tuple[int, Completion]] = []
        started, steps = time.perf_counter(), 0
        while steps < self._num_steps and self._engine.requests:
            for request, completion in self._engine.step():
                sampled.append((request.ticket, completion))
                self._grade(use, request.ticket, request.prompt, completion)
            self.on_running(len(self._engine.requests))
            steps += 1
        if steps:  # an idle engine keeps its last measurement
            self._step_seconds = (time.perf_counter() - started) / steps
        return sampled

    def _grade(self, use: str, ticket: int, prompt: Prompt, completion: Completion) -> None:
        if self._grading is not None:
            key = use, ticket, completion.sample
            self._grading.submit(
                key, prompt.source, completion.text, prompt.truth, dict(prompt.extra)
            )

    def _graded(self, use: str) -> list[Graded]:
        """Return the grades that have arrived. If the engine is idle, wait for at most one period,
        because an exchange without events would achieve nothing. A deterministic run waits for all
        grades."""
        if self._grading is None:
            return []
        started = time.perf_counter()
        until = started + (0.0 if self._engine.requests else self._period)
        self._collect(wait=False)
        while self._grading.pending:
            if self._deterministic:
                self._collect(wait=True)
            elif not self._grades[use] and time.perf_counter() < until:
                time.sleep(0.001)
                self._collect(wait=False)
            else:
                break
        if not self._engine.requests:
            self.grade_seconds += time.perf_counter() - started
        # Sort by ticket and sample: the order of arrival depends on timing.
        return sorted(self._grades.pop(use, []), key=lambda item: item[:2])

    def _collect(self, *, wait: bool) -> None:
        assert self._grading is not None
        for (use, ticket, sample), grade, outcome in self._grading.collect(wait):
            self._grades[use].append((ticket, sample, grade, outcome))

    def _exchange_reports(
        self, sampled: list[tuple[int, Completion]], graded: list[Graded]
    ) -> list[RankReport]:
        """Exchange reports, and set the number of engine steps until the next exchange."""
        is_leader = self._engine.is_leader
        report_here = RankReport(
            self._engine.replica,
            sampled if is_leader else [],
            graded if is_leader else [],
            {} if self._grading is None else dict(self._grading.last_errors),
            self._step_seconds,
            self._exchange_seconds,
            self._stop(),
        )
        started = time.perf_counter()
        reports = self._exchange.all_gather(report_here, RankReport)
        self._exchange_seconds = time.perf_counter() - started
        for report in reports:
            self.last_errors |= report.errors
        if not self._deterministic:
            # These are the seconds of the previous exchange. The rank that arrived last waited for
            # no other rank, so the minimum is the cost of the exchange.
            cost = min(report.exchange_seconds for report in reports)
            self._period = min(max(cost / EXCHANGE_SHARE, MIN_SECONDS), MAX_SECONDS)
            # Use the time of the replica's first rank: all its ranks must run as many steps.
            step_seconds = next(
                report.step_seconds for report in reports if report.replica == self._engine.replica
            )
            # At most double the number of steps: if engine steps suddenly become slow, the other
            # replicas must not wait long.
            num_steps = max(round(self._period / step_seconds), 1)
            self._set_pace(min(num_steps, 2 * self._num_steps))
        return reports

    def _set_pace(self, num_steps: int) -> None:
        if not self._deterministic:
            self._num_steps = num_steps
