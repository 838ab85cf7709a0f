"""The section "groups": what became of every prompt that was issued.

The ledger's books, step by step (rollout/ledger.py):

    issued + carried before
        =  trained + all_correct + all_wrong + overlong + abstained + expired + carried

A group is *decided* with its last grade. Then it has ended as all_correct, all_wrong, overlong or
abstained, or it is mixed and waits, ready, until it is trained on or expires. So without on_policy,
where only ready groups expire,

    newly mixed  =  trained + expired + carried_ready - carried_ready of the step before
    decided      =  newly mixed + all_correct + all_wrong + overlong + abstained

and the keep rate that came is newly mixed / decided, what the forecast (groups/keep_rate) is of.
With on_policy nothing is carried, and what expires was mostly undecided: it is left out of both.

Without dynamic_sampling a group need not be mixed to be trained on: nothing tells how many were,
and the forecast is of groups with all their grades. Then there is no keep rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo_megatron.report.charts import line, lines
from dapo_megatron.report.folder import RunData, finite

FATES = ("trained", "all_correct", "all_wrong", "overlong", "abstained", "expired")
"""As rollout/ledger.py has them."""
_IN_WORDS = {
    "issued": "issued",
    "trained": "trained on",
    "all_correct": "all answers right",
    "all_wrong": "all answers wrong",
    "overlong": "too long to compare",
    "abstained": "a grade is missing",
    "expired": "expired",
    "open": "carried on, open",
    "unaccounted": "of steps without metrics",
}
_JUDGED = ("all_correct", "all_wrong", "overlong", "abstained")

KEPT = "derived/keep_rate"
FORECAST = "groups/keep_rate"
DECIDED = "derived/decided"

CHARTS: list[dict[str, Any]] = [
    lines(
        "groups_fates",
        "What became of the prompts",
        "Groups that ended in each step, by what became of them. Only mixed groups, with right and "
        "wrong answers, teach anything; with rollout.dynamic_sampling no others are trained on. "
        "The line is what goes on in the next step.",
        "groups",
        [
            line("groups/trained", _IN_WORDS["trained"], color=2),
            line("groups/all_correct", _IN_WORDS["all_correct"], color=0),
            line("groups/all_wrong", _IN_WORDS["all_wrong"], color=1),
            line("groups/overlong", _IN_WORDS["overlong"], color=3),
            line("groups/abstained", _IN_WORDS["abstained"], color=6),
            line("groups/expired", _IN_WORDS["expired"], color=7),
            line("groups/carried", "carried on", color=4, line=True),
        ],
        section="groups",
        kind="stacked_bars",
        overlay=False,
    ),
    lines(
        "groups_keep_rate",
        "Keep rate",
        "Share of decided groups that are mixed: what came in the step, and what the coordinator "
        "expects by the end of it, from which it issues prompts. At 0.25 a step samples four "
        "prompts for each that it trains on.",
        "share of decided groups",
        [
            line(KEPT, "came", color=2),
            line(FORECAST, "forecast", dash=True, color=0),
        ],
        section="groups",
        overlay=False,
        y_range=[0, 1.05],
        y_tick_format=".0%",
    ),
    lines(
        "groups_open",
        "Prompts in flight",
        "Issued in the step and decided in it; carried to the next one, and how many of those are "
        "mixed and only wait for their turn.",
        "groups",
        [
            line("groups/issued", "issued", color=0),
            line(DECIDED, "decided", color=2),
            line("groups/carried", "carried on", color=4),
            line("groups/carried_ready", "carried on, ready", dash=True, color=4),
        ],
        section="groups",
        overlay=False,
    ),
    lines(
        "groups_age",
        "Age of what is trained on",
        "How many weight versions ago the groups of a step were begun. 0 is on-policy; "
        "rollout.lookahead sets the mean.",
        "versions",
        [
            line("groups/age_mean", "mean", color=0),
            line("groups/age_max", "oldest", dash=True, color=1),
        ],
        section="groups",
        overlay=False,
    ),
    lines(
        "groups_fresh",
        "Fresh tokens",
        "Share of the trained tokens that the current weights sampled, and completions that were "
        "interrupted and go on in the next step.",
        "share of tokens",
        [
            line("groups/fresh_token_fraction", "fresh tokens", color=2),
            line(
                "groups/interrupted_completions",
                "interrupted completions",
                axis="y2",
                dash=True,
                color=1,
            ),
        ],
        section="groups",
        overlay=False,
        y_range=[0, 1.05],
        y_tick_format=".0%",
        y2="completions",
    ),
    lines(
        "groups_grading",
        "Completions without a grade, or without an answer",
        "timeout, memory, crash and error: the grader failed, and the group is not trained on. "
        "Unparsed: no answer was found in the text, which is graded wrong.",
        "completions",
        [
            line("grading/unparsed", "no answer found", color=7, line=True),
            line("grading/timeout", "timeout", color=0),
            line("grading/crash", "crash", color=1),
            line("grading/memory", "memory", color=3),
            line("grading/error", "error", color=6),
        ],
        section="groups",
        kind="stacked_bars",
        overlay=False,
    ),
]


def derived(run: RunData) -> dict[str, list[float | None]]:
    """The keep rate that came, and the groups decided, by step; see above. Of a run that has no
    keep rate also the forecast, emptied."""
    newly_mixed = _newly_mixed(run)
    judged = [run.metrics.column(f"groups/{fate}") for fate in _JUDGED]
    decided: list[float | None] = []
    kept: list[float | None] = []
    for at, mixed in enumerate(newly_mixed):
        others = [column[at] for column in judged]
        total = None if mixed is None else mixed + sum(other or 0.0 for other in others)
        total = finite(total)
        decided.append(total)
        kept.append(mixed / total if mixed is not None and total else None)
    if not keeps_mixed_alone(run):
        nothing: list[float | None] = [None] * len(decided)
        return {KEPT: nothing, FORECAST: nothing, DECIDED: decided}
    return {KEPT: kept, DECIDED: decided}


def keeps_mixed_alone(run: RunData) -> bool:
    """Whether groups are only trained on if they are mixed."""
    return run.knob("rollout.dynamic_sampling") is not False


def note(run: RunData) -> str | None:
    """What is to be known before the charts are read."""
    if keeps_mixed_alone(run):
        return None
    return (
        "rollout.dynamic_sampling is off in this run: groups are trained on whether they are mixed "
        "or not, also those all right or all wrong, which teach nothing. So there is no keep rate."
    )


def _newly_mixed(run: RunData) -> list[float | None]:
    steps = run.metrics.steps
    trained = run.metrics.column("groups/trained")
    if run.knob("rollout.on_policy") is True:
        return list(trained)
    expired = run.metrics.column("groups/expired")
    ready = run.metrics.column("groups/carried_ready")
    found: list[float | None] = []
    for at, step in enumerate(steps):
        before = 0.0 if step == 1 else None
        if at > 0 and steps[at - 1] == step - 1:
            before = ready[at - 1]
        here = (trained[at], expired[at], ready[at], before)
        found.append(_balance(here))
    return found


def _balance(here: Sequence[float | None]) -> float | None:
    trained, expired, ready, before = here
    if trained is None or expired is None or ready is None or before is None:
        return None
    mixed = trained + expired + ready - before
    return finite(mixed) if mixed >= 0 else None


def totals(run: RunData) -> dict[str, int]:
    """Groups over the run: issued, each fate, open (carried by the last step) and unaccounted,
    which is issued - fates - open: 0 unless steps are missing. Empty if nothing was recorded."""
    if all(value is None for value in run.metrics.column("groups/issued")):
        return {}
    sums = {name: _sum(run, name) for name in ("issued", *FATES)}
    sums["open"] = round(run.metrics.last("groups/carried") or 0)
    sums["unaccounted"] = sums["issued"] - sum(sums[fate] for fate in FATES) - sums["open"]
    return sums


def totals_table(run: RunData) -> list[tuple[str, int, float | None]]:
    """(what, groups, share of the issued) of `totals`, in words; the first is what was issued."""
    sums = totals(run)
    issued = sums.get("issued", 0)
    return [
        (_IN_WORDS[name], count, count / issued if issued and name != "issued" else None)
        for name, count in sums.items()
        if count or name in ("issued", "trained")
    ]


def _sum(run: RunData, name: str) -> int:
    return sum(round(value) for value in run.metrics.column(f"groups/{name}") if value is not None)
