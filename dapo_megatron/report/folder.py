"""A run's folder as the report reads it: finished, still written to, damaged, or of an older
version. What cannot be read is reported in `RunData.warnings` and left out. Whether the run is at
its end, and how it got there, follows from what it left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from dapo_megatron.doctor import run as last_attempt
from dapo_megatron.files import check_depth
from dapo_megatron.report.models import MAX_NUMBER, Attempt, Plan, Provenance, Summary, T, decode
from dapo_megatron.report.wording import first_few
from dapo_megatron.types import ConfigError

MARKS = ("config.yaml", "metrics.jsonl", "attempts.jsonl", "summary.json")
"""A folder with one of these is a run's."""

_EVALUATIONS = "eval/"
_LOW, _HIGH = "_low", "_high"
_MAX_STEP = 1_000_000
_OF_YAML = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Metrics:
    """Columns, each as long as `steps`; a missing or non-finite value is None."""

    steps: list[int]
    """Rollout steps from 1, ascending."""
    columns: dict[str, list[float | None]]

    def column(self, name: str) -> list[float | None]:
        """A metric by step; all None if no step has it."""
        return self.columns.get(name) or [None] * len(self.steps)

    def values(self, name: str) -> list[float]:
        """The values of a metric that there are, in step order."""
        return [value for value in self.column(name) if value is not None]

    def last(self, name: str) -> float | None:
        """The newest value there is."""
        return next(reversed(self.values(name)), None)

    def total(self, name: str) -> float:
        """The sum of a metric over the steps that have it."""
        return sum(self.values(name))

    @property
    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return self.steps[-1] if self.steps else 0


@dataclass(frozen=True)
class Evaluation:
    """A figure of one evaluation set after one rollout step; step 0 is before training."""

    set: str
    figure: str
    """Name in the run: avg@4, pass@4, cons@4, ungraded."""
    step: int
    value: float
    low: float | None = None
    """The 95% interval, where one was taken."""
    high: float | None = None


class StateWord(StrEnum):
    FINISHED = "finished"
    RUNNING = "running"
    STOPPED = "stopped"
    """Saved after a signal; the next start goes on."""
    CRASHED = "crashed"
    HUNG = "hung"
    """The watchdog ended it."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunState:
    """State of a run, and the evidence for it in a sentence."""

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
    """Plain values, of whatever version wrote them: see `knob`."""
    config_text: str
    metrics: Metrics
    evaluations: list[Evaluation]
    state: RunState
    summary: Summary | None
    """Written by the run at its end; None before."""
    attempts: list[Attempt]
    """Its starts, oldest first."""
    plan: Plan | None
    provenance: Provenance | None
    warnings: list[str]
    """Files and lines that could not be read."""

    def knob(self, key: str) -> Any:
        """A config value by dotted key; None where this run's config has none. To compute with it
        use one of the following methods: a config may be damaged, or of any version."""
        return _knob(self.config, key)

    def number(self, key: str) -> float | None:
        """A config value that is a finite number, else None."""
        return finite(self.knob(key))

    def count(self, key: str) -> int | None:
        """A config value that is a whole number from 0 on, else None."""
        value = self.knob(key)
        is_count = isinstance(value, int) and finite(value) is not None and value >= 0
        return value if is_count else None

    def word(self, key: str) -> str | None:
        """A config value that is text, else None."""
        value = self.knob(key)
        return value if isinstance(value, str) else None

    @property
    def is_on_policy(self) -> bool:
        """True if each step trains on what its own weights sampled."""
        return self.knob("rollout.on_policy") is True

    def sources(self) -> list[dict[str, Any]]:
        """Return the data sets in data.train, as far as they are objects."""
        value = self.knob("data.train")
        return (
            [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
        )


def read_run(path: Path) -> RunData:
    """Read a run's folder; it may be written to meanwhile.

    Raises ConfigError, with the way out, for a folder that is not a run's.
    """
    _check_is_run(path)
    warnings: list[str] = []
    config_text = _text(path / "config.yaml", warnings)
    config = _yaml(config_text, warnings)
    metrics, evaluations = read_metrics(
        _json_lines(path / "metrics.jsonl", dict[str, Any], warnings)
    )
    # A later note of an attempt replaces earlier ones.
    lines = _json_lines(path / "attempts.jsonl", Attempt, warnings)
    attempts = list({line.attempt: line for line in lines}.values())
    summary = _json(path / "summary.json", Summary, warnings)
    name = _knob(config, "run.name")
    planned = _knob(config, "train.rollout_steps")
    return RunData(
        path=path,
        name=str(name) if name and isinstance(name, str | int) else path.resolve().name,
        config=config,
        config_text=config_text,
        metrics=metrics,
        evaluations=evaluations,
        state=_state(path, summary, attempts, finite(planned)),
        summary=summary,
        attempts=attempts,
        plan=_json(path / "plan.json", Plan, warnings),
        provenance=_json(path / "provenance.json", Provenance, warnings),
        warnings=warnings,
    )


def _knob(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_metrics(lines: Iterable[Mapping[str, Any]]) -> tuple[Metrics, list[Evaluation]]:
    """The columns of the steps from 1 on, and the evaluations, in step order. A step that comes
    again, as after a resume, replaces what was there and all after it."""
    by_step: dict[int, Mapping[str, Any]] = {}
    last = -1
    for line in lines:
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _MAX_STEP:
            continue
        if step <= last:
            by_step = {at: values for at, values in by_step.items() if at < step}
        by_step[step] = line
        last = step
    steps = [step for step in by_step if step > 0]
    names = dict.fromkeys(name for step in steps for name in by_step[step] if name != "step")
    columns = {name: [finite(by_step[step].get(name)) for step in steps] for name in names}
    evaluations = [point for step, line in by_step.items() for point in _evaluations(step, line)]
    return Metrics(steps, columns), evaluations


def finite(value: Any) -> float | None:
    """A number as a float; None for what is none to compute with: null, NaN, text, 1e300."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None  # false for NaN


