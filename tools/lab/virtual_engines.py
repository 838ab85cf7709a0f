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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapo_megatron.rollout.driver import Events
from dapo_megatron.types import Completion, Finish, Grade, Prompt, SampleRequest, Segment

RIGHT, WRONG = Grade(1.0, True, ""), Grade(-1.0, False, "")
ROUNDING = 1e-6
"""Tolerance in tokens: far more than the float64 error of a step, far less than one token."""

Outcome = tuple[int, bool]
"""Tokens of a completion if it is never cut, and whether it is correct."""


@dataclass(frozen=True)
class EngineModel:
    """Speed of an engine. The defaults are those of the `dapo32b` preset."""

    max_sequences: int = 256
    """Maximum number of running sequences. More are queued."""
    capacity: float = 9_000
    """Maximum tokens/s of the whole engine."""
    per_sequence: float = 60
    """Maximum tokens/s of one sequence."""
    prefill: float | None = None
    """Tokens/s at which a prompt and the tokens so far of a continued sequence are read. The engine
    generates nothing meanwhile. None: reading takes no time."""


def so_far(request: SampleRequest) -> int:
    """Return the number of response tokens that a continued request already has."""
    return 0 if request.so_far is None else len(request.so_far.tokens)


class VirtualEngine:
    """One replica. `time` is its clock in seconds, which only increases."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.time = 0.0
        self._work = 0.0
        # A heap of (work at its end, serial to break ties, request, final length in tokens).
        self._running: list[tuple[float, int, SampleRequest, int]] = []
        self._queue: deque[tuple[SampleRequest, int]] = deque()
        self._serial = 0

    @property
    def rate(self) -> float:
        """Current tokens/s of each running sequence."""
        model, num = self.model, len(self._running)
        knee = model.capacity / model.per_sequence
        return model.per_sequence if num <= knee else model.capacity / num

    def submit(self, request: SampleRequest, length: int) -> None:
        """Queue a request whose final response has `length` tokens, more than it has so far."""
        self._queue.append((request, length))
        self._admit()

    def next_end(self) -> float:
        """Return the time at which the next sequence ends; infinity if none runs."""
        if not self._running:
            return math.inf
        return self.time + (self._running[0][0] - self._work) / self.rate

    def run_until(self, time: float) -> list[tuple[SampleRequest, int]]:
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

    def interrupt(self) -> list[tuple[SampleRequest, int]]:
        """Drop all requests, running and queued. Return each with its number of tokens."""
        dropped = []
        for ends_at, _, request, length in self._running:
            # Only whole tokens count, and at least one is still missing.
            done = length - math.ceil(ends_at - self._work - ROUNDING)
            dropped.append((request, min(max(done, so_far(request)), length - 1)))
        dropped += [(request, so_far(request)) for request, _ in self._queue]
        self._running.clear()
        self._queue.clear()
        return dropped

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.model.max_sequences:
            request, length = self._queue.popleft()
            num_tokens = so_far(request)
            self._serial += 1
            entry = (self._work + length - num_tokens, self._serial, request, length)
            heapq.heappush(self._running, entry)
            if self.model.prefill is not None:
                self.time += (len(request.prompt.tokens) + num_tokens) / self.model.prefill


class VirtualDriver:
    """Rollout driver (rollout/driver.py) with virtual engines and a virtual clock.

    Tokens and log-probs are ranges, because only their length matters. `outcome` returns the
    outcome of (ticket, sample). Grading takes no time.
    """

    def __init__(
        self,
        model: EngineModel,
        num_replicas: int,
        outcome: Callable[[int, int], Outcome],
        exchange_seconds: float = 1.0,
    ) -> None:
        self.engines = [VirtualEngine(model) for _ in range(num_replicas)]
        self.num_replicas = num_replicas
        self.max_sequences = model.max_sequences
        self.grade_seconds = 0.0
        self.last_errors: dict[str, str] = {}
        self.version = 0
        """Version of the weights of all engines."""
        self.clock = 0.0
        self.tokens_of: Counter[int] = Counter()
        """Tokens generated for each ticket, counted as in `num_generated`."""
        self._outcome = outcome
        self._exchange_seconds = exchange_seconds

    @property
    def num_generated(self) -> int:
        """Tokens generated by all engines. Those of a sequence count when it ends or is
        interrupted."""
        return self.tokens_of.total()

    def advance(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> Events:
        """Start `requests[replica]` and run to the next exchange at which a sequence has ended."""
        for engine, share in zip(self.engines, requests, strict=True):
            for request in share:
                length = min(self._outcome(request.ticket, request.sample)[0], request.max_tokens)
                engine.submit(request, length)
        first = min(engine.next_end() for engine in self.engines)
        until = self.clock + self._exchange_seconds
        if until < first < math.inf:
            missing = (first - self.clock) / self._exchange_seconds
            until = self.clock + math.ceil(missing) * self._exchange_seconds
        ended = [item for engine in self.engines for item in engine.run_until(until)]
        self.clock = until
        sampled = [
            (request.ticket, self._completion(request, length, self._finish(request, length)))
            for request, length in ended
        ]
        ungraded = [(ticket, completion) for ticket, _, completion in grade] + sampled
        return Events(sampled, [self._graded(ticket, done.sample) for ticket, done in ungraded])

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Stop all engines.

        Returns the unfinished completions with at least one token, sorted by ticket and sample.
        """
        unfinished = [
            (request.ticket, self._completion(request, tokens, Finish.UNFINISHED))
            for engine in self.engines
            for request, tokens in engine.interrupt()
            if tokens
        ]
        return sorted(unfinished, key=lambda item: (item[0], item[1].sample))

    def sleep(self, seconds: float) -> None:
        """Advance the clock by the seconds of a training phase."""
        self.clock += seconds
        for engine in self.engines:
            engine.run_until(self.clock)

    def _finish(self, request: SampleRequest, length: int) -> Finish:
        return Finish.LENGTH if length >= request.max_tokens else Finish.STOP

    def _graded(self, ticket: int, sample: int) -> tuple[int, int, Grade, str]:
        return ticket, sample, RIGHT if self._outcome(ticket, sample)[1] else WRONG, ""

    def _completion(self, request: SampleRequest, length: int, finish: Finish) -> Completion:
        before = request.so_far.segments if request.so_far else ()
        new = length - so_far(request)
        self.tokens_of[request.ticket] += new
        if before and before[-1].version == self.version:
            new += before[-1].num_tokens
            before = before[:-1]
        tokens: tuple[int, ...] = range(length)  # type: ignore[assignment]
        return Completion(
            sample=request.sample,
            tokens=tokens,
            logprobs=tokens,
            text="",
            finish=finish,
            segments=(*before, Segment(self.version, new)) if new else before,
        )
