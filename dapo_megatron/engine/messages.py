"""Messages between rank 0 and an engine server.

A server sends Hello and receives its config. When its engine is built, it is Ready. It then gets
requests for completions, and returns each completion once: graded, or not yet finished or graded
after an interrupt. Between two phases (the collection of a step, the evaluation of a set) a server
keeps nothing but weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from dapo_megatron.bridge.group import Meeting
from dapo_megatron.cluster.collectives import ErrorRecord
from dapo_megatron.types import Completion, Prompt, SampleRequest, TensorSlice

STEPS = 8
"""Engine steps after which every engine of a deterministic run answers."""
Returned = tuple[int, Completion, str]
"""(ticket, completion, what grading it gave): "graded", or why it has no grade; empty if it is
unfinished, or not graded yet."""
Offer = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""HF name -> shape and dtype of each tensor of the policy."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a phase, and what happens to its completions.

    name        separates the seeds of different uses of the engines (training, each evaluation set)
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


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for completions of one prompt.

    `samples` are (index, completion so far). The latter is None for a new completion. A finished
    one is only graded.
    """

    ticket: int
    prompt: Prompt
    samples: tuple[tuple[int, Completion | None], ...]


class OrderKind(StrEnum):
    WELCOME = "welcome"
    """Build the engine: `config`, `seed` and `report_seconds` are set."""
    END = "end"
    """End: the run is over."""
    LEAVE = "leave"
    """End, because the server is not of this run or was given up; `text` is the reason. Another
    start may connect again."""
    PING = "ping"
    """Only shows rank 0 whether the connection lasts."""
    SAMPLE = "sample"
    """Sample `requests`. In a deterministic run, run `num_steps` engine steps, wait for all grades,
    and report once. Otherwise (0) keep running, and report when there is news."""
    INTERRUPT = "interrupt"
    """Drop all requests, and return what they have so far."""
    CALL = "call"
    """Call the engine's method `text` with `arguments` (CALLS)."""


@dataclass(frozen=True, slots=True)
class Order:
    """Message from rank 0 to a server."""

    kind: OrderKind
    text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    report_seconds: float = 0.0
    """Minimum time between two reports while the engine is running."""
    sampling: Sampling | None = None
    requests: list[GroupRequest] = field(default_factory=list)
    num_steps: int = 0
    arguments: bytes = b""


CALLS: dict[str, tuple[Any, Any]] = {
    "trace": (tuple[Offer], list[list[TensorSlice]]),
    "connect": (tuple[Meeting], None),
    "load": (tuple[int, list[str]], None),
    "fingerprints": (tuple[()], list[list[tuple[int, int]]]),
    "score": (tuple[list[list[int]]], list[list[float]]),
    "sleep": (tuple[()], None),
    "wake": (tuple[str], None),
}
"""Methods of a server's engine that rank 0 calls: types of the arguments, and of the result."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a server.

    replica  that it serves; None: any that is free
    process  node and process id, for logs
    facts    what must be the same as on rank 0: versions and source code
    """

    replica: int | None
    process: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """Message from a server to rank 0."""

    hello: Hello | None = None
    ready: dict[str, str] | None = None
    """The engine has been built, and sleeps: digests of the model's files."""
    returned: list[Returned] = field(default_factory=list)
    num_sampled: int = 0
    """Number of requests whose sampling has ended, since the last interrupt."""
    is_interrupted: bool = False
    """Whether this is the last report of a phase."""
    is_news: bool = True
    """Whether this is more than a sign of life."""
    num_waiting: int = 0
    """Number of completions that wait for their environment. They have no slot of the engine."""
    turn_counts: Mapping[str, float] = field(default_factory=dict)
    """Calls of tools, failures of environments and seconds that completions waited, since the last
    report."""
    grade_seconds: float = 0.0
    """Total seconds that the engine was idle because graders were still running."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Last error of a grader or an environment, by data set."""
    answer: bytes | None = None
    """Result of a call."""
    error: ErrorRecord | None = None
    """Error of a call, or of building the engine."""


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return the first fact that differs, as text; empty if none does."""
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name)} there, and {here.get(name)} on rank 0"
    return ""
