"""Running a round: prompts go to replicas, completions come back graded, on every rank alike."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dapo_megatron.protocols import Exchange, RolloutEngine
from dapo_megatron.types import Completion, Grade, Group, Prompt, SampleRequest

HEARTBEAT_SECONDS = 20.0
"""How long ranks go without hearing from each other while one of them waits for graders."""


class Grading(Protocol):
    """What the driver needs of rewards.pool.GradingPool."""

    @property
    def pending(self) -> int:
        """Gradings not yet collected."""
        ...

    def submit(self, key: Any, source: str, response: str, truth: str, extra: Any) -> None:
        """Queue one grading."""
        ...

    def collect(self, wait: bool) -> Sequence[tuple[Any, Grade | None, str]]:
        """(key, grade or None, why) of what has finished."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: `num_samples` completions per prompt; `seed_name` separates the random
    numbers of different uses (training, each evaluation set)."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed_name: str


def sample_seed(seed_name: str, ticket: int, sample: int) -> int:
    """A seed in [0, 2^62) that depends on these three alone, not on layout, replica or time."""
    digest = hashlib.blake2b(f"{seed_name}/{ticket}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class RolloutDriver:
    """Feeds this rank's engine with its replica's share of a round.

    `grading` is None on ranks that do not speak for their replica.
    """

    def __init__(self, engine: RolloutEngine, grading: Grading | None, exchange: Exchange) -> None:
        self._engine = engine
        self._grading = grading
        self._exchange = exchange
        self._abstained: Counter[str] = Counter()
        self.grade_seconds = 0.0
        """Waited for grading after the last token, over the life of the driver."""
        self.abstentions: Counter[str] = Counter()
        """Completions without a grade by cause (timeout, crash, error), over the life of the
        driver and over all replicas: the same on every rank."""

    def run(
        self,
        tickets: Sequence[tuple[int, Prompt]],
        sampling: Sampling,
        on_progress: Callable[[int], None] = lambda groups: None,
    ) -> list[Group]:
        """Sample and grade; every rank gets all groups, in the order of `tickets`.

        `on_progress` is told about how many groups are complete, judging by this replica.
        """
        mine = tickets[self._engine.replica :: self._engine.num_replicas]
        self._engine.submit(
            [
                _request(ticket, prompt, sample, sampling)
                for ticket, prompt in mine
                for sample in range(sampling.num_samples)
            ]
        )
        finished: dict[tuple[int, int], Completion] = {}
        prompts = dict(mine)
        missing = dict.fromkeys(prompts, sampling.num_samples)
        while self._engine.has_work():
            for ticket, completion in self._engine.step():
                key = (ticket, completion.sample)
                finished[key] = completion
                missing[ticket] -= 1
                if self._grading is not None:
                    prompt = prompts[ticket]
                    self._grading.submit(
                        key, prompt.source, completion.text, prompt.truth, dict(prompt.extra)
                    )
            self._collect(finished, wait=False)
            done = sum(left == 0 for left in missing.values())
            on_progress(min(done * self._engine.num_replicas, len(tickets)))
        sampled = time.perf_counter()
        # Told every few seconds: a collective that waited for hours of hung graders would end the
        # run, and these may cost graded answers only.
        while any(self._exchange.all_gather(self._grade_a_while(finished))):
            pass
        self.grade_seconds += time.perf_counter() - sampled
        return self._everyones(tickets, finished if self._engine.is_leader else {})

    def _grade_a_while(self, finished: dict[tuple[int, int], Completion]) -> bool:
        """Take in gradings for HEARTBEAT_SECONDS at most; whether some are still to come."""
        until = time.perf_counter() + HEARTBEAT_SECONDS
        while self._grading is not None and self._grading.pending:
            if time.perf_counter() > until:
                return True
            self._collect(finished, wait=True)
        return False

    def _collect(self, finished: dict[tuple[int, int], Completion], *, wait: bool) -> None:
        if self._grading is not None:
            for key, grade, why in self._grading.collect(wait):
                finished[key] = replace(finished[key], grade=grade)
                if grade is None:
                    self._abstained[why] += 1

    def _everyones(
        self,
        tickets: Sequence[tuple[int, Prompt]],
        finished: dict[tuple[int, int], Completion],
    ) -> list[Group]:
        """Grading is decided by one rank per replica and told to all: a grader that is at the
        edge of its time limit must not split the ranks' minds."""
        completions: dict[int, list[Completion]] = {ticket: [] for ticket, _ in tickets}
        abstained, self._abstained = self._abstained, Counter()
        for part, causes in self._exchange.all_gather((finished, abstained)):
            self.abstentions.update(causes)
            for (ticket, _), completion in part.items():
                completions[ticket].append(completion)
        return [
            Group(ticket, prompt, tuple(sorted(completions[ticket], key=lambda c: c.sample)))
            for ticket, prompt in tickets
        ]


def _request(ticket: int, prompt: Prompt, sample: int, sampling: Sampling) -> SampleRequest:
    return SampleRequest(
        ticket=ticket,
        sample=sample,
        tokens=prompt.tokens,
        seed=sample_seed(sampling.seed_name, ticket, sample),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
