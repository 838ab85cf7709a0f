"""Memory of each phase, against what the plan had said before the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo_megatron.report.charts import line, lines
from dapo_megatron.report.folder import RunData, finite
from dapo_megatron.report.phases import COLORS, LABELS
from dapo_megatron.types import STEP_PHASES


def memory_plan(run: RunData) -> dict[str, Any] | None:
    """{device, phases: {phase: GiB}, note} of plan.json; None if the run has none."""
    if run.plan is None:
        return None
    phases = run.plan.get("phases")
    planned = {
        phase: gib
        for phase in STEP_PHASES
        if isinstance(phases, dict) and (gib := finite(phases.get(phase))) is not None and gib > 0
    }
    if not planned and not run.plan.get("note"):
        return None
    return {
        "device": str(run.plan.get("device", "")),
        "phases": planned,
        "note": str(run.plan.get("note") or ""),
    }


def planned_name(phase: str) -> str:
    """The series of a phase's planned level."""
    return f"derived/plan_{phase}_gib"


def derived(run: RunData) -> dict[str, list[float | None]]:
    """The plan's levels, one value for every step, where the phase was measured."""
    plan = memory_plan(run)
    return {
        planned_name(phase): [None if v is None else gib for v in column]
        for phase, gib in (plan["phases"] if plan else {}).items()
        if (column := run.metrics.column(f"memory/{phase}_gib"))
    }


def note(run: RunData) -> str | None:
    """What the plan says of itself, such as why it says no more."""
    plan = memory_plan(run)
    return f"The plan of memory: {plan['note']}" if plan and plan["note"] else None


def charts(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """What any of the runs measured, and planned in the same colours, dashed."""
    plans = [plan["phases"] for run in runs if (plan := memory_plan(run))]
    planned = [phase for phase in STEP_PHASES if any(phase in plan for plan in plans)]
    against = " Dashed: what the plan said before the run." if planned else ""
    measured = [
        line(f"memory/{phase}_gib", LABELS.get(phase, phase), color=COLORS[phase])
        for phase in STEP_PHASES
    ]
    levels = [
        line(
            planned_name(phase),
            f"{LABELS.get(phase, phase)}, planned",
            color=COLORS[phase],
            dash=True,
        )
        for phase in planned
    ]
    of_torch = [
        line(
            f"memory/{phase}_torch_gib",
            f"{LABELS.get(phase, phase)}, tensors",
            color=COLORS[phase],
            dash=True,
        )
        for phase in STEP_PHASES
    ]
    found = [
        lines(
            "memory",
            "Memory",
            "The most that each phase took, on the rank that took most: of the device, or on CPU "
            f"of the process.{against}",
            "GiB",
            [*measured, *levels],
            section="time",
            overlay=False,
        ),
        lines(
            "memory_tensors",
            "Memory of tensors",
            "The same as far as torch allocated it; the rest is CUDA itself, its libraries and "
            "what lies idle in between.",
            "GiB",
            of_torch,
            section="time",
            overlay=False,
        ),
    ]
    names = {name for run in runs for name in run.metrics.columns}
    return [one for one in found if any(series["metric"] in names for series in one["series"])]
