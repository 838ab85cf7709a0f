"""A run's folder as the report reads it: finished, still written to, damaged, or of an older
version. What cannot be read is told of in `RunData.warnings` and left out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo_megatron.files import check_depth, parse_json
from dapo_megatron.report.state import RunState, state_of
from dapo_megatron.types import ConfigError

MARKS = ("config.yaml", "metrics.jsonl", "attempts.jsonl", "summary.json")
"""A folder with one of these is a run's."""

_EVALUATIONS = "eval/"
_LOW, _HIGH = "_low", "_high"
_MAX_STEP = 1_000_000
_MAX_NUMBER = 1e100
"""Larger figures are as good as missing: their sums and squares are infinite."""
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

    def last(self, name: str) -> float | None:
        """The newest value there is."""
        return next((value for value in reversed(self.column(name)) if value is not None), None)


@dataclass(frozen=True)
class Evaluation:
    """A figure of one evaluation set after one rollout step; step 0 is before training."""

    set: str
    figure: str
    """As the run calls it: avg@4, pass@4, cons@4, ungraded."""
    step: int
    value: float
    low: float | None = None
    """The 95% interval, where one was taken."""
    high: float | None = None


@dataclass(frozen=True)
class RunData:
    """What a run's folder holds, but for its rollouts."""

    path: Path
    name: str
    config: dict[str, Any]
    """Plain values, of whatever version wrote them: see `knob`."""
    config_text: str
    metrics: Metrics
    evaluations: list[Evaluation]
    state: RunState
    summary: dict[str, Any] | None
    """What the run wrote at its end; None before."""
    attempts: list[dict[str, Any]]
    """Its starts, oldest first: attempt, job, step, time and, if noted, end."""
    plan: dict[str, Any] | None
    provenance: dict[str, Any] | None
    warnings: list[str]
    """What could not be read, by file."""

    def knob(self, key: str, default: Any = None) -> Any:
        """A config value by dotted key; `default` where this run's config has none. Whoever
        computes with it asks one of the following: a config may be damaged, or of any version."""
        return knob(self.config, key, default)

    def number(self, key: str) -> float | None:
        """A config value that is a finite number, else None."""
        return finite(self.knob(key))

    def count(self, key: str) -> int | None:
        """A config value that is a whole number from 0 on, else None."""
        value = self.knob(key)
        return (
            value if isinstance(value, int) and finite(value) is not None and value >= 0 else None
        )

    def word(self, key: str) -> str | None:
        """A config value that is text, else None."""
        value = self.knob(key)
        return value if isinstance(value, str) else None

    def entries(self, key: str) -> list[dict[str, Any]]:
        """The objects in a config value that is a list, else none."""
        value = self.knob(key)
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def read_run(path: Path) -> RunData:
    """Read a run's folder; it may be written to meanwhile.

    Raises ConfigError, with the way out, for a folder that is not a run's.
    """
    _check_is_run(path)
    warnings: list[str] = []
    config_text = _text(path / "config.yaml", warnings)
    config = _yaml(config_text, warnings)
    lines = _json_lines(path / "metrics.jsonl", warnings)
    metrics, evaluations = read_metrics(lines)
    attempts = _attempts(_json_lines(path / "attempts.jsonl", warnings))
    summary = _json_object(path / "summary.json", warnings)
    name = knob(config, "run.name")
    planned = knob(config, "train.rollout_steps")
    return RunData(
        path=path,
        name=str(name) if name and isinstance(name, str | int) else path.resolve().name,
        config=config,
        config_text=config_text,
        metrics=metrics,
        evaluations=evaluations,
        state=state_of(path, summary, attempts, planned if isinstance(planned, int) else None),
        summary=summary,
        attempts=attempts,
        plan=_json_object(path / "plan.json", warnings),
        provenance=_json_object(path / "provenance.json", warnings),
        warnings=warnings,
    )


def knob(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key; list entries by number."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return default
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
            by_step = {one: values for one, values in by_step.items() if one < step}
        by_step[step] = line
        last = step
    steps = [step for step in by_step if step > 0]
    names = dict.fromkeys(name for step in steps for name in by_step[step] if name != "step")
    columns = {name: [finite(by_step[step].get(name)) for step in steps] for name in names}
    evaluations = [one for step, line in by_step.items() for one in _evaluations(step, line)]
    return Metrics(steps, columns), evaluations


def finite(value: Any) -> float | None:
    """A number as a float; None for what is none to compute with: null, NaN, text, 1e300."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _MAX_NUMBER else None  # false for NaN


def clock(seconds: Any, form: str = "%Y-%m-%d %H:%M:%S") -> str | None:
    """A recorded time.time() as this machine's clock shows it; None for what is none."""
    number = finite(seconds)
    if number is None:
        return None
    try:
        return time.strftime(form, time.localtime(number))
    except (OverflowError, ValueError, OSError):  # beyond the years that there are
        return None


def _evaluations(step: int, line: Mapping[str, Any]) -> Iterable[Evaluation]:
    for name, value in line.items():
        number = finite(value)
        if not name.startswith(_EVALUATIONS) or number is None or name.endswith((_LOW, _HIGH)):
            continue
        of_set, _, figure = name.removeprefix(_EVALUATIONS).rpartition("/")
        low, high = (finite(line.get(name + end)) for end in (_LOW, _HIGH))
        yield Evaluation(of_set, figure, step, number, low, high)


def _check_is_run(path: Path) -> None:
    if any((path / mark).exists() for mark in MARKS):
        return
    what = "is not a run's folder" if path.is_dir() else "is not a folder"
    if not path.exists():
        what = "does not exist"
    inside = path if path.is_dir() else path.parent
    found = [inside] if not path.is_dir() else []
    with suppress(OSError):
        found += sorted(one for one in inside.iterdir() if one.is_dir())
    runs = [str(one) for one in found if any((one / mark).exists() for mark in MARKS)]
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    way_out = f"such as {', '.join(runs[:5])}{more}" if runs else "runs/<name>"
    raise ConfigError(
        f"RUN_FOLDER: {path} {what} (it would have {MARKS[0]} and {MARKS[1]}); name one, {way_out}"
    )


def _attempts(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """As cluster.attempt writes them: of one that is noted twice the later note."""
    return list({str(line["attempt"]): line for line in lines if "attempt" in line}.values())


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


def _json_object(path: Path, warnings: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None  # of an older version, or not yet
    text = _text(path, warnings)
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        warnings.append(f"{path.name}: not a JSON object; left out")
        return None
    return value


def _json_lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file. A last line without an end is being written: no warning."""
    text = _text(path, warnings)
    found = []
    wrong = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif number < len(lines):
            wrong.append(number)
    if wrong:
        shown = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        warnings.append(f"{path.name}: {len(wrong)} damaged lines left out (line {shown})")
    return found
