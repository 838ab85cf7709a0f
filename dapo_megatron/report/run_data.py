"""Contents of a run's folder, as the report uses them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pandas as pd
from msgspec import Meta

MAX_NUMBER = 1e100
"""Larger values are treated as missing, because their sums and squares overflow."""

Integer = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]


class Attempt(msgspec.Struct, frozen=True):
    """A line of attempts.jsonl: one start of the run."""

    attempt: str
    time: Number | None = None
    end: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """summary.json: the fields that the report shows."""

    steps: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    seconds: Number | None = None
    peak_memory_gib: Number | None = None
    commit: str | None = None


class Provenance(msgspec.Struct, frozen=True):
    """provenance.json."""

    facts: Mapping[str, str] = {}
    tags: Mapping[str, str] = {}
    devices: str | None = None
    num_processes: Integer | None = None


class Plan(msgspec.Struct, frozen=True):
    """plan.json: planned memory of each phase in GiB."""

    phases: Mapping[str, Number] = {}


@dataclass(frozen=True)
class Evaluation:
    """A metric of an evaluation set after a rollout step. Step 0 is before training."""

    set: str
    metric: str
    """Name of the metric: avg@4, pass@4, cons@4, ungraded."""
    step: int
    value: float
    low: float | None = None
    """Lower end of the 95% interval, None without an interval."""
    high: float | None = None


class StateWord(StrEnum):
    FINISHED = "finished"
    RUNNING = "running"
    STOPPED = "stopped"
    """The run saved a checkpoint after a signal; the next start continues it."""
    CRASHED = "crashed"
    HUNG = "hung"
    """The watchdog ended the run."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunState:
    """State of a run, and a sentence with the evidence for it."""

    word: StateWord
    text: str


@dataclass(frozen=True)
class RunData:
    """Contents of a run's folder, except its rollouts and timelines."""

    path: Path
    name: str
    config: dict[str, Any]
    """Unvalidated values, possibly from another version: read them with `setting` and similar."""
    metrics: pd.DataFrame
    """A column per metric, NaN where it is missing. The index is the rollout step, ascending."""
    state: RunState
    evaluations: Sequence[Evaluation] = ()
    config_text: str = ""
    summary: Summary = field(default_factory=Summary)
    attempts: Sequence[Attempt] = ()
    """Starts of the run, oldest first."""
    plan: Plan = field(default_factory=Plan)
    provenance: Provenance = field(default_factory=Provenance)
    warnings: list[str] = field(default_factory=list)
    """Files and lines that could not be read."""

    @property
    def steps(self) -> list[int]:
        """Rollout steps with metrics, ascending."""
        return list(map(int, self.metrics.index))

    @property
    def last_step(self) -> int:
        """Newest step, 0 if there is none."""
        return max(self.steps, default=0)

    def series(self, name: str) -> pd.Series:
        """Return a metric by step, all NaN if no step has it."""
        if name in self.metrics:
            return self.metrics[name]
        return pd.Series(math.nan, self.metrics.index)

    def values(self, name: str) -> list[float]:
        """Return the recorded values of a metric, in step order."""
        return list(self.series(name).dropna())

    def total(self, name: str) -> float:
        """Return the sum of a metric over the steps that have it."""
        return float(self.series(name).sum())

    def setting(self, key: str) -> Any:
        """Return a config value by dotted key, None without one. Its type is not validated; use
        `number`, `count` or `word` to compute with it."""
        return setting(self.config, key)

    def number(self, key: str) -> float | None:
        """Return a config value that is a finite number, else None."""
        return finite(self.setting(key))

    def count(self, key: str) -> int | None:
        """Return a config value that is a non-negative integer, else None."""
        value = self.setting(key)
        is_count = isinstance(value, int) and finite(value) is not None and value >= 0
        return value if is_count else None

    def word(self, key: str) -> str:
        """Return a config value that is a string, else ""."""
        value = self.setting(key)
        return value if isinstance(value, str) else ""

    @property
    def is_on_policy(self) -> bool:
        """True if each step trains only on samples of its current weights."""
        return self.setting("rollout.on_policy") is True


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a value of nested mappings by dotted key, None without one."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def frame_of(steps: Iterable[int], columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return columns as a table by step. Infinite values and values above MAX_NUMBER become NaN."""
    index = pd.Index(list(steps), dtype="int64")
    values = np.full((len(index), len(columns)), math.nan)
    for number, column in enumerate(columns.values()):
        values[:, number] = column
    values[~(np.abs(values) <= MAX_NUMBER)] = math.nan
    return pd.DataFrame(values, index, list(columns))


def finite(value: Any) -> float | None:
    """Return a number as a float; None for null, NaN, text, bool and values above MAX_NUMBER."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None  # false for NaN
