"""The coordinator's side of the engines: orders to the leaders of replicas, reports from them.

Leaders never wait for one another. Each reports when it has news, and the coordinator answers with
new requests. In a deterministic run, all replicas take turns in lock step instead, so that
decisions depend on engine steps and never on the clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from dapo_megatron.cluster.collectives import EnginesChanged, decode, encode
from dapo_megatron.cluster.messages import Hub
from dapo_megatron.rollout.messages import (
    GroupRequest,
    Order,
    OrderKind,
    Report,
    Sampling,
    Ungraded,
    divided,
)
from dapo_megatron.types import DataError, RankError

logger = logging.getLogger(__name__)

COALESCE_SECONDS = 0.01
"""Minimum time between two answers of `advance`, so that many small reports cost little."""
COALESCE_SECONDS_PER_REPLICA = 0.0005
"""The same, per replica: 0.13 s for 256 replicas."""
QUEUED_SHARE = 8
"""A replica has up to 1 + 1/8 times as many requests as it runs at once, and at least one more. So
no slot is free while a report and its answer are on their way. In lock step there are none."""
MAX_ORDER_BYTES = 2**23
"""Size of an order from which on it is divided, down to a single completion."""
MAX_PROMPT_BYTES = 2**23
"""Maximum size of a prompt with truth and extra values."""
DISCONNECTED_SECONDS = 3.0
"""A replica of an elastic run counts as lost if its connection has ended for so long. One that is
alive connects again within a second."""
ALIVE_SECONDS = 5.0
"""Interval at which rank 0 and leaders show each other that they are alive, if they have no news.
"""
WAIT_SECONDS = 1.0
"""Maximum time that `advance` waits for news."""


SHORT_SECONDS = 0.02
"""The same in `short_waits`."""


class Driver(Protocol):
    """All engines of a run, as seen by the coordinator."""

    num_replicas: int
    max_sequences: int
    """Maximum number of requests that one replica runs at once."""
    lost: set[int]
    """Replicas that are gone or hang. Nothing more is sent to them."""

    @property
    def grade_seconds(self) -> float:
        """Total seconds that a replica waited for graders while its engine was idle, mean over
        replicas."""
        ...

    @property
    def last_errors(self) -> Mapping[str, str]:
        """Last error of a grader, by data set."""
        ...

    def name(self, replica: int) -> str:
        """Return a replica's name for errors, such as "replica 3 (rank 12, host n4)"."""
        ...

    def start(self, sampling: Sampling, dropped: Sequence[int] = ()) -> None:
        """Start a phase in which all requests have these sampling parameters. Grades of the tickets
        `dropped` are dropped."""
        ...

    def advance(
        self,
        requests: Sequence[Sequence[GroupRequest]],
        regrade: Sequence[Sequence[Ungraded]],
    ) -> list[tuple[int, Report]]:
        """Send each replica its requests, and finished completions to grade again. Return the
        reports that have arrived, as (replica, report); none if there is no news for a while."""
        ...

    def interrupt(self) -> list[tuple[int, Report]]:
        """Stop all engines. Return the last reports, with all unfinished completions."""
        ...

    def raise_lost(self) -> None:
        """Raise EnginesChanged naming the lost replicas, if there are any."""
        ...


