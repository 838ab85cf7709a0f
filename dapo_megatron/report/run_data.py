"""Reads a run's folder for the report. The run may be finished or running, its files corrupt or of
an older version. Files that cannot be read are skipped and listed in `RunData.warnings`. The state
of the run is inferred from its files."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dapo_megatron.config.yaml12 import parse_yaml
from dapo_megatron.doctor import run as last_attempt
from dapo_megatron.files import read_file
from dapo_megatron.report.models import (
    MAX_NUMBER,
    Attempt,
    PlanFile,
    Provenance,
    Summary,
    T,
    decode,
)
from dapo_megatron.report.wording import first_few
from dapo_megatron.types import ConfigError

MARKS = ("config.yaml", "metrics.jsonl", "attempts.jsonl", "summary.json")
"""Files that identify a run's folder; one is enough."""

_EVALUATIONS = "eval/"
_LOW, _HIGH = "_low", "_high"
_MAX_STEP = 1_000_000


@dataclass(frozen=True)
class Metrics:
    """Metrics by rollout step. Missing and non-finite values are NaN."""

    frame: pd.DataFrame
    """A column per metric. The index is the rollout step, ascending from 1."""

    @property
    def steps(self) -> list[int]:
        """Rollout steps."""
        return list(map(int, self.frame.index))

    def series(self, name: str) -> pd.Series:
        """Return a metric by step, all NaN if no step has it."""
        if name in self.frame:
            return self.frame[name]
        return pd.Series(math.nan, self.frame.index)

    def column(self, name: str) -> list[float | None]:
        """Return a metric by step, with None for NaN."""
        return [None if value != value else value for value in self.series(name).tolist()]

    def values(self, name: str) -> list[float]:
        """Return the recorded values of a metric, in step order."""
        return list(self.series(name).dropna())

    def last(self, name: str) -> float | None:
        """Return the newest recorded value, None without one."""
        return next(reversed(self.values(name)), None)

    def total(self, name: str) -> float:
        """Return the sum of a metric over the steps that have it."""
        return float(self.series(name).sum())

    @property
    def last_step(self) -> int:
        """Newest step, 0 if there is none."""
        return next(reversed(self.steps), 0)


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

    @property
    def has_ended(self) -> bool:
        """True if this start will write nothing more."""
        return self.word is not StateWord.RUNNING


