"""A plan for people, and for programs.

A table for each kind of rank. A phase takes what its fullest moment takes: what is there at others
alone stands in brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_megatron.plan.estimate import Plan
from dapo_megatron.plan.layout import describe
from dapo_megatron.plan.parts import GIB, Part, size
from dapo_megatron.plan.phases import PHASES, Moment, Phases, fullest
from dapo_megatron.plan.speed import Speed
from dapo_megatron.plan.stage import ACTIVATIONS


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
    for title, phases in _kinds(plan):
        console.print(_memory(plan, title, phases))
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
    for text in plan.warnings():
        console.print(f"warning: {text}", highlight=False, markup=False, soft_wrap=True)


def _tokens(plan: Plan, speed: Speed | None) -> float:
    """Of a sequence of mean length."""
    if speed is None:
        return plan.config.max_sequence_tokens / 4
    return speed.tokens / (
        plan.config.rollout.prompts_per_step * plan.config.rollout.samples_per_prompt
    )


def _kinds(plan: Plan) -> Iterator[tuple[str, Phases]]:
    """The kinds of ranks by name. Neighbouring stages that differ by nothing but their activations
    are one kind: the first of them holds most micro-batches."""
    for _, group in groupby(plan.kinds.items(), key=lambda item: _weighed(item[1])):
        alike = list(group)
        first, phases = alike[0]
        more = f", and {len(alike) - 1} more like it, with fewer activations"
        yield first + (more if len(alike) > 1 else ""), phases


def _weighed(phases: Phases) -> list[tuple[str, int]]:
    """What tells kinds apart."""
    return [
        (part.name, part.num_bytes)
        for moments in phases.values()
        for moment in moments
        for part in moment.parts
        if part.name != ACTIVATIONS
    ]


def _memory(plan: Plan, title: str, phases: Phases) -> Table:
    """A column per phase."""
    room = plan.gpu_memory_bytes
    limit = "" if room is None else f" of {room / GIB:g}"
    table = Table(title=f"memory of {title}: GiB{limit}")
    table.add_column("part")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("how")
    most = {phase: fullest(phases[phase]) for phase in PHASES}
    every = [part for moments in phases.values() for one in moments for part in one.parts]
    for name in dict.fromkeys(part.name for part in every):
        shown = [_shown(name, phases[phase], most[phase]) for phase in PHASES]
        largest = max((p for p in every if p.name == name), key=lambda part: part.num_bytes)
        table.add_row(name, *shown, largest.how)
    table.add_section()
    table.add_row("all", *[f"{most[phase].num_bytes / GIB:.1f}" for phase in PHASES], "")
    if room is not None:
        free = [(room - most[phase].num_bytes) / GIB for phase in PHASES]
        table.add_row("free", *[f"{gib:.1f}" for gib in free], "")
    names = [most[phase].name if len(phases[phase]) > 1 else "" for phase in PHASES]
    table.add_row("fullest at", *names, "(in brackets: at another moment, not in the sum)")
    return table


def _shown(name: str, moments: Iterable[Moment], counted: Moment) -> str:
    """The size of a part in a phase, in brackets if it is not of the moment that counts."""
    sizes = {
        moment.name: size(part for part in moment.parts if part.name == name) / GIB
        for moment in moments
    }
    if here := sizes[counted.name]:
        return f"{here:.2f}"
    elsewhere = max(sizes.values())
    return f"({elsewhere:.2f})" if elsewhere else ""


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
    fullest_of_all = {phase: plan.fullest(phase) for phase in PHASES}
    return {
        "processes": plan.num_processes,
        "gpu_memory_bytes": plan.gpu_memory_bytes,
        "host_memory_bytes": plan.host_memory_bytes,
        "fits": plan.fits(),
        "problems": list(plan.problems()),
        "warnings": list(plan.warnings()),
        "kinds": {
            kind: {
                phase: {moment.name: _rows(moment.parts) for moment in moments}
                for phase, moments in phases.items()
            }
            for kind, phases in plan.kinds.items()
        },
        "phases": {
            phase: {"kind": kind, "moment": moment.name, "bytes": moment.num_bytes}
            for phase, (kind, moment) in fullest_of_all.items()
        },
        "sequences": plan.sequences,
        "host": _rows(plan.host),
        "disk": _rows(plan.disk),
        "seconds": None if speed is None else {**speed.seconds, "step": speed.step_seconds},
        "assumptions": None if speed is None else dict(speed.assumptions.lines()),
    }


def _rows(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [{"part": part.name, "bytes": part.num_bytes, "how": part.how} for part in parts]
