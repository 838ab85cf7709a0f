"""Messages between the coordinator on rank 0 and the leaders of replicas.

Orders go from the coordinator to a leader, reports from a leader to the coordinator. They describe
completions by `CompletionSummary`: tokens, log-probs and texts stay with the leader. A *phase* is
the collection of one step, or the evaluation of one set of problems.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dapo_megatron.types import (
    Completion,
    CompletionSummary,
    Finish,
    Grade,
    Int32s,
    Outcome,
    Prompt,
    SampleRequest,
    TrainingSequence,
)

STEPS = 8
"""Engine steps per turn in a deterministic run, where all replicas take turns in lock step."""

Sampled = tuple[int, CompletionSummary]
"""(ticket, completion)."""
Graded = tuple[int, int, Grade | None, str]
"""(ticket, sample, grade or None, "graded" or why there is no grade)."""
Closed = tuple[int, Outcome, str | None]
"""(ticket, outcome, verdict of its grades)."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for completions of one prompt.

    `samples` are (index, number of tokens so far). A completion with tokens so far continues the
    one that the replica holds.
    """

    ticket: int
    prompt: Prompt
    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a phase, and what happens to its completions.

    name        separates the grades and the seeds of different uses of the engines (training, each
                evaluation set)
    max_tokens  limit of a whole response
    is_seeded   every request has its own random numbers, which depend only on `name`, ticket,
                sample and the number of tokens so far
    is_kept     a replica keeps completions until their ticket is closed
    """

    name: str
    max_tokens: int
    temperature: float
    top_p: float
    is_seeded: bool
    is_kept: bool

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
    regrade: list[tuple[int, int]] = field(default_factory=list)
    """(ticket, sample) of finished completions of a resumed run."""
    dropped: list[int] = field(default_factory=list)
    """Tickets whose completions so far are dropped, because others of the same group were lost."""
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
    stop: str = ""
    """Name of the stop signal that a rank of the replica got, or empty."""
    grade_seconds: float = 0.0
    """Total seconds that the replica waited for graders while its engine was idle."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Last error of a grader, by data set."""
    is_alive_only: bool = False
    """Whether the report has no news, and only shows that the leader is alive."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Message from a leader to the other ranks of its engine, before the same engine steps.

    sampling  sampling parameters of the phase; None before the first phase
    groups    new requests
    tokens    tokens so far of the requested completions that have some, in the order of `groups`
    """

    sampling: Sampling | None
    groups: list[GroupRequest]
    tokens: list[Int32s]
    num_steps: int
    interrupt: bool
    end: bool
    is_broken: bool
    asks_stop: bool
    """Gather the stop signals of all ranks of the engine."""

    def requests(self) -> list[SampleRequest]:
        """Return the new requests. Completions so far have only their tokens: what engines of
        other ranks than the leader return is dropped."""
        tokens = iter(self.tokens)
        requests = []
        for group in self.groups:
            assert self.sampling is not None
            for sample, num_tokens in group.samples:
                so_far = None
                if num_tokens:
                    so_far = Completion(
                        sample, next(tokens), array("f"), "", Finish.UNFINISHED, segments=()
                    )
                requests.append(self.sampling.request(group.ticket, group.prompt, sample, so_far))
        return requests


@dataclass(frozen=True, slots=True)
class Move:
    """An unfinished completion that goes to the replica `target`, which will continue it. The
    summary names the replica that holds it before."""

    ticket: int
    prompt: Prompt
    summary: CompletionSummary
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Result of a collection, which rank 0 sends to all ranks."""

    sequences: list[TrainingSequence]
    """The sequences that the step trains on."""
    closed: list[Closed]
    """Tickets that ended in the step."""
    moves: list[Move]
    metrics: dict[str, float]
