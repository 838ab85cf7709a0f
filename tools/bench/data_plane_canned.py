"""Completions, engine and graders of the data plane's benchmark, made up on the spot.

Nothing here is part of the product. A `Generator` uses only names that old commits have too.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_megatron.types import Completion, Finish, Grade, Prompt, SampleRequest, Segment

VOCABULARY = 151_936
MAX_TOKENS = 20_480
SIGMA = 1.0
"""Standard deviation of the log of the lengths."""
PROMPT_TOKENS = 200
CHARACTERS_PER_TOKEN = 3.5
_POOL_CHARACTERS = 2**22


class Generator:
    """Source of completions that depend only on seed, ticket and sample. It keeps none of them."""

    def __init__(self, mean_tokens: float, seed: int) -> None:
        self._mu = math.log(mean_tokens) - SIGMA**2 / 2
        self._seed = seed
        rng = np.random.default_rng(seed)
        words = rng.choice([f"{number:x} " for number in range(50_000)], _POOL_CHARACTERS // 4)
        self._text = "".join(words)[:_POOL_CHARACTERS]

    def length(self, ticket: int, sample: int) -> int:
        """Return the number of tokens of a completion."""
        length = np.random.default_rng([self._seed, ticket, sample]).lognormal(self._mu, SIGMA)
        return min(max(round(length), 1), MAX_TOKENS)

    def values(self, num_tokens: int, key: Sequence[int]) -> tuple[array[int], array[float]]:
        """Return fresh tokens and log-probs."""
        rng = np.random.default_rng([self._seed, *key])
        # About as compressible as text: frequent tokens have small numbers.
        tokens = (VOCABULARY ** rng.random(num_tokens, np.float32)).astype(np.int32)
        logprobs = rng.standard_exponential(num_tokens, np.float32)
        np.negative(logprobs, out=logprobs)
        packed = array("i", [])
        packed.frombytes(tokens.data.cast("B"))
        packed_logprobs = array("f", [])
        packed_logprobs.frombytes(logprobs.data.cast("B"))
        return packed, packed_logprobs

    def text(self, num_tokens: int, key: Sequence[int]) -> str:
        """Return the text of a completion with `num_tokens` tokens."""
        size = int(num_tokens * CHARACTERS_PER_TOKEN)
        start = int(np.random.default_rng([self._seed, *key]).integers(_POOL_CHARACTERS - size))
        return self._text[start : start + size]

    def prompt(self, index: int) -> Prompt:
        """Return a prompt."""
        rng = np.random.default_rng([self._seed, 2**31 + index])
        tokens = tuple(rng.integers(VOCABULARY, size=PROMPT_TOKENS).tolist())
        text = self._text[index * 7 % 10_000 :][: int(PROMPT_TOKENS * CHARACTERS_PER_TOKEN)]
        return Prompt("canned", index, tokens, text, "42")


class CannedEngine:
    """Engine that makes up its completions. Implements what a worker uses of a RolloutEngine.

    Only that of a leader returns completions; the worker of another rank would drop them.

    tokens_per_step   tokens of each running sequence that a call of `step` samples
    step_seconds      minimum time between the ends of two steps; meanwhile the engine sleeps
    """

    def __init__(
        self,
        generator: Generator,
        replica: int,
        num_replicas: int,
        is_leader: bool,
        max_sequences: int,
        tokens_per_step: int,
        step_seconds: float,
    ) -> None:
        self.replica = replica
        self.num_replicas = num_replicas
        self.is_leader = is_leader
        self.max_sequences = max_sequences
        self.version = 0
        self.num_steps = self.tokens_given = 0
        self._generator = generator
        self._tokens_per_step = tokens_per_step
        self._step_seconds = step_seconds
        self._last_step = 0.0
        self._requests: dict[tuple[int, int], SampleRequest] = {}
        self._queue: deque[SampleRequest] = deque()
        # Key of a request -> tokens so far, and tokens at its end.
        self._running: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def requests(self) -> Collection[SampleRequest]:
        """See RolloutEngine."""
        return self._requests.values()

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See RolloutEngine."""
        self._requests.update(((request.ticket, request.sample), request) for request in requests)
        self._queue.extend(requests)
        if not self.is_leader:
            so_far = (request.so_far for request in requests)
            self.tokens_given += sum(before.num_tokens for before in so_far if before is not None)
        self._admit()

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """See RolloutEngine."""
        self.num_steps += 1
        time.sleep(max(self._last_step + self._step_seconds - time.monotonic(), 0.0))
        self._last_step = time.monotonic()
        finished = []
        for key, (so_far, length) in list(self._running.items()):
            so_far = min(so_far + self._tokens_per_step, length)
            if so_far < length:
                self._running[key] = so_far, length
                continue
            del self._running[key]
            request = self._requests.pop(key)
            finish = Finish.LENGTH if length == MAX_TOKENS else Finish.STOP
            if self.is_leader:
                finished.append((request, self._completion(request, length, finish)))
        self._admit()
        return finished

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        """See RolloutEngine."""
        unfinished = [
            (self._requests[key], self._completion(self._requests[key], so_far, Finish.UNFINISHED))
            for key, (so_far, _) in self._running.items()
            if so_far and self.is_leader
        ]
        unfinished += [
            (request, request.so_far) for request in self._queue if request.so_far is not None
        ]
        for items in (self._requests, self._running, self._queue):
            items.clear()
        return unfinished

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.max_sequences:
            request = self._queue.popleft()
            length = min(self._generator.length(request.ticket, request.sample), request.max_tokens)
            key = request.ticket, request.sample
            so_far = request.so_far.num_tokens if request.so_far else 0
            self._running[key] = so_far, length

    def _completion(self, request: SampleRequest, num_tokens: int, finish: Finish) -> Completion:
        """Return a completion, of which `request.so_far` is the start."""
        before = request.so_far
        new = num_tokens - (before.num_tokens if before else 0)
        if before is not None and not new:
            return before
        key = request.ticket, request.sample, num_tokens
        tokens, logprobs = self._generator.values(new, key)
        segments = before.segments if before else ()
        if before is not None:
            tokens, logprobs = before.tokens + tokens, before.logprobs + logprobs
        if segments and segments[-1].version == self.version:
            new += segments[-1].num_tokens
            segments = segments[:-1]
        return Completion(
            sample=request.sample,
            tokens=tokens,
            logprobs=logprobs,
            text="" if finish is Finish.UNFINISHED else self._generator.text(num_tokens, key),
            finish=finish,
            segments=(*segments, Segment(self.version, new)),
        )


class ScriptedGrading:
    """Grading pool that answers after `delay_seconds` and makes every group mixed."""

    last_errors: Mapping[str, str] = {}

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self._delay_seconds = delay_seconds
        self._answers: deque[tuple[float, tuple[Any, Grade, str]]] = deque()

    @property
    def pending(self) -> int:
        """See GradingPool."""
        return len(self._answers)

    def submit(self, key: Any, source: str, response: str, truth: str, extra: Any) -> None:
        """See GradingPool."""
        _, _, sample, _ = key
        grade = Grade(1.0, True, "42") if sample == 0 else Grade(-1.0, False, "41")
        due = time.monotonic() + self._delay_seconds
        self._answers.append((due, (key, grade, "graded")))

    def collect(self, wait: bool) -> list[tuple[Any, Grade | None, str]]:
        """See GradingPool."""
        now, answers = time.monotonic(), []
        while self._answers and (wait or self._answers[0][0] <= now):
            answers.append(self._answers.popleft()[1])
        return answers