@dataclass(frozen=True)
class RunData:
    """Contents of a run's folder, except its rollouts."""

    path: Path
    name: str
    config: dict[str, Any]
    """Unvalidated values, possibly from another version: read them with `setting` and similar."""
    config_text: str
    metrics: Metrics
    evaluations: list[Evaluation]
    state: RunState
    summary: Summary | None
    """Contents of summary.json, which a run writes when it finishes; None without it."""
    attempts: list[Attempt]
    """Starts of the run, oldest first."""
    plan: PlanFile | None
    provenance: Provenance | None
    warnings: list[str]
    """Files and lines that could not be read."""

    def setting(self, key: str) -> Any:
        """Return a config value by dotted key, None without one. Its type is not validated; use
        `number`, `count` or `word` to compute with it."""
        return _setting(self.config, key)

    def number(self, key: str) -> float | None:
        """Return a config value that is a finite number, else None."""
        return finite(self.setting(key))

    def count(self, key: str) -> int | None:
        """Return a config value that is a non-negative integer, else None."""
        value = self.setting(key)
        is_count = isinstance(value, int) and finite(value) is not None and value >= 0
        return value if is_count else None

    def word(self, key: str) -> str | None:
        """Return a config value that is a string, else None."""
        value = self.setting(key)
        return value if isinstance(value, str) else None

    @property
    def is_on_policy(self) -> bool:
        """True if each step trains only on samples of its current weights."""
        return self.setting("rollout.on_policy") is True

    def sources(self) -> list[dict[str, Any]]:
        """Return the valid entries of data.train."""
        value = self.setting("data.train")
        return (
            [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
        )


def read_run(path: Path) -> RunData:
    """Read a run's folder, which the run may be writing to.

    Raises ConfigError, with a suggestion, for a folder that is not a run's.
    """
    _check_is_run(path)
    warnings: list[str] = []
    config_text = _text(path / "config.yaml", warnings)
    config = _yaml(config_text, warnings)
    metrics, evaluations = read_metrics(
        _json_lines(path / "metrics.jsonl", dict[str, Any], warnings)
    )
    # A later line of an attempt replaces earlier ones.
    lines = _json_lines(path / "attempts.jsonl", Attempt, warnings)
    attempts = list({line.attempt: line for line in lines}.values())
    summary = _json(path / "summary.json", Summary, warnings)
    name = _setting(config, "run.name")
    planned_steps = _setting(config, "train.rollout_steps")
    return RunData(
        path=path,
        name=str(name) if name and isinstance(name, str | int) else path.resolve().name,
        config=config,
        config_text=config_text,
        metrics=metrics,
        evaluations=evaluations,
        state=_state(path, summary, attempts, finite(planned_steps)),
        summary=summary,
        attempts=attempts,
        plan=_json(path / "plan.json", PlanFile, warnings),
        provenance=_json(path / "provenance.json", Provenance, warnings),
        warnings=warnings,
    )


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_metrics(lines: Iterable[Mapping[str, Any]]) -> tuple[Metrics, list[Evaluation]]:
    """Return the metrics of steps from 1 on, and all evaluations, in step order. A repeated step
    (after a resume) replaces the earlier line and all lines of later steps."""
    by_step: dict[int, Mapping[str, Any]] = {}
    last = -1
    for line in lines:
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _MAX_STEP:
            continue
        if step <= last:
            by_step = {old: values for old, values in by_step.items() if old < step}
        by_step[step] = line
        last = step
    steps = [step for step in by_step if step > 0]
    names = dict.fromkeys(name for step in steps for name in by_step[step] if name != "step")
    columns = {name: [finite(by_step[step].get(name)) for step in steps] for name in names}
    evaluations = [point for step, line in by_step.items() for point in _evaluations(step, line)]
    return Metrics(frame_of(steps, columns)), evaluations


def frame_of(steps: Sequence[int], columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return columns as a table by step. Values above MAX_NUMBER become NaN, because their squares
    would overflow."""
    values = np.full((len(steps), len(columns)), math.nan)
    for index, column in enumerate(columns.values()):
        values[:, index] = column
    values[~(np.abs(values) <= MAX_NUMBER)] = math.nan
    return pd.DataFrame(values, pd.Index(steps, dtype="int64"), list(columns))


def finite(value: Any) -> float | None:
    """Return a number as a float; None for null, NaN, text, bool and values above MAX_NUMBER."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None  # false for NaN


def clock(seconds: float | None, time_format: str = "%Y-%m-%d %H:%M:%S") -> str | None:
    """Format a recorded time.time() in local time. None without one, or if it is out of range."""
    if seconds is not None:
        with suppress(OverflowError, ValueError, OSError):  # year out of range
            return time.strftime(time_format, time.localtime(seconds))
    return None


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it was deleted meanwhile."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _evaluations(step: int, line: Mapping[str, Any]) -> Iterable[Evaluation]:
    for name, value in line.items():
        number = finite(value)
        if not name.startswith(_EVALUATIONS) or number is None or name.endswith((_LOW, _HIGH)):
            continue
        set_name, _, figure = name.removeprefix(_EVALUATIONS).rpartition("/")
        low, high = (finite(line.get(name + suffix)) for suffix in (_LOW, _HIGH))
        yield Evaluation(set_name, figure, step, number, low, high)


def _check_is_run(path: Path) -> None:
    if _is_run(path):
        return
    problem = "is not a run's folder" if path.is_dir() else "is not a folder"
    parent = path if path.is_dir() else path.parent
    folders = []
    with suppress(OSError):
        folders = [parent, *sorted(folder for folder in parent.iterdir() if folder.is_dir())]
    runs = [str(folder) for folder in folders if _is_run(folder)]
    raise ConfigError(
        f"RUN_FOLDER: {path} {problem if path.exists() else 'does not exist'} (a run's folder has "
        f"{MARKS[0]} and {MARKS[1]}); name a run's folder, "
        + (f"such as {first_few(runs)}" if runs else "runs/<name>")
    )


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)


def _text(path: Path, warnings: list[str]) -> str:
    try:
        return read_file(path).decode(errors="replace")
    except FileNotFoundError:
        warnings.append(f"{path.name}: missing")
    except OSError as error:
        warnings.append(f"{path.name}: {error.strerror}")
    return ""


def _yaml(text: str, warnings: list[str]) -> dict[str, Any]:
    try:
        value = parse_yaml(text, "config.yaml")
    except ConfigError as error:
        warnings.append(str(error).splitlines()[0])
        return {}
    if not isinstance(value, dict):
        if text:
            warnings.append("config.yaml: has no keys")
        return {}
    return value


def _json(path: Path, schema: type[T], warnings: list[str]) -> T | None:
    if not path.exists():
        return None  # an older version, or not written yet
    try:
        return decode(_text(path, warnings), schema)
    except ValueError as error:
        warnings.append(f"{path.name}: skipped ({error})")
        return None


def _json_lines(path: Path, schema: type[T], warnings: list[str]) -> list[T]:
    """Return the records of a JSONL file. Corrupt lines are skipped with a warning, except a last
    line without a newline, which is still being written."""
    lines = _text(path, warnings).split("\n")
    values, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            values += [decode(line, schema)] if line.strip() else []
        except ValueError:
            damaged += [number] if number < len(lines) else []
    if damaged:
        warnings.append(
            f"{path.name}: {len(damaged)} corrupt lines skipped (line {first_few(damaged)})"
        )
    return values


def _state(
    folder: Path, summary: Summary | None, attempts: Sequence[Attempt], planned_steps: float | None
) -> RunState:
    """Return the state of a run. A summary with fewer than `planned_steps` (train.rollout_steps) is
    ignored, because it belongs to an earlier, shorter run."""
    report, ago = None, ""
    # A folder copied without hidden files has no heartbeats; another version's format may differ.
    with suppress(ConfigError, OSError, TypeError):
        report = last_attempt.report(folder)
        newest = max(
            (heartbeat.time for heartbeat in report.heartbeats if heartbeat), default=report.time
        )
        ago = last_attempt.ago_text(time.time() - newest)
    # A recorded end takes precedence over heartbeats: a run writes its report while its ranks live.
    done = summary.steps if summary is not None else None
    if summary is not None and (done is None or planned_steps is None or done >= planned_steps):
        steps = f" after step {done}" if done is not None else ""
        return RunState(StateWord.FINISHED, f"it wrote its summary{steps}")
    end = attempts[-1].end if attempts else None
    if report is not None and report.is_alive and not end:
        return RunState(StateWord.RUNNING, f"the last heartbeat of a rank was {ago} ago")
    where = f"`doctor run {folder}` shows where its ranks were"
    hang = report.hang if report is not None else ""
    if hang or end == StateWord.HUNG:
        text = ": ".join(["the watchdog ended it", *hang.splitlines()[:1]])
        return RunState(StateWord.HUNG, f"{text}; {where}")
    if end == StateWord.STOPPED:
        return RunState(
            StateWord.STOPPED,
            "it was asked to stop and saved a checkpoint; start it again with resume=auto",
        )
    if end == StateWord.CRASHED:
        return RunState(StateWord.CRASHED, f"its last start ended with an error; {where}")
    if report is not None:
        return RunState(
            StateWord.CRASHED,
            f"it was killed without recording an end; the last heartbeat was {ago} ago; {where}",
        )
    return RunState(StateWord.UNKNOWN, "it has neither a summary nor heartbeats")
