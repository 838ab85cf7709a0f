"""The `plan` command: forecast memory and time of a run, as tables and JSON.

There is one table for each kind of rank that needs the most memory in some phase. It shows each
phase at its fullest moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_megatron.config import Config
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.model import planned_architecture, published_notes
from dapo_megatron.plan import GIB, MemoryItem
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.estimate import (
    PHASES,
    MemoryEstimate,
    NodeSpec,
    Phases,
    estimate_memory,
    fullest,
)
from dapo_megatron.plan.layout import changes, check_layout, describe, layouts
from dapo_megatron.plan.speed import Assumptions, Speed, estimate_speed
from dapo_megatron.types import ConfigError

NUM_LAYOUTS = 5
"""Number of layouts that are named if a run does not fit."""
_NONE = "  none; use more nodes, or free memory of the largest parts (docs/plan.md)"


def check(config: Config, num_processes: int) -> None:
    """Check model, compatibility and layout before a forecast. Raises ConfigError."""
    arch = planned_architecture(config)
    check_compatibility(config, arch)
    check_layout(config, arch, num_processes)


def forecast(
    config: Config,
    num_processes: int,
    nodes: NodeSpec,
    assumptions: Assumptions | None = None,
    json_file: Path | None = None,
) -> list[str]:
    """Print the tables and write `json_file`. Return a text for each thing that does not fit, and
    one with the layouts that do."""
    estimate = estimate_memory(config, num_processes, nodes)
    speed = estimate_speed(estimate, assumptions) if nodes.gpus_per_node else None
    render(estimate, LiteralConsole(), speed)
    problems = list(estimate.problems())
    write_result(json_file, json.dumps(to_json(estimate, speed)))
    if problems and speed is not None:
        fitting = fitting_layouts(estimate, speed.assumptions)
        gpus = f"{num_processes} GPUs of {nodes.gpu_memory_gib:g} GiB"
        near = [f"  {seconds:,.0f} s a step: {text}" for seconds, text in fitting[:NUM_LAYOUTS]]
        problems += [f"layouts that fit {gpus} with memory to spare:", *(near or [_NONE])]
    return problems


def fitting_layouts(estimate: MemoryEstimate, assumptions: Assumptions) -> list[tuple[float, str]]:
    """Return the layouts of the policy that fit the same GPUs without a warning, as (seconds of a
    step, overrides), the fastest first and then the nearest. Each is tried as configured and with
    full recomputation."""
    config, fitting = estimate.config, []
    for other in layouts(config, estimate.num_processes, estimate.arch):
        for recompute in dict.fromkeys([config.policy.recompute, "full"]):
            policy = other.policy.model_copy(update={"recompute": recompute})
            changed = other.model_copy(update={"policy": policy})
            try:
                check_compatibility(changed, estimate.arch)
            except ConfigError:
                continue
            tried = estimate_memory(changed, estimate.num_processes, estimate.nodes)
            if tried.fits() and not any(tried.gpu_warnings()):
                seconds = estimate_speed(tried, assumptions).step_seconds
                # Differences of a few per cent mean nothing, so that nearer layouts come first.
                fitting.append((float(f"{seconds:.2g}"), seconds, changes(config, changed)))
                break
    return [(seconds, text) for _, seconds, text in sorted(fitting, key=itemgetter(0))]


# ------------------------------------------------------------------ tables


def render(estimate: MemoryEstimate, console: Console, speed: Speed | None = None) -> None:
    """Print the tables. What does not fit is in `MemoryEstimate.problems`."""
    for note in published_notes(estimate.config):
        console.print(f"model: {note}", highlight=False, soft_wrap=True)
    console.print(_title(estimate), highlight=False, markup=False)
    for kind in estimate.shown_kinds():
        console.print(_memory(estimate, kind, estimate.kinds[kind]))
    for title, parts in (*estimate.hosts.items(), ("disk", estimate.disk)):
        table = Table("part", "GiB", "how", title=title)
        for part in parts:
            table.add_row(part.name, f"{part.gib:.2f}", part.how)
        console.print(table)
    limit = estimate.config.max_sequence_tokens
    text = f"KV cache of an engine: {estimate.sequences:,} sequences of {limit:,} tokens"
    if speed is not None:
        text += f", {estimate.engine.sequences(speed.length):,} of {speed.length:,}"
    console.print(text, highlight=False)
    if speed is not None:
        _render_speed(estimate, speed, console)
    for warning in estimate.warnings():
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)


def _title(estimate: MemoryEstimate) -> str:
    """Describe model, layout, engines and kernels in a line."""
    config, ranks, kernels = estimate.config, estimate.num_processes, estimate.stages[0].kernels
    where = "" if config.engine.colocated else " on other GPUs"
    return (
        f"{estimate.arch.family}, {ranks} ranks: {describe(config.policy, ranks)}; engines "
        f"{config.num_replicas(ranks)} of {config.engine_tensor_parallel} ranks{where}; "
        f"kernels {kernels}"
    )


def _memory(estimate: MemoryEstimate, kind: str, phases: Phases) -> Table:
    """Return the table of one kind of rank, with a column per phase."""
    room = estimate.gpu_memory_bytes
    limit = f" of {room / GIB:g}" if isfinite(room) else ""
    table = Table("part", title=f"memory of {kind}: GiB{limit}")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("how")
    moments = [fullest(phases[phase]) for phase in PHASES]
    hows = {part.name: part.how for moment in moments for part in moment.parts}
    for name, how in hows.items():
        sizes = [
            next((f"{part.gib:.2f}" for part in moment.parts if part.name == name), "")
            for moment in moments
        ]
        table.add_row(name, *sizes, how)
    table.add_section()
    table.add_row("all", *[f"{moment.num_bytes / GIB:.1f}" for moment in moments])
    if isfinite(room):
        free = [(room - moment.num_bytes) / GIB for moment in moments]
        table.add_row("free", *[f"{gib:.1f}" for gib in free])
    names = [m.name if len(phases[p]) > 1 else "" for p, m in zip(PHASES, moments, strict=True)]
    table.add_row("fullest at", *names)
    return table


def _render_speed(estimate: MemoryEstimate, speed: Speed, console: Console) -> None:
    table = Table("phase", "seconds", title="a rollout step (estimate)")
    for phase, seconds in (*speed.seconds.items(), ("step", speed.step_seconds)):
        table.add_row(phase, f"{seconds:,.0f}")
    console.print(table)
    if not estimate.config.engine.colocated:
        how = "at the same time" if speed.overlaps else "one after another"
        waiting, sent = speed.waiting, speed.sync_bytes / GIB
        console.print(
            f"policy and engines work {how}: the policy waits for {waiting['policy']:.0%} of a "
            f"step, engines for {waiting['engine']:.0%} (engine.replicas). A sync sends "
            f"{sent:,.1f} GiB, {sent / estimate.engine_gpus:.1f} to each GPU of an engine",
            highlight=False,
        )
    given = ", ".join(f"{name} {value}" for name, value in speed.assumptions.lines())
    console.print(
        f"assumed: {given}; {speed.prompts:,.0f} prompts a step, responses of "
        f"{speed.response_tokens:,.0f} tokens on average. Without evaluation and checkpoints",
        highlight=False,
        markup=False,
    )


def to_json(estimate: MemoryEstimate, speed: Speed | None) -> dict[str, Any]:
    """Return the estimates in bytes and seconds, and the problems. `speed` is None without GPUs."""
    fullest_of_all = {phase: estimate.fullest(phase) for phase in PHASES}
    return {
        "model_notes": list(published_notes(estimate.config)),
        "processes": estimate.num_processes,
        "gpu_memory_bytes": estimate.gpu_memory_bytes if speed else None,
        "host_memory_bytes": estimate.host_memory_bytes if speed else None,
        "fits": estimate.fits(),
        "problems": list(estimate.problems()),
        "warnings": list(estimate.warnings()),
        "kinds": {
            kind: {
                phase: {moment.name: _rows(moment.parts) for moment in moments}
                for phase, moments in phases.items()
            }
            for kind, phases in estimate.kinds.items()
        },
        "phases": {
            phase: {"kind": kind, "moment": moment.name, "bytes": moment.num_bytes}
            for phase, (kind, moment) in fullest_of_all.items()
        },
        "sequences": estimate.sequences,
        "hosts": {title: _rows(parts) for title, parts in estimate.hosts.items()},
        "disk": _rows(estimate.disk),
        "seconds": None if speed is None else {**speed.seconds, "step": speed.step_seconds},
        "sync_bytes": None if speed is None else speed.sync_bytes,
        "waiting": speed.waiting if speed and not estimate.config.engine.colocated else None,
        "assumptions": None if speed is None else dict(speed.assumptions.lines()),
    }


def _rows(parts: Iterable[MemoryItem]) -> list[dict[str, Any]]:
    return [{"part": part.name, "bytes": part.num_bytes, "how": part.how} for part in parts]
