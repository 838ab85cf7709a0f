"""Findings on the work around the policy: prompts, grades, weights that reach the engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from dapo_megatron.report.finding import Finding, Level, named, number, percent, times
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.groups import DECIDED, FATES, KEPT, derived, totals
from dapo_megatron.report.thresholds import limit
from dapo_megatron.report.trend import track, track_of

FAILURES = ("timeout", "crash", "memory", "error")
"""Of a grading: nothing is known of the completion."""

_WORDS = {"all_correct": "all right", "all_wrong": "all wrong"}


def starved(run: RunData) -> Iterator[Finding]:
    """Steps that trained on fewer groups than they should."""
    wanted = run.count("rollout.prompts_per_step")
    trained = track(run, "groups/trained")
    if not trained or wanted is None:
        return
    short = [s for s, v in zip(trained.steps, trained.values, strict=True) if v < wanted]
    if not short:
        return
    fewest = min(trained.values)
    much = len(short) >= limit("groups.starved") * len(trained) and len(trained) > 1
    yield Finding(
        "bad" if much else "warn",
        f"Starved: {times(len(short), 'step')} trained on fewer than {wanted:,} groups",
        f"{named(short)[:1].upper()}{named(short)[1:]}; the fewest {fewest:,.0f}. "
        f"{_why_not_kept(run)}",
        "groups/trained",
        (short[0], short[-1]),
        "data.train: problems of the right difficulty; rollout.max_prompts_per_step: higher; "
        "rollout.at_bound",
    )


def keep_rate(run: RunData) -> Iterator[Finding]:
    """Few groups are mixed: a step costs more prompts."""
    kept = track_of(run.metrics.steps, derived(run)[KEPT])
    if not kept.is_long:
        return
    low = kept.late < limit("keep.low")
    fell = kept.falls and kept.growth <= limit("keep.fall")
    if not low and not fell:
        return
    cost = 1 / kept.late if kept.late > 0 else float("inf")
    yield Finding(
        "warn" if low else "note",
        f"{'Only' if low else 'Down to'} {percent(kept.late)} of groups are mixed",
        f"{percent(kept.early)} → {percent(kept.late)}: each group trained on now costs "
        f"{cost:.1f} prompts. {_why_not_kept(run)}",
        KEPT,
        kept.late_span,
        "data.train: harder problems if most are all right, easier ones if all wrong",
    )


def _why_not_kept(run: RunData) -> str:
    """What the groups of the last quarter of the run ended as that were not trained on."""
    sums = {}
    for fate in FATES[1:]:
        ended = track(run, f"groups/{fate}")
        if total := sum(ended.values[-ended.window :]):
            sums[fate] = total
    said = [
        f"{total:,.0f} {_WORDS.get(fate, fate)}"
        for fate, total in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return f"Lately not trained on: {', '.join(said)}." if said else ""


def lost(run: RunData) -> Iterator[Finding]:
    """Groups that expired or abstained, and books that do not balance."""
    sums = totals(run)
    if not sums or not sums["issued"]:
        return
    knobs = {
        "abstained": "rewards.timeout_seconds: higher; rewards.memory_mib: higher; "
        "data.train: its grader",
        "expired": "rollout.max_age: higher; rollout.lookahead: lower",
    }
    for fate, knob in knobs.items():
        if fate == "expired" and run.knob("rollout.on_policy") is True:
            continue  # what is open at the end of a step expires
        ended = track(run, f"groups/{fate}")
        steps = [s for s, v in zip(ended.steps, ended.values, strict=True) if v > 0]
        share = sums[fate] / sums["issued"]
        if not steps or share < limit("groups.lost"):
            continue
        yield Finding(
            "warn",
            f"{percent(share)} of groups {fate}",
            f"{sums[fate]:,} of {sums['issued']:,}, at {named(steps)}.",
            f"groups/{fate}",
            (steps[0], steps[-1]),
            knob,
        )


def books(run: RunData) -> Iterator[Finding]:
    """Every prompt is accounted for, or is not."""
    sums = totals(run)
    steps = run.metrics.steps
    # Older versions had other fates; without the first steps the sums cannot match.
    is_whole = bool(steps) and len(steps) == steps[-1]
    has_all = all(f"groups/{fate}" in run.metrics.columns for fate in FATES)
    if not sums or not sums["issued"] or not is_whole or not has_all:
        return
    said = ", ".join(
        f"{sums[name]:,} {_WORDS.get(name, name)}" for name in (*FATES, "open") if sums[name]
    )
    if sums["unaccounted"]:
        yield Finding(
            "warn",
            f"{abs(sums['unaccounted']):,} groups are unaccounted for",
            f"{sums['issued']:,} issued = {said} and {sums['unaccounted']:,} of which nothing is "
            "known: metrics.jsonl is not whole.",
            "groups/issued",
        )
    else:
        yield Finding(
            "good",
            "Every prompt is accounted for",
            f"{sums['issued']:,} groups issued = {said}.",
            "groups/trained",
        )


def stale(run: RunData) -> Iterator[Finding]:
    """Groups older than lookahead says."""
    age = track(run, "groups/age_mean")
    ahead = run.number("rollout.lookahead")
    if run.knob("rollout.on_policy") is True or ahead is None:
        return
    if age.is_long and age.late > limit("groups.stale") * ahead:
        yield Finding(
            "note",
            f"What is trained on is {age.late:.1f} versions old",
            f"Mean age {number(age.early)} → {number(age.late)}; rollout.lookahead is {ahead:g}, "
            "which should be the mean age.",
            "groups/age_mean",
            age.late_span,
            "rollout.max_overtake: lower; rollout.max_response_tokens: lower",
        )


# ------------------------------------------------------------------------------- grading


def grading(run: RunData) -> Iterator[Finding]:
    """Completions whose grader failed, by cause and data set."""
    completions = _graded(run)
    sums = {cause: _sum(run, f"grading/{cause}") for cause in FAILURES}
    failed = sum(sums.values())
    if not failed:
        if completions and any(f"grading/{cause}" in run.metrics.columns for cause in FAILURES):
            yield Finding(
                "good",
                "Every completion was graded",
                f"{completions:,.0f} completions, no timeout, crash or error of a grader.",
                "grading/timeout",
            )
        return
    share = failed / completions if completions else 0.0
    level: Level = "warn" if share >= limit("grading.failed") else "note"
    if share >= limit("grading.failed_much"):
        level = "bad"
    metric = max(sums, key=sums.__getitem__)
    by_cause = ", ".join(f"{count:,.0f} {cause}" for cause, count in sums.items() if count)
    part = f" ({percent(share)} of {completions:,.0f})" if completions else ""
    yield Finding(
        level,
        f"Graders failed on {times(round(failed), 'completion')}",
        f"{by_cause}{part}.{_by_source(run)} Their groups are not trained on.",
        f"grading/{metric}",
        knob="rewards.timeout_seconds: higher; rewards.memory_mib: higher; rewards.workers: more; "
        "data.train: its grader",
    )


def _by_source(run: RunData) -> str:
    found: dict[str, float] = {}
    for name in run.metrics.columns:
        match = re.fullmatch(r"grading/(.+)/(\w+)", name)
        if match and match[2] in FAILURES:
            found[match[1]] = found.get(match[1], 0.0) + _sum(run, name)
    said = ", ".join(f"{source} {count:,.0f}" for source, count in found.items() if count)
    return f" By data set: {said}." if said else ""


def unparsed(run: RunData) -> Iterator[Finding]:
    """Texts in which the grader found no answer."""
    samples = run.count("rollout.samples_per_prompt")
    if not samples:
        return
    decided = derived(run)[DECIDED]
    counts = run.metrics.column("grading/unparsed")
    shares = track_of(
        run.metrics.steps,
        [
            None if c is None or not d else c / (d * samples)
            for c, d in zip(counts, decided, strict=True)
        ],
    )
    if shares.is_long and shares.late >= limit("grading.unparsed"):
        yield Finding(
            "warn",
            f"No answer is found in {percent(shares.late)} of completions",
            f"{percent(shares.early)} → {percent(shares.late)}. They are graded wrong; read some.",
            "grading/unparsed",
            shares.late_span,
            "data.train: what its prompts ask for, and its grader; "
            "rollout.max_response_tokens: higher, if they are cut off",
        )


def _graded(run: RunData) -> float:
    samples = run.count("rollout.samples_per_prompt")
    decided = sum(value for value in derived(run)[DECIDED] if value is not None)
    return decided * samples if samples is not None else 0.0


def _sum(run: RunData, name: str) -> float:
    return sum(value for value in run.metrics.column(name) if value is not None)


# ------------------------------------------------------------------------------- weights


def syncs(run: RunData) -> Iterator[Finding]:
    """Whether the engines sample from the weights that are trained."""
    compared, unread = track(run, "sync/fingerprinted"), track(run, "sync/unread_tensors")
    largest = track(run, "mismatch/gap_max")
    if unread and (worst := max(unread.values)) > 0:
        steps = [s for s, v in zip(unread.steps, unread.values, strict=True) if v > 0]
        yield Finding(
            "note",
            f"{times(round(worst), 'tensor')} of the engines cannot be read back",
            f"At {named(steps)}: their fingerprints are not compared; the fixed sequences after "
            "each sync still are.",
            "sync/unread_tensors",
            (steps[0], steps[-1]),
            "engine.quantization: none, to have all of them compared",
        )
    if not compared:
        return
    done = sum(value > 0 for value in compared.values)
    gap = f"; largest gap to the policy {number(max(largest.values))} nats" if largest else ""
    if done == 0 and compared.is_long:
        yield Finding(
            "note",
            "The engines' weights were never compared with the policy's",
            f"At none of {times(len(compared), 'sync')} on record{gap}.",
            "mismatch/gap_max",
            compared.span,
            "sync.fingerprint_every: lower",
        )
    elif done:
        where = "each" if done == len(compared) else f"{done:,}"
        yield Finding(
            "good",
            f"Sync verified at {where} of {times(len(compared), 'sync')}",
            f"Fingerprints of all weights agreed{gap}.",
            "mismatch/gap_max",
            compared.span,
        )


RULES: tuple[Callable[[RunData], Iterator[Finding]], ...] = (
    starved,
    lost,
    grading,
    unparsed,
    keep_rate,
    stale,
    syncs,
    books,
)
