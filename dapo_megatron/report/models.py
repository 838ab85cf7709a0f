"""Forms of the files that a run leaves and its report reads. Keys that are not here are ignored.

A record of another form is damaged, or of a version that is not known: it is left out as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from dapo_megatron.files import parse_json

T = TypeVar("T")

MAX_NUMBER = 1e100
"""Larger figures are as good as missing: their sums and squares are infinite."""

Whole = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]


class Attempt(msgspec.Struct, frozen=True):
    """A line of attempts.jsonl: one start of the run."""

    attempt: str
    job: str | None = None
    step: Whole | None = None
    time: Number | None = None
    end: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """summary.json, as far as the report shows it."""

    steps: Natural | None = None
    seconds: Number | None = None
    peak_memory_gib: Number | None = None
    num_processes: Natural | None = None
    commit: str | None = None
    versions: Mapping[str, str] = {}


class Provenance(msgspec.Struct, frozen=True):
    """provenance.json."""

    facts: Mapping[str, str] = {}
    tags: Mapping[str, str] = {}
    devices: str | None = None
    num_processes: Natural | None = None


class Plan(TypedDict, total=False):
    """plan.json: planned GiB of each phase."""

    phases: dict[str, Number]
    note: str | None


class Completion(TypedDict):
    """A completion in a line of samples/."""

    sample: Whole
    text: str
    finish: str
    score: Number | None
    correct: bool | None
    parsed: bool | None
    pred: str | None
    segments: list[tuple[Natural, Natural]]
    tokens: list[Natural]
    logprobs: list[float]
    reward: NotRequired[Number | None]


class Group(TypedDict):
    """A line of samples/."""

    ticket: Whole
    source: str
    fate: str
    verdict: str | None
    prompt: str
    truth: str
    extra: NotRequired[dict[str, Any]]
    completions: list[Completion]


class PolicyValues(TypedDict):
    """A line of samples/policy/."""

    ticket: Whole
    sample: Whole
    advantage: Number | None
    gap_mean: Number | None
    gap_max: Number | None
    logprobs: list[float | None] | None
    entropy: list[float | None] | None


INDEX_GROUPS: dict[str, Any] = {
    "offset": list[Natural],
    "ticket": list[Whole],
    "source": list[str],
    "fate": list[str],
    "verdict": list[str | None],
}
INDEX_COMPLETIONS: dict[str, Any] = {
    "group": list[Natural],
    "sample": list[Whole],
    "score": list[Number | None],
    "correct": list[bool | None],
    "parsed": list[bool | None],
    "num_tokens": list[Natural],
    "finish": list[str],
    "age": list[Whole | None],
    "logprob_mean": list[Number | None],
    "logprob_min": list[Number | None],
}
"""Columns of samples/index/."""


def decode(text: str | bytes, form: type[T]) -> T:
    """Parse JSON of a form. Raises ValueError for any other."""
    return msgspec.convert(parse_json(text), form)
