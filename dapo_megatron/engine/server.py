"""The engine server: a process with an engine and graders, which rank 0 leads through one socket.

    python -m dapo_megatron engine --connect ADDRESS

It gets its config from rank 0, so it can run on any node that has the code, the model's files and
the run's secret. It ends with its connection to rank 0.
"""

from __future__ import annotations

import heapq
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from dapo_megatron.cluster.address import LOOPBACK, address_towards
from dapo_megatron.cluster.collectives import ErrorRecord, decode, encode
from dapo_megatron.cluster.curve import trust_rank0, watch_connection
from dapo_megatron.cluster.imports import quick_imports
from dapo_megatron.cluster.processes import bind_near, visible_gpus
from dapo_megatron.cluster.scratch import prepare_scratch
from dapo_megatron.cluster.secret import run_secret
from dapo_megatron.cluster.servers import OF_A_RANK, process_name
from dapo_megatron.cluster.stop import SIGNALS
from dapo_megatron.cluster.versions import source_digest, versions
from dapo_megatron.config.file import parse_config
from dapo_megatron.engine.messages import (
    CALLS,
    GroupRequest,
    Hello,
    Order,
    OrderKind,
    Report,
    Returned,
    Sampling,
)
from dapo_megatron.engine.turns import Ended, Turns
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.files import sha256
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.types import Completion, DapoError, Finish, Prompt, SampleRequest

if TYPE_CHECKING:
    from dapo_megatron.engine.engine import VllmEngine

FLIGHT_RECORDER = "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variable with the start of the path of torch's record of collectives."""
ALIVE_SECONDS = 1.0
"""Interval at which a server with work shows rank 0 that it is alive."""
GRADING_SECONDS = 0.002
"""Interval at which a server that only waits for graders looks for grades."""
IDLE_SECONDS = 0.5
"""Maximum time that an idle server waits for an order before it looks at its connection."""
SILENCE_SECONDS = 60.0
"""Time without a sign of life from rank 0's process after which the server ends."""


class Left(Exception):
    """Rank 0 has told this server to end, or is gone. `code` is its exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Link:
    """Connection to rank 0."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 1000), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        trust_rank0(self._socket, secret)
        self._monitor = watch_connection(self._socket, SILENCE_SECONDS)
        self._socket.connect(address)
        self.sent_at = 0.0

    def send(self, report: Report) -> None:
        """Send a report."""
        self.sent_at = time.monotonic()
        self._socket.send(encode(report), copy=False)

    def orders(self, seconds: float) -> Iterator[Order]:
        """Yield the orders that arrive within `seconds`. Raises Left."""
        self._socket.poll(int(1000 * seconds))
        while self._socket.poll(0):
            frame = self._socket.recv(copy=False)
            order: Order = decode(frame.buffer, Order, "rank 0")
            if order.kind is OrderKind.END:
                raise Left("the run is over", 0)
            if order.kind is OrderKind.LEAVE:
                raise Left(order.text)
            if order.kind is not OrderKind.PING:
                yield order
        if self._monitor.poll(0):
            raise Left("the connection to rank 0 has ended")


