"""Running the engines of all replicas, and telling every rank what came of it.

Nobody waits for a batch: each replica runs a few engine steps at its own pace, then all ranks
exchange what was sampled and graded (`advance`). Decisions are made from these news alone, which
every rank hears in the same order, so all of them decide alike, and the ranks of one engine get the
same requests between the same engine steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dapo_megatron.protocols import Exchange, RolloutEngine
from dapo_megatron.types import Completion, Grade, Prompt, SampleRequest

STEPS = 8
"""Engine steps between exchanges of a deterministic run."""
EXCHANGE_SHARE = 0.05
"""Share of the time that exchanges may take; they are made as often as that allows, ..."""
MIN_SECONDS, MAX_SECONDS = 0.02, 2.0
"""... but neither more nor less often than this."""


class Grading(Protocol):
    """What the driver needs of rewards.pool.GradingPool."""

    @property
    def pending(self) -> int:
        """Gradings not yet collected."""
        ...

    @property
    def last_errors(self) -> Mapping[str, str]:
        """The last thing that went wrong, by data set."""
        ...

    def submit(self, key: Any, source: str, response: str, truth: str, extra: Any) -> None:
        """Queue one grading."""
        ...

    def collect(self, wait: bool) -> Sequence[tuple[Any, Grade | None, str]]:
        """(key, grade or None, why) of what has finished."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """A completion to sample, and the prompt that its grading needs."""

    prompt: Prompt
    request: SampleRequest


@dataclass(frozen=True, slots=True)
class News:
    """What happened since the last exchange, over all replicas; the same on every rank."""

    sampled: list[tuple[int, Completion]]
    """(ticket, finished completion): not graded yet."""
    graded: list[tuple[int, int, Grade | None, str]]
    """(ticket, sample, grade or None, why)."""
    stop: str = ""
    """The signal that asked a rank to stop, if any. Grades are then left out: a signal to a whole
    job kills graders as well, and what they say is asked for again after a resume."""


class Driver(Protocol):
    """All engines of a run. Collective: every rank makes the same calls."""

    num_replicas: int
    max_sequences: int
    """Requests that one replica can run at once."""
    grade_seconds: float
    """This rank waited for graders with an idle engine, so far."""

    last_errors: dict[str, str]
    """What last went wrong in a grader, by data set."""

    def advance(
        self,
        orders: Sequence[Sequence[Order]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> News:
        """Start `orders[replica]`, grade what a resumed run had sampled and not graded, run all
        engines for a while, and hear what came of it.

        `use` separates training from evaluation: grades that come late, while the engines are used
        for something else, are kept until this use asks again.
        """
        ...

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Stop all engines: (ticket, unfinished completion), by ticket and sample."""
        ...


@dataclass(frozen=True, slots=True)
class _Told:
    """One rank's part of an exchange. Only the leader of a replica has news."""

    replica: int
    sampled: list[tuple[int, Completion]]
    graded: list[tuple[int, int, Grade | None, str]]
    errors: Mapping[str, str]
    """What last went wrong in a grader, by data set."""
    step_seconds: float
    exchange_seconds: float
    stop: str


