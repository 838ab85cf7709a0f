"""Findings on time and memory: idle engines, what grew, what is slow, what leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from dapo_megatron.report import groups
from dapo_megatron.report.finding import Finding, named, number, percent
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.memory import memory_plan
from dapo_megatron.report.phases import IDLE, derived
from dapo_megatron.report.thresholds import limit
from dapo_megatron.report.trend import Track, track, track_of
from dapo_megatron.types import STEP_PHASES, Phase

_LEAST_GIB = 0.5
_RARE = (Phase.CHECKPOINT, Phase.EVALUATE)


def engines(run: RunData) -> Iterator[Finding]:
    """Engines without work while the run generates."""
    idle = track_of(run.metrics.steps, derived(run)[IDLE])
    if not idle or idle.late < limit("engines.idle"):
        return
    on_policy = run.knob("rollout.on_policy") is True
    yield Finding(
        "warn" if idle.late >= limit("engines.idle_much") else "note",
        f"Engines are idle for {percent(idle.late)} of generation",
        f"{percent(idle.early)} → {percent(idle.late)} of time/generate, mean over replicas"
        + ("; rollout.on_policy waits for the longest answer of a step." if on_policy else "."),
        IDLE,
        idle.late_span,
        "rollout.on_policy: false"
        if on_policy
        else "rollout.lookahead: higher; engine.max_sequences: lower",
    )


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
        if seconds.late < limit("time.share") * step.late or not _stands_apart(seconds):
            continue
        if min(seconds.growth, by_token) < limit("time.growth"):
            continue
        much = min(seconds.growth, by_token) >= limit("time.growth_much")
        meanwhile = _keep_rate(run) if phase is Phase.GENERATE else ""
        if phase is Phase.SYNC:
            meanwhile = " `doctor nodes` measures the network."
        again = f", {by_token:.1f} times for each token" if per_token.is_long else ""
        yield Finding(
            "warn" if much else "note",
            f"{phase} takes {seconds.growth:.1f} times as long as at first",
            f"{number(seconds.early)} → {number(seconds.late)} s a step{again}; "
            f"{percent(seconds.late / step.late)} of the step.{meanwhile}",
            f"time/{phase}",
            seconds.span,
            _GROWTH_KNOBS.get(phase),
        )


def _keep_rate(run: RunData) -> str:
    """What explains a longer generation as a rule."""
    kept = track_of(run.metrics.steps, groups.derived(run)[groups.KEPT])
    if not kept.is_long:
        return ""
    return f" Meanwhile mixed groups went {percent(kept.early)} → {percent(kept.late)}."


_GROWTH_KNOBS = {
    Phase.GENERATE: "engine.max_sequences: higher; rollout.lookahead: higher",
    Phase.LOGPROBS: "train.max_tokens_per_microbatch: higher",
    Phase.UPDATE: "train.max_tokens_per_microbatch: higher; policy.recompute",
    Phase.SYNC: "sync.fingerprint_every: higher",
}


def _per_token(run: RunData, phase: str) -> list[float | None]:
    """Seconds of a phase for each token trained on in the step."""
    column = run.metrics.column
    rows = zip(
        column(f"time/{phase}"),
        column("throughput/tokens_per_second"),
        column("time/step"),
        strict=True,
    )
    found: list[float | None] = []
    for seconds, pace, whole in rows:
        tokens = pace * whole if pace and whole else 0.0
        found.append(seconds / tokens if seconds is not None and tokens > 0 else None)
    return found


def _stands_apart(series: Track) -> bool:
    """Whether it rises, and nearly all of its end lies above nearly all of its begin."""
    first, last = sorted(series.values[: series.window]), sorted(series.values[-series.window :])
    return series.rises and last[len(last) // 4] > first[-1 - len(first) // 4]


def slow_steps(run: RunData) -> Iterator[Finding]:
    """Single steps that took many times as long as those before."""
    column = run.metrics.column
    rows = zip(column("time/step"), column("time/checkpoint"), column("time/evaluate"), strict=True)
    own = [None if whole is None else whole - (c or 0.0) - (e or 0.0) for whole, c, e in rows]
    series = track_of(run.metrics.steps, own)
    slow = series.spikes(limit("time.slow_step"))
    if not slow:
        return
    steps = [series.steps[place] for place in slow]
    worst = max(slow, key=series.values.__getitem__)
    at = run.metrics.steps.index(series.steps[worst])
    phase = max(STEP_PHASES, key=lambda one: column(f"time/{one}")[at] or 0.0)
    yield Finding(
        "note",
        f"Slow at {named(steps)}",
        f"Step {series.steps[worst]} took {number(series.values[worst])} s, most of it {phase}; "
        f"the median is {number(median(series.values))} s.",
        "time/step",
        (steps[0], steps[-1]),
        chart="time_phases",
    )


def throughput(run: RunData) -> Iterator[Finding]:
    """Fewer tokens per second than at first."""
    name = "throughput/tokens_per_second"
    series = track(run, name)
    upside_down = Track(series.steps, tuple(-value for value in series.values))
    if not series.is_long or series.growth > limit("throughput.drop"):
        return
    if not _stands_apart(upside_down):
        return
    yield Finding(
        "warn" if series.growth <= limit("throughput.drop_much") else "note",
        f"Throughput is down to {percent(series.growth)} of its start",
        f"{number(series.early)} → {number(series.late)} tokens per second.{_what_grew(run)}",
        name,
        series.span,
    )


def _what_grew(run: RunData) -> str:
    """The phase that takes so many seconds more than at first, as none does."""
    tracks = {phase: track(run, f"time/{phase}") for phase in STEP_PHASES if phase not in _RARE}
    phase, most = max(tracks.items(), key=lambda item: item[1].late - item[1].early)
    if most.late <= most.early:
        return ""
    kept = _keep_rate(run) if phase is Phase.GENERATE else ""
    return (
        f" Of all phases {phase} grew most, {number(most.early)} → {number(most.late)} s a step."
        f"{kept}"
    )


def memory(run: RunData) -> Iterator[Finding]:
    """More memory than planned, or ever more."""
    plan = memory_plan(run)
    planned = plan["phases"] if plan else {}
    over, leaks = [], []
    for phase in STEP_PHASES:
        series = track(run, f"memory/{phase}_gib")
        if not series:
            continue
        most = max(series.values)
        said = planned.get(phase, float("inf"))
        if most > max(limit("memory.over_plan") * said, said + _LEAST_GIB):
            over.append((most / said, phase, most, said))
        if _leaks(series):
            leaks.append((phase, series.second_half()))
    if over:
        _, phase, most, said = max(over)
        yield Finding(
            "warn",
            f"{phase} takes more memory than planned",
            f"{number(most)} GiB, the plan said {number(said)}"
            + (
                f"; so do {', '.join(name for _, name, *_ in over if name != phase)}."
                if over[1:]
                else "."
            ),
            f"memory/{phase}_gib",
            knob="engine.memory_fraction: lower, if it comes near the device's memory; "
            "train.max_tokens_per_microbatch: lower",
        )
    if leaks:
        phase, half = max(leaks, key=lambda one: one[1].values[-1] - one[1].values[0])
        yield Finding(
            "warn",
            f"Memory keeps growing: {', '.join(name for name, _ in leaks)}",
            f"{phase}: {number(half.early)} → {number(half.late)} GiB since step "
            f"{half.steps[0]}. A leak ends a long run.",
            f"memory/{phase}_gib",
            half.span,
        )


def _leaks(series: Track) -> bool:
    """Ever more over the second half, and in each half of that: caches reach their size once."""
    half = series.second_half()
    if not half.is_long or not half.rises:
        return False
    least = max(_LEAST_GIB, limit("memory.leak") * half.early)
    again = half.second_half()
    return half.late - half.early >= least and again.late - again.early >= least / 4


RULES: tuple[Callable[[RunData], Iterator[Finding]], ...] = (
    engines,
    growth,
    slow_steps,
    throughput,
    memory,
)