class EngineServer:
    """Engine and graders of a replica, led by rank 0."""

    def __init__(
        self,
        engine: VllmEngine,
        grading: GradingPool,
        turns: Turns | None,
        link: Link,
        report_seconds: float,
    ) -> None:
        self._engine, self._grading, self._link = engine, grading, link
        self._turns = turns
        """None if the run has no environments."""
        self._next_turns: list[tuple[int, int, SampleRequest]] = []
        """(ticket, sample, request) of turns that wait for a slot, a heap: the oldest groups go
        first, so that the last ones of a step do not wait for those of the next."""
        self._report_seconds = report_seconds
        self._sampling: Sampling | None = None
        """Parameters of the phase; None between phases."""
        self._is_free = False  # keeps running, instead of a number of steps per order
        self._ungraded: dict[int, tuple[int, Completion]] = {}
        """(ticket, completion) of what is being graded, in the order of finishing, by number."""
        self._graded: dict[int, Returned] = {}
        """Results by number, not reported yet."""
        self._num_gradings = 0
        self._num_sampled = 0
        self._progress = 0, 0  # (sampled, waiting) of the last report
        self._grade_seconds = 0.0
        self._reported = 0.0

    def close(self) -> None:
        """Kill the processes of environments, and what they have started."""
        if self._turns:
            self._turns.close()

    def serve(self) -> None:
        """Obey rank 0 until the run is over. Raises Left."""
        while True:
            is_sampling = self._is_free and bool(self._engine.requests or self._next_turns)
            is_pending = bool(self._grading.pending or self._num_waiting)
            wait = GRADING_SECONDS if is_pending else IDLE_SECONDS
            is_waiting = self._is_free and not is_sampling and bool(self._ungraded)
            started = time.perf_counter()
            for order in self._link.orders(0.0 if is_sampling else wait):
                self._obey(order)
            if is_waiting:
                self._grade_seconds += time.perf_counter() - started
            if self._is_free:
                self._advance()

    def _advance(self) -> None:
        self._step()
        self._go_on(*self._collect_turns())
        self._collect()
        self._report_news()

    def _obey(self, order: Order) -> None:
        if order.kind is OrderKind.SAMPLE:
            assert order.sampling is not None
            self._sampling, self._is_free = order.sampling, not order.num_steps
            if self._turns:
                self._turns.set_sampling(order.sampling)
            for request in order.requests:
                self._accept(request, order.sampling)
            if order.num_steps:
                self._await_turns()
                for _ in range(order.num_steps):
                    self._step()
                self._await_turns()
                self._await_grades()
                self._report()
        elif order.kind is OrderKind.INTERRUPT:
            self._interrupt()
        elif order.kind is OrderKind.CALL:
            self._link.send(self._call(order))

    def _accept(self, request: GroupRequest, sampling: Sampling) -> None:
        """Submit what is to be sampled, and grade what is finished."""
        to_sample = []
        for sample, so_far in request.samples:
            if so_far is None or so_far.finish is Finish.UNFINISHED:
                to_sample.append(sampling.request(request.ticket, request.prompt, sample, so_far))
            else:
                self._grade(request.ticket, request.prompt, so_far)
        if not request.prompt.environment:
            self._engine.submit(to_sample)
            return
        assert self._turns is not None
        for each in to_sample:
            self._turns.begin(each)

    def _step(self) -> None:
        """Run an engine step. Grade the completions that finish."""
        while self._next_turns and len(self._engine.requests) < self._engine.max_sequences:
            self._engine.submit([heapq.heappop(self._next_turns)[-1]])
        if not self._engine.requests:
            return
        for request, completion in self._engine.step():
            if request.prompt.environment:
                assert self._turns is not None
                self._turns.take(request, completion)
            else:
                self._num_sampled += 1
                self._grade(request.ticket, request.prompt, completion)
        self._show_alive()

    @property
    def _num_waiting(self) -> int:
        return self._turns.num_waiting if self._turns else 0

    def _collect_turns(self) -> tuple[list[SampleRequest], list[Ended]]:
        return self._turns.collect() if self._turns else ([], [])

    def _await_turns(self) -> None:
        """Wait for all environments, and go on in an order that does not depend on the clock."""
        to_sample, ended = self._collect_turns()
        while self._num_waiting:
            time.sleep(GRADING_SECONDS)
            more_to_sample, more_ended = self._collect_turns()
            to_sample, ended = to_sample + more_to_sample, ended + more_ended
            self._show_alive()
        ended.sort(key=lambda each: (each.ticket, each.completion.sample))
        self._go_on(to_sample, ended)

    def _go_on(self, to_sample: list[SampleRequest], ended: list[Ended]) -> None:
        """Sample the next turns of completions, and grade those that have ended."""
        for request in to_sample:
            heapq.heappush(self._next_turns, (request.ticket, request.sample, request))
        for each in ended:
            self._num_sampled += 1
            if each.completion.grade is None and not each.cause:
                self._grade(each.ticket, each.prompt, each.completion)
            else:
                number, why = self._number(each.ticket, each.completion), each.cause or "graded"
                self._graded[number] = each.ticket, each.completion, why

    def _grade(self, ticket: int, prompt: Prompt, completion: Completion) -> None:
        extra = dict(prompt.extra)
        if prompt.environment:
            assert self._turns is not None
            extra["turns"] = self._turns.spoken(prompt, completion)
        number = self._number(ticket, completion)
        self._grading.submit(number, prompt.source, completion.text, prompt.truth, extra)

    def _number(self, ticket: int, completion: Completion) -> int:
        """Number a completion that has ended, and return its number."""
        self._num_gradings += 1
        self._ungraded[self._num_gradings] = ticket, completion
        return self._num_gradings

    def _collect(self) -> None:
        """Take the grades that have arrived."""
        for number, grade, why in self._grading.collect(wait=False):
            if number in self._ungraded:  # else it was interrupted
                ticket, completion = self._ungraded[number]
                self._graded[number] = ticket, replace(completion, grade=grade), why

    def _await_grades(self) -> None:
        started = time.perf_counter()
        while len(self._graded) < len(self._ungraded):
            self._collect()
            self._show_alive()
            time.sleep(GRADING_SECONDS)
        if not self._engine.requests:
            self._grade_seconds += time.perf_counter() - started

    def _interrupt(self) -> None:
        """Return all completions: graded, finished, or with the tokens so far."""
        unfinished = self._engine.interrupt()
        self._next_turns.clear()
        if self._turns and self._sampling:
            with_environment = [item for item in unfinished if item[0].prompt.environment]
            unfinished = [item for item in unfinished if not item[0].prompt.environment]
            more, ended = self._turns.interrupt(with_environment)
            unfinished += more
            self._go_on([], ended)
        self._collect()
        self._report(
            [item for number, item in self._ungraded.items() if number not in self._graded],
            [(request.ticket, completion) for request, completion in unfinished],
        )
        self._ungraded.clear()
        self._grading.drop_queued()
        self._sampling, self._is_free, self._num_sampled, self._progress = None, False, 0, (0, 0)

    def _report_news(self) -> None:
        """Report in a free phase, if there is news and the last report is not too recent."""
        has_news = bool(self._graded) or self._progress != (self._num_sampled, self._num_waiting)
        is_due = time.monotonic() - self._reported > self._report_seconds
        if has_news and (is_due or not self._engine.requests):
            self._report()
        else:
            self._show_alive()

    def _report(self, *ungraded: list[tuple[int, Completion]]) -> None:
        """Report what is graded, in the order of finishing. With `ungraded`, the phase ends."""
        graded = [self._graded[number] for number in sorted(self._graded)]
        for number in self._graded:
            del self._ungraded[number]
        self._graded.clear()
        rest = [(ticket, completion, "") for items in ungraded for ticket, completion in items]
        self._progress = self._num_sampled, self._num_waiting
        self._link.send(
            Report(
                returned=graded + rest,
                num_sampled=self._num_sampled,
                num_waiting=self._num_waiting,
                is_interrupted=bool(ungraded),
                turn_counts=self._turns.take_counts() if self._turns else {},
                grade_seconds=self._grade_seconds,
                errors=self._grading.last_errors | (self._turns.last_errors if self._turns else {}),
            )
        )
        self._reported = time.monotonic()

    def _show_alive(self) -> None:
        if time.monotonic() - self._link.sent_at > ALIVE_SECONDS:
            self._link.send(Report(is_news=False))

    def _call(self, order: Order) -> Report:
        """Call a method of the engine for rank 0."""
        of, _ = CALLS[order.text]
        arguments = decode(order.arguments, of, "rank 0")
        try:
            result = getattr(self._engine, order.text)(*arguments)
        except DapoError as error:
            return Report(error=ErrorRecord.of(error))
        return Report(answer=encode(result))


