"""Outcome of every issued prompt, per step and over the run.

The ledger's counts of each step (rollout/ledger.py):

    issued + carried before
        =  trained + all_correct + all_wrong + overlong + abstained + expired + carried

A group is *decided* when its last completion is graded. It then ends as all_correct, all_wrong,
overlong or abstained, or it is mixed and ready until it is trained on or expires. Without
on_policy, only ready groups expire, so

    newly mixed  =  trained + expired + carried_ready - carried_ready of the step before
    decided      =  newly mixed + all_correct + all_wrong + overlong + abstained

The keep rate is newly mixed / decided, and groups/keep_rate is its forecast. With on_policy nothing
is carried, and expired groups count in neither, because most were undecided. Without
dynamic_sampling, groups are trained on whether mixed or not, and there is no keep rate.
"""

from __future__ import annotations

import math

import pandas as pd

from dapo_megatron.report.run_data import RunData
from dapo_megatron.types import Outcome

OUTCOMES = tuple(Outcome)
IN_WORDS = {
    "issued": "issued",
    "trained": "trained on",
    "all_correct": "all answers right",
    "all_wrong": "all answers wrong",
    "overlong": "too long to compare",
    "abstained": "a grade is missing",
    "expired": "expired",
    "open": "carried on, open",
    "unaccounted": "from steps without metrics",
}
_JUDGED = (Outcome.ALL_CORRECT, Outcome.ALL_WRONG, Outcome.OVERLONG, Outcome.ABSTAINED)

KEPT = "derived/keep_rate"
FORECAST = "groups/keep_rate"
DECIDED = "derived/decided"


def derived(run: RunData) -> dict[str, pd.Series]:
    """Return the keep rate and the number of decided groups by step. Without dynamic sampling, the
    keep rate and its forecast are NaN."""
    column = run.metrics.series
    mixed = column("groups/trained")
    if not run.is_on_policy:
        ready = column("groups/carried_ready")
        # Nothing is carried into step 1. After a missing step the previous number is unknown.
        before = ready.reindex(ready.index - 1).set_axis(ready.index)
        before[before.index == 1] = 0.0
        mixed = mixed + column("groups/expired") + ready - before
        mixed = mixed.where(mixed >= 0)
    decided = mixed + sum(column(f"groups/{outcome}").fillna(0) for outcome in _JUDGED)
    if not trains_on_mixed_only(run):
        missing = decided * math.nan
        return {KEPT: missing, FORECAST: missing, DECIDED: decided}
    return {KEPT: mixed / decided.where(decided > 0), DECIDED: decided}


def trains_on_mixed_only(run: RunData) -> bool:
    """Return True if only mixed groups are trained on (rollout.dynamic_sampling)."""
    return run.setting("rollout.dynamic_sampling") is not False


def note(run: RunData) -> str | None:
    """Return a note to show above the charts, None without one."""
    if trains_on_mixed_only(run):
        return None
    return (
        "rollout.dynamic_sampling is off: groups with only right or only wrong answers are trained "
        "on too. There is no keep rate."
    )


def totals(run: RunData) -> dict[str, int]:
    """Return the number of groups over the run: issued, each outcome, open (carried by the last
    step) and unaccounted (0 unless steps are missing). Empty if nothing was recorded."""
    if not run.metrics.values("groups/issued"):
        return {}
    sums = {name: round(run.metrics.total(f"groups/{name}")) for name in ("issued", *OUTCOMES)}
    sums["open"] = round(run.metrics.last("groups/carried") or 0)
    sums["unaccounted"] = sums["issued"] - sum(sums[outcome] for outcome in OUTCOMES) - sums["open"]
    return sums


def totals_table(run: RunData) -> list[tuple[str, int, float | None]]:
    """Return `totals` as rows of (label, number of groups, share of the issued groups)."""
    sums = totals(run)
    issued = sums.get("issued", 0)
    return [
        (IN_WORDS[name], count, count / issued if issued and name != "issued" else None)
        for name, count in sums.items()
        if count or name in ("issued", "trained")
    ]