class EngineDriver:
    """The `Driver` of a run: this rank's engine, and the exchange with all others.

    `grading` is None on ranks that do not speak for their replica.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        grading: Grading | None,
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
        """Told, whenever it may have changed, how many requests this replica's engine has."""
        self._engine = engine
        self._grading = grading
        self._exchange = exchange
        self._deterministic = deterministic
        self._stop = stop
        self._prompts: dict[tuple[int, int], Prompt] = {}  # of what this replica samples
        self._grades: defaultdict[str, list[tuple[int, int, Grade | None, str]]] = defaultdict(list)
        self._num_steps = STEPS if deterministic else 1
        self._period = MIN_SECONDS
        self._step_seconds = MIN_SECONDS  # until the first one is measured
        self._exchange_seconds = 0.0

    def advance(
        self,
        orders: Sequence[Sequence[Order]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> News:
        """See `Driver`."""
        mine = orders[self._engine.replica]
        self._prompts |= {(o.request.ticket, o.request.sample): o.prompt for o in mine}
        self.on_running(len(self._prompts))
        self._engine.submit([order.request for order in mine])
        for ticket, prompt, completion in grade:
            if ticket % self.num_replicas == self._engine.replica:
                self._grade(use, ticket, prompt, completion)
        sampled = self._run(use)
        told = self._tell(sampled, self._graded(use))
        stop = next((part.stop for part in told if part.stop), "")
        return News(
            sampled=[item for part in told for item in part.sampled],
            graded=[] if stop else [item for part in told for item in part.graded],
            stop=stop,
        )

    def in_flight(self) -> str:
        """What this replica was asked for and has not answered, for a rank that hangs."""
        shown = ", ".join(f"{ticket}/{sample}" for ticket, sample in list(self._prompts)[:20])
        gradings = 0 if self._grading is None else self._grading.pending
        return (
            f"{len(self._prompts)} completions of replica {self._engine.replica} "
            f"(ticket/sample: {shown}); {gradings} gradings"
        )

    def interrupt(self) -> list[tuple[int, Completion]]:
        """See `Driver`."""
        unfinished = self._engine.interrupt()
        self._prompts.clear()
        self.on_running(0)
        self._set_pace(1)  # the next work may be of another kind: full engines, long prompts
        mine = unfinished if self._engine.is_leader else []
        parts = self._exchange.all_gather(mine, list[tuple[int, Completion]])
        return sorted(
            (item for part in parts for item in part), key=lambda item: (item[0], item[1].sample)
        )

    def _run(self, use: str) -> list[tuple[int, Completion]]:
        """What finished in some engine steps."""
        sampled: list[tuple[int, Completion]] = []
        begun, steps = time.perf_counter(), 0
        while steps < self._num_steps and self._engine.has_work():
            for ticket, completion in self._engine.step():
                sampled.append((ticket, completion))
                prompt = self._prompts.pop((ticket, completion.sample))
                self._grade(use, ticket, prompt, completion)
            self.on_running(len(self._prompts))
            steps += 1
        if steps:  # an idle engine's pace is the one it had
            self._step_seconds = (time.perf_counter() - begun) / steps
        return sampled

    def _grade(self, use: str, ticket: int, prompt: Prompt, completion: Completion) -> None:
        if self._grading is not None:
            key = use, ticket, completion.sample
            self._grading.submit(
                key, prompt.source, completion.text, prompt.truth, dict(prompt.extra)
            )

    def _graded(self, use: str) -> list[tuple[int, int, Grade | None, str]]:
        """What is graded by now. With an idle engine the graders get a moment: the exchange with
        nothing to say would only be made again. A deterministic run waits for all of them."""
        if self._grading is None:
            return []
        begun = time.perf_counter()
        until = begun + (0.0 if self._engine.has_work() else self._period)
        self._collect(wait=False)
        while self._grading.pending:
            if self._deterministic:
                self._collect(wait=True)
            elif not self._grades[use] and time.perf_counter() < until:
                time.sleep(0.001)
                self._collect(wait=False)
            else:
                break
        if not self._engine.has_work():
            self.grade_seconds += time.perf_counter() - begun
        # In the order of samples, not of graders.
        return sorted(self._grades.pop(use, []), key=lambda item: item[:2])

    def _collect(self, *, wait: bool) -> None:
        assert self._grading is not None
        for (use, ticket, sample), grade, why in self._grading.collect(wait):
            self._grades[use].append((ticket, sample, grade, why))

    def _tell(
        self,
        sampled: list[tuple[int, Completion]],
        graded: list[tuple[int, int, Grade | None, str]],
    ) -> list[_Told]:
        """Exchange, and set the pace up to the next time."""
        leads = self._engine.is_leader
        mine = _Told(
            self._engine.replica,
            sampled if leads else [],
            graded if leads else [],
            {} if self._grading is None else dict(self._grading.last_errors),
            self._step_seconds,
            self._exchange_seconds,
            self._stop(),
        )
        begun = time.perf_counter()
        told = self._exchange.all_gather(mine, _Told)
        self._exchange_seconds = time.perf_counter() - begun
        for part in told:
            self.last_errors |= part.errors
        if not self._deterministic:
            # The last to come waited for nobody: what it took is what the exchange costs.
            cost = min(part.exchange_seconds for part in told)
            self._period = min(max(cost / EXCHANGE_SHARE, MIN_SECONDS), MAX_SECONDS)
            # As the first rank of the replica says: all of them must make as many steps.
            pace = next(p.step_seconds for p in told if p.replica == self._engine.replica)
            # A pace that has just dropped must not keep the others waiting for long.
            self._set_pace(min(max(round(self._period / pace), 1), 2 * self._num_steps))
        return told

    def _set_pace(self, num_steps: int) -> None:
        if not self._deterministic:
            self._num_steps = num_steps
