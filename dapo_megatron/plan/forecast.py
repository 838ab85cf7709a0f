"""The `plan` command: forecast memory and time of a run, as tables and JSON.

There is one table for each kind of rank. The size of a phase is that of its fullest moment. Sizes
that occur only at other moments are in brackets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_megatron.config import Config
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.model import planned_architecture, published_notes
from dapo_megatron.plan import GIB, MemoryItem, size
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.estimate import MemoryEstimate, NodeSpec, estimate_memory
from dapo_megatron.plan.layout import describe
from dapo_megatron.plan.phases import PHASES, Moment, Phases, fullest
from dapo_megatron.plan.separate import describe_sides, side_warnings
from dapo_megatron.plan.speed import Assumptions, Speed, estimate_speed
from dapo_megatron.plan.stage import ACTIVATIONS
from dapo_megatron.plan.suggestions import alternatives, check_layout_and_memory, problems
from dapo_megatron.types import Phase


def check(config: Config, num_processes: int, nodes: NodeSpec) -> None:
    """Check model, compatibility and layout before a forecast. Raises ConfigError."""
    check_compatibility(config, planned_architecture(config))
    check_layout_and_memory(config, num_processes, nodes)


def forecast(
    config: Config,
    num_processes: int,
    nodes: NodeSpec,
    assumptions: Assumptions | None = None,
    json_file: Path | None = None,
) -> list[str]:
    """Print the tables and write `json_file`. Return a text for each problem (what does not fit)
    and for each remedy."""
    estimate = estimate_memory(config, num_processes, nodes)
    speed = estimate_speed(estimate, assumptions) if nodes.gpus_per_node else None
    render(estimate, LiteralConsole(), speed)
    excesses = list(problems(estimate))
    write_result(json_file, json.dumps(to_json(estimate, speed, excesses)))
    if excesses and nodes.gpus_per_node:
        return [*excesses, *alternatives(config, num_processes, nodes)]
    return excesses


def render(estimate: MemoryEstimate, console: Console, speed: Speed | None = None) -> None:
    """Print the tables. They do not say what does not fit; see `suggestions.problems`."""
    config = estimate.config
    for note in published_notes(config):
        console.print(f"model: {note}", highlight=False, soft_wrap=True)
    where = "" if config.engine.colocated else " on other GPUs"
    console.print(
        f"{estimate.arch.family}, {estimate.num_processes} ranks: "
        f"{describe(config.policy, estimate.num_processes)}; engines "
        f"{config.num_replicas(estimate.num_processes)} of {config.engine_tensor_parallel} ranks"
        f"{where}; kernels {estimate.kernels}"
        + ("" if estimate.kernels == "local" else " (activations counted, not measured)"),
        highlight=False,
        markup=False,
    )
    for title, phases in _kinds(estimate):
        console.print(_memory(estimate, title, phases))
    for title, parts in (*estimate.hosts.items(), ("disk", estimate.disk)):
        console.print(_parts(title, parts))
    tokens = _tokens(estimate, speed)
    console.print(
        f"KV cache of an engine: {estimate.sequences:,} sequences of "
        f"{config.max_sequence_tokens:,} tokens, {estimate.engine.sequences(tokens):,} of "
        f"{tokens:,.0f}",
        highlight=False,
    )
    if speed is not None:
        _render_speed(estimate, speed, console)
    for text in warnings(estimate, speed):
        console.print(f"warning: {text}", highlight=False, soft_wrap=True)


def _tokens(estimate: MemoryEstimate, speed: Speed | None) -> float:
    """Return the mean number of tokens of a sequence; a quarter of the limit without `speed`."""
    if speed is None:
        return estimate.config.max_sequence_tokens / 4
    return speed.tokens / (
        estimate.config.rollout.prompts_per_step * estimate.config.rollout.samples_per_prompt
    )


def _kinds(estimate: MemoryEstimate) -> Iterator[tuple[str, Phases]]:
    """Yield the kinds of ranks by name. Adjacent stages that differ only in their activations are
    one kind, shown with the first of them, which holds the most micro-batches."""
    for _, group in groupby(estimate.kinds.items(), key=lambda item: _group_key(item[1])):
        alike = list(group)
        first, phases = alike[0]
        more = f", and {len(alike) - 1} more like it, with fewer activations"
        yield first + (more if len(alike) > 1 else ""), phases


def _group_key(phases: Phases) -> list[tuple[str, int]]:
    """Return the names and sizes that distinguish kinds of ranks: all except activations."""
    return [
        (part.name, part.num_bytes)
        for moments in phases.values()
        for moment in moments
        for part in moment.parts
        if part.name != ACTIVATIONS
    ]


def _memory(estimate: MemoryEstimate, title: str, phases: Phases) -> Table:
    """Return the table of one kind of rank, with a column per phase."""
    room = estimate.gpu_memory_bytes
    limit = "" if room is None else f" of {room / GIB:g}"
    table = Table(title=f"memory of {title}: GiB{limit}")
    table.add_column("part")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("how")
    most = {phase: fullest(phases[phase]) for phase in PHASES}
    every = [part for moments in phases.values() for m in moments for part in m.parts]
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
    """Return the size of a part in a phase, in brackets if it does not occur at the fullest
    moment."""
    sizes = {
        moment.name: size(part for part in moment.parts if part.name == name) / GIB
        for moment in moments
    }
    if here := sizes[counted.name]:
        return f"{here:.2f}"
    elsewhere = max(sizes.values())
    return f"({elsewhere:.2f})" if elsewhere else ""


def _parts(title: str, parts: Iterable[MemoryItem]) -> Table:
    table = Table("part", "GiB", "how", title=title)
    for part in parts:
        table.add_row(part.name, f"{part.gib:.2f}", part.how)
    return table


def warnings(estimate: MemoryEstimate, speed: Speed | None) -> list[str]:
    """Return the warnings of memory, and those of engines on other GPUs."""
    of_sides = () if estimate.config.engine.colocated else side_warnings(estimate, speed)
    return [*estimate.warnings(), *of_sides]


_RANKS = {
    Phase.GENERATE: " (engine ranks)",
    Phase.LOGPROBS: " (policy ranks)",
    Phase.UPDATE: " (policy ranks)",
    Phase.SYNC: "",
}


def _render_speed(estimate: MemoryEstimate, speed: Speed, console: Console) -> None:
    is_separate = not estimate.config.engine.colocated
    table = Table("phase", "seconds", title="a rollout step (estimate)")
    for phase, seconds in speed.seconds.items():
        side = _RANKS[Phase(phase)] if is_separate else ""
        table.add_row(phase + side, f"{seconds:,.0f}")
    table.add_row("step", f"{speed.step_seconds:,.0f}")
    console.print(table)
    if is_separate:
        console.print(describe_sides(estimate, speed), highlight=False)
    lines = [f"{name} {value}" for name, value in speed.assumptions.lines() if value != "None"]
    console.print(
        f"assumed: {', '.join(lines)}; {speed.prompts:,.0f} prompts a step, responses of "
        f"{speed.response_tokens:,.0f} tokens on average. Without evaluation and checkpoints",
        highlight=False,
        markup=False,
    )


def to_json(
    estimate: MemoryEstimate, speed: Speed | None, problems: Sequence[str]
) -> dict[str, Any]:
    """Return the estimates in bytes and seconds, and the problems."""
    fullest_of_all = {phase: estimate.fullest(phase) for phase in PHASES}
    return {
        "model_notes": list(published_notes(estimate.config)),
        "processes": estimate.num_processes,
        "gpu_memory_bytes": estimate.gpu_memory_bytes,
        "host_memory_bytes": estimate.host_memory_bytes,
        "fits": estimate.fits(),
        "problems": list(problems),
        "warnings": warnings(estimate, speed),
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
        "host": _rows(estimate.host),
        "hosts": {title: _rows(parts) for title, parts in estimate.hosts.items()},
        "disk": _rows(estimate.disk),
        "seconds": None if speed is None else {**speed.seconds, "step": speed.step_seconds},
        "sync_bytes": None if speed is None else speed.sync_bytes,
        "waiting": speed.waiting if speed and not estimate.config.engine.colocated else None,
        "assumptions": None if speed is None else dict(speed.assumptions.lines()),
    }


def _rows(parts: Iterable[MemoryItem]) -> list[dict[str, Any]]:
    return [{"part": part.name, "bytes": part.num_bytes, "how": part.how} for part in parts]
