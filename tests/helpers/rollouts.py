"""Replace EngineDriver by scripted engines, whose every response is known in advance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import Events
from dapo_megatron.types import Collected, Completion, Finish, Grade, Prompt, SampleRequest, Segment

Correct = Callable[[int, int], bool | None]
"""(ticket, sample) -> whether it is correct, or None if the grader times out."""
Length = Callable[[int, int], int]
"""(ticket, sample) -> number of tokens of the full response."""

MAX_TOKENS = 8


class Killed(Exception):
    """The process died in the middle of a step."""


@dataclass
class _Running:
    request: SampleRequest
    tokens: int
    segments: tuple[Segment, ...]


@dataclass
class ScriptedDriver:
    """Replicas that advance at random (`rng`). Responses depend only on ticket and sample.

    Requests are checked: no completion is requested twice, no replica exceeds `max_sequences`, and
    a continuation starts with exactly the tokens sampled so far.
    """

    correct: Correct
    length: Length = lambda ticket, sample: 1
    num_replicas: int = 2
    max_sequences: int = 8
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    grade_at_once: bool = True
    version: int = 0
    grade_seconds: float = 0.0
    last_errors: dict[str, str] = field(default_factory=dict)
    on_advance: Callable[[], None] = lambda: None
    stop: str = ""
    """Name of a signal to report at the next exchange."""
    requests: list[SampleRequest] = field(default_factory=list)
    """Every request so far."""

    def __post_init__(self) -> None:
        self._running: list[dict[tuple[int, int], _Running]] = [
            {} for _ in range(self.num_replicas)
        ]
        self._to_grade: list[tuple[int, Completion]] = []

    def advance(
        self,
        requests: Sequence[Sequence[SampleRequest]],
        grade: Sequence[tuple[int, Prompt, Completion]] = (),
        use: str = "",
    ) -> Events:
        assert len(requests) == self.num_replicas
        for replica, started in enumerate(requests):
            for request in started:
                self._start(replica, request)
        self.on_advance()
        self._to_grade += [(ticket, completion) for ticket, _, completion in grade]
        sampled = [item for running in self._running for item in self._move_on(running)]
        self.rng.shuffle(sampled)
        if self.stop:  # like the real driver: grades are ignored after a stop signal
            return Events(sampled, [], self.stop)
        self._to_grade += sampled
        graded = [item for item in self._to_grade if self.grade_at_once or self.rng.random() < 0.5]
        self._to_grade = [item for item in self._to_grade if item not in graded]
        self.grade_seconds += 0.5
        return Events(
            sampled,
            [(ticket, item.sample, *self._grade(ticket, item)) for ticket, item in graded],
        )

    def interrupt(self) -> list[tuple[int, Completion]]:
        unfinished = [
            (ticket, self._completion(running, Finish.UNFINISHED))
            for replica in self._running
            for (ticket, _), running in replica.items()
            if running.tokens
        ]
        for replica in self._running:
            replica.clear()
        return sorted(unfinished, key=lambda item: (item[0], item[1].sample))

    def _start(self, replica: int, request: SampleRequest) -> None:
        key = request.ticket, request.sample
        assert not any(key in running for running in self._running), f"{key} requested twice"
        so_far = request.so_far
        tokens, segments = 0, ()
        if so_far is not None:
            assert so_far.finish is Finish.UNFINISHED
            assert list(so_far.tokens) == list(range(len(so_far.tokens)))
            tokens, segments = len(so_far.tokens), so_far.segments
            assert 0 < tokens < self.length(*key)
        self._running[replica][key] = _Running(request, tokens, segments)
        assert len(self._running[replica]) <= self.max_sequences
        self.requests.append(request)

    def _move_on(self, replica: dict[tuple[int, int], _Running]) -> list[tuple[int, Completion]]:
        finished = []
        for (ticket, sample), running in list(replica.items()):
            more = min(self.rng.randint(0, 2), self.length(ticket, sample) - running.tokens)
            if more:
                running.tokens += more
                *older, last = running.segments or (Segment(self.version, 0),)
                if last.version == self.version:
                    running.segments = (*older, Segment(self.version, last.num_tokens + more))
                else:
                    running.segments = (*older, last, Segment(self.version, more))
            if running.tokens == self.length(ticket, sample):
                del replica[ticket, sample]
                finish = Finish.LENGTH if running.tokens >= MAX_TOKENS else Finish.STOP
                finished.append((ticket, self._completion(running, finish)))
        return finished

    def _completion(self, running: _Running, finish: Finish) -> Completion:
        return Completion(
            sample=running.request.sample,
            tokens=tuple(range(running.tokens)),
            logprobs=tuple(
                -0.01 * (part.version + 1)
                for part in running.segments
                for _ in range(part.num_tokens)
            ),
            text="" if finish is Finish.UNFINISHED else "7",
            finish=finish,
            segments=running.segments,
        )

    def _grade(self, ticket: int, completion: Completion) -> tuple[Grade | None, str]:
        right = self.correct(ticket, completion.sample)
        if right is None:
            return None, "timeout"
        return Grade(1.0 if right else -1.0, right, "7"), "graded"


def make_coordinator(
    driver: ScriptedDriver, *, overlong: dict[str, Any] | None = None, **rollout: Any
) -> Coordinator:
    """Make a coordinator for ten prompts, 4 groups of 2 per step unless `rollout` overrides it."""
    settings = {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "temperature": 0.9,
        "top_p": 1.0,
        "max_prompt_tokens": 8,
        "max_response_tokens": MAX_TOKENS,
        "on_policy": False,
        "dynamic_sampling": True,
    }
    shaping = {
        "max_tokens": MAX_TOKENS,
        "buffer_tokens": 4,
        "penalty": True,
        "filter": False,
        "filtered_in_mean": False,
    }
    return Coordinator(
        config=RolloutConfig(**{**settings, **rollout}),
        overlong=OverlongConfig(**{**shaping, **(overlong or {})}),
        stream=PromptStream(
            [Prompt("sums", index, (index,), str(index), "7") for index in range(10)],
            seed=0,
            shuffle=True,
        ),
        driver=driver,
        seed=3,
    )


def collect(coordinator: Coordinator, driver: ScriptedDriver, version: int) -> Collected:
    """Collect one step with weights of `version`."""
    driver.version = version
    return coordinator.collect(version, lambda done: None)


def moved(driver: ScriptedDriver, num_replicas: int) -> ScriptedDriver:
    """Return a driver with the same script, as after a restart with `num_replicas` replicas."""
    return replace(driver, num_replicas=num_replicas, requests=[], on_advance=lambda: None)