def clock(seconds: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str | None:
    """Return a recorded time.time() as this machine's clock shows it, None without one."""
    if seconds is not None:
        with suppress(OverflowError, ValueError, OSError):  # beyond the years that there are
            return time.strftime(form, time.localtime(seconds))
    return None


def size_of(path: Path) -> int:
    """Bytes of a file; 0 for one that is gone meanwhile."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _evaluations(step: int, line: Mapping[str, Any]) -> Iterable[Evaluation]:
    for name, value in line.items():
        number = finite(value)
        if not name.startswith(_EVALUATIONS) or number is None or name.endswith((_LOW, _HIGH)):
            continue
        of_set, _, figure = name.removeprefix(_EVALUATIONS).rpartition("/")
        low, high = (finite(line.get(name + end)) for end in (_LOW, _HIGH))
        yield Evaluation(of_set, figure, step, number, low, high)


def _check_is_run(path: Path) -> None:
    if _is_run(path):
        return
    what = "is not a run's folder" if path.is_dir() else "is not a folder"
    inside = path if path.is_dir() else path.parent
    folders = []
    with suppress(OSError):
        folders = [inside, *sorted(folder for folder in inside.iterdir() if folder.is_dir())]
    runs = [str(folder) for folder in folders if _is_run(folder)]
    raise ConfigError(
        f"RUN_FOLDER: {path} {what if path.exists() else 'does not exist'} (it would have "
        f"{MARKS[0]} and {MARKS[1]}); name one, "
        + (f"such as {first_few(runs)}" if runs else "runs/<name>")
    )


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)


def _text(path: Path, warnings: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        warnings.append(f"{path.name}: missing")
    except OSError as error:
        warnings.append(f"{path.name}: {error.strerror}")
    return ""


def _yaml(text: str, warnings: list[str]) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
        check_depth(value)
    # Besides its own errors yaml lets through those of what it makes values with: int, date, dict.
    except (yaml.YAMLError, *_OF_YAML) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.append(f"config.yaml: not YAML ({said})")
        return {}
    if not isinstance(value, dict):
        if text:
            warnings.append("config.yaml: holds no keys")
        return {}
    return value


def _json(path: Path, form: type[T], warnings: list[str]) -> T | None:
    if not path.exists():
        return None  # of an older version, or not yet
    try:
        return decode(_text(path, warnings), form)
    except ValueError as error:
        warnings.append(f"{path.name}: left out ({error})")
        return None


def _json_lines(path: Path, form: type[T], warnings: list[str]) -> list[T]:
    """Return the records of a JSONL file. A last line without an end is being written: no
    warning."""
    lines = _text(path, warnings).split("\n")
    values, damaged = [], []
    for at, line in enumerate(lines, start=1):
        try:
            values += [decode(line, form)] if line.strip() else []
        except ValueError:
            damaged += [at] if at < len(lines) else []
    if damaged:
        warnings.append(
            f"{path.name}: {len(damaged)} damaged lines left out (line {first_few(damaged)})"
        )
    return values


def _state(
    folder: Path, summary: Summary | None, attempts: Sequence[Attempt], planned_steps: float | None
) -> RunState:
    """`planned_steps`: train.rollout_steps; a summary of fewer is of an earlier, shorter run."""
    report, ago = None, ""
    # A folder copied without its hidden files has no pulses; those of another version may differ.
    with suppress(ConfigError, OSError, TypeError):
        report = last_attempt.report(folder)
        newest = max((one.time for one in report.pulses if one is not None), default=report.time)
        ago = last_attempt.ago_text(time.time() - newest)
    # What a run says of its end comes first: it writes its report while its ranks still live.
    done = summary.steps if summary is not None else None
    if summary is not None and (done is None or planned_steps is None or done >= planned_steps):
        steps = f" after step {done}" if done is not None else ""
        return RunState(StateWord.FINISHED, f"it wrote its summary{steps}")
    end = attempts[-1].end if attempts else None
    if report is not None and report.is_alive and not end:
        return RunState(StateWord.RUNNING, f"a rank gave a sign of life {ago} ago")
    where = f"`doctor run {folder}` tells where its ranks were"
    hang = report.hang if report is not None else ""
    if hang or end == StateWord.HUNG:
        text = ": ".join(["the watchdog ended it", *hang.splitlines()[:1]])
        return RunState(StateWord.HUNG, f"{text}; {where}")
    if end == StateWord.STOPPED:
        return RunState(
            StateWord.STOPPED, "it was asked to stop and saved; start it again with resume=auto"
        )
    if end == StateWord.CRASHED:
        return RunState(StateWord.CRASHED, f"its last start ended by an error; {where}")
    if report is not None:
        return RunState(
            StateWord.CRASHED,
            f"it was cut short without a word; the last sign of life was {ago} ago; {where}",
        )
    return RunState(StateWord.UNKNOWN, "it has neither a summary nor signs of life")
