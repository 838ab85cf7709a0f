"""Findings on time and memory: idle engines, what grew, what is slow, what leaks."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from dapo_megatron.report.finding import Finding, Track, track, track_of
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.groups import KEPT
from dapo_megatron.report.phases import IDLE, memory_plan
from dapo_megatron.report.wording import named, number, percent
from dapo_megatron.types import STEP_PHASES, Phase

_LEAST_GIB = 0.5
_RARE = (Phase.CHECKPOINT, Phase.EVALUATE)

ENGINES_IDLE = 0.3  # of generation: a note
ENGINES_IDLE_MUCH = 0.5  # of generation: a warning


def engines(run: RunData) -> Iterator[Finding]:
    """Engines without work while the run generates."""
    idle = track(run, IDLE)
    if not idle or idle.late < ENGINES_IDLE:
        return
    on_policy = run.knob("rollout.on_policy") is True
    waits = "; rollout.on_policy waits for the longest answer of a step" if on_policy else ""
    yield idle.finding(
        "warn" if idle.late >= ENGINES_IDLE_MUCH else "note",
        f"Engines are idle for {percent(idle.late)} of generation",
        f"{percent(idle.early)} → {percent(idle.late)} of time/generate, mean over "
        f"replicas{waits}.",
        "rollout.on_policy: false"
        if on_policy
        else "rollout.lookahead: higher; engine.max_sequences: lower",
        steps=idle.late_span,
    )


TIME_GROWTH = 1.5  # times its start, in seconds and in seconds for each token: a note
TIME_GROWTH_MUCH = 3.0  # times its start: a warning
TIME_SHARE = 0.1  # of a step; phases below it are not judged

_GROWTH_KNOBS = {
    "generate": "engine.max_sequences: higher; rollout.lookahead: higher",
    "logprobs": "train.max_tokens_per_microbatch: higher",
    "update": "train.max_tokens_per_microbatch: higher; policy.recompute",
    "sync": "sync.fingerprint_every: higher",
}


def growth(run: RunData) -> Iterator[Finding]:
    """A phase that takes longer than it did, for as many tokens."""
    step = track(run, "time/step")
    if not step.is_long or step.late <= 0:
        return
    for phase in STEP_PHASES:
        seconds = track(run, f"time/{phase}")
        if phase in _RARE or not seconds.is_long:
            continue
        per_token = track_of(run.metrics.steps, _per_token(run, phase))
        by_token = per_token.growth if per_token.is_long else seconds.growth
        least = min(seconds.growth, by_token)
        is_small = seconds.late < TIME_SHARE * step.late or least < TIME_GROWTH
        if is_small or not _stands_apart(seconds):
            continue
        meanwhile = _keep_rate(run) if phase is Phase.GENERATE else ""
        if phase is Phase.SYNC:
            meanwhile = " `doctor nodes` measures the network."
        again = f", {by_token:.1f} times for each token" if per_token.is_long else ""
        yield seconds.finding(
            "warn" if least >= TIME_GROWTH_MUCH else "note",
            f"{phase} takes {seconds.growth:.1f} times as long as at first",
            f"{number(seconds.early)} → {number(seconds.late)} s a step{again}; "
            f"{percent(seconds.late / step.late)} of the step.{meanwhile}",
            _GROWTH_KNOBS.get(phase),
        )


def _keep_rate(run: RunData) -> str:
    """Return what usually explains a longer generation."""
    kept = track(run, KEPT)
    if not kept.is_long:
        return ""
    return f" Meanwhile mixed groups went {percent(kept.early)} → {percent(kept.late)}."


def _per_token(run: RunData, phase: str) -> list[float | None]:
    """Seconds of a phase for each token trained on in the step."""
    column = run.metrics.column
    rows = zip(
        column(f"time/{phase}"),
        column("throughput/tokens_per_second"),
        column("time/step"),
        strict=True,
    )
    per_token: list[float | None] = []
    for seconds, pace, whole in rows:
        tokens = pace * whole if pace and whole else 0.0
        per_token.append(seconds / tokens if seconds is not None and tokens > 0 else None)
    return per_token


def _stands_apart(series: Track) -> bool:
    """True if it rises, and nearly all of its end lies above nearly all of its start."""
    first, last = sorted(series.values[: series.window]), sorted(series.values[-series.window :])
    return series.rises and last[len(last) // 4] > first[-1 - len(first) // 4]


TIME_SLOW_STEP = 3.0  # times the median of the 20 steps before


def slow_steps(run: RunData) -> Iterator[Finding]:
    """Single steps that took many times as long as those before."""
    column = run.metrics.column
    rows = zip(column("time/step"), column("time/checkpoint"), column("time/evaluate"), strict=True)
    own = [None if whole is None else whole - (c or 0.0) - (e or 0.0) for whole, c, e in rows]
    series = track_of(run.metrics.steps, own, "time/step")
    slow = series.spikes(TIME_SLOW_STEP)
    if not slow:
        return
    steps = [series.steps[place] for place in slow]
    worst = max(slow, key=series.values.__getitem__)
    at = run.metrics.steps.index(series.steps[worst])
    phase = max(STEP_PHASES, key=lambda phase: column(f"time/{phase}")[at] or 0.0)
    yield series.finding(
        "note",
        f"Slow at {named(steps)}",
        f"Step {series.steps[worst]} took {number(series.values[worst])} s, most of it {phase}; "
        f"the median is {number(median(series.values))} s.",
        steps=steps,
        chart="time_phases",
    )


THROUGHPUT_DROP = 0.7  # of its start: a note
THROUGHPUT_DROP_MUCH = 0.5  # of its start: a warning


def throughput(run: RunData) -> Iterator[Finding]:
    """Fewer tokens per second than at first."""
    series = track(run, "throughput/tokens_per_second")
    upside_down = Track(series.steps, tuple(-value for value in series.values))
    has_dropped = series.is_long and series.growth <= THROUGHPUT_DROP
    if not has_dropped or not _stands_apart(upside_down):
        return
    yield series.finding(
        "warn" if series.growth <= THROUGHPUT_DROP_MUCH else "note",
        f"Throughput is down to {percent(series.growth)} of its start",
        f"{number(series.early)} → {number(series.late)} tokens per second.{_what_grew(run)}",
    )


def _what_grew(run: RunData) -> str:
    """The phase that takes so many seconds more than at first, as none does."""
    tracks = {phase: track(run, f"time/{phase}") for phase in STEP_PHASES if phase not in _RARE}
    phase, most = max(tracks.items(), key=lambda item: item[1].late - item[1].early)
    if most.late <= most.early:
        return ""
    kept = _keep_rate(run) if phase is Phase.GENERATE else ""
    figures = f"{number(most.early)} → {number(most.late)} s a step"
    return f" Of all phases {phase} grew most, {figures}.{kept}"


MEMORY_OVER_PLAN = 1.1  # times the plan, and 0.5 GiB above it
MEMORY_LEAK = 0.1  # of its size, and 0.5 GiB, over the second half of the run


def memory(run: RunData) -> Iterator[Finding]:
    """More memory than planned, or ever more."""
    planned = memory_plan(run)
    over, leaks = [], []
    for phase in STEP_PHASES:
        series = track(run, f"memory/{phase}_gib")
        if not series:
            continue
        most = max(series.values)
        gib = planned.get(phase, float("inf"))
        if most > max(MEMORY_OVER_PLAN * gib, gib + _LEAST_GIB):
            over.append((most / gib, phase, most, gib))
        if _leaks(series):
            leaks.append((phase, series.second_half()))
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
    if leaks:
        phase, half = max(leaks, key=lambda leak: leak[1].values[-1] - leak[1].values[0])
        yield half.finding(
            "warn",
            f"Memory keeps growing: {', '.join(name for name, _ in leaks)}",
            f"{phase}: {number(half.early)} → {number(half.late)} GiB since step "
            f"{half.steps[0]}. A leak ends a long run.",
        )


def _leaks(series: Track) -> bool:
    """Ever more over the second half, and in each half of that: caches reach their size once."""
    half = series.second_half()
    if not half.is_long or not half.rises:
        return False
    least = max(_LEAST_GIB, MEMORY_LEAK * half.early)
    again = half.second_half()
    return half.late - half.early >= least and again.late - again.early >= least / 4


RULES = (engines, growth, slow_steps, throughput, memory)