def engine_facts() -> dict[str, str]:
    """Return what must be the same on rank 0 and on all engines: versions and source code."""
    return {
        **{f"version of {name}": version for name, version in versions().items()},
        "source code of dapo_megatron, SHA-256": source_digest(),
    }


def model_digests(folder: str) -> dict[str, str]:
    """Return the digests of a model's small files, by name."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    paths = [Path(folder) / name for name in names]
    return {path.name: sha256(path) for path in paths if path.exists()}


def command(address: str, replica: int | None) -> None:
    """Serve until the run is over. Ends the process with exit code 0 then, and 1 if rank 0 refused
    or gave up this server."""
    for name in OF_A_RANK:  # a task of Slurm has them
        os.environ.pop(name, None)
    if FLIGHT_RECORDER in os.environ:  # not in the file of the rank with the same number
        os.environ[FLIGHT_RECORDER] += f"engine{os.getpid() if replica is None else replica}_"
    prepare_scratch()
    for number in (*SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides, and saves what engines have
    from dapo_megatron.engine import device

    secret = run_secret(2)
    assert secret is not None
    link = Link(address, secret)
    process = process_name(os.getpid())
    link.send(Report(hello=Hello(replica, process, engine_facts())))
    device.prepare_environment()
    if device.has_cuda():
        bind_near(visible_gpus())
    with quick_imports():
        device.import_vllm()
        import dapo_megatron.engine.engine  # noqa: F401
    server = None
    try:
        server = _build(link, _welcome(link), address)
        server.serve()
    except Left as left:
        if server is not None:
            server.close()
        if left.code:
            print(f"engine: {left}", file=sys.stderr, flush=True)
        os._exit(left.code)  # vLLM's threads and workers end with the process


def _welcome(link: Link) -> Order:
    """Wait for rank 0's order to build."""
    while True:
        for order in link.orders(IDLE_SECONDS):
            if order.kind is OrderKind.WELCOME:
                return order


def _build(link: Link, welcome: Order, address: str) -> EngineServer:
    """Build graders and engine, and tell rank 0, which is at `address`. An error is told, too."""
    from dapo_megatron.engine.engine import VllmEngine

    try:
        config = parse_config(dict(welcome.config))
        rewards = config.rewards
        grading = GradingPool(
            config.graders,
            rewards.workers,
            rewards.timeout_seconds,
            rewards.memory_mib,
            rewards.environment,
        )
        engine = VllmEngine(config, seed=welcome.seed, is_empty=True)
        turns = None
        if config.environments:
            pool = EnvironmentPool(
                config.environments,
                config.rollout.turns.call_seconds,
                rewards.memory_mib,
                rewards.environment,
            )
            is_open = config.rollout.turns.endpoint == "cluster"
            host = address_towards(address) if is_open else LOOPBACK
            turns = Turns(config, engine, pool, host)
        engine.sleep()
    except DapoError as error:
        link.send(Report(error=ErrorRecord.of(error)))
        raise Left(str(error)) from error
    link.send(Report(ready=model_digests(config.model.path)))
    return EngineServer(engine, grading, turns, link, welcome.report_seconds)
