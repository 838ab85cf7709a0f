"""Engines as rank 0 sees them: servers that connect to its socket, come and go.

Each connection of a server has an identity. There is a single rule for every kind of loss: an
identity ends, by a connection that ended, silence, or an error, and what it was working on goes
back to the queue (dispatch.py). The server has to connect again as a new identity, and takes part
from the next sync. One that is not part of the next sync gets no requests.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from dapo_megatron.cluster.collectives import ErrorRecord, decode, encode
from dapo_megatron.cluster.curve import admit_engines, end_watch, watch_connection
from dapo_megatron.cluster.instruments import TimelineRecorder
from dapo_megatron.engine.messages import (
    CALLS,
    STEPS,
    GroupRequest,
    Hello,
    Order,
    OrderKind,
    Report,
    Sampling,
    difference,
)
from dapo_megatron.protocols import Recorder
from dapo_megatron.types import EnginesLost, Finish, RankError

logger = logging.getLogger(__name__)

COALESCE_SECONDS, COALESCE_SECONDS_PER_REPLICA = 0.01, 0.0005
"""Minimum time between two answers of `advance`, so that many small reports cost little."""
REPORT_SECONDS, REPORT_SECONDS_PER_REPLICA = 0.02, 0.004
"""Minimum time between two reports of a replica, so that rank 0 gets at most 250 per second."""
QUEUED_SHARE = 8
"""A replica has up to 1 + 1/8 times as many requests as it runs at once, and at least one more. So
no slot is free while a report and its answer are on their way. Deterministic runs have none."""
PING_SECONDS = 0.2
"""Time after the event that a connection has ended, after which sending to its identity fails."""
WAIT_SECONDS = 1.0
"""Maximum time that `advance` waits for news, and interval of `Pool.on_second`."""


@dataclass
class _Engine:
    """A connected server."""

    identity: bytes
    number: int
    """Number of this connection."""
    replica: int
    process: str
    heard: float
    """Time of its last message, as time.monotonic()."""
    is_ready: bool = False
    is_synced: bool = False
    """Whether it took part in the last sync."""
    is_busy: bool = False
    """Whether it owes a message, so that its silence counts."""
    grade_seconds: float = 0.0


class Pool:
    """Engines of a run. Implements dispatch.Driver. One thread uses it at a time.

    config       is given to the servers
    versions     of the code and its libraries, by name. Servers must have the same
    model_files  digests of the model's files, by name. Servers must have the same
    seed, start  of the run, and the name of what it starts from: they seed the random numbers of
                 the servers
    """

    def __init__(
        self,
        endpoint: str,
        secret: bytes,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        model_files: Mapping[str, str],
        *,
        num_replicas: int,
        max_sequences: int,
        deterministic: bool,
        silence_seconds: float,
        seed: int = 0,
        start: str = "",
    ) -> None:
        """Listen on `endpoint`, such as tcp://10.0.0.1:0. `address` then has the port."""
        self.num_replicas, self.max_sequences = num_replicas, max_sequences
        if not deterministic:
            self.max_sequences += math.ceil(max_sequences / QUEUED_SHARE)
        self.last_errors: dict[str, str] = {}
        self.stop_signal = ""
        self.on_second: Callable[[], object] | None = None
        """Called every second while rank 0 waits for engines; see engines.py."""
        self.timeline: TimelineRecorder | None = None
        """Gets the number of requests of each replica."""
        self.recorder: Recorder | None = None
        """Gets a line about each engine that is lost or refused; None: the log does."""
        self.failure: ErrorRecord | None = None
        """Why the last engine that could not be built failed."""
        self.given_up: list[str] = []
        """Processes that have to be ended, because they may hang."""
        self._config, self._versions, self._model_files = dict(config), versions, model_files
        self._seed, self._start = seed, start
        self._num_steps = STEPS if deterministic else 0
        self._silence_seconds = silence_seconds
        self._coalesce_seconds = max(COALESCE_SECONDS, COALESCE_SECONDS_PER_REPLICA * num_replicas)
        self._sampling: Sampling | None = None
        self._engines: dict[int, _Engine] = {}
        self._num_connections = 0
        self._reports: list[tuple[int, Report]] = []
        self._sent: dict[int, int] = {}
        self._answered, self._ticked, self._ping_at = 0.0, 0.0, math.inf
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.router_mandatory = True  # sending to an identity that has ended fails
        self._router.linger = 0
        self._router.sndhwm = self._router.rcvhwm = 0  # servers never block; requests are bounded
        self._monitor = watch_connection(self._router, silence_seconds)
        self._authenticator = admit_engines(self._context, self._router, secret)
        self._router.bind(endpoint)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Let all servers end, and close the socket."""
        for engine in list(self._engines.values()):  # one that cannot be reached is removed
            self._send(engine.identity, Order(OrderKind.END))
        end_watch(self._router, self._monitor)
        self._router.close(linger=1000)
        self._authenticator.stop()
        self._context.term()

    # ------------------------------------------------------------------ who is there

    @property
    def present(self) -> list[int]:
        """The replicas that can sample."""
        return sorted(number for number, engine in self._engines.items() if engine.is_synced)

    @property
    def ready(self) -> dict[int, int]:
        """The replicas that can take part in a sync, and the number of each one's connection."""
        engines = sorted(self._engines.items())
        return {replica: engine.number for replica, engine in engines if engine.is_ready}

    @property
    def lost(self) -> set[int]:
        """See dispatch.Driver."""
        return set(range(self.num_replicas)).difference(self.present)

    def name(self, replica: int) -> str:
        """See dispatch.Driver."""
        engine = self._engines.get(replica)
        return f"engine {replica}" + (f" ({engine.process})" if engine else "")

    def describe(self) -> tuple[str, ...]:
        """Return a line for each engine. Any thread may call this."""
        now = time.monotonic()
        return tuple(
            f"engine {replica} ({engine.process}): heard {now - engine.heard:.0f} s ago"
            + ("" if engine.is_synced else ", takes part from the next sync")
            for replica, engine in sorted(self._engines.copy().items())
        )

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Handle messages for so long."""
        end = time.monotonic() + seconds
        self._handle(0.0)
        while (left := end - time.monotonic()) > 0:
            self._handle(left)

    def lose(self, replica: int, why: str) -> None:
        """Go on without a replica. Its process is told to end, if it still listens."""
        engine = self._engines.pop(replica, None)
        if engine is None:
            return
        self._note_line(
            f"  engine {replica} ({engine.process}): {why}; what it was working on is sampled again"
        )
        self.given_up.append(engine.process)
        self._set_requests(replica, 0)
        self._reports = [item for item in self._reports if item[0] != replica]
        self._send(engine.identity, Order(OrderKind.LEAVE, text=f"rank 0 gave it up: {why}"))

    # ------------------------------------------------------------------ sampling

    @property
    def grade_seconds(self) -> float:
        """See dispatch.Driver."""
        return sum(e.grade_seconds for e in self._engines.values()) / self.num_replicas

    def start(self, sampling: Sampling) -> None:
        """See dispatch.Driver."""
        if not self.present:
            raise EnginesLost("no engine is left that could sample")
        self._sampling, self._reports = sampling, []
        self._sent = dict.fromkeys(range(self.num_replicas), 0)

    def advance(self, requests: Sequence[Sequence[GroupRequest]]) -> list[tuple[int, Report]]:
        """See dispatch.Driver."""
        for replica in self.present:
            if requests[replica] or self._num_steps:
                self._sent[replica] += sum(
                    completion is None or completion.finish is Finish.UNFINISHED
                    for group in requests[replica]
                    for _, completion in group.samples
                )
                self._order(
                    replica,
                    Order(
                        OrderKind.SAMPLE,
                        sampling=self._sampling,
                        requests=list(requests[replica]),
                        num_steps=self._num_steps,
                    ),
                )
                self._set_requests(replica, self._sent[replica])
        if self._num_steps:
            self._gather(lambda report: True)
            self._reports.sort(key=lambda item: item[0])
        else:
            self.wait(max(self._answered + self._coalesce_seconds - time.monotonic(), 0.0))
            if not self._reports and self.present:
                self._handle(WAIT_SECONDS)
            self._answered = time.monotonic()
        reports, self._reports = self._reports, []
        for replica, report in reports:
            num_sampling = self._sent[replica] - report.num_sampled - report.num_waiting
            self._set_requests(replica, num_sampling)
        return reports

    def interrupt(self) -> list[tuple[int, Report]]:
        """See dispatch.Driver."""
        for replica in self.present:
            self._order(replica, Order(OrderKind.INTERRUPT))
        self._gather(lambda report: report.is_interrupted)
        reports, self._reports = self._reports, []
        for replica in self.present:
            self._engines[replica].is_busy = False
            self._set_requests(replica, 0)
        return sorted(reports, key=lambda item: item[0]) if self._num_steps else reports

    def _gather(self, is_last: Callable[[Report], bool]) -> None:
        """Wait until every replica that is present has sent a report of this kind."""

        def missing() -> set[int]:
            have = {replica for replica, report in self._reports if is_last(report)}
            return set(self.present) - have

        while missing():
            self._handle(WAIT_SECONDS)

    # ------------------------------------------------------------------ calls

    def begin(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> None:
        """Call a method of these replicas' engines, with arguments of each; see `finish`."""
        self._reports = []
        called = [replica for replica in arguments if replica in self._engines]
        for replica in called:
            message = encode(tuple(arguments[replica]))
            self._order(replica, Order(OrderKind.CALL, text=method, arguments=message))
        self._called = method, called

    def finish(self, seconds: float) -> tuple[dict[int, Any], dict[int, ErrorRecord]]:
        """Return the results of the replicas that answered, and the errors of the others. One that
        does not answer within `seconds`, or is lost, is in neither."""
        (method, called), end = self._called, time.monotonic() + seconds
        for replica in called:
            if replica in self._engines:  # busy with the call, it shows no sign of life
                self._engines[replica].is_busy = False
        results: dict[int, Any] = {}
        errors: dict[int, ErrorRecord] = {}
        while waiting := [
            r for r in called if r in self._engines and r not in results and r not in errors
        ]:
            self._handle(WAIT_SECONDS)
            reports, self._reports = self._reports, []
            for replica, report in reports:
                if report.error is not None:
                    errors[replica] = report.error
                elif report.answer is not None:
                    try:
                        of = CALLS[method][1]
                        results[replica] = decode(report.answer, of, self.name(replica))
                    except RankError as error:
                        self.lose(replica, str(error))
            if time.monotonic() > end:
                for replica in set(waiting) - results.keys() - errors.keys():
                    self.lose(replica, f"no answer to {method} within {seconds:g} s")
        return dict(sorted(results.items())), dict(sorted(errors.items()))

    def note_sync(self, replicas: Collection[int]) -> None:
        """Note which replicas have the new weights."""
        for number, engine in self._engines.items():
            engine.is_synced = number in replicas

    # ------------------------------------------------------------------ messages

    def _handle(self, seconds: float) -> None:
        """Wait up to `seconds` for messages, and handle them."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * min(seconds, WAIT_SECONDS))))
        while self._router.poll(0):
            identity, frame = self._router.recv_multipart(copy=False)
            self._take(identity.bytes, frame.buffer)
        if self._monitor in ready:
            while self._monitor.poll(0):
                self._monitor.recv_multipart()
            self._ping_at = min(self._ping_at, time.monotonic() + PING_SECONDS)
        if (now := time.monotonic()) >= self._ping_at:
            self._ping_at = math.inf
            for engine in list(self._engines.values()):  # the event does not name the peer
                self._send(engine.identity, Order(OrderKind.PING))
        for replica, engine in list(self._engines.items()):
            if engine.is_busy and now - engine.heard > self._silence_seconds:
                self.lose(replica, f"no sign of life for {self._silence_seconds:g} s")
        if self.on_second is not None and now - self._ticked >= WAIT_SECONDS:
            self._ticked = now
            self.on_second()

    def _take(self, identity: bytes, message: memoryview) -> None:
        """Handle a message."""
        engine = next((e for e in self._engines.values() if e.identity == identity), None)
        try:
            report: Report = decode(message, Report, engine.process if engine else "an engine")
        except RankError as error:
            if engine is not None:
                self.lose(engine.replica, str(error))
            return
        if report.hello is not None:
            self._greet(identity, report.hello)
        elif engine is None:
            self._send(identity, Order(OrderKind.LEAVE, text="rank 0 has given it up"))
        else:
            self._note(engine, report)

    def _note(self, engine: _Engine, report: Report) -> None:
        """Note a report of a connected server."""
        engine.heard = time.monotonic()
        engine.grade_seconds = max(engine.grade_seconds, report.grade_seconds)
        self.last_errors |= report.errors
        if report.error is not None and not engine.is_ready:
            self.failure = report.error
            self.lose(engine.replica, report.error.text)
        elif report.ready is not None:
            if fault := difference(self._model_files, report.ready):
                self.lose(engine.replica, f"model.path: {fault}")
            engine.is_ready = True
        elif report.is_news:
            if self._num_steps:
                engine.is_busy = False
            self._reports.append((engine.replica, report))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        """Admit a server that connects, or tell it why not."""
        free = set(range(self.num_replicas)) - self._engines.keys()
        replica = min(free, default=None) if hello.replica is None else hello.replica
        fault = difference(self._versions, hello.facts)
        if replica is None or replica >= self.num_replicas:
            fault = f"the run has its {self.num_replicas} engines (engine.replicas)"
        if fault or replica is None:
            self._note_line(f"  refused an engine ({hello.process}): {fault}")
            self._send(identity, Order(OrderKind.LEAVE, text=fault))
            return
        self.lose(replica, "another process has taken its place")
        self.failure = None
        self._num_connections += 1
        number, now = self._num_connections, time.monotonic()
        self._engines[replica] = _Engine(identity, number, replica, hello.process, now)
        self._send(
            identity,
            Order(
                OrderKind.WELCOME,
                config=self._config,
                seed=_seed(f"{self._seed}/{replica}/{self._start}/{number}"),
                report_seconds=max(REPORT_SECONDS, REPORT_SECONDS_PER_REPLICA * self.num_replicas),
            ),
        )

    def _set_requests(self, replica: int, num_requests: int) -> None:
        if self.timeline is not None:
            self.timeline.change(replica, num_requests)

    def _note_line(self, text: str) -> None:
        if self.recorder is None:
            logger.warning(text)
        else:
            self.recorder.note(text)

    def _order(self, replica: int, order: Order) -> None:
        """Send an order that the replica answers. A replica that cannot be reached is lost."""
        engine = self._engines[replica]
        if not engine.is_busy:
            engine.is_busy, engine.heard = True, time.monotonic()
        self._send(engine.identity, order)

    def _send(self, identity: bytes, order: Order) -> None:
        try:
            self._router.send_multipart([identity, encode(order)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            for replica, engine in list(self._engines.items()):
                if engine.identity == identity:
                    self.lose(replica, "its connection has ended")


def _seed(name: str) -> int:
    """Return the seed of a server's own random numbers. Every start of a server has another."""
    digest = hashlib.blake2b(name.encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big") >> 1
