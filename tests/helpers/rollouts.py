"""Replace EngineDriver by scripted replicas, whose every response is known in advance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.messages import GroupRequest, Report, Sampling
from dapo_megatron.types import (
    Collected,
    CompletionSummary,
    Finish,
    Grade,
    Prompt,
    Segment,
)

Correct = Callable[[int, int], bool | None]
"""(ticket, sample) -> whether it is correct, or None if the grader times out."""
Length = Callable[[int, int], int]
"""(ticket, sample) -> number of tokens of the full response."""

MAX_TOKENS = 8


class RefusedByReplica(AssertionError):
    """A replica was asked to continue a response that it does not hold like this."""


class Killed(Exception):
    """The process died in the middle of a step."""


@dataclass
class _Response:
    """A response on a replica, running or waiting to be continued."""

    replica: int
    tokens: int = 0
    segments: tuple[Segment, ...] = ()

    def sample(self, num_tokens: int, version: int) -> None:
        """Add tokens sampled by weights of `version`."""
        self.tokens += num_tokens
        *older, last = self.segments or (Segment(version, 0),)
        if last.version == version:
            self.segments = (*older, Segment(version, last.num_tokens + num_tokens))
        else:
            self.segments = (*older, last, Segment(version, num_tokens))

    def summary(self, sample: int, finish: Finish) -> CompletionSummary:
        """Return the summary of the response so far."""
        return CompletionSummary(sample, self.tokens, finish, self.segments, self.replica)


@dataclass
class ScriptedDriver:
    """Driver of replicas that advance at random (`rng`). Responses depend only on ticket and
    sample.

    Requests are checked: no completion is requested twice, no replica exceeds `max_sequences`, and
    a completion continues on the replica that holds it, with exactly the tokens sampled so far.
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
    on_start: Callable[[], None] = lambda: None
    on_advance: Callable[[], None] = lambda: None
    on_interrupt: Callable[[], None] = lambda: None
    stop: str = ""
    """Name of a signal to report at the next turn."""
    lost: set[int] = field(default_factory=set)
    lost_by_start: set[int] = field(default_factory=set)
    """Replicas that the start of the phase lost. Requests to them are ignored."""
    orphans: set[int] = field(default_factory=set)
    """Tickets with tokens that a replica had sampled when it was lost in the last interrupt."""
    requests: list[GroupRequest] = field(default_factory=list)
    """Every request so far."""
    held: dict[tuple[int, int], _Response] = field(default_factory=dict)
    """Responses that are unfinished or finished, as the leaders of replicas hold them."""

    def __post_init__(self) -> None:
        self._running: list[dict[tuple[int, int], _Response]] = [
            {} for _ in range(self.num_replicas)
        ]
        self._to_grade: list[tuple[int, int]] = []

    def name(self, replica: int) -> str:
        return f"replica {replica}"

    def start(self, sampling: Sampling, dropped: Sequence[int] = ()) -> None:
        assert not any(self._running)
        for key in [key for key in self.held if key[0] in dropped]:
            self._drop(key)
        before = set(self.lost)
        self.on_start()
        self.lost_by_start = self.lost - before

    def raise_lost(self) -> None:
        raise NotImplementedError

    def lose(self, replica: int) -> None:
        """Lose a replica, with all that it holds."""
        self.lost.add(replica)
        running = self._running[replica]
        self.orphans |= {ticket for (ticket, _), response in running.items() if response.tokens}
        running.clear()
        for key in [key for key, held in self.held.items() if held.replica == replica]:
            self._drop(key)

    def inventories(self) -> list[list[tuple[int, int, int]]]:
        """Return (ticket, sample, number of tokens) of what each replica that is left holds."""
        return [
            [(*key, held.tokens) for key, held in self.held.items() if held.replica == replica]
            for replica in range(self.num_replicas)
            if replica not in self.lost
        ]

    def _drop(self, key: tuple[int, int]) -> None:
        del self.held[key]
        self._to_grade = [other for other in self._to_grade if other != key]

    def advance(
        self,
        requests: Sequence[Sequence[GroupRequest]],
        regrade: Sequence[Sequence[tuple[int, int]]],
    ) -> list[tuple[int, Report]]:
        assert len(requests) == self.num_replicas
        for replica, groups in enumerate(requests):
            for group in groups if replica not in self.lost_by_start else ():
                self._start(replica, group)
        self.on_advance()
        for replica, keys in enumerate(regrade):
            if replica in self.lost:
                continue
            assert all(self.held[key].replica == replica for key in keys)
            self._to_grade += keys
        sampled = [self._move_on(running) for running in self._running]
        self._to_grade += [
            (ticket, summary.sample) for items in sampled for ticket, summary in items
        ]
        graded = [key for key in self._to_grade if self.grade_at_once or self.rng.random() < 0.5]
        self._to_grade = [key for key in self._to_grade if key not in graded]
        self.grade_seconds += 0.5
        reports = [
            (
                replica,
                Report(
                    sampled=items,
                    graded=[
                        (*key, *self._grade(*key))
                        for key in graded
                        if self.held[key].replica == replica
                    ],
                    stop=self.stop,
                ),
            )
            for replica, items in enumerate(sampled)
            if replica not in self.lost
        ]
        self.rng.shuffle(reports)
        return reports

    def interrupt(self) -> list[tuple[int, Report]]:
        self.orphans.clear()
        self.on_interrupt()
        reports = [
            (
                replica,
                Report(
                    unfinished=[
                        (ticket, response.summary(sample, Finish.UNFINISHED))
                        for (ticket, sample), response in running.items()
                        if response.tokens
                    ]
                ),
            )
            for replica, running in enumerate(self._running)
        ]
        for running in self._running:
            running.clear()
        return reports

    def _start(self, replica: int, group: GroupRequest) -> None:
        assert replica not in self.lost
        for sample, num_tokens in group.samples:
            key = group.ticket, sample
            assert not any(key in running for running in self._running), f"{key} requested twice"
            response = self.held[key] if num_tokens else _Response(replica)
            assert response.replica == replica
            if not response.tokens == num_tokens < self.length(*key):
                raise RefusedByReplica(f"{key}: {response.tokens} tokens, not {num_tokens}")
            self.held[key] = self._running[replica][key] = response
        assert len(self._running[replica]) <= self.max_sequences
        self.requests.append(group)

    def _move_on(
        self, running: dict[tuple[int, int], _Response]
    ) -> list[tuple[int, CompletionSummary]]:
        finished = []
        for (ticket, sample), response in list(running.items()):
            more = min(self.rng.randint(0, 2), self.length(ticket, sample) - response.tokens)
            if more:
                response.sample(more, self.version)
            if response.tokens == self.length(ticket, sample):
                del running[ticket, sample]
                finish = Finish.LENGTH if response.tokens >= MAX_TOKENS else Finish.STOP
                finished.append((ticket, response.summary(sample, finish)))
        return finished

    def _grade(self, ticket: int, sample: int) -> tuple[Grade | None, str]:
        right = self.correct(ticket, sample)
        if right is None:
            return None, "timeout"
        return Grade(1.0 if right else -1.0, right, "7"), "graded"


