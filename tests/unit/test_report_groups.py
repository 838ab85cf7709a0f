"""Counts of groups over a run: the derived keep rate equals the one that the coordinator saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.report.charts import CHARTS
from dapo_megatron.report.groups import (
    DECIDED,
    FORECAST,
    KEPT,
    OUTCOMES,
    derived,
    note,
    totals,
    totals_table,
)
from dapo_megatron.report.run_data import Metrics, RunData, RunState, StateWord, frame_of
from dapo_megatron.rollout.ledger import Ledger, TicketState
from dapo_megatron.types import Outcome

NAMES = ("issued", *OUTCOMES, "carried", "carried_ready")

# Counts of a real run: model_configs/tiny_cpu.yaml, seed 0, 40 steps. Columns: NAMES, and
# accuracy/perfect_fraction over the groups decided in the step, as an independent check.
REAL = """
32 32 0 0 0 0 0 0 0 0.000000
32 32 0 0 0 0 0 0 0 0.000000
32 32 0 0 0 0 0 0 0 0.000000
32 32 0 0 0 0 0 0 0 0.000000
32 32 0 0 0 0 0 0 0 0.000000
32 32 0 0 0 0 0 0 0 0.000000
32 32 0 0 0 0 0 0 0 0.000000
64 32 2 0 0 0 0 30 30 0.031250
32 32 0 0 0 0 0 30 30 0.000000
32 32 1 0 0 0 0 29 29 0.031250
32 32 0 0 0 0 0 29 29 0.000000
32 32 0 0 0 0 0 29 29 0.000000
32 32 0 0 0 0 0 29 29 0.000000
32 32 3 0 0 0 0 26 26 0.093750
32 32 4 0 0 0 0 22 22 0.125000
32 32 2 0 0 0 0 20 20 0.062500
32 32 2 0 0 0 0 18 18 0.062500
32 32 3 0 0 0 0 15 15 0.093750
32 32 2 0 0 0 0 13 13 0.062500
32 32 2 0 0 0 0 11 11 0.062500
32 32 4 0 0 0 0 7 7 0.125000
32 32 3 0 0 0 0 4 4 0.093750
32 32 4 0 0 0 0 0 0 0.125000
64 32 12 0 0 0 0 20 20 0.187500
32 32 6 0 0 0 0 14 14 0.187500
32 32 6 0 0 0 0 8 8 0.187500
32 32 8 0 0 0 0 0 0 0.250000
64 32 14 0 0 0 0 18 18 0.218750
32 32 8 0 0 0 0 10 10 0.250000
32 32 4 0 0 0 0 6 6 0.125000
32 32 2 0 0 0 0 4 4 0.062500
64 32 9 0 0 0 0 27 26 0.142857
32 32 4 0 0 0 0 23 22 0.125000
32 32 9 0 0 0 0 14 12 0.290323
32 32 9 0 0 0 0 5 4 0.272727
64 32 15 0 0 0 0 22 21 0.234375
32 32 6 0 0 0 0 16 14 0.193548
32 32 6 0 0 0 0 10 9 0.181818
32 32 8 0 0 0 0 2 1 0.250000
64 32 15 0 0 0 0 19 18 0.234375
"""


def run_of(
    rows: list[dict[str, float]], steps: list[int] | None = None, **settings: Any
) -> RunData:
    columns: dict[str, list[float | None]] = {
        f"groups/{name}": [row.get(name) for row in rows] for name in NAMES
    }
    return RunData(
        path=Path("runs/made"),
        name="made",
        config={"rollout": settings},
        config_text="",
        metrics=Metrics(frame_of(steps or range(1, len(rows) + 1), columns)),
        evaluations=[],
        state=RunState(StateWord.FINISHED, ""),
        summary=None,
        attempts=[],
        plan=None,
        provenance=None,
        warnings=[],
    )


def real() -> tuple[RunData, list[float]]:
    lines = [line.split() for line in REAL.strip().splitlines()]
    rows = [dict(zip(NAMES, map(float, line[:-1]), strict=True)) for line in lines]
    return run_of(rows), [float(line[-1]) for line in lines]


def series_of(run: RunData) -> dict[str, list[float | None]]:
    """Return the derived series, with None for what is not known."""
    columns = derived(run)
    metrics = Metrics(frame_of(run.metrics.steps, columns))
    return {name: metrics.column(name) for name in columns}


def test_the_groups_of_the_real_run_are_all_accounted_for() -> None:
    counts = totals(real()[0])
    assert counts["issued"] == 1472
    assert counts["trained"] == 40 * 32
    assert counts["unaccounted"] == 0
    assert counts["issued"] == sum(counts[outcome] for outcome in OUTCOMES) + counts["open"]


def test_the_table_of_totals_covers_all_issued_groups() -> None:
    (name, issued, _), *outcomes = totals_table(real()[0])
    assert (name, issued) == ("issued", 1472)
    assert sum(count for _, count, _ in outcomes) == issued
    assert sum(share for *_, share in outcomes if share is not None) == pytest.approx(1)


def test_decided_groups_agree_with_the_recorded_perfect_fraction() -> None:
    run, perfect = real()
    decided = series_of(run)[DECIDED]
    assert len(decided) == 40
    for at, fraction in enumerate(perfect):
        all_correct = run.metrics.column("groups/all_correct")[at]
        assert all_correct == pytest.approx(fraction * (decided[at] or 0), abs=1e-3)


@st.composite
def steps_of_a_ledger(draw: st.DrawFn) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """Use a ledger at random; return its counts by step and (newly mixed, decided) by step."""
    ledger = Ledger()
    counts, truth = [], []
    for _ in range(draw(st.integers(1, 6))):
        for ticket in [t for t, state in ledger.open.items() if state is TicketState.READY]:
            if draw(st.integers(0, 5)) == 0:  # at the start of a step, because of its age
                ledger.close_ticket(ticket, Outcome.EXPIRED)
        ledger.issue(draw(st.integers(0, 8)))
        mixed = decided = 0
        for ticket in [t for t, state in ledger.open.items() if state is not TicketState.READY]:
            ended = draw(st.sampled_from(["open", "ready", *Outcome]))
            if ended in ("open", Outcome.TRAINED, Outcome.EXPIRED):
                continue
            ledger.move(ticket, TicketState.RUNNING)
            ledger.move(ticket, TicketState.GRADING)
            decided += 1
            if ended == "ready":
                mixed += 1
                ledger.move(ticket, TicketState.READY)
            else:
                ledger.close_ticket(ticket, Outcome(ended))
        for ticket in [t for t, state in ledger.open.items() if state is TicketState.READY]:
            if draw(st.booleans()):
                ledger.close_ticket(ticket, Outcome.TRAINED)
        held = {ticket: state is TicketState.READY for ticket, state in ledger.open.items()}
        counts.append({name: float(count) for name, count in ledger.close_step(held).items()})
        truth.append((mixed, decided))
    return counts, truth


@given(steps_of_a_ledger())
@settings(deadline=None)
def test_the_derived_keep_rate_equals_that_of_the_ledger(
    counts_and_truth: tuple[list[dict[str, float]], list[tuple[int, int]]],
) -> None:
    counts, truth = counts_and_truth
    series = series_of(run_of(counts))
    assert series[DECIDED] == [decided for _, decided in truth]
    assert series[KEPT] == [mixed / decided if decided else None for mixed, decided in truth]
    sums = totals(run_of(counts))
    assert sums["unaccounted"] == 0
    assert sums["open"] == counts[-1]["carried"]


def test_on_policy_the_keep_rate_ignores_expired_groups() -> None:
    row = {"issued": 20.0, "trained": 8.0, "all_wrong": 2.0, "expired": 10.0, "carried_ready": 0.0}
    row |= {"all_correct": 0.0, "overlong": 0.0, "abstained": 0.0, "carried": 0.0}
    series = series_of(run_of([row, row], on_policy=True))
    assert series[KEPT] == [0.8, 0.8]
    assert series_of(run_of([row, row], on_policy=False))[KEPT] == [0.9, 0.9]


def test_without_dynamic_sampling_there_is_no_keep_rate() -> None:
    row = {**dict.fromkeys(NAMES, 0.0), "issued": 4.0, "trained": 4.0}
    off = run_of([row, row], dynamic_sampling=False)
    assert series_of(off) == {KEPT: [None] * 2, FORECAST: [None] * 2, DECIDED: [4.0, 4.0]}
    assert "no keep rate" in str(note(off))
    for run in (run_of([row, row], dynamic_sampling=True), run_of([row, row])):
        assert series_of(run)[KEPT] == [1.0, 1.0]
        assert FORECAST not in series_of(run)  # as recorded
        assert note(run) is None


def test_after_a_missing_step_the_keep_rate_is_unknown() -> None:
    row = {**dict.fromkeys(NAMES, 0.0), "issued": 4.0, "trained": 4.0}
    series = series_of(run_of([row, row, row], steps=[2, 3, 5]))
    assert series[KEPT] == [None, 1.0, None]


def test_a_run_without_group_counts_has_no_keep_rate() -> None:
    run = run_of([{}, {}])
    assert series_of(run) == {KEPT: [None, None], DECIDED: [None, None]}
    assert totals(run) == {}


def test_a_lost_line_shows_as_unaccounted_groups() -> None:
    run, _ = real()
    frame = run.metrics.frame.copy()
    frame.loc[1, "groups/issued"] += 3
    frame = frame.drop(index=6)
    assert totals(replace(run, metrics=Metrics(frame)))["unaccounted"] == 3


def test_the_chart_of_fates_shows_everything_the_coordinator_counts() -> None:
    stacked = next(chart for chart in CHARTS if chart.id == "groups_fates")
    drawn = set(stacked.series)
    assert drawn == {f"groups/{outcome}" for outcome in Outcome} | {"groups/carried"}
    assert set(OUTCOMES) == set(Outcome)
