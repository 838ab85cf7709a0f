"""Engines on a virtual clock, and the driver that shows them to the coordinator.

An engine generates min(capacity, per_sequence * running) tokens/s, shared equally by what runs.
Every running sequence then gets the same tokens, so one number per engine, its *work*, says how far
all of them are: a sequence that starts at work w and has r tokens to go ends at work w + r. Events
are handled one by one, nothing is cut into time steps.
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
"""Tokens: far more than float64 loses in a step, far less than one."""

Outcome = tuple[int, bool]
"""Tokens of a completion, were it never cut, and whether it is correct."""


@dataclass(frozen=True)
class EngineModel:
    """How fast an engine is. The default is the model of issue 5."""

    max_sequences: int = 256
    """That run at once; more are queued."""
    capacity: float = 9_000
    """Tokens/s of the whole engine, at most."""
    per_sequence: float = 60
    """Tokens/s of one sequence, at most."""
    prefill: float | None = None
    """Tokens/s at which a prompt, or the tokens so far of a continued sequence, are read again;
    the engine does nothing else meanwhile. None: at no cost."""


def so_far(request: SampleRequest) -> int:
    """Tokens of the response that the request comes with."""
    return 0 if request.so_far is None else len(request.so_far.tokens)


class VirtualEngine:
    """One replica. `time` is its clock in seconds, never set back."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.time = 0.0
        self._work = 0.0
        # A heap of (work at its end, serial to break ties, request, its length in the end).
        self._running: list[tuple[float, int, SampleRequest, int]] = []
        self._queue: deque[tuple[SampleRequest, int]] = deque()
        self._serial = 0

    @property
    def rate(self) -> float:
        """Tokens/s of each running sequence now."""
        model, num = self.model, len(self._running)
        knee = model.capacity / model.per_sequence
        return model.per_sequence if num <= knee else model.capacity / num

    def submit(self, request: SampleRequest, length: int) -> None:
        """Queue a request whose response will have `length` tokens, more than it has so far."""
        self._queue.append((request, length))
        self._admit()

    def next_end(self) -> float:
        """When the next sequence ends; infinity if none runs."""
        if not self._running:
            return math.inf
        return self.time + (self._running[0][0] - self._work) / self.rate

    def run_until(self, time: float) -> list[tuple[SampleRequest, int]]:
        """What ended up to then, with its length. Slots are filled from the queue at once."""
        ended = []
        while (end := self.next_end()) <= time:
            self._work, _, request, length = heapq.heappop(self._running)
            self.time = end
            ended.append((request, length))
            self._admit()
        if time > self.time:  # reading prompts may have taken longer
            self._work += (time - self.time) * self.rate
            self.time = time
        return ended

    def interrupt(self) -> list[tuple[SampleRequest, int]]:
        """Drop everything; all requests, running or queued, and the tokens that each has."""
        dropped = []
        for ends_at, _, request, length in self._running:
            # Whole tokens; at least one is still to come.
            done = length - math.ceil(ends_at - self._work - ROUNDING)
            dropped.append((request, min(max(done, so_far(request)), length - 1)))
        dropped += [(request, so_far(request)) for request, _ in self._queue]
        self._running.clear()
        self._queue.clear()
        return dropped

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.model.max_sequences:
            request, length = self._queue.popleft()
            had = so_far(request)
            self._serial += 1
            place = (self._work + length - had, self._serial, request, length)
            heapq.heappush(self._running, place)
            if self.model.prefill is not None:
                self.time += (len(request.prompt.tokens) + had) / self.model.prefill


class VirtualDriver:
    """A rollout Driver (rollout/driver.py) whose engines and clock are virtual. Tokens and
    log-probs are ranges: they have a length, and nothing else that matters here.

    `outcome` says of (ticket, sample) what it will be. Grading takes no time.
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
        """Of the weights that all engines sample with."""
        self.clock = 0.0
        self.tokens_of: Counter[int] = Counter()
        """Generated for each ticket, as `num_generated`."""
        self._outcome = outcome
        self._exchange_seconds = exchange_seconds

    @property
    def num_generated(self) -> int:
        """Tokens, by all engines, ever; what still runs counts when it ends or is interrupted."""
        return self.tokens_of.total()

    def advance(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> Events:
        """Start `requests[replica]`, then run until the next exchange in which something ends."""
        for engine, share in zip(self.engines, requests, strict=True):
            for request in share:
                length = min(self._outcome(request.ticket, request.sample)[0], request.max_tokens)
                engine.submit(request, length)
        first = min(engine.next_end() for engine in self.engines)
        until = self.clock + self._exchange_seconds
        if until < first < math.inf:
            missing = (first - self.clock) / self._exchange_seconds
            until = self.clock + math.ceil(missing) * self._exchange_seconds
        ended = [one for engine in self.engines for one in engine.run_until(until)]
        self.clock = until
        sampled = [
            (request.ticket, self._completion(request, length, self._finish(request, length)))
            for request, length in ended
        ]
        ungraded = [(ticket, completion) for ticket, _, completion in grade] + sampled
        return Events(sampled, [self._graded(ticket, one.sample) for ticket, one in ungraded])

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Stop all engines; the completions with at least one token that had not ended, by ticket
        and sample."""
        unfinished = [
            (request.ticket, self._completion(request, tokens, Finish.UNFINISHED))
            for engine in self.engines
            for request, tokens in engine.interrupt()
            if tokens
        ]
        return sorted(unfinished, key=lambda item: (item[0], item[1].sample))

    def sleep(self, seconds: float) -> None:
        """Training: time goes by, and nothing is generated."""
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
