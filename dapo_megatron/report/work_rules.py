"""Findings on prompts, grading, weights in the engines, time and memory.

Each threshold is a constant next to its rules, and docs/report.md explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from dapo_megatron.report.finding import Finding, Level
from dapo_megatron.report.finding_rule import (
    EVERY_STEP,
    PER_TOKEN,
    PLAIN_STEP,
    UNPARSED,
    FindingRule,
    JudgedSeries,
    RunRule,
    always,
    first_of,
)
from dapo_megatron.report.groups import DECIDED, IN_WORDS, KEPT, OUTCOMES, totals
from dapo_megatron.report.phases import ENGINES_WAIT, IDLE, POLICY_WAITS, memory_plan
from dapo_megatron.report.run_data import RunData
from dapo_megatron.report.wording import number, percent, times
from dapo_megatron.rewards.pool import CAUSES
from dapo_megatron.types import STEP_PHASES, Outcome, Phase

_LEAST_GIB = 0.5

# ---------------------------------------------------------------------------- prompts and grades

GROUPS_STARVED = 0.1  # of the steps: bad; any: a warning
GROUPS_LOST = 0.01  # of issued groups
GROUPS_STALE = 2.0  # mean age, times rollout.lookahead
KEEP_LOW = 0.2  # share of decided groups that are mixed
KEEP_FALL = 0.6  # of its start: a note
GRADING_FAILED = 0.01  # of completions: a warning; any: a note
GRADING_FAILED_MUCH = 0.1  # of completions: bad
GRADING_UNPARSED = 0.5  # of completions


def _share_lost(ended: JudgedSeries) -> float:
    issued = ended.run.metrics.total("groups/issued")
    return float(ended.series.sum()) / issued if issued > 0 else 0.0


_lost = partial(
    FindingRule,
    when={"warn": lambda s: _share_lost(s) >= GROUPS_LOST},
    steps=lambda s: s.where(lambda num: num > 0),
    facts=lambda s: {"share": _share_lost(s), "num": round(s.series.sum())},
)


def ledger(run: RunData) -> Iterator[Finding]:
    """Check that the outcomes of all groups add up to the issued groups."""
    sums, steps = totals(run), run.metrics.steps
    # Older versions had other outcomes. If steps are missing, the sums cannot match.
    is_whole = bool(steps) and len(steps) == steps[-1]
    has_all = all(f"groups/{outcome}" in run.metrics.frame for outcome in OUTCOMES)
    if not sums or not sums["issued"] or not is_whole or not has_all:
        return
    names = [name for name in (*OUTCOMES, "open") if sums[name]]
    ends = ", ".join(f"{sums[name]:,} {IN_WORDS[name]}" for name in names)
    text = f"{sums['issued']:,} issued: {ends}."
    if lost := sums["unaccounted"]:
        text += f" {lost:,} are missing: metrics.jsonl is incomplete."
        title = f"{abs(lost):,} groups are unaccounted for"
        yield Finding("warn", title, text, "groups/issued")
    else:
        yield Finding("good", "Every prompt is accounted for", text, "groups/trained")


def grading(run: RunData) -> Iterator[Finding]:
    """Count the completions whose grader failed, by cause."""
    completions = run.metrics.total(DECIDED) * (run.count("rollout.samples_per_prompt") or 0)
    sums = {cause: run.metrics.total(f"grading/{cause}") for cause in CAUSES}
    failed = sum(sums.values())
    if not failed:
        if completions and any(f"grading/{cause}" in run.metrics.frame for cause in CAUSES):
            text = f"{completions:,.0f} completions without a timeout, crash or error of a grader."
            yield Finding("good", "Every completion was graded", text, "grading/timeout")
        return
    share = failed / completions if completions else 0.0
    level: Level = "warn" if share >= GRADING_FAILED else "note"
    by_cause = ", ".join(f"{count:,.0f} {cause}" for cause, count in sums.items() if count)
    yield Finding(
        "bad" if share >= GRADING_FAILED_MUCH else level,
        f"Graders failed on {times(round(failed), 'completion')}",
        f"{by_cause} ({percent(share)} of completions). Their groups are not trained on.",
        f"grading/{max(sums, key=sums.__getitem__)}",
        "rewards.timeout_seconds: higher; rewards.memory_mib: higher; rewards.workers: more; "
        "data.train: its grader",
    )


def _verified(syncs: JudgedSeries) -> dict[str, str]:
    num, gaps = int((syncs.series > 0).sum()), syncs.other("mismatch/gap_max").series
    is_whole = bool((syncs.series[syncs.series > 0] == 1).all())
    weights = "all weights" if is_whole else "all compared weights"
    which = "each" if num == len(syncs) else f"{num:,}"
    gap = f"; largest gap to the policy {number(gaps.max())} nats" if len(gaps) else ""
    return {"which": which, "syncs": times(len(syncs), "sync"), "gap": gap, "weights": weights}


_syncs = partial(FindingRule, "sync/fingerprinted", facts=_verified, chart="mismatch")

PROMPTS: tuple[RunRule, ...] = (
    FindingRule(
        "groups/trained",
        {"bad": lambda s: len(s.hits) >= GROUPS_STARVED * len(s) and len(s) > 1, "warn": always},
        "Starved: {length} trained on fewer than {s.bound:,.0f} groups",
        "At {steps}; the minimum was {fewest:,.0f}.",
        "data.train: problems of suitable difficulty; rollout.max_prompts_per_step: higher; "
        "rollout.at_bound",
        bound="rollout.prompts_per_step",
        steps=lambda s: s.where(lambda trained: trained < s.bound),
        facts=lambda s: {"length": times(len(s.hits), "step"), "fewest": s.series.min()},
    ),
    _lost(
        f"groups/{Outcome.ABSTAINED}",
        title="{share!p} of groups abstained",
        text="{num:,} groups at {steps}: a grade is missing.",
        setting="rewards.timeout_seconds: higher; rewards.memory_mib: higher; data.train: "
        "its grader",
    ),
    _lost(
        f"groups/{Outcome.EXPIRED}",
        title="{share!p} of groups expired",
        text="{num:,} groups at {steps}.",
        setting="rollout.max_age: higher; rollout.lookahead: lower",
        only=lambda run: not run.is_on_policy,  # on-policy, open groups expire at every step
    ),
    grading,
    FindingRule(
        UNPARSED,
        {"warn": lambda s: s.late >= GRADING_UNPARSED},
        "No answer is found in {s.late!p} of completions",
        "{s.early!p} → {s.late!p}. They are graded wrong. Read some of them.",
        "data.train: the answer format in its prompts, and its grader; "
        "rollout.max_response_tokens: higher, if they are cut off",
        trend=True,
        chart="groups_grading",
    ),
    FindingRule(
        KEPT,
        {
            "warn": lambda s: s.late < KEEP_LOW,
            "note": lambda s: s.falls and s.growth <= KEEP_FALL,
        },
        "Only {s.late!p} of groups are mixed",
        "{s.early!p} → {s.late!p}: each group trained on now costs {cost:.1f} prompts.",
        "data.train: harder problems if most are all right, easier ones if all wrong",
        trend=True,
        facts=lambda s: {"cost": 1 / s.late if s.late > 0 else float("inf")},
    ),
    FindingRule(
        "groups/age_mean",
        {"note": lambda s: s.late > GROUPS_STALE * s.bound},
        "Trained groups are {s.late:.1f} versions old",
        "Mean age {s.early!n} → {s.late!n}; rollout.lookahead is {s.bound:g}.",
        "rollout.max_overtake: lower; rollout.max_response_tokens: lower",
        trend=True,
        only=lambda run: not run.is_on_policy,
        bound="rollout.lookahead",
    ),
    FindingRule(
        "sync/unread_tensors",
        {"note": always},
        "{s.most:.0f} tensors of the engines cannot be read back",
        "At {steps}: their fingerprints are not compared.",
        "engine.quantization: none, to compare all tensors",
        steps=lambda s: s.where(lambda num: num > 0),
    ),
    first_of(
        _syncs(
            {"good": lambda s: s.series.max() > 0},
            "Sync verified at {which} of {syncs}",
            "The fingerprints of {weights} were equal{gap}.",
        ),
        _syncs(
            {"note": always},
            "The engines' weights were never compared with the policy's",
            "At none of {syncs}{gap}.",
            "sync.fingerprint_every: lower",
            trend=True,
        ),
    ),
    ledger,
)


# ---------------------------------------------------------------------------- time and memory

ENGINES_IDLE = 0.3  # of generation: a note
ENGINES_IDLE_MUCH = 0.5  # of generation: a warning
SIDE_WAITS = 0.5  # of a step: a warning
TIME_GROWTH = 1.5  # times its start, in seconds and in seconds per token: a note
TIME_GROWTH_MUCH = 3.0  # times its start: a warning
TIME_SHARE = 0.1  # of a step; phases below it are not judged
TIME_SLOW_STEP = 3.0  # times the median of the 20 steps before
THROUGHPUT_DROP = 0.7  # of its start: a note
THROUGHPUT_DROP_MUCH = 0.5  # of its start: a warning
MEMORY_OVER_PLAN = 1.1  # times the plan, and 0.5 GiB above it
MEMORY_LEAK = 0.1  # of its size, and 0.5 GiB, over the second half of the run

_GROWTH_KNOBS = {
    Phase.GENERATE: "engine.max_sequences: higher; rollout.lookahead: higher",
    Phase.LOGPROBS: "train.max_tokens_per_microbatch: higher",
    Phase.UPDATE: "train.max_tokens_per_microbatch: higher; policy.recompute",
    Phase.SYNC: "sync.fingerprint_every: higher",
}


def growth(phase: Phase) -> FindingRule:
    """Return the rule for a phase that became slower, in seconds and in seconds per token."""

    def grew(seconds: JudgedSeries, times: float) -> bool:
        per_token, step = seconds.other(PER_TOKEN.format(phase)), seconds.other("time/step")
        is_large = seconds.late >= TIME_SHARE * step.late > 0
        token_growth = per_token.growth if per_token.is_long else seconds.growth
        is_clear = seconds.rises and seconds.is_apart
        return is_large and is_clear and min(seconds.growth, token_growth) >= times

    return FindingRule(
        f"time/{phase}",
        {"warn": lambda s: grew(s, TIME_GROWTH_MUCH), "note": lambda s: grew(s, TIME_GROWTH)},
        f"{phase} takes {{s.growth:.1f}} times as long as at the start",
        "{s.early!n} → {s.late!n} s per step, and more seconds per token.",
        _GROWTH_KNOBS.get(phase),
        trend=True,
    )


def waits(metric: str, who: str, change: str) -> FindingRule:
    """Return the rule for a side, the policy or engines on other GPUs, that waits most of the time
    for the other. `change` is that of engine.replicas, which gives GPUs to the other side."""

    def setting(waiting: JudgedSeries) -> str:
        if waiting.run.is_on_policy:
            return "rollout.on_policy: false; engine.colocated: true"
        return f"engine.replicas: {change}, on the same GPUs in total"

    return FindingRule(
        metric,
        {"warn": lambda s: s.late > SIDE_WAITS},
        f"{who} {{s.late!p}} of a step",
        "{s.early!p} → {s.late!p} of time/step.",
        "{setting}",
        facts=lambda s: {"setting": setting(s)},
    )


def _drops(throughput: JudgedSeries, share: float) -> bool:
    return throughput.growth <= share and throughput.falls and throughput.is_apart


def over_plan(run: RunData) -> Iterator[Finding]:
    """Compare the memory of each phase with the plan."""
    over = []
    for phase, gib in memory_plan(run).items():
        peak = max(run.metrics.values(f"memory/{phase}_gib"), default=0.0)
        if peak > max(MEMORY_OVER_PLAN * gib, gib + _LEAST_GIB):
            text = f"{phase} {number(peak)} GiB (planned {number(gib)})"
            over.append((peak / gib, phase, text))
    if over:
        yield Finding(
            "warn",
            f"{max(over)[1]} takes more memory than planned",
            f"Peaks: {', '.join(text for *_, text in over)}.",
            f"memory/{max(over)[1]}_gib",
            "engine.memory_fraction: lower, if the peak is near the device's memory; "
            "train.max_tokens_per_microbatch: lower",
        )


def leak(phase: Phase) -> FindingRule:
    """Return the rule for a phase whose memory grows over the second half of the run, and still
    over its last quarter, because the growth of caches stops."""

    def leaks(memory: JudgedSeries) -> bool:
        half = memory.half
        threshold = max(_LEAST_GIB, MEMORY_LEAK * half.early)
        return half.rises and half.change >= threshold and half.half.change >= threshold / 4

    return FindingRule(
        f"memory/{phase}_gib",
        {"warn": leaks},
        f"Memory keeps growing: {phase}",
        "{s.half.early!n} → {s.half.late!n} GiB over the second half of the run. A memory leak "
        "will crash a long run.",
    )


TIME: tuple[RunRule, ...] = (
    FindingRule(
        IDLE,
        {"warn": lambda s: s.late >= ENGINES_IDLE_MUCH, "note": lambda s: s.late >= ENGINES_IDLE},
        "Engines are idle for {s.late!p} of generation",
        "{s.early!p} → {s.late!p} of time/generate, mean over replicas.",
        "{setting}",
        facts=lambda s: {
            "setting": "rollout.on_policy: false"
            if s.run.is_on_policy
            else "rollout.lookahead: higher; engine.max_sequences: lower"
        },
    ),
    waits(POLICY_WAITS, "The policy waits for", "higher"),
    waits(ENGINES_WAIT, "Engines wait for", "lower"),
    *map(growth, EVERY_STEP),
    FindingRule(
        PLAIN_STEP,
        {"note": always},
        "Slow at {steps}",
        "Step {s.peak} took {s.most!n} s; recent steps take {s.late!n} s.",
        steps=lambda s: s.spikes(TIME_SLOW_STEP),
        chart="time_phases",
    ),
    FindingRule(
        "throughput/tokens_per_second",
        {
            "warn": lambda s: _drops(s, THROUGHPUT_DROP_MUCH),
            "note": lambda s: _drops(s, THROUGHPUT_DROP),
        },
        "Throughput is down to {s.growth!p} of its start",
        "{s.early!n} → {s.late!n} tokens per second.",
    ),
    over_plan,
    *map(leak, STEP_PHASES),
)