def make_coordinator(
    driver: ScriptedDriver,
    *,
    overlong: dict[str, Any] | None = None,
    is_elastic: bool = False,
    **rollout: Any,
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
        is_elastic=is_elastic,
    )


def collect(coordinator: Coordinator, driver: ScriptedDriver, version: int) -> Collected:
    """Collect one step with weights of `version`."""
    driver.version = version
    return coordinator.collect(version, lambda done: None)


def resume(coordinator: Coordinator, driver: ScriptedDriver, state: Mapping[str, Any]) -> None:
    """Restore `state`, and let replicas hold what it describes."""
    coordinator.restore(json.loads(json.dumps(state)))
    driver.held = {
        (group.ticket, completion.sample): _Response(
            completion.replica, completion.num_tokens, completion.segments
        )
        for group in coordinator.groups.values()
        for completion in group.completions.values()
    }


def moved(driver: ScriptedDriver, num_replicas: int) -> ScriptedDriver:
    """Return a driver with the same script, as after a restart with `num_replicas` replicas."""
    return replace(
        driver,
        num_replicas=num_replicas,
        requests=[],
        held={},
        lost=set(),
        on_advance=lambda: None,
    )


def without_lost(driver: ScriptedDriver, num_new: int = 0) -> ScriptedDriver:
    """Return the driver of the next generation: replicas that are left get new numbers, and
    `num_new` others join."""
    left = [replica for replica in range(driver.num_replicas) if replica not in driver.lost]
    following = moved(driver, len(left) + num_new)
    following.held = {
        key: replace(held, replica=left.index(held.replica)) for key, held in driver.held.items()
    }
    return following
