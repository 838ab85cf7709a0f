"""Series that follow from the metrics of a run: outcomes of prompts, phases of a step, waiting.

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
from dataclasses import replace

import pandas as pd

from dapo_megatron.report.run_data import RunData, frame_of
from dapo_megatron.types import STEP_PHASES, Outcome

KEPT = "derived/keep_rate"
DECIDED = "derived/decided"
CLIPPED = "derived/clipped_tokens"
UNPARSED = "derived/unparsed_share"
GENERATE, REST = "derived/time_generate", "derived/time_rest"
"""Seconds of generate without waiting for graders, and seconds outside all phases."""
MOVED = "derived/time_sync_moved"
"""Seconds of sync that move weights."""
IDLE = "derived/engine_idle"
"""Share of generation in which the engines have no request."""
WAITING = "derived/waiting"
"""Mean number of completions that wait for their environment during generation."""
POLICY_WAITS, ENGINES_WAIT = "derived/policy_waits", "derived/engines_wait"
"""Shares of a step, with engines on other GPUs."""
PLANNED = "derived/plan_{}_gib"
"""Planned memory of a phase in GiB; format it with the phase."""

FORECAST = "groups/keep_rate"
OUTCOMES: dict[str, str] = {
    Outcome.TRAINED: "trained on",
    Outcome.ALL_CORRECT: "all answers right",
    Outcome.ALL_WRONG: "all answers wrong",
    Outcome.OVERLONG: "too long to compare",
    Outcome.ABSTAINED: "a grade is missing",
    Outcome.EXPIRED: "expired",
}
"""Outcome of a group -> words for it."""


def derived(run: RunData) -> RunData:
    """Return the run with the derived series added to its metrics."""
    columns = dict(run.metrics.items()) | _groups(run) | _times(run)
    for phase in STEP_PHASES:
        measured = run.series(f"memory/{phase}_gib")
        planned = run.plan.phases.get(phase, math.nan)
        columns[PLANNED.format(phase)] = measured.where(measured.isna(), planned)
    return replace(run, metrics=frame_of(run.steps, columns).dropna(axis=1, how="all"))


def _groups(run: RunData) -> dict[str, pd.Series]:
    mixed = run.series("groups/trained")
    if not run.is_on_policy:
        ready = run.series("groups/carried_ready")
        # Nothing is carried into step 1. After a missing step the previous number is unknown.
        before = ready.reindex(ready.index - 1).set_axis(ready.index)
        before[before.index == 1] = 0.0
        mixed = mixed + run.series("groups/expired") + ready - before
        mixed = mixed.where(mixed >= 0)
    judged = (Outcome.ALL_CORRECT, Outcome.ALL_WRONG, Outcome.OVERLONG, Outcome.ABSTAINED)
    decided = mixed + sum(run.series(f"groups/{outcome}").fillna(0) for outcome in judged)
    completions = decided * (run.count("rollout.samples_per_prompt") or 0)
    series = {
        DECIDED: decided,
        KEPT: mixed / decided.where(decided > 0),
        UNPARSED: run.series("grading/unparsed") / completions.where(completions > 0),
        CLIPPED: run.series("policy/clip_fraction_high") + run.series("policy/clip_fraction_low"),
    }
    if run.setting("rollout.dynamic_sampling") is False:
        series |= {KEPT: decided * math.nan, FORECAST: decided * math.nan}
    return series


def _times(run: RunData) -> dict[str, pd.Series]:
    def seconds(name: str, *without: str) -> pd.Series:
        parts = sum(run.series(f"time/{part}").fillna(0) for part in without)
        return (run.series(f"time/{name}") - parts).clip(lower=0)

    generate, idle = seconds("generate"), seconds("engine_idle")
    # Only runs with engines on other GPUs record the share of training in which they had requests.
    overlap = run.series("throughput/overlap")
    step = seconds("step").where(overlap.notna()).where(lambda total: total > 0)
    training = seconds("logprobs").fillna(0) + seconds("update").fillna(0)
    return {
        GENERATE: seconds("generate", "grade"),
        REST: seconds("step", *STEP_PHASES),
        MOVED: seconds("sync", "sync_verify", "sync_turns"),
        IDLE: (idle / generate.where(generate > 0)).clip(0, 1),
        WAITING: run.series("time/environments") / generate.where(generate > 0),
        POLICY_WAITS: (generate.fillna(0) / step).clip(0, 1),
        ENGINES_WAIT: ((idle.fillna(0) + (1 - overlap) * training) / step).clip(0, 1),
    }


def totals(run: RunData) -> dict[str, int]:
    """Return the number of groups over the run: issued, each outcome, open (carried by the last
    step) and unaccounted (0 unless steps are missing). Empty if nothing was recorded."""
    if not run.values("groups/issued"):
        return {}
    sums = {name: round(run.total(f"groups/{name}")) for name in ("issued", *OUTCOMES)}
    sums["open"] = round((run.values("groups/carried") or [0])[-1])
    sums["unaccounted"] = sums["issued"] - sum(sums[outcome] for outcome in OUTCOMES) - sums["open"]
    return sums
