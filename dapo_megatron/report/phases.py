"""Phases of a step: their seconds, and their memory compared with the plan."""

from __future__ import annotations

import pandas as pd

from dapo_megatron.report.run_data import RunData, finite
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
"""Phase -> index in curves.PALETTE."""
LABELS = {"grade": "wait for graders", Phase.LOGPROBS: "log-probs", "rest": "the rest"}

GENERATE = "derived/time_generate"
REST = "derived/time_rest"
MOVED = "derived/time_sync_moved"
IDLE = "derived/engine_idle"
POLICY_WAITS, ENGINES_WAIT = "derived/policy_waits", "derived/engines_wait"
PLANNED = "derived/plan_{}_gib"
"""Planned memory of a phase in GiB; format it with the phase."""


def derived(run: RunData) -> dict[str, pd.Series]:
    """Return series by step: seconds of generate without waiting for graders, seconds outside all
    phases, seconds of sync that move weights, idle share of the engines, and planned memory. With
    engines on other GPUs also the shares of a step in which the policy waits for them, and they are
    idle."""

    def time(name: str) -> pd.Series:
        return run.metrics.series(f"time/{name}")

    def without(total: str, *parts: str) -> pd.Series:
        return (time(total) - sum(time(part).fillna(0) for part in parts)).clip(lower=0)

    series = {
        GENERATE: without("generate", "grade"),
        REST: without("step", *STEP_PHASES),
        MOVED: without("sync", "sync_verify", "sync_turns"),
        IDLE: (time("engine_idle") / time("generate").where(lambda of: of > 0)).clip(0, 1),
    }
    # Only runs with engines on other GPUs have it: the share of the training in which they had
    # requests.
    overlap = run.metrics.series("throughput/overlap")
    step = time("step").where(overlap.notna() & (time("step") > 0))
    training = time("logprobs").fillna(0) + time("update").fillna(0)
    idle = time("engine_idle").fillna(0) + (1 - overlap) * training
    series |= {
        POLICY_WAITS: (time("generate").fillna(0) / step).clip(0, 1),
        ENGINES_WAIT: (idle / step).clip(0, 1),
    }
    for phase, gib in memory_plan(run).items():
        measured = run.metrics.series(f"memory/{phase}_gib")
        series[PLANNED.format(phase)] = measured.where(measured.isna(), gib)
    return series


def memory_plan(run: RunData) -> dict[str, float]:
    """Return phase -> planned memory in GiB from the run's plan.json; empty without one."""
    phases = (run.plan or {}).get("phases")
    levels = {name: finite(phases.get(name)) for name in STEP_PHASES if isinstance(phases, dict)}
    return {name: gib for name, gib in levels.items() if gib is not None and gib > 0}


def note(run: RunData) -> str | None:
    """Return the note of the memory plan, None without one."""
    text = (run.plan or {}).get("note")
    return f"Memory plan: {text}" if text else None
