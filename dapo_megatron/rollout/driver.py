"""Runs the engines of all replicas, and exchanges what was sampled and graded between all ranks.

Nobody waits for a batch. Each replica runs a few engine steps at its own pace, then all ranks
exchange what was sampled and graded (`advance`). Decisions are made from these events only. Every
rank gets them in the same order, so all ranks decide alike, and the ranks of one engine get the
same requests between the same engine steps.
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
"""Engine steps between exchanges of a deterministic run."""
EXCHANGE_SHARE = 0.05
"""Share of the time that exchanges may take; they are made as often as that allows, ..."""
MIN_SECONDS, MAX_SECONDS = 0.02, 2.0
"""... but neither more nor less often than this."""
NUM_SHOWN = 20
"""Requests in flight that are named for a rank that hangs."""

Graded = tuple[int, int, Grade | None, str]
"""(ticket, sample, grade or None, why)."""


@dataclass(frozen=True, slots=True)
class Events:
    """What happened since the last exchange, over all replicas; the same on every rank."""

    sampled: list[tuple[int, Completion]]
    """(ticket, finished completion): not graded yet."""
    graded: list[Graded]
    stop: str = ""
    """Signal that asked a rank to stop, if any. Grades are then left out: a signal to a whole job
    kills graders too, and their answers are asked for again after a resume."""


class Driver(Protocol):
    """All engines of a run. Collective: every rank makes the same calls."""

    num_replicas: int
    max_sequences: int
    """Requests that one replica can run at once."""
    grade_seconds: float
    """Seconds so far that this rank waited for graders with an idle engine."""
    last_errors: dict[str, str]
    """Last error in a grader, by data set."""

    def advance(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> Events:
        """Start `requests[replica]`, grade what a resumed run had sampled and not graded, run all
        engines for a while, and return what happened.

        `use` separates training from evaluation: grades that come late, while the engines are used
        for something else, are kept until this use asks again.
        """
        ...

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Stop all engines. Return (ticket, unfinished completion), by ticket and sample."""
        ...


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part of an exchange. Only the leader of a replica has events."""

    replica: int
    sampled: list[tuple[int, Completion]]
    graded: list[Graded]
    errors: Mapping[str, str]
    """Last error in a grader, by data set."""
    step_seconds: float
    exchange_seconds: float
    stop: str


class EngineDriver:
    """The `Driver` of a run: this rank's engine, and the exchange with all others.

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
        self._step_seconds = MIN_SECONDS  # until the first one is measured
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
        """Describe what this replica was asked for and has not answered, for a rank that hangs."""
        requests = list(self._engine.requests)  # the run goes on meanwhile
        shown = ", ".join(f"{one.ticket}/{one.sample}" for one in requests[:NUM_SHOWN])
        gradings = 0 if self._grading is None else self._grading.pending
        return (
            f"{len(requests)} completions of replica {self._engine.replica} "
            f"(ticket/sample: {shown}); {gradings} gradings"
        )

    def interrupt(self) -> list[tuple[int, Completion]]:
        """See `Driver`."""
        unfinished = self._engine.interrupt()
        self.on_running(0)
        self._set_pace(1)  # the next work may be of another kind: full engines, long prompts
        mine = [(request.ticket, completion) for request, completion in unfinished]
        parts = self._exchange.all_gather(
            mine if self._engine.is_leader else [], list[tuple[int, Completion]]
        )
        return sorted(
            (item for part in parts for item in part), key=lambda item: (item[0], item[1].sample)
        )

    def _run(self, use: str) -> list[tuple[int, Completion]]:
        """Run some engine steps. Return what finished."""
        sampled: list[tuple[int, Completion]] = []
        started, steps = time.perf_counter(), 0
        while steps < self._num_steps and self._engine.requests:
            for request, completion in self._engine.step():
                sampled.append((request.ticket, completion))
                self._grade(use, request.ticket, request.prompt, completion)
            self.on_running(len(self._engine.requests))
            steps += 1
        if steps:  # an idle engine's pace is the one it had
            self._step_seconds = (time.perf_counter() - started) / steps
        return sampled

    def _grade(self, use: str, ticket: int, prompt: Prompt, completion: Completion) -> None:
        if self._grading is not None:
            key = use, ticket, completion.sample
            self._grading.submit(
                key, prompt.source, completion.text, prompt.truth, dict(prompt.extra)
            )

    def _graded(self, use: str) -> list[Graded]:
        """Return what is graded by now. With an idle engine the graders get a moment, because an
        exchange without events would only be made again. A deterministic run waits for all."""
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
        # In the order of samples, not of graders.
        return sorted(self._grades.pop(use, []), key=lambda item: item[:2])

    def _collect(self, *, wait: bool) -> None:
        assert self._grading is not None
        for (use, ticket, sample), grade, why in self._grading.collect(wait):
            self._grades[use].append((ticket, sample, grade, why))

    def _exchange_reports(
        self, sampled: list[tuple[int, Completion]], graded: list[Graded]
    ) -> list[RankReport]:
        """Exchange reports, and set the pace up to the next time."""
        leads = self._engine.is_leader
        mine = RankReport(
            self._engine.replica,
            sampled if leads else [],
            graded if leads else [],
            {} if self._grading is None else dict(self._grading.last_errors),
            self._step_seconds,
            self._exchange_seconds,
            self._stop(),
        )
        started = time.perf_counter()
        reports = self._exchange.all_gather(mine, RankReport)
        self._exchange_seconds = time.perf_counter() - started
        for report in reports:
            self.last_errors |= report.errors
        if not self._deterministic:
            # The last to come waited for nobody: its time is what the exchange costs.
            cost = min(report.exchange_seconds for report in reports)
            self._period = min(max(cost / EXCHANGE_SHARE, MIN_SECONDS), MAX_SECONDS)
            # By the first rank of the replica: all of them must make as many steps.
            pace = next(r.step_seconds for r in reports if r.replica == self._engine.replica)
            # A pace that has just dropped must not keep the others waiting for long.
            self._set_pace(min(max(round(self._period / pace), 1), 2 * self._num_steps))
        return reports

    def _set_pace(self, num_steps: int) -> None:
        if not self._deterministic:
            self._num_steps = num_steps
