"""Outcome of every prompt that was issued, step by step and over the run.

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

from dapo_megatron.report.folder import RunData, finite
from dapo_megatron.types import Fate

FATES = tuple(Fate)
IN_WORDS = {
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
_JUDGED = (Fate.ALL_CORRECT, Fate.ALL_WRONG, Fate.OVERLONG, Fate.ABSTAINED)

KEPT = "derived/keep_rate"
FORECAST = "groups/keep_rate"
DECIDED = "derived/decided"


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
    """True if groups are only trained on if they are mixed."""
    return run.knob("rollout.dynamic_sampling") is not False


def note(run: RunData) -> str | None:
    """Return a note to read before the charts."""
    if keeps_mixed_alone(run):
        return None
    return (
        "rollout.dynamic_sampling is off in this run: groups are trained on whether they are mixed "
        "or not, also those all right or all wrong, which teach nothing. So there is no keep rate."
    )


def _newly_mixed(run: RunData) -> list[float | None]:
    steps, column = run.metrics.steps, run.metrics.column
    trained_on, ready_after = column("groups/trained"), column("groups/carried_ready")
    if run.is_on_policy:
        return list(trained_on)
    ready_before = {0: 0.0, **dict(zip(steps, ready_after, strict=True))}
    newly_mixed: list[float | None] = []
    rows = zip(steps, trained_on, column("groups/expired"), ready_after, strict=True)
    for step, trained, expired, ready in rows:
        before = ready_before.get(step - 1)
        mixed = None
        if not (trained is None or expired is None or ready is None or before is None):
            mixed = finite(trained + expired + ready - before)
        newly_mixed.append(mixed if mixed is not None and mixed >= 0 else None)
    return newly_mixed


def totals(run: RunData) -> dict[str, int]:
    """Groups over the run: issued, each fate, open (carried by the last step) and unaccounted,
    which is issued - fates - open: 0 unless steps are missing. Empty if nothing was recorded."""
    if not run.metrics.values("groups/issued"):
        return {}
    sums = {
        name: sum(map(round, run.metrics.values(f"groups/{name}"))) for name in ("issued", *FATES)
    }
    sums["open"] = round(run.metrics.last("groups/carried") or 0)
    sums["unaccounted"] = sums["issued"] - sum(sums[fate] for fate in FATES) - sums["open"]
    return sums


def totals_table(run: RunData) -> list[tuple[str, int, float | None]]:
    """(what, groups, share of the issued) of `totals`, in words; the first is what was issued."""
    sums = totals(run)
    issued = sums.get("issued", 0)
    return [
        (IN_WORDS[name], count, count / issued if issued and name != "issued" else None)
        for name, count in sums.items()
        if count or name in ("issued", "trained")
    ]
