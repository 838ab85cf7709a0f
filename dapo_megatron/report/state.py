"""Whether a run is at its end, and how it got there, from what it left in its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dapo_megatron.doctor import run
from dapo_megatron.doctor.run import ago_text
from dapo_megatron.types import ConfigError


class StateWord(StrEnum):
    FINISHED = "finished"
    RUNNING = "running"
    STOPPED = "stopped"
    """By a signal, saved; the next start goes on."""
    CRASHED = "crashed"
    HUNG = "hung"
    """The watchdog ended it."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunState:
    """How a run stands, and the evidence for it in a sentence."""

    word: StateWord
    text: str

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be written by this start."""
        return self.word is not StateWord.RUNNING


def state_of(
    folder: Path,
    summary: Mapping[str, Any] | None,
    attempts: Sequence[Mapping[str, Any]],
    planned_steps: int | None,
) -> RunState:
    """`planned_steps`: train.rollout_steps; a summary of fewer is of an earlier, shorter run."""
    report = None
    # A folder copied without its hidden files has no pulses; those of another version may differ.
    with suppress(ConfigError, OSError, TypeError):
        report = run.report(folder)
    # What a run says of its end comes first: it writes its report while its ranks still live.
    done = _number(summary, "steps")
    if summary is not None and (done is None or planned_steps is None or done >= planned_steps):
        steps = f" after step {done:.0f}" if done is not None else ""
        return RunState(StateWord.FINISHED, f"it wrote its summary{steps}")
    last = attempts[-1] if attempts else None
    if report is not None and report.is_alive and not (last and last.get("end")):
        newest = max(one.time for one in report.pulses if one is not None)
        return RunState(
            StateWord.RUNNING, f"a rank gave a sign of life {ago_text(time.time() - newest)} ago"
        )
    return _ended(folder, report, last)


def _ended(folder: Path, report: run.Report | None, last: Mapping[str, Any] | None) -> RunState:
    """Of a run that neither lives nor finished."""
    where = f"`doctor run {folder}` tells where its ranks were"
    end = last.get("end") if last is not None else None
    if (report is not None and report.hang) or end == StateWord.HUNG:
        said = report.hang.splitlines()[0] if report is not None and report.hang else ""
        text = f"the watchdog ended it{': ' if said else ''}{said}"
        return RunState(StateWord.HUNG, f"{text}; {where}")
    if end == StateWord.STOPPED:
        return RunState(
            StateWord.STOPPED, "it was asked to stop and saved; start it again with resume=auto"
        )
    if end == StateWord.CRASHED:
        return RunState(StateWord.CRASHED, f"its last start ended by an error; {where}")
    if report is not None:
        ago = ago_text(time.time() - max(one.time for one in report.pulses if one is not None))
        return RunState(
            StateWord.CRASHED,
            f"it was cut short without a word; the last sign of life was {ago} ago; {where}",
        )
    return RunState(StateWord.UNKNOWN, "it has neither a summary nor signs of life")


def _number(values: Mapping[str, Any] | None, name: str) -> float | None:
    value = values.get(name) if values is not None else None
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None
