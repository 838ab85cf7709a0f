"""Messages between the coordinator on rank 0 and the leaders of replicas.

Orders go from the coordinator to a leader, reports from a leader to the coordinator. Completions
travel with their tokens, so a leader holds none that it has reported. A *phase* is the collection
of one step, or the evaluation of one set of problems.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from dapo_megatron.types import (
    Completion,
    Grade,
    Prompt,
    SampleRequest,
    TrainingSequence,
)

T = TypeVar("T")

STEPS = 8
"""Engine steps per turn in a deterministic run, where all replicas take turns in lock step."""

MAX_PART_BYTES = 2**22
"""Size of the completions in a message from which on the rest goes into another one."""
_COMPLETION_BYTES = 200
"""Rough size of a completion in a message without its tokens and text."""

Sampled = tuple[int, Completion]
"""(ticket, completion)."""
Graded = tuple[int, int, Grade | None, str]
"""(ticket, sample, grade or None, "graded" or why there is no grade)."""
Ungraded = tuple[int, int, Prompt, str]
"""(ticket, sample, prompt, text) of a finished completion to grade."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for completions of one prompt.

    `samples` are (index, completion so far). The latter is None for a new completion.
    """

    ticket: int
    prompt: Prompt
    samples: tuple[tuple[int, Completion | None], ...]


def divided(requests: Iterable[GroupRequest]) -> Iterator[list[GroupRequest]]:
    """Yield requests in lists with completions of about MAX_PART_BYTES."""
    samples = ((request, sample) for request in requests for sample in request.samples)
    for part in _by_size(samples, lambda item: item[1][1]):
        by_ticket: dict[int, list[tuple[int, Completion | None]]] = {}
        for request, sample in part:
            by_ticket.setdefault(request.ticket, []).append(sample)
        known = {request.ticket: request for request, _ in part}
        yield [replace(known[t], samples=tuple(samples)) for t, samples in by_ticket.items()]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a phase, and what happens to its completions.

    name        separates the grades and the seeds of different uses of the engines (training, each
                evaluation set)
    max_tokens  limit of a whole response
    is_seeded   every request has its own random numbers, which depend only on `name`, ticket,
                sample and the number of tokens so far
    """

    name: str
    max_tokens: int
    temperature: float
    top_p: float
    is_seeded: bool

    def request(
        self, ticket: int, prompt: Prompt, sample: int, so_far: Completion | None = None
    ) -> SampleRequest:
        """Return the request for completion `sample`, or for the rest of it after `so_far`."""
        num_tokens = 0 if so_far is None else so_far.num_tokens
        return SampleRequest(
            ticket=ticket,
            sample=sample,
            prompt=prompt,
            seed=sample_seed(self.name, ticket, sample, num_tokens) if self.is_seeded else None,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            so_far=so_far,
        )


