"""A plan for people, and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_megatron.layout import describe
from dapo_megatron.plan.parts import GIB, Part
from dapo_megatron.plan.phases import PHASES
from dapo_megatron.plan.plan import Plan
from dapo_megatron.plan.speed import Speed


def render(plan: Plan, console: Console, speed: Speed | None = None) -> None:
    """Print the tables. What does not fit is not among them: `Plan.problems`."""
    config = plan.config
    console.print(
        f"{plan.arch.family}, {plan.num_processes} ranks: "
        f"{describe(config.policy, plan.num_processes)}; engines of "
        f"{config.engine_tensor_parallel}; kernels {plan.kernels}"
        + ("" if plan.kernels == "local" else " (activations counted, not measured)"),
        highlight=False,
        markup=False,
    )
    console.print(_memory(plan))
    for title, parts in (("host memory of a node", plan.host), ("disk", plan.disk)):
        console.print(_parts(title, parts))
    tokens = _tokens(plan, speed)
    console.print(
        f"KV cache of an engine: {plan.sequences:,} sequences of {config.max_sequence_tokens:,} "
        f"tokens, {plan.engine.sequences(tokens):,} of {tokens:,.0f}",
        highlight=False,
    )
    if speed is not None:
        _render_speed(speed, console)


def _tokens(plan: Plan, speed: Speed | None) -> float:
    """Of a sequence of mean length."""
    if speed is None:
        return plan.config.max_sequence_tokens / 4
    return speed.tokens / (
        plan.config.rollout.prompts_per_step * plan.config.rollout.samples_per_prompt
    )


def _memory(plan: Plan) -> Table:
    """A column per phase, of the kind of rank that is fullest in it."""
    limit = "" if plan.gpu_memory_bytes is None else f" of {plan.gpu_memory_bytes / GIB:g} GiB"
    table = Table(title=f"memory of the fullest rank{limit}, GiB")
    table.add_column("part")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("how")
    phases = {phase: {part.name: part for part in plan.fullest(phase)[1]} for phase in PHASES}
    every = {name: part for parts in phases.values() for name, part in parts.items()}
    for name, any_part in every.items():
        sizes = [f"{parts[name].gib:.2f}" if name in parts else "" for parts in phases.values()]
        table.add_row(name, *sizes, any_part.how)
    table.add_section()
    table.add_row("all", *[f"{plan.num_bytes(phase) / GIB:.1f}" for phase in PHASES], "")
    if plan.gpu_memory_bytes is not None:
        table.add_row("free", *[f"{plan.slack_gib(phase):.1f}" for phase in PHASES], "")
    if len(plan.kinds) > 1:
        kinds = [plan.fullest(phase)[0] for phase in PHASES]
        told = "; ".join(
            f"{kind}: {', '.join(p for p, k in zip(PHASES, kinds, strict=True) if k == kind)}"
            for kind in dict.fromkeys(kinds)
        )
        table.caption = f"fullest is {told}"
    return table


def _parts(title: str, parts: Iterable[Part]) -> Table:
    table = Table("part", "GiB", "how", title=title)
    for part in parts:
        table.add_row(part.name, f"{part.gib:.2f}", part.how)
    return table


def _render_speed(speed: Speed, console: Console) -> None:
    table = Table("phase", "seconds", title="a rollout step (estimate)")
    for phase, seconds in speed.seconds.items():
        table.add_row(phase, f"{seconds:,.0f}")
    table.add_row("step", f"{speed.step_seconds:,.0f}")
    console.print(table)
    lines = [f"{name} {value}" for name, value in speed.assumptions.lines() if value != "None"]
    console.print(
        f"assumed: {', '.join(lines)}; {speed.prompts:,.0f} prompts a step, responses of "
        f"{speed.response_tokens:,.0f} tokens on the mean. No evaluation, no checkpoint",
        highlight=False,
        markup=False,
    )


def to_json(plan: Plan, speed: Speed | None = None) -> dict[str, Any]:
    """The same figures, in bytes and seconds."""
    return {
        "processes": plan.num_processes,
        "gpu_memory_bytes": plan.gpu_memory_bytes,
        "fits": plan.fits(),
        "problems": list(plan.problems()),
        "kinds": {
            kind: {phase: _rows(parts) for phase, parts in phases.items()}
            for kind, phases in plan.kinds.items()
        },
        "phases": {
            phase: {"kind": plan.fullest(phase)[0], "bytes": plan.num_bytes(phase)}
            for phase in PHASES
        },
        "sequences": plan.sequences,
        "host": _rows(plan.host),
        "disk": _rows(plan.disk),
        "seconds": None if speed is None else {**speed.seconds, "step": speed.step_seconds},
        "assumptions": None if speed is None else dict(speed.assumptions.lines()),
    }


def _rows(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [{"part": part.name, "bytes": part.num_bytes, "how": part.how} for part in parts]
