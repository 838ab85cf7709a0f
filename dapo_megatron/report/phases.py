"""Phases of a step: where its seconds go, and what memory they take against the plan of it."""

from __future__ import annotations

from dapo_megatron.report.folder import RunData, finite
from dapo_megatron.types import STEP_PHASES, Phase

COLORS = {
    Phase.GENERATE: 0,
    "grade": 5,
    Phase.LOGPROBS: 4,
    Phase.UPDATE: 2,
    Phase.SYNC: 1,
    Phase.CHECKPOINT: 3,
    Phase.EVALUATE: 6,
    "rest": 7,
}
"""Slot of the series colours by phase, here and in the timeline."""

LABELS = {
    Phase.GENERATE: "generate",
    "grade": "wait for graders",
    Phase.LOGPROBS: "log-probs",
    "rest": "the rest",
}

GENERATE = "derived/time_generate"
REST = "derived/time_rest"
MOVED = "derived/time_sync_moved"
IDLE = "derived/engine_idle"
PLANNED = "derived/plan_{}_gib"
"""The planned level of a phase."""


def derived(run: RunData) -> dict[str, list[float | None]]:
    """generate without waiting for graders, what is in no phase, what of sync is moving weights,
    and the idle share of engines, by step. time/grade is a part of time/generate, and
    time/sync_verify and time/sync_turns of time/sync. And the levels of the memory plan, one value
    for every step where the phase was measured."""
    column = run.metrics.column
    names = ("step", "grade", "sync_verify", "sync_turns", "engine_idle", *STEP_PHASES)
    times = {name: column(f"time/{name}") for name in names}
    series: dict[str, list[float | None]] = {name: [] for name in (GENERATE, REST, MOVED, IDLE)}
    for at in range(len(run.metrics.steps)):
        here = {name: values[at] for name, values in times.items()}
        series[GENERATE].append(_less(here["generate"], here["grade"]))
        series[REST].append(_less(here["step"], *(here[phase] for phase in STEP_PHASES)))
        series[MOVED].append(_less(here["sync"], here["sync_verify"], here["sync_turns"]))
        series[IDLE].append(_share(here["engine_idle"], here["generate"]))
    for phase, gib in memory_plan(run).items():
        measured = column(f"memory/{phase}_gib")
        series[PLANNED.format(phase)] = [None if value is None else gib for value in measured]
    return series


def _less(whole: float | None, *parts: float | None) -> float | None:
    """A whole without its parts, not below 0: clocks are read one after the other."""
    if whole is None:
        return None
    return finite(max(0.0, whole - sum(part or 0.0 for part in parts)))


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole or whole < 0 else min(1.0, max(0.0, part / whole))


def memory_plan(run: RunData) -> dict[str, float]:
    """GiB that each phase takes by the run's plan.json; empty if it has none."""
    phases = (run.plan or {}).get("phases")
    levels = (
        {name: finite(phases.get(name)) for name in STEP_PHASES} if isinstance(phases, dict) else {}
    )
    return {name: gib for name, gib in levels.items() if gib is not None and gib > 0}


def note(run: RunData) -> str | None:
    """Return the plan's own note, such as why it says no more."""
    text = (run.plan or {}).get("note")
    return f"The plan of memory: {text}" if text else None
