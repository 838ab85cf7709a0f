"""Engines on a virtual clock, and the driver through which the coordinator uses them.

An engine generates min(capacity, per_sequence * running) tokens/s, shared equally by its running
sequences. Because all of them advance equally, one number per engine, its *work*, describes their
progress: a sequence that starts at work w with r tokens to go ends at work w + r. The simulation
goes from event to event, without time steps.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from dapo_megatron.engine.messages import GroupRequest, Report, Returned, Sampling
from dapo_megatron.rollout.pool import QUEUED_SHARE
from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, Finish, Grade

RIGHT, WRONG = Grade(1.0, True, ""), Grade(-1.0, False, "")
ROUNDING = 1e-6
"""Tolerance in tokens: far more than the float64 error of a step, far less than one token."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Number of tokens and correctness of each completion of a group, if it is never cut."""

    lengths: tuple[int, ...]
    correct: tuple[bool, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether dynamic sampling keeps the group."""
        return any(self.correct) and not all(self.correct)

    @property
    def mean_length(self) -> float:
        """Tokens per completion."""
        return sum(self.lengths) / len(self.lengths)


class Workload(Protocol):
    """Answers of each ticket. They do not depend on who asks, or when."""

    def group(self, ticket: int) -> Answers:
        """Return the group of a ticket."""
        ...


@dataclass(frozen=True)
class EngineModel:
    """Speed of an engine."""

    max_sequences: int = 256
    """Maximum number of running sequences. More are queued."""
    capacity: float = 9_000
    """Maximum tokens/s of the whole engine."""
    per_sequence: float = 60
    """Maximum tokens/s of one sequence."""
    prefill: float | None = None
    """Tokens/s at which a prompt and the tokens so far of a continued sequence are read. The engine
    generates nothing meanwhile. None: reading takes no time."""
    turn_seconds: float = 0.0
    """Seconds of control between two engine steps. An engine step samples one token of each running
    sequence."""


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """Request for a completion, of which `so_far` tokens are already there."""

    ticket: int
    sample: int
    prompt_tokens: int
    so_far: int = 0
    segments: tuple[Segment, ...] = ()
    """Segments of the tokens so far."""


class VirtualEngine:
    """One replica. `time` is its clock in seconds, which only increases."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.time = 0.0
        self._work = 0.0
        # A heap of (work at its end, serial to break ties, request, final length in tokens).
        self._running: list[tuple[float, int, VirtualRequest, int]] = []
        self._queue: deque[tuple[VirtualRequest, int]] = deque()
        self._serial = 0

    @property
    def rate(self) -> float:
        """Current tokens/s of each running sequence."""
        model, num = self.model, len(self._running)
        knee = model.capacity / model.per_sequence
        rate = model.per_sequence if num <= knee else model.capacity / num
        return rate / (1 + rate * model.turn_seconds)

    def submit(self, request: VirtualRequest, length: int) -> None:
        """Queue a request whose final response has `length` tokens, more than it has so far."""
        self._queue.append((request, length))
        self._admit()

    def next_end(self) -> float:
        """Return the time at which the next sequence ends; infinity if none runs."""
        if not self._running:
            return math.inf
        return self.time + (self._running[0][0] - self._work) / self.rate

    def run_until(self, time: float) -> list[tuple[VirtualRequest, int]]:
        """Advance to `time`. Return the requests that ended, with their lengths.

        Queued requests take free slots immediately.
        """
        ended = []
        while (end := self.next_end()) <= time:
            self._work, _, request, length = heapq.heappop(self._running)
            self.time = end
            ended.append((request, length))
            self._admit()
        if time > self.time:  # prefill may have set the clock beyond `time`
            self._work += (time - self.time) * self.rate
            self.time = time
        return ended

    def interrupt(self) -> list[tuple[VirtualRequest, int]]:
        """Drop all requests, running and queued. Return each with its number of tokens."""
        dropped = []
        for ends_at, _, request, length in self._running:
            # Only whole tokens count, and at least one is still missing.
            done = length - math.ceil(ends_at - self._work - ROUNDING)
            dropped.append((request, min(max(done, request.so_far), length - 1)))
        dropped += [(request, request.so_far) for request, _ in self._queue]
        self._running.clear()
        self._queue.clear()
        return dropped

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.model.max_sequences:
            request, length = self._queue.popleft()
            self._serial += 1
            entry = (self._work + length - request.so_far, self._serial, request, length)
            heapq.heappush(self._running, entry)
            if self.model.prefill is not None:
                self.time += (request.prompt_tokens + request.so_far) / self.model.prefill


class Length:
    """Stands for an array of tokens or log-probs, which nobody reads."""

    def __init__(self, typecode: str, length: int) -> None:
        self.typecode, self._length = typecode, length

    def __len__(self) -> int:
        return self._length


class VirtualDriver:
    """Rollout driver (rollout/dispatch.py) with virtual engines and a virtual clock.

    Grading takes no time. Servers report every `report_seconds`, all at the same time.
    """

    def __init__(
        self,
        model: EngineModel,
        num_replicas: int,
        workload: Workload,
        report_seconds: float = 1.0,
    ) -> None:
        self.engines = [VirtualEngine(model) for _ in range(num_replicas)]
        self.num_replicas = num_replicas
        # Some are queued, as in Pool.
        self.max_sequences = model.max_sequences + model.max_sequences // QUEUED_SHARE
        self.grade_seconds = 0.0
        self.last_errors: dict[str, str] = {}
        self.lost: set[int] = set()
        self.stop_signal = ""
        self.version = 0
        """Version of the weights of all engines."""
        self.clock = 0.0
        self.tokens_of: Counter[int] = Counter()
        """Tokens generated for each ticket, counted when a sequence ends or is interrupted."""
        self.max_tokens = math.inf
        """Limit of a response, set by `start`."""
        self._num_sampled = [0] * num_replicas
        self._end = math.inf
        self._workload = workload
        self._report_seconds = report_seconds

    def name(self, replica: int) -> str:
        """See `Driver`."""
        return f"replica {replica}"

    def start(self, sampling: Sampling) -> None:
        """See `Driver`."""
        self.max_tokens = sampling.max_tokens

    def advance(self, requests: Sequence[Sequence[GroupRequest]]) -> list[tuple[int, Report]]:
        """Start `requests[replica]` and run to the next reports after a sequence has ended."""
        for engine, groups in zip(self.engines, requests, strict=True):
            for group in groups:
                self._submit(engine, group)
        first = min(engine.next_end() for engine in self.engines)
        until = self.clock + self._report_seconds
        if until < first < math.inf:
            missing = (first - self.clock) / self._report_seconds
            until = self.clock + math.ceil(missing) * self._report_seconds
        until = min(until, self._end)
        reports = []
        for replica, engine in enumerate(self.engines):
            returned = [self._graded(*ended) for ended in engine.run_until(until)]
            if returned:
                self._num_sampled[replica] += len(returned)
                report = Report(returned=returned, num_sampled=self._num_sampled[replica])
                reports.append((replica, report))
        self.clock = until
        return reports

    def interrupt(self) -> list[tuple[int, Report]]:
        """Stop all engines."""
        reports = []
        for replica, engine in enumerate(self.engines):
            unfinished: list[Returned] = [
                (request.ticket, self._completion(request, tokens, Finish.UNFINISHED), "")
                for request, tokens in engine.interrupt()
                if tokens
            ]
            reports.append((replica, Report(returned=unfinished, is_interrupted=True)))
        self._num_sampled = [0] * self.num_replicas
        return reports

    @contextmanager
    def until(self, end: float) -> Iterator[Callable[[], bool]]:
        """Let the clock stop at `end` in this block. Yield a function that returns whether it is
        there."""
        self._end = end
        yield lambda: self.clock >= end
        self._end = math.inf

    def sleep(self, seconds: float) -> None:
        """Advance the clock by the seconds of a training phase."""
        self.clock += seconds
        for engine in self.engines:
            engine.run_until(self.clock)

    def _submit(self, engine: VirtualEngine, group: GroupRequest) -> None:
        prompt_tokens = len(group.prompt.tokens)
        lengths = self._workload.group(group.ticket).lengths
        for sample, so_far in group.samples:
            request = VirtualRequest(group.ticket, sample, prompt_tokens)
            if so_far is not None:
                request = replace(request, so_far=so_far.num_tokens, segments=so_far.segments)
            engine.submit(request, int(min(lengths[sample], self.max_tokens)))

    def _graded(self, request: VirtualRequest, length: int) -> Returned:
        finish = Finish.LENGTH if length >= self.max_tokens else Finish.STOP
        completion = self._completion(request, length, finish)
        is_right = self._workload.group(request.ticket).correct[request.sample]
        return request.ticket, replace(completion, grade=RIGHT if is_right else WRONG), "graded"

    def _completion(self, request: VirtualRequest, length: int, finish: Finish) -> Completion:
        segments, new = request.segments, length - request.so_far
        self.tokens_of[request.ticket] += new
        if new and segments and segments[-1].version == self.version:
            segments = (*segments[:-1], Segment(self.version, segments[-1].num_tokens + new))
        elif new:
            segments = (*segments, Segment(self.version, new))
        return Completion(
            sample=request.sample,
            tokens=cast(Any, Length("i", length)),
            logprobs=cast(Any, Length("f", length)),
            text="",
            finish=finish,
            segments=segments,
        )