def sample_seed(name: str, ticket: int, sample: int, num_tokens: int = 0) -> int:
    """Return a seed in [0, 2^62) that depends on the arguments only, not on layout, replica or
    time. A completion that continues after `num_tokens` tokens gets another seed than at its
    start."""
    digest = hashlib.blake2b(f"{name}/{ticket}/{sample}/{num_tokens}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 2


class OrderKind(StrEnum):
    START = "start"
    """Start a phase; `sampling` is set. There is no answer."""
    SUBMIT = "submit"
    """Submit `requests`. A RUN with more of them follows."""
    RUN = "run"
    """Submit `requests`, and grade the completions `regrade`. In lock step, run STEPS engine steps
    and report once. Otherwise keep running, and report when there is news."""
    ALIVE = "alive"
    """Only shows that rank 0 is alive."""
    INTERRUPT = "interrupt"
    """Drop all requests, and report the unfinished completions."""
    END = "end"
    """End the phase. There is no answer."""


@dataclass(frozen=True, slots=True)
class Order:
    """Message from the coordinator to the leader of a replica."""

    kind: OrderKind
    sampling: Sampling | None = None
    requests: list[GroupRequest] = field(default_factory=list)
    regrade: list[Ungraded] = field(default_factory=list)
    """Finished completions of a resumed run."""
    dropped: list[int] = field(default_factory=list)
    """Tickets whose grades are dropped, because completions of the same group were lost."""
    is_broken: bool = False
    """At the end of a phase: whether a replica was lost, so that the ranks meet again."""


@dataclass(frozen=True, slots=True)
class Report:
    """Message from the leader of a replica to the coordinator."""

    sampled: list[Sampled] = field(default_factory=list)
    """Finished completions, not graded yet."""
    graded: list[Graded] = field(default_factory=list)
    unfinished: list[Sampled] | None = None
    """Unfinished completions with at least one token, in the answer to an interrupt."""
    is_continued: bool = False
    """Whether the rest of this report follows in another one."""
    stop: str = ""
    """Name of the stop signal that a rank of the replica got, or empty."""
    grade_seconds: float = 0.0
    """Total seconds that the replica waited for graders while its engine was idle."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Last error of a grader, by data set."""
    is_alive_only: bool = False
    """Whether the report has no news, and only shows that the leader is alive."""

    def parts(self) -> Iterator[Report]:
        """Yield the report in parts of MAX_PART_BYTES, of at least one completion each. The driver
        joins them with `joined`."""
        items = [(True, item) for item in self.sampled]
        items += [(False, item) for item in self.unfinished or ()]
        *parts, last = _by_size(items, lambda item: item[1][1])
        for part in parts:
            yield self._with(part, Report(is_continued=True))
        yield self._with(last, self)

    def _with(self, items: list[tuple[bool, Sampled]], report: Report) -> Report:
        """Return `report` with these completions, given as (is finished, item)."""
        unfinished = [item for is_finished, item in items if not is_finished]
        return replace(
            report,
            sampled=[item for is_finished, item in items if is_finished],
            unfinished=None if self.unfinished is None else unfinished,
        )

    def joined(self, before: Report) -> Report:
        """Return this report with the completions of the part before it."""
        return replace(
            self,
            sampled=before.sampled + self.sampled,
            unfinished=None
            if self.unfinished is None
            else (before.unfinished or []) + self.unfinished,
        )


def _by_size(
    items: Iterable[T], completion_of: Callable[[T], Completion | None]
) -> Iterator[list[T]]:
    """Yield items in lists of about MAX_PART_BYTES, which have at least one if there are any."""
    part: list[T] = []
    num_bytes = 0
    for item in items:
        completion = completion_of(item)
        size = 0 if completion is None else _size_of(completion)
        if part and num_bytes + size > MAX_PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += size
    yield part


def _size_of(completion: Completion) -> int:
    """Return the approximate size of a completion in a message, in bytes."""
    arrays = (completion.tokens, completion.logprobs, completion.routes or b"")
    num_bytes = sum(memoryview(values).nbytes for values in arrays)
    return _COMPLETION_BYTES + 4 * len(completion.text) + num_bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """Message from a leader to the other ranks of its engine, before the same engine steps.

    sampling  sampling parameters of the phase; None before the first phase
    groups    new requests
    """

    sampling: Sampling | None
    groups: list[GroupRequest]
    num_steps: int
    interrupt: bool
    end: bool
    is_broken: bool
    asks_stop: bool
    """Gather the stop signals of all ranks of the engine."""

    def requests(self) -> list[SampleRequest]:
        """Return the new requests."""
        if self.sampling is None:
            assert not self.groups
            return []
        return [
            self.sampling.request(group.ticket, group.prompt, sample, so_far)
            for group in self.groups
            for sample, so_far in group.samples
        ]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Result of a collection, which rank 0 sends to all ranks."""

    sequences: list[TrainingSequence]
    """The sequences that the step trains on."""
    metrics: dict[str, float]
