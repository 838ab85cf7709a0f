"""Findings on the work around the policy: prompts, grades, weights that reach the engines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from dapo_megatron.report.finding import Column, Finding, Level, track
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.groups import DECIDED, FATES, KEPT, totals
from dapo_megatron.report.rule import Case, Rule, RunRule, always, first_of, lately
from dapo_megatron.report.wording import number, percent, times
from dapo_megatron.rewards.pool import CAUSES
from dapo_megatron.types import Fate

_WORDS: dict[str, str] = {Fate.ALL_CORRECT: "all right", Fate.ALL_WRONG: "all wrong"}

GROUPS_STARVED = 0.1  # of the steps: bad; any: a warning

starved = Rule(
    "groups/trained",
    {"bad": lambda s: len(s.hits) >= GROUPS_STARVED * len(s) > 0 and len(s) > 1, "warn": always},
    "Starved: {length} trained on fewer than {s.bound:,.0f} groups",
    "At {steps}; the fewest {fewest:,.0f}. {why}",
    "data.train: problems of the right difficulty; rollout.max_prompts_per_step: higher; "
    "rollout.at_bound",
    bound="rollout.prompts_per_step",
    steps=lambda s: s.where(lambda trained: trained < s.bound),
    facts=lambda s: {
        "length": times(len(s.hits), "step"),
        "fewest": min(s.values),
        "why": _why_not_kept(s.run),
    },
)


def _why_not_kept(run: RunData) -> str:
    """Count the groups at the end of the run that were not trained on, by outcome."""
    sums = Counter[str]()
    for fate in FATES[1:]:
        ended = track(run, f"groups/{fate}")
        sums[fate] = round(sum(ended.values[-ended.window :]))
    ends = ", ".join(f"{num:,} {_WORDS.get(fate, fate)}" for fate, num in sums.most_common() if num)
    return f"Lately not trained on: {ends}." if ends else ""


KEEP_LOW = 0.2  # of decided groups are mixed
KEEP_FALL = 0.6  # of its start: a note

_keep_rate = partial(
    Rule,
    KEPT,
    text="{s.early!p} → {s.late!p}: each group trained on now costs {cost:.1f} prompts. {why}",
    knob="data.train: harder problems if most are all right, easier ones if all wrong",
    trend=True,
    steps=lately,
    facts=lambda s: {
        "cost": 1 / s.late if s.late > 0 else float("inf"),
        "why": _why_not_kept(s.run),
    },
)
keep_rate = first_of(
    _keep_rate({"warn": lambda s: s.late < KEEP_LOW}, "Only {s.late!p} of groups are mixed"),
    _keep_rate(
        {"note": lambda s: s.falls and s.growth <= KEEP_FALL},
        "Down to {s.late!p} of groups are mixed",
    ),
)

GROUPS_LOST = 0.01  # of issued groups


def lost(fate: Fate, knob: str, **more: Any) -> Rule:
    """Return the rule on groups that ended as `fate` without being trained on."""

    def facts(ended: Case) -> dict[str, Any]:
        sums = totals(ended.run) or {"issued": 0, fate: 0}
        share = sums[fate] / sums["issued"] if sums["issued"] else 0.0
        return {"num": sums[fate], "issued": sums["issued"], "share": share}

    return Rule(
        f"groups/{fate}",
        {"warn": lambda s: facts(s)["share"] >= GROUPS_LOST},
        f"{{share!p}} of groups {fate}",
        "{num:,} of {issued:,}, at {steps}.",
        knob,
        steps=lambda s: s.where(lambda num: num > 0),
        facts=facts,
        **more,
    )


abstained = lost(
    Fate.ABSTAINED,
    "rewards.timeout_seconds: higher; rewards.memory_mib: higher; data.train: its grader",
)
expired = lost(
    Fate.EXPIRED,
    "rollout.max_age: higher; rollout.lookahead: lower",
    only=lambda run: not run.is_on_policy,  # there what is open at the end of a step expires
)


def ledger(run: RunData) -> Iterator[Finding]:
    """Check that every prompt is accounted for."""
    sums = totals(run)
    steps = run.metrics.steps
    # Older versions had other fates; without the first steps the sums cannot match.
    is_whole = bool(steps) and len(steps) == steps[-1]
    has_all = all(f"groups/{fate}" in run.metrics.columns for fate in FATES)
    if not sums or not sums["issued"] or not is_whole or not has_all:
        return
    ends = ", ".join(
        f"{sums[name]:,} {_WORDS.get(name, name)}" for name in (*FATES, "open") if sums[name]
    )
    if sums["unaccounted"]:
        yield Finding(
            "warn",
            f"{abs(sums['unaccounted']):,} groups are unaccounted for",
            f"{sums['issued']:,} issued = {ends} and {sums['unaccounted']:,} of which nothing is "
            "known: metrics.jsonl is not whole.",
            "groups/issued",
        )
    else:
        title, text = "Every prompt is accounted for", f"{sums['issued']:,} groups issued = {ends}."
        yield Finding("good", title, text, "groups/trained")


GROUPS_STALE = 2.0  # times rollout.lookahead, of the mean age

stale = Rule(
    "groups/age_mean",
    {"note": lambda s: s.late > GROUPS_STALE * s.bound},
    "What is trained on is {s.late:.1f} versions old",
    "Mean age {s.early!n} → {s.late!n}; rollout.lookahead is {s.bound:g}, which should be the mean "
    "age.",
    "rollout.max_overtake: lower; rollout.max_response_tokens: lower",
    trend=True,
    only=lambda run: not run.is_on_policy,
    bound="rollout.lookahead",
    steps=lately,
)

# ------------------------------------------------------------------------------- grading

GRADING_FAILED = 0.01  # of completions: a warning; any: a note
GRADING_FAILED_MUCH = 0.1  # of completions: bad
GRADING_UNPARSED = 0.5  # of completions


def grading(run: RunData) -> Iterator[Finding]:
    """Count the completions whose grader failed, by cause and data set."""
    completions = run.metrics.total(DECIDED) * (run.count("rollout.samples_per_prompt") or 0)
    sums = {cause: run.metrics.total(f"grading/{cause}") for cause in CAUSES}
    failed = sum(sums.values())
    if not failed:
        if completions and any(f"grading/{cause}" in run.metrics.columns for cause in CAUSES):
            yield Finding(
                "good",
                "Every completion was graded",
                f"{completions:,.0f} completions, no timeout, crash or error of a grader.",
                "grading/timeout",
            )
        return
    share = failed / completions if completions else 0.0
    level: Level = "warn" if share >= GRADING_FAILED else "note"
    if share >= GRADING_FAILED_MUCH:
        level = "bad"
    by_cause = ", ".join(f"{count:,.0f} {cause}" for cause, count in sums.items() if count)
    part = f" ({percent(share)} of {completions:,.0f})" if completions else ""
    yield Finding(
        level,
        f"Graders failed on {times(round(failed), 'completion')}",
        f"{by_cause}{part}.{_by_source(run)} Their groups are not trained on.",
        f"grading/{max(sums, key=sums.__getitem__)}",
        knob="rewards.timeout_seconds: higher; rewards.memory_mib: higher; rewards.workers: more; "
        "data.train: its grader",
    )


def _by_source(run: RunData) -> str:
    sums = Counter[str]()
    for name in run.metrics.columns:
        if match := re.fullmatch(rf"grading/(.+)/({'|'.join(CAUSES)})", name):
            sums[match[1]] += round(run.metrics.total(name))
    sources = ", ".join(f"{source} {count:,}" for source, count in sums.items() if count)
    return f" By data set: {sources}." if sources else ""


def _unparsed_share(run: RunData) -> Column:
    samples = run.count("rollout.samples_per_prompt")
    counts = zip(run.metrics.column("grading/unparsed"), run.metrics.column(DECIDED), strict=True)
    return [
        num / (of * samples) if num is not None and of and samples else None for num, of in counts
    ]


unparsed = Rule(
    "grading/unparsed",
    {"warn": lambda s: s.late >= GRADING_UNPARSED},
    "No answer is found in {s.late!p} of completions",
    "{s.early!p} → {s.late!p}. They are graded wrong; read some.",
    "data.train: what its prompts ask for, and its grader; rollout.max_response_tokens: higher, "
    "if they are cut off",
    trend=True,
    column=_unparsed_share,
    steps=lately,
)

# ------------------------------------------------------------------------------- weights

unread = Rule(
    "sync/unread_tensors",
    {"note": always},
    "{num} of the engines cannot be read back",
    "At {steps}: their fingerprints are not compared; the fixed sequences after each sync still "
    "are.",
    "engine.quantization: none, to have all of them compared",
    steps=lambda s: s.where(lambda num: num > 0),
    facts=lambda s: {"num": times(round(s.most), "tensor")},
)


def _compared(run: RunData) -> Column:
    return run.metrics.column("sync/fingerprinted")


def _verified(syncs: Case) -> dict[str, str]:
    num, gaps = len(syncs.where(lambda value: value > 0)), syncs.other("mismatch/gap_max").values
    return {
        "which": "each" if num == len(syncs) else f"{num:,}",
        "syncs": times(len(syncs), "sync"),
        "gap": f"; largest gap to the policy {number(max(gaps))} nats" if gaps else "",
    }


# Drawn with the gap of engine and policy.
_syncs = partial(Rule, "mismatch/gap_max", column=_compared, facts=_verified)
syncs = first_of(
    _syncs(
        {"good": lambda s: max(s.values) > 0},
        "Sync verified at {which} of {syncs}",
        "Fingerprints of all weights agreed{gap}.",
    ),
    _syncs(
        {"note": always},
        "The engines' weights were never compared with the policy's",
        "At none of {syncs} on record{gap}.",
        "sync.fingerprint_every: lower",
        trend=True,
    ),
)


RULES: tuple[RunRule, ...] = (
    starved,
    abstained,
    expired,
    grading,
    unparsed,
    keep_rate,
    stale,
    unread,
    syncs,
    ledger,
)
