"""Findings on time and memory: idle engines, what grew, what is slow, what leaks."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from dapo_megatron.report.finding import Column, Finding, Track, track
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.groups import KEPT
from dapo_megatron.report.phases import IDLE, memory_plan
from dapo_megatron.report.rule import Case, Rule, RunRule, always, lately
from dapo_megatron.report.wording import number, percent
from dapo_megatron.types import STEP_PHASES, Phase

_LEAST_GIB = 0.5
_EVERY_STEP = [p for p in STEP_PHASES if p not in (Phase.CHECKPOINT, Phase.EVALUATE)]

ENGINES_IDLE = 0.3  # of generation: a note
ENGINES_IDLE_MUCH = 0.5  # of generation: a warning

_CARRY = "rollout.lookahead: higher; engine.max_sequences: lower"
engines = Rule(
    IDLE,
    {"warn": lambda s: s.late >= ENGINES_IDLE_MUCH, "note": lambda s: s.late >= ENGINES_IDLE},
    "Engines are idle for {s.late!p} of generation",
    "{s.early!p} → {s.late!p} of time/generate, mean over replicas{waits}.",
    lambda s: "rollout.on_policy: false" if s.run.is_on_policy else _CARRY,
    steps=lately,
    facts=lambda s: {
        "waits": "; rollout.on_policy waits for the longest answer of a step"
        if s.run.is_on_policy
        else ""
    },
)

TIME_GROWTH = 1.5  # times its start, in seconds and in seconds for each token: a note
TIME_GROWTH_MUCH = 3.0  # times its start: a warning
TIME_SHARE = 0.1  # of a step; phases below it are not judged

_GROWTH_KNOBS = {
    Phase.GENERATE: "engine.max_sequences: higher; rollout.lookahead: higher",
    Phase.LOGPROBS: "train.max_tokens_per_microbatch: higher",
    Phase.UPDATE: "train.max_tokens_per_microbatch: higher; policy.recompute",
    Phase.SYNC: "sync.fingerprint_every: higher",
}


def growth(phase: Phase) -> Rule:
    """Return the rule on a phase that takes longer than it did, for as many tokens."""

    def grew(seconds: Case, times: float) -> bool:
        step, per_token = seconds.other("time/step"), _per_token(seconds, phase)
        is_large = step.is_long and step.late > 0 and seconds.late >= TIME_SHARE * step.late
        has_grown = min(seconds.growth, per_token.growth) >= times
        return is_large and has_grown and seconds.stands_apart

    def facts(seconds: Case) -> dict[str, Any]:
        per_token = _per_token(seconds, phase)
        again = f", {per_token.growth:.1f} times for each token"
        return {
            "again": again if per_token is not seconds else "",
            "share": seconds.late / seconds.other("time/step").late,
            "meanwhile": _keep_rate(seconds.run) if phase is Phase.GENERATE else "",
        }

    return Rule(
        f"time/{phase}",
        {"warn": lambda s: grew(s, TIME_GROWTH_MUCH), "note": lambda s: grew(s, TIME_GROWTH)},
        f"{phase} takes {{s.growth:.1f}} times as long as at first",
        "{s.early!n} → {s.late!n} s a step{again}; {share!p} of the step.{meanwhile}"
        + (" `doctor nodes` measures the network." if phase is Phase.SYNC else ""),
        _GROWTH_KNOBS.get(phase),
        trend=True,
        facts=facts,
    )


def _per_token(seconds: Case, phase: Phase) -> Track:
    """Return the seconds of a phase for each token trained on, or `seconds` where too few are
    known."""
    column = seconds.run.metrics.column
    names = (f"time/{phase}", "throughput/tokens_per_second", "time/step")
    rows = zip(seconds.run.metrics.steps, *map(column, names), strict=True)
    known = [
        (at, spent / tokens)
        for at, spent, pace, step in rows
        if spent is not None and (tokens := (pace or 0.0) * (step or 0.0)) > 0
    ]
    per_token = Track(tuple(at for at, _ in known), tuple(value for _, value in known))
    return per_token if per_token.is_long else seconds


def _keep_rate(run: RunData) -> str:
    """Return what usually explains a longer generation."""
    kept = track(run, KEPT)
    if not kept.is_long:
        return ""
    return f" Meanwhile mixed groups went {percent(kept.early)} → {percent(kept.late)}."


TIME_SLOW_STEP = 3.0  # times the median of the 20 steps before


def _without_extras(run: RunData) -> Column:
    """Return the seconds of steps without checkpoint and evaluation."""
    names = ("time/step", "time/checkpoint", "time/evaluate")
    rows = zip(*map(run.metrics.column, names), strict=True)
    return [None if step is None else step - (c or 0.0) - (e or 0.0) for step, c, e in rows]


def _in_slow_step(seconds: Case) -> dict[str, Any]:
    metrics = seconds.run.metrics
    at_peak = metrics.steps.index(seconds.peak)
    phase = max(STEP_PHASES, key=lambda phase: metrics.column(f"time/{phase}")[at_peak] or 0.0)
    return {"phase": phase, "median": median(seconds.values)}


slow_steps = Rule(
    "time/step",
    {"note": always},
    "Slow at {steps}",
    "Step {s.peak} took {s.most!n} s, most of it {phase}; the median is {median!n} s.",
    column=_without_extras,
    steps=lambda s: s.spikes(TIME_SLOW_STEP),
    facts=_in_slow_step,
    chart="time_phases",
)

THROUGHPUT_DROP = 0.7  # of its start: a note
THROUGHPUT_DROP_MUCH = 0.5  # of its start: a warning


def _drops(pace: Case, share: float) -> bool:
    upside_down = Track(pace.steps, tuple(-value for value in pace.values))
    return pace.growth <= share and upside_down.stands_apart


def _what_grew(pace: Case) -> dict[str, str]:
    """Name the phase that takes most seconds more than at first, if one does."""
    tracks = {phase: pace.other(f"time/{phase}") for phase in _EVERY_STEP}
    phase = max(tracks, key=lambda phase: tracks[phase].change)
    most = tracks[phase]
    if most.change <= 0:
        return {"grew": ""}
    kept = _keep_rate(pace.run) if phase is Phase.GENERATE else ""
    figures = f"{number(most.early)} → {number(most.late)} s a step"
    return {"grew": f" Of all phases {phase} grew most, {figures}.{kept}"}


throughput = Rule(
    "throughput/tokens_per_second",
    {
        "warn": lambda s: _drops(s, THROUGHPUT_DROP_MUCH),
        "note": lambda s: _drops(s, THROUGHPUT_DROP),
    },
    "Throughput is down to {s.growth!p} of its start",
    "{s.early!n} → {s.late!n} tokens per second.{grew}",
    facts=_what_grew,
)

MEMORY_OVER_PLAN = 1.1  # times the plan, and 0.5 GiB above it
MEMORY_LEAK = 0.1  # of its size, and 0.5 GiB, over the second half of the run


def over_plan(run: RunData) -> Iterator[Finding]:
    """Compare the memory of each phase with the plan."""
    over = []
    for phase, gib in memory_plan(run).items():
        most = max(run.metrics.values(f"memory/{phase}_gib"), default=0.0)
        if most > max(MEMORY_OVER_PLAN * gib, gib + _LEAST_GIB):
            over.append((most / gib, phase, most, gib))
    if over:
        _, phase, most, gib = max(over)
        others = ", ".join(name for _, name, *_ in over if name != phase)
        yield Finding(
            "warn",
            f"{phase} takes more memory than planned",
            f"{number(most)} GiB, the plan said {number(gib)}"
            f"{f'; so do {others}' if others else ''}.",
            f"memory/{phase}_gib",
            knob="engine.memory_fraction: lower, if it comes near the device's memory; "
            "train.max_tokens_per_microbatch: lower",
        )


def leaks(run: RunData) -> Iterator[Finding]:
    """Find phases that take ever more memory over the second half, and in each half of that: caches
    reach their size once."""
    leaking = {}
    for phase in STEP_PHASES:
        half = track(run, f"memory/{phase}_gib").half
        least = max(_LEAST_GIB, MEMORY_LEAK * half.early)
        if half.rises and half.change >= least and half.half.change >= least / 4:
            leaking[phase] = half
    if leaking:
        phase = max(leaking, key=lambda phase: leaking[phase].change)
        half = leaking[phase]
        yield Finding(
            "warn",
            f"Memory keeps growing: {', '.join(leaking)}",
            f"{phase}: {number(half.early)} → {number(half.late)} GiB since step "
            f"{half.steps[0]}. A leak ends a long run.",
            f"memory/{phase}_gib",
            (half.steps[0], half.steps[-1]),
        )


RULES: tuple[RunRule, ...] = (
    engines,
    *map(growth, _EVERY_STEP),
    slow_steps,
    throughput,
    over_plan,
    leaks,
)