class EngineDriver:
    """Driver over the sockets of a run. Only the coordinator's thread uses it.

    silence_seconds   a replica without any sign of life for so long counts as lost; at least three
                      times ALIVE_SECONDS, because an idle replica shows none more often
    is_elastic        the run goes on without a lost replica; otherwise it is an error
    """

    def __init__(
        self,
        hub: Hub,
        num_replicas: int,
        max_sequences: int,
        *,
        deterministic: bool,
        silence_seconds: float,
        is_elastic: bool = False,
    ) -> None:
        self.num_replicas = num_replicas
        self.max_sequences = max_sequences
        self._coalesce_seconds = max(COALESCE_SECONDS, COALESCE_SECONDS_PER_REPLICA * num_replicas)
        if not deterministic:
            self.max_sequences += math.ceil(max_sequences / QUEUED_SHARE)
        self.last_errors: dict[str, str] = {}
        self.lost: set[int] = set()
        self.num_messages = 0
        """Number of messages from replicas so far."""
        self.stop_signal = ""
        """Name of the stop signal that a rank without an engine got, or empty."""
        self._hub, self._is_elastic = hub, is_elastic
        hub.on_fault = lambda replica, error: self._lose(replica, str(error))
        self._wait_seconds = WAIT_SECONDS
        self._deterministic = deterministic
        self._silence_seconds = max(silence_seconds, 3 * ALIVE_SECONDS)
        self._grade_seconds = [0.0] * num_replicas
        self._parts: dict[int, Report] = {}
        """Reports of which a part is still to come."""
        self._heard = [0.0] * num_replicas
        self._told = [0.0] * num_replicas
        self._answered = self._checked = 0.0

    @property
    def grade_seconds(self) -> float:
        """See `Driver`."""
        return sum(self._grade_seconds) / self.num_replicas

    def name(self, replica: int) -> str:
        """See `Driver`."""
        return self._hub.name(replica)

    @property
    def present(self) -> list[int]:
        """The replicas that are not lost."""
        return [replica for replica in range(self.num_replicas) if replica not in self.lost]

    def start(self, sampling: Sampling, dropped: Sequence[int] = ()) -> None:
        """See `Driver`."""
        self._reset_clocks()
        self._send_all(Order(OrderKind.START, sampling=sampling, dropped=list(dropped)))

    def advance(
        self,
        requests: Sequence[Sequence[GroupRequest]],
        regrade: Sequence[Sequence[Ungraded]],
    ) -> list[tuple[int, Report]]:
        """See `Driver`."""
        for replica, (new, again) in enumerate(zip(requests, regrade, strict=True)):
            if replica not in self.lost and (new or again or self._deterministic):
                self._send_run(replica, list(new), list(again))
        if self._deterministic:
            reports = self._one_each()
        else:
            time.sleep(max(self._answered + self._coalesce_seconds - time.monotonic(), 0.0))
            reports = self._receive()
            self._answered = time.monotonic()
        if self.stop_signal:
            reports.append((0, Report(stop=self.stop_signal)))
        return reports

    def interrupt(self) -> list[tuple[int, Report]]:
        """See `Driver`."""
        self._send_all(Order(OrderKind.INTERRUPT))
        reports: list[tuple[int, Report]] = []
        interrupted: set[int] = set()
        while not interrupted.issuperset(self.present):
            for replica, report in self._receive():
                if replica in interrupted:
                    raise RankError(f"{self.name(replica)}: reports although it was interrupted")
                if report.unfinished is not None:
                    interrupted.add(replica)
                reports.append((replica, report))
        return sorted(reports, key=lambda item: item[0]) if self._deterministic else reports

    @contextmanager
    def short_waits(self) -> Iterator[None]:
        """Let `advance` return soon without news, because its caller waits for something else."""
        self._wait_seconds = SHORT_SECONDS
        try:
            yield
        finally:
            self._wait_seconds = WAIT_SECONDS

    def idle(self, is_over: Callable[[], bool]) -> None:
        """Let all replicas wait until `is_over`."""
        self._reset_clocks()
        while not is_over():
            self._receive()

    def end(self, *, only_here: bool = False) -> None:
        """End the phase on all replicas, or only on that of rank 0, if it has one. Raises
        EnginesChanged if a replica was lost in an elastic run."""
        if only_here:
            if self._hub.local is not None:
                self._send(self._hub.local, encode(Order(OrderKind.END)))
            return
        self._check_connections()
        self._send_all(Order(OrderKind.END, is_broken=bool(self.lost)))
        self.raise_lost()

    def raise_lost(self) -> None:
        """See `Driver`."""
        if self.lost:
            names = ", ".join(self.name(replica) for replica in sorted(self.lost))
            raise EnginesChanged(f"{names}: lost; the run goes on without it")

    def seconds_gone(self) -> dict[int, float]:
        """Return the seconds since the connection to a replica ended, for those without one;
        infinity if the replica is known to be lost."""
        gone = {replica: self._hub.silence(replica) for replica in range(self.num_replicas)}
        gone |= dict.fromkeys(self.lost, math.inf)
        return {replica: seconds for replica, seconds in gone.items() if seconds > 0.0}

    def _reset_clocks(self) -> None:
        self._heard = [time.monotonic()] * self.num_replicas
        self._told = list(self._heard)

    def _one_each(self) -> list[tuple[int, Report]]:
        """Return one report of each replica, in the order of replicas."""
        reports: dict[int, Report] = {}
        while not reports.keys() >= set(self.present):
            for replica, report in self._receive():
                if replica in reports:
                    raise RankError(f"{self.name(replica)}: two reports in one turn")
                reports[replica] = report
        return sorted(reports.items())

    def _receive(self) -> list[tuple[int, Report]]:
        """Wait a limited time for messages, and return the reports with news.

        A replica that is silent for too long, or whose message is missing or cannot be read, is
        lost. Raises as `_lose` does.
        """
        reports: list[tuple[int, Report]] = []
        messages = self._hub.receive(self._wait_seconds)
        self.num_messages += len(messages)
        now = time.monotonic()
        for replica, message in messages:
            if replica in self.lost:
                continue
            self._heard[replica] = now
            try:
                report: Report = decode(message, Report, self.name(replica))
            except RankError as error:
                self._lose(replica, str(error))
                continue
            if replica in self._parts:
                report = report.joined(self._parts.pop(replica))
            if report.is_continued:
                self._parts[replica] = report
                continue
            self._grade_seconds[replica] = report.grade_seconds
            self.last_errors |= report.errors
            if not report.is_alive_only:
                reports.append((replica, report))
        if now - self._checked > WAIT_SECONDS:
            self._checked = now
            self._check_alive(now)
        return reports

    def _check_alive(self, now: float) -> None:
        """Show replicas that rank 0 is alive. A silent one is lost."""
        self._check_connections()
        for replica in self.present:
            silence = now - self._heard[replica]
            if silence > self._silence_seconds:
                self._lose(
                    replica,
                    f"{self.name(replica)}: no sign of life for {silence:.0f} s. Its engine hangs "
                    "or its process is gone; see its log (limit: watchdog.generate or evaluate)",
                )
            elif now - self._told[replica] > ALIVE_SECONDS:
                self._send(replica, encode(Order(OrderKind.ALIVE)))

    def _check_connections(self) -> None:
        """Find out which replicas of an elastic run have ended."""
        for replica in self.present if self._is_elastic else ():
            if self._hub.silence(replica) > DISCONNECTED_SECONDS:
                self._lose(replica, f"{self.name(replica)}: its connection has ended")

    def _lose(self, replica: int, why: str) -> None:
        """Go on without a replica, or raise RankError if the run is not elastic. Raises
        EnginesChanged if it was the last one."""
        if not self._is_elastic:
            raise RankError(why)
        if replica in self.lost:
            return
        logger.warning("%s; the run goes on without it", why)
        self.lost.add(replica)
        if not self.present:
            self.raise_lost()

    def _send_run(
        self, replica: int, requests: list[GroupRequest], regrade: list[Ungraded]
    ) -> None:
        """Send requests, in several orders if the completions so far would make one too large."""
        *parts, last = divided(requests)
        for part in parts:
            self._send_part(replica, part, [], OrderKind.SUBMIT)
        self._send_part(replica, last, regrade, OrderKind.RUN)

    def _send_part(
        self,
        replica: int,
        requests: list[GroupRequest],
        regrade: list[Ungraded],
        kind: OrderKind,
    ) -> None:
        """Send an order, divided if its prompts are too large: these may have megabytes (tests of
        programs). Raises DataError naming a prompt that is too large by itself."""
        message = encode(Order(kind, requests=requests, regrade=regrade))
        if len(message) <= MAX_ORDER_BYTES:
            self._send(replica, message)
            return
        if len(requests) == 1 and not regrade:  # a request per completion
            group = requests[0]
            requests = [replace(group, samples=(sample,)) for sample in group.samples]
        if len(requests) + len(regrade) == 1:
            prompt = requests[0].prompt if requests else regrade[0][2]
            if len(encode(prompt)) > MAX_PROMPT_BYTES:
                raise DataError(
                    f"{prompt.source}, row {prompt.index}: prompt, truth and extra values together "
                    f"have more than {MAX_PROMPT_BYTES:,} bytes; leave this row out"
                )
            self._send(replica, message)
            return
        middle = (len(requests) + len(regrade)) // 2
        rest = max(middle - len(requests), 0)
        self._send_part(replica, requests[:middle], regrade[:rest], OrderKind.SUBMIT)
        self._send_part(replica, requests[middle:], regrade[rest:], kind)

    def _send(self, replica: int, message: bytes) -> None:
        if self._is_elastic:
            try:
                self._hub.send(replica, message, DISCONNECTED_SECONDS)
            except RankError as error:
                self._lose(replica, str(error))
        else:
            self._hub.send(replica, message)
        self._told[replica] = time.monotonic()

    def _send_all(self, order: Order) -> None:
        message = encode(order)
        for replica in self.present:
            self._send(replica, message)
