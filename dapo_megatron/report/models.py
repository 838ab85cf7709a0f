"""Schemas of the files of a run that the report reads. Other keys are ignored.

A record that does not match its schema is corrupt or from an unknown version, and is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from dapo_megatron.files import parse_json

T = TypeVar("T")

MAX_NUMBER = 1e100
"""Larger values are treated as missing, because their sums and squares overflow."""

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
    """summary.json: the fields that the report shows."""

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


class PlanFile(TypedDict, total=False):
    """plan.json: planned memory of each phase in GiB."""

    phases: dict[str, Number]
    note: str | None


def decode(text: str | bytes, schema: type[T]) -> T:
    """Parse JSON and validate it against a schema. Raises ValueError if it does not match."""
    return msgspec.convert(parse_json(text), schema)
