"""Findings on the work around the policy: prompts, grades, weights that reach the engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dapo_megatron.report.finding import Finding, Level, track, track_of
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.groups import DECIDED, FATES, KEPT, totals
from dapo_megatron.report.wording import named, number, percent, times

FAILURES = ("timeout", "crash", "memory", "error")
"""Causes of a missing grade: nothing is known of the completion."""

_WORDS = {"all_correct": "all right", "all_wrong": "all wrong"}

GROUPS_STARVED = 0.1  # of the steps: bad; any: a warning


def starved(run: RunData) -> Iterator[Finding]:
    """Steps that trained on fewer groups than they should."""
    wanted = run.count("rollout.prompts_per_step")
    trained = track(run, "groups/trained")
    if not trained or wanted is None:
        return
    short = trained.steps_where(lambda num: num < wanted)
    if not short:
        return
    much = len(short) >= GROUPS_STARVED * len(trained) and len(trained) > 1
    yield trained.finding(
        "bad" if much else "warn",
        f"Starved: {times(len(short), 'step')} trained on fewer than {wanted:,} groups",
        f"{named(short).capitalize()}; the fewest {min(trained.values):,.0f}. {_why_not_kept(run)}",
        "data.train: problems of the right difficulty; rollout.max_prompts_per_step: higher; "
        "rollout.at_bound",
        steps=short,
    )


KEEP_LOW = 0.2  # of decided groups are mixed
KEEP_FALL = 0.6  # of its start: a note


def keep_rate(run: RunData) -> Iterator[Finding]:
    """Few groups are mixed: a step costs more prompts."""
    kept = track(run, KEPT)
    if not kept.is_long:
        return
    low = kept.late < KEEP_LOW
    fell = kept.falls and kept.growth <= KEEP_FALL
    if not low and not fell:
        return
    cost = 1 / kept.late if kept.late > 0 else float("inf")
    yield kept.finding(
        "warn" if low else "note",
        f"{'Only' if low else 'Down to'} {percent(kept.late)} of groups are mixed",
        f"{percent(kept.early)} → {percent(kept.late)}: each group trained on now costs "
        f"{cost:.1f} prompts. {_why_not_kept(run)}",
        "data.train: harder problems if most are all right, easier ones if all wrong",
        steps=kept.late_span,
    )


def _why_not_kept(run: RunData) -> str:
    """Count the groups at the end of the run that were not trained on, by outcome."""
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


GROUPS_LOST = 0.01  # of issued groups


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
        steps = ended.steps_where(lambda num: num > 0)
        share = sums[fate] / sums["issued"]
        if steps and share >= GROUPS_LOST:
            text = f"{sums[fate]:,} of {sums['issued']:,}, at {named(steps)}."
            title = f"{percent(share)} of groups {fate}"
            yield ended.finding("warn", title, text, knob, steps=steps)


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


GROUPS_STALE = 2.0  # times rollout.lookahead, of the mean age


def stale(run: RunData) -> Iterator[Finding]:
    """Groups older than lookahead says."""
    age = track(run, "groups/age_mean")
    ahead = run.number("rollout.lookahead")
    if run.knob("rollout.on_policy") is True or ahead is None:
        return
    if age.is_long and age.late > GROUPS_STALE * ahead:
        yield age.finding(
            "note",
            f"What is trained on is {age.late:.1f} versions old",
            f"Mean age {number(age.early)} → {number(age.late)}; rollout.lookahead is {ahead:g}, "
            "which should be the mean age.",
            "rollout.max_overtake: lower; rollout.max_response_tokens: lower",
            steps=age.late_span,
        )


# ------------------------------------------------------------------------------- grading

GRADING_FAILED = 0.01  # of completions: a warning; any: a note
GRADING_FAILED_MUCH = 0.1  # of completions: bad
GRADING_UNPARSED = 0.5  # of completions


def grading(run: RunData) -> Iterator[Finding]:
    """Completions whose grader failed, by cause and data set."""
    completions = run.metrics.total(DECIDED) * (run.count("rollout.samples_per_prompt") or 0)
    sums = {cause: run.metrics.total(f"grading/{cause}") for cause in FAILURES}
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
    sums: dict[str, float] = {}
    for name in run.metrics.columns:
        match = re.fullmatch(r"grading/(.+)/(\w+)", name)
        if match and match[2] in FAILURES:
            sums[match[1]] = sums.get(match[1], 0.0) + run.metrics.total(name)
    said = ", ".join(f"{source} {count:,.0f}" for source, count in sums.items() if count)
    return f" By data set: {said}." if said else ""


def unparsed(run: RunData) -> Iterator[Finding]:
    """Texts in which the grader found no answer."""
    samples = run.count("rollout.samples_per_prompt")
    if not samples:
        return
    name = "grading/unparsed"
    counts = zip(run.metrics.column(name), run.metrics.column(DECIDED), strict=True)
    column = [None if c is None or not d else c / (d * samples) for c, d in counts]
    shares = track_of(run.metrics.steps, column, name)
    if shares.is_long and shares.late >= GRADING_UNPARSED:
        yield shares.finding(
            "warn",
            f"No answer is found in {percent(shares.late)} of completions",
            f"{percent(shares.early)} → {percent(shares.late)}. They are graded wrong; read some.",
            "data.train: what its prompts ask for, and its grader; "
            "rollout.max_response_tokens: higher, if they are cut off",
            steps=shares.late_span,
        )


# ------------------------------------------------------------------------------- weights


def syncs(run: RunData) -> Iterator[Finding]:
    """Proof that the engines sample from the weights that are trained."""
    compared, unread = track(run, "sync/fingerprinted"), track(run, "sync/unread_tensors")
    largest = track(run, "mismatch/gap_max")
    if unread and (worst := max(unread.values)) > 0:
        steps = unread.steps_where(lambda num: num > 0)
        yield unread.finding(
            "note",
            f"{times(round(worst), 'tensor')} of the engines cannot be read back",
            f"At {named(steps)}: their fingerprints are not compared; the fixed sequences after "
            "each sync still are.",
            "engine.quantization: none, to have all of them compared",
            steps=steps,
        )
    if not compared:
        return
    compared = replace(compared, metric=largest.metric)  # drawn there
    done = len(compared.steps_where(lambda value: value > 0))
    gap = f"; largest gap to the policy {number(max(largest.values))} nats" if largest else ""
    if done == 0 and compared.is_long:
        yield compared.finding(
            "note",
            "The engines' weights were never compared with the policy's",
            f"At none of {times(len(compared), 'sync')} on record{gap}.",
            "sync.fingerprint_every: lower",
        )
    elif done:
        where = "each" if done == len(compared) else f"{done:,}"
        title = f"Sync verified at {where} of {times(len(compared), 'sync')}"
        yield compared.finding("good", title, f"Fingerprints of all weights agreed{gap}.")


RULES = (
    starved,
    lost,
    grading,
    unparsed,
    keep_rate,
    stale,
    syncs,
    books,
)
