"""The engine worker of a rank: runs its engine on the coordinator's orders.

The leader of a replica gets the orders. The other ranks of its engine follow it: before every
engine step, or turn of a deterministic run, it sends them the same requests. So all ranks of an
engine submit the same requests between the same steps, and no replica waits for another.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import cast

from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.cluster.messages import Member
from dapo_megatron.protocols import Exchange, RolloutEngine
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.driver import ALIVE_SECONDS, DISCONNECTED_SECONDS
from dapo_megatron.rollout.engines import lost_error
from dapo_megatron.rollout.messages import (
    STEPS,
    Graded,
    Order,
    OrderKind,
    Report,
    Sampled,
    Sampling,
    Turn,
)
from dapo_megatron.types import Prompt

IDLE_SECONDS = 1.0
"""Maximum time that an idle leader waits for orders before it shows its peers that it is alive."""
GRADING_SECONDS = 0.005
"""Interval at which a leader with an idle engine looks for grades."""
REPORT_SECONDS = 0.02
"""Minimum time between two reports while the engine is running."""
REPORT_SECONDS_PER_REPLICA = 0.004
"""The same, per replica of the run, so that rank 0 gets at most 250 reports per second. The engine
has queued requests meanwhile (driver.QUEUED_SHARE)."""
NUM_SHOWN = 20
"""Number of requests in flight that the report of a hanging rank lists."""


class Follower:
    """Engine worker of a rank that does not lead its replica.

    peers         the ranks of this engine; the leader is rank 0 of them
    stop          name of the stop signal that this rank got, or empty
    on_activity   called with a sign of life
    """

    def __init__(
        self,
        engine: RolloutEngine,
        peers: Exchange,
        *,
        stop: Callable[[], str] = lambda: "",
        on_activity: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine, self._peers, self._stop = engine, peers, stop
        self._on_activity = on_activity

    def serve(self) -> None:
        """Follow the leader until the end of the phase."""
        is_over = False
        while not is_over:
            turn = cast(Turn, self._peers.broadcast(None, Turn))
            self._on_activity("turn")
            self._take(turn)
            is_over = turn.end
            if turn.is_broken:
                raise lost_error(None)

    def in_flight(self) -> str:
        """Return the unanswered requests as text, for the report of a hang."""
        return describe(self._engine)

    def _take(self, turn: Turn) -> None:
        if turn.asks_stop:
            self._peers.all_gather(self._stop(), str)
        self._engine.submit(turn.requests())
        if turn.interrupt:
            self._engine.interrupt()
        for _ in range(turn.num_steps):
            if self._engine.requests:
                self._engine.step()


class Leader:
    """Engine worker of the rank that leads a replica.

    member          its socket to the coordinator
    peers           the ranks of this engine; this is rank 0 of them
    deterministic   take turns in lock step with all replicas
    is_elastic      the run goes on without lost replicas, in another generation of its ranks
    stop            name of the stop signal that this rank got, or empty
    on_running      called with the number of requests of the engine whenever it may have changed
    on_activity     called with a sign of life
    """

    def __init__(
        self,
        engine: RolloutEngine,
        grading: GradingPool,
        member: Member,
        peers: Exchange,
        *,
        deterministic: bool,
        is_elastic: bool = False,
        stop: Callable[[], str] = lambda: "",
        on_activity: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.on_running: Callable[[int], None] = lambda num_requests: None
        self._engine = engine
        self._grading = grading
        self._member = member
        self._peers = peers
        self._deterministic, self._is_elastic = deterministic, is_elastic
        self._stop = stop
        self._on_activity = on_activity
        self._sampling: Sampling | None = None
        self._is_interrupted = False  # since the last answer to an interrupt, until the next phase
        self._sampled: list[Sampled] = []
        self._grades: defaultdict[str, list[Graded]] = defaultdict(list)
        self._num_drops: Counter[int] = Counter()
        self._grade_seconds = 0.0
        self._stop_signal = ""
        self._reported = self._asked = 0.0
        self._report_seconds = max(REPORT_SECONDS, REPORT_SECONDS_PER_REPLICA * engine.num_replicas)

    def serve(self) -> None:
        """Obey the coordinator until it ends the phase."""
        while True:
            orders = self._orders()
            turn = self._turn(orders)
            self._take(turn)
            for order in orders:
                for ticket, sample, prompt, text in order.regrade:
                    self._grade(ticket, sample, prompt, text)
            unfinished = self._interrupt() if turn.interrupt else None
            self._run(turn.num_steps)
            self._collect(wait=self._deterministic and turn.num_steps > 0)
            self._report(unfinished, is_due=self._deterministic and turn.num_steps > 0)
            if turn.is_broken:
                raise lost_error(None)
            if turn.end:
                return

    def in_flight(self) -> str:
        """Return the unanswered requests as text, for the report of a hang."""
        return f"{describe(self._engine)}; {self._grading.pending} gradings"

    # ------------------------------------------------------------------ orders

    def _orders(self) -> list[Order]:
        """Return the orders that have arrived. If the engine is idle, or in lock step, first wait
        for some, but not for long."""
        is_waiting = self._deterministic or not self._engine.requests
        timeout = 0.0
        if is_waiting:
            timeout = GRADING_SECONDS if self._grading.pending else IDLE_SECONDS
        started = time.perf_counter()
        messages = self._member.receive(timeout)
        if is_waiting and self._grading.pending:
            self._grade_seconds += time.perf_counter() - started
        if messages or not is_waiting:
            # An idle leader that hears nothing shows no sign of life: rank 0 may hang.
            self._on_activity("orders")
        if self._is_elastic and self._member.silence > DISCONNECTED_SECONDS:
            # Rank 0 has left this generation, perhaps before this rank noticed a lost engine.
            return [Order(OrderKind.END, is_broken=True)]
        return [decode(message, Order, "rank 0") for message in messages]

    def _turn(self, orders: list[Order]) -> Turn:
        """Return the turn of all ranks of the engine that these orders ask for."""
        kinds = {order.kind for order in orders}
        for order in orders:
            if order.sampling is not None:
                self._sampling, self._is_interrupted = order.sampling, False
            for ticket in order.dropped:
                self._drop(ticket)
        num_steps = STEPS if OrderKind.RUN in kinds else 0
        now = time.monotonic()
        asks_stop = now - self._asked > IDLE_SECONDS or (self._deterministic and num_steps > 0)
        self._asked = now if asks_stop else self._asked
        return Turn(
            sampling=self._sampling,
            groups=[group for order in orders for group in order.requests],
            num_steps=num_steps if self._deterministic else 1,
            interrupt=OrderKind.INTERRUPT in kinds,
            end=OrderKind.END in kinds,
            is_broken=any(order.is_broken for order in orders),
            asks_stop=asks_stop,
        )

    def _take(self, turn: Turn) -> None:
        """Start a turn on all ranks of the engine."""
        if self._peers.world_size > 1:
            self._peers.broadcast(turn, Turn)
        if turn.asks_stop:
            signals = self._peers.all_gather(self._stop(), str)
            self._stop_signal = next(filter(None, signals), "")
        self._engine.submit(turn.requests())
        self._show_running()

    # ------------------------------------------------------------------ engine and graders

    def _run(self, num_steps: int) -> None:
        """Run engine steps. Grade the completions that finish."""
        for _ in range(num_steps):
            if not self._engine.requests:
                break
            for request, completion in self._engine.step():
                self._sampled.append((request.ticket, completion))
                self._grade(request.ticket, completion.sample, request.prompt, completion.text)
            self._on_activity("engine step")
            self._show_running()

    def _interrupt(self) -> list[Sampled]:
        """Interrupt the engine. Return its unfinished completions."""
        interrupted = self._engine.interrupt()
        self.on_running(0)
        return [(request.ticket, completion) for request, completion in interrupted]

    def _show_running(self) -> None:
        """Pass on how many requests run. Others may be queued in the engine."""
        self.on_running(min(len(self._engine.requests), self._engine.max_sequences))

    def _drop(self, ticket: int) -> None:
        """Drop the grades of a ticket, also those that are still to come."""
        self._num_drops[ticket] += 1
        for name, grades in self._grades.items():
            self._grades[name] = [grade for grade in grades if grade[0] != ticket]

    def _grade(self, ticket: int, sample: int, prompt: Prompt, text: str) -> None:
        assert self._sampling is not None
        key = self._sampling.name, ticket, sample, self._num_drops[ticket]
        self._grading.submit(key, prompt.source, text, prompt.truth, dict(prompt.extra))

    def _collect(self, *, wait: bool) -> None:
        """Collect the grades that have arrived. `wait`: all of them."""
        started = time.perf_counter()
        while self._grading.pending:
            results = self._grading.collect(wait)
            for (name, ticket, sample, num_drops), grade, outcome in results:
                if num_drops == self._num_drops[ticket]:
                    self._grades[name].append((ticket, sample, grade, outcome))
            if not wait:
                break
            self._on_activity("grades")
            self._report(None, is_due=False)  # shows that this leader is alive
        if wait and not self._engine.requests:
            self._grade_seconds += time.perf_counter() - started

    def _report(self, unfinished: list[Sampled] | None, *, is_due: bool) -> None:
        """Send a report, if there is news and the last one is not too recent, or one is due.

        After the answer to an interrupt there is none: the next phase may be of another use, and
        would get it. Late grades wait for the next phase of their use.
        """
        name = "" if self._sampling is None else self._sampling.name
        has_news = bool(self._sampled or self._grades[name] or self._stop_signal)
        has_news = has_news and not self._is_interrupted
        since = time.monotonic() - self._reported
        is_idle = not self._engine.requests
        is_due = is_due or unfinished is not None
        if not self._deterministic:
            is_due = is_due or (has_news and (is_idle or since > self._report_seconds))
        if not is_due and since < ALIVE_SECONDS:
            return
        self._reported = time.monotonic()
        self._is_interrupted = self._is_interrupted or unfinished is not None
        report = Report(is_alive_only=True, grade_seconds=self._grade_seconds)
        if is_due:
            report = Report(
                sampled=self._sampled,
                # Sorted, because the order of arrival depends on timing.
                graded=sorted(self._grades.pop(name, []), key=lambda item: item[:2]),
                unfinished=unfinished,
                stop=self._stop_signal,
                grade_seconds=self._grade_seconds,
                errors=dict(self._grading.last_errors),
            )
            self._sampled = []
        for part in report.parts():
            self._member.send(encode(part))


def describe(engine: RolloutEngine) -> str:
    """Return the unanswered requests of an engine as text."""
    requests = list(engine.requests)  # a copy: called from another thread
    shown = ", ".join(f"{request.ticket}/{request.sample}" for request in requests[:NUM_SHOWN])
    return f"{len(requests)} completions of replica {engine.replica} (ticket/sample: {shown})"
