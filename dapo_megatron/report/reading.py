"""Reads a run's folder for the report. The run may be finished or running, its files corrupt or of
another version. Files that cannot be read are skipped and listed in `RunData.warnings`. The state
of the run is inferred from its files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dapo_megatron.config.yaml12 import parse_yaml
from dapo_megatron.doctor import run as last_attempt
from dapo_megatron.files import parse_json, read_file
from dapo_megatron.report.derived import derived
from dapo_megatron.report.run_data import (
    Attempt,
    Evaluation,
    Plan,
    Provenance,
    RunData,
    RunState,
    StateWord,
    Summary,
    finite,
    frame_of,
    setting,
)
from dapo_megatron.report.wording import first_few
from dapo_megatron.types import ConfigError

MARKS = ("config.yaml", "metrics.jsonl", "attempts.jsonl", "summary.json")
"""Files that identify a run's folder; one is enough."""

T = TypeVar("T")

_EVALUATIONS = "eval/"
_LOW, _HIGH = "_low", "_high"
_MAX_STEP = 1_000_000


def read_run(path: Path) -> RunData:
    """Read a run's folder, which the run may be writing to.

    Raises ConfigError, with a suggestion, for a folder that is not a run's.
    """
    _check_is_run(path)
    warnings: list[str] = []
    config_text = _text(path / "config.yaml", warnings)
    config = _yaml(config_text, warnings)
    steps, columns, evaluations = read_metrics(
        _json_lines(path / "metrics.jsonl", dict[str, Any], warnings)
    )
    # A later line of an attempt replaces earlier ones.
    lines = _json_lines(path / "attempts.jsonl", Attempt, warnings)
    attempts = list({line.attempt: line for line in lines}.values())
    summary = _json(path / "summary.json", Summary, warnings)
    name = setting(config, "run.name")
    run = RunData(
        path=path,
        name=str(name) if name and isinstance(name, str | int) else path.resolve().name,
        config=config,
        metrics=frame_of(steps, columns),
        state=_state(path, summary, attempts, finite(setting(config, "train.rollout_steps"))),
        evaluations=evaluations,
        config_text=config_text,
        summary=summary or Summary(),
        attempts=attempts,
        plan=_json(path / "plan.json", Plan, warnings) or Plan(),
        provenance=_json(path / "provenance.json", Provenance, warnings) or Provenance(),
        warnings=warnings,
    )
    return derived(run)


def read_metrics(
    lines: Iterable[Mapping[str, Any]],
) -> tuple[list[int], dict[str, list[float | None]], list[Evaluation]]:
    """Return the steps from 1 on, their metrics as columns, and all evaluations, in step order. A
    repeated step (after a resume) replaces the earlier line and all lines of later steps."""
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
    return steps, columns, evaluations


def _evaluations(step: int, line: Mapping[str, Any]) -> Iterator[Evaluation]:
    for name, value in line.items():
        number = finite(value)
        if not name.startswith(_EVALUATIONS) or number is None or name.endswith((_LOW, _HIGH)):
            continue
        set_name, _, figure = name.removeprefix(_EVALUATIONS).rpartition("/")
        low, high = (finite(line.get(name + suffix)) for suffix in (_LOW, _HIGH))
        yield Evaluation(set_name, figure, step, number, low, high)


# ---------------------------------------------------------------------------- files


def _check_is_run(path: Path) -> None:
    if _is_run(path):
        return
    parent, runs = path if path.is_dir() else path.parent, list[str]()
    with suppress(OSError):
        runs = [str(folder) for folder in (parent, *sorted(parent.iterdir())) if _is_run(folder)]
    raise ConfigError(
        f"RUN_FOLDER: {path} is not a run's folder, which has {MARKS[0]} and {MARKS[1]}; name one, "
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
    if isinstance(value, dict):
        return value
    if text:
        warnings.append("config.yaml: has no keys")
    return {}


def _json(path: Path, schema: type[T], warnings: list[str]) -> T | None:
    if not path.exists():
        return None  # an older version, or not written yet
    try:
        return msgspec.convert(parse_json(_text(path, warnings)), schema)
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
            values += [msgspec.convert(parse_json(line), schema)] if line.strip() else []
        except ValueError:
            damaged += [number] if number < len(lines) else []
    if damaged:
        warnings.append(
            f"{path.name}: {len(damaged)} corrupt lines skipped (line {first_few(damaged)})"
        )
    return values


# ---------------------------------------------------------------------------- state


def _state(
    folder: Path, summary: Summary | None, attempts: Sequence[Attempt], planned_steps: float | None
) -> RunState:
    """Return the state of a run. A summary with fewer than `planned_steps` (train.rollout_steps) is
    ignored, because it belongs to an earlier, shorter run."""
    report, ago = None, ""
    # A folder copied without hidden files has no heartbeats; another version's format may differ.
    with suppress(ConfigError, OSError, TypeError):
        report = last_attempt.report(folder)
        newest = max((beat.time for beat in report.heartbeats if beat), default=report.time)
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
        text = "it was asked to stop and saved a checkpoint; start it again with resume=auto"
        return RunState(StateWord.STOPPED, text)
    if end == StateWord.CRASHED:
        return RunState(StateWord.CRASHED, f"its last start ended with an error; {where}")
    if report is not None:
        text = f"it was killed without recording an end; the last heartbeat was {ago} ago; {where}"
        return RunState(StateWord.CRASHED, text)
    return RunState(StateWord.UNKNOWN, "it has neither a summary nor heartbeats")
