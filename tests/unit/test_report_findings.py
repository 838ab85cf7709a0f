"""Findings: each one on a series that shows it, none on noise, and derived series of the ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config import Config
from dapo_megatron.report.charts import all_charts, chart_of
from dapo_megatron.report.derived import DECIDED, KEPT, OUTCOMES, derived, totals
from dapo_megatron.report.findings import Finding, findings
from dapo_megatron.report.run_data import (
    Attempt,
    Evaluation,
    Plan,
    RunData,
    RunState,
    StateWord,
    frame_of,
)
from dapo_megatron.rollout.ledger import Ledger, TicketState
from dapo_megatron.types import STEP_PHASES, Outcome

CONFIG: dict[str, Any] = {
    "rollout": {"prompts_per_step": 32, "samples_per_prompt": 16, "lookahead": 1.8},
    "sync": {"max_gap": 1e-3},
}
HEALTHY = {
    "accuracy/raw": 0.5,
    "policy/entropy": 0.5,
    "policy/grad_norm": 0.3,
    "policy/loss": 0.01,
    "policy/clip_fraction_high": 0.005,
    "policy/clip_fraction_low": 0.005,
    "response_tokens/mean": 300.0,
    "response_tokens/clipped_fraction": 0.02,
    "mismatch/gap_mean": 1e-6,
    "mismatch/gap_max": 1e-5,
    "groups/issued": 40.0,
    "groups/trained": 32.0,
    "groups/all_correct": 5.0,
    "groups/all_wrong": 3.0,
    **{f"groups/{name}": 0.0 for name in ("overlong", "abstained", "expired", "carried")},
    "groups/carried_ready": 0.0,
    "groups/age_mean": 0.5,
    "grading/unparsed": 3.0,
    **{f"grading/{cause}": 0.0 for cause in ("timeout", "crash", "memory", "error")},
    "sync/fingerprinted": 1.0,
    "sync/unread_tensors": 0.0,
    "time/step": 100.0,
    "time/generate": 60.0,
    "time/engine_idle": 3.0,
    "time/logprobs": 8.0,
    "time/update": 28.0,
    "time/sync": 3.0,
    "throughput/tokens_per_second": 1000.0,
    "memory/update_gib": 70.0,
}

Series = float | Sequence[float | None]


def run_of(series: dict[str, Series] | None = None, num_steps: int = 40, **changes: Any) -> RunData:
    """A healthy run of constant series, changed by `series`, and by fields of RunData."""
    columns = {
        name: [value] * num_steps if isinstance(value, int | float) else list(value)
        for name, value in {**HEALTHY, **(series or {})}.items()
    }
    standing: dict[str, Any] = {
        "path": Path("runs/made"),
        "name": "made",
        "config": CONFIG,
        "metrics": frame_of(range(1, num_steps + 1), columns),
        "state": RunState(StateWord.FINISHED, "it wrote its summary"),
        "attempts": [Attempt("a")],
    }
    return derived(RunData(**standing | changes))


def noisy(values: Sequence[float], share: float = 0.05, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [value * (1 + rng.gauss(0, share)) for value in values]


def ramp(begin: float, end: float, num_steps: int = 40) -> list[float]:
    return noisy([begin + (end - begin) * at / (num_steps - 1) for at in range(num_steps)], 0.03)


def fall(begin: float, share: float) -> list[float]:
    """An exponential from `begin` to `begin * share`."""
    return noisy([begin * share ** (at / 39) for at in range(40)])


def peaks(base: float, **at: float) -> list[float]:
    """Noise around `base`, with values at steps: s21=9.0."""
    values = noisy([base] * 40, 0.1)
    for step, value in at.items():
        values[int(step[1:]) - 1] = value
    return values


SHOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"accuracy/raw": ramp(0.3, 0.7)}, "good", "Learning: accuracy 0."),
    ({"accuracy/raw": ramp(0.7, 0.3)}, "bad", "Accuracy is falling"),
    ({"accuracy/raw": ramp(0.3, 0.8, 24) + ramp(0.8, 0.5, 16)}, "warn", "Accuracy has fallen by 0"),
    ({"accuracy/raw": 0.97}, "good", "Flat at the top"),
    ({}, "note", "No trend: accuracy 0.500"),
    ({"policy/entropy": fall(0.7, 0.3)}, "note", "Entropy is down to"),
    ({"policy/entropy": fall(0.7, 0.08)}, "warn", "Entropy is down to"),
    ({"policy/entropy": fall(0.7, 0.01)}, "bad", "Entropy has collapsed"),
    ({"policy/entropy": ramp(0.7, 4)}, "warn", "Entropy has grown"),
    ({"response_tokens/mean": fall(200, 5)}, "warn", "Answers grow"),
    ({"response_tokens/clipped_fraction": 0.4}, "warn", "40% of answers are cut off"),
    (
        {"policy/grad_norm": peaks(0.3, s21=9.0, s31=5.0)},
        "note",
        "Gradient norm spikes at",
    ),
    (
        {"policy/grad_norm": peaks(0.3, s9=9, s15=9, s27=9)},
        "warn",
        "Gradient norm spikes at",
    ),
    ({"policy/clip_fraction_low": 0.2}, "warn", "20% of tokens are clipped"),
    (
        {"mismatch/gap_max": peaks(1e-5, s40=9e-4)},
        "warn",
        "The gap between engine and",
    ),
    ({"mismatch/gap_mean": ramp(1e-6, 2e-5)}, "warn", "The gap between engine and"),
    ({"correction/masked_tokens": 0.2}, "note", "Corrections mask 20%"),
    ({"correction/masked_tokens": 0.7}, "warn", "Corrections mask 70%"),
    ({"groups/trained": [*[32.0] * 39, 20.0]}, "warn", "Starved: 1 step trained on fewer than 32"),
    ({"groups/trained": 20.0}, "bad", "Starved: 40 steps"),
    ({"groups/all_correct": 300.0}, "warn", "Only 9.55% of groups are mixed"),
    ({"groups/abstained": 1.0}, "warn", "2.5% of groups abstained"),
    ({"groups/expired": 1.0}, "warn", "2.5% of groups expired"),
    ({"groups/issued": 41.0}, "warn", "40 groups are unaccounted"),
    ({}, "good", "Every prompt is accounted for"),
    ({"grading/timeout": [*[0.0] * 39, 2.0]}, "note", "Graders failed on 2 completions"),
    ({"grading/error": 20.0}, "warn", "Graders failed on 800"),
    ({"grading/crash": 300.0}, "bad", "Graders failed on 12,000"),
    ({}, "good", "Every completion was graded"),
    ({"grading/unparsed": 500.0}, "warn", "No answer is found"),
    ({}, "good", "Sync verified at 40 of 40 syncs"),
    ({"sync/fingerprinted": 0.0}, "note", "The engines' weights were never compared"),
    ({"sync/unread_tensors": 3.0}, "note", "3 tensors"),
    ({"throughput/overlap": 0.9}, "warn", "The policy waits for 60%"),
    ({"throughput/overlap": 0.0, "time/update": 60.0}, "warn", "Engines wait for 71%"),
    ({"time/engine_idle": 20.0}, "note", "Engines are idle for 33%"),
    ({"time/engine_idle": 40.0}, "warn", "Engines are idle for 67%"),
    ({"time/update": ramp(20, 50)}, "note", "update takes 2."),
    ({"time/update": ramp(10, 50)}, "warn", "update takes"),
    ({"throughput/tokens_per_second": ramp(1000, 600)}, "note", "Throughput is down"),
    ({"throughput/tokens_per_second": ramp(1000, 300)}, "warn", "Throughput is down"),
    ({"memory/update_gib": ramp(40, 90)}, "warn", "Memory keeps growing: update"),
    ({"policy/loss": [*[0.1] * 30, None, *[0.1] * 9]}, "warn", "policy/loss is missing at 1 step"),
]


@pytest.mark.parametrize(("series", "level", "title"), SHOWN)
def test_a_finding_is_reported_on_a_series_that_shows_it(
    series: dict[str, Any], level: str, title: str
) -> None:
    before = {finding.title for finding in findings(run_of())} if series else set()
    new = [finding for finding in findings(run_of(series)) if finding.title not in before]
    [finding] = [finding for finding in new if finding.title.startswith(title)]
    assert finding.level == level
    assert finding.metric is None or chart_of(finding.metric) is not None


def test_findings_of_other_files_than_the_metrics() -> None:
    run = run_of(
        state=RunState(StateWord.CRASHED, "it was killed"),
        attempts=[Attempt("a"), Attempt("b", end="stopped"), Attempt("c")],
        plan=Plan({"update": 60.0}),
        evaluations=[
            Evaluation("a", "avg@4", 0, 0.3, 0.25, 0.35),
            Evaluation("b", "avg@4", 0, 0.5, 0.45, 0.55),
            Evaluation("a", "avg@4", 40, 0.6, 0.55, 0.65),
            Evaluation("b", "avg@4", 40, 0.3, 0.25, 0.35),
        ],
    )
    new = {item.title: item.level for item in findings(run)}
    assert new["The run crashed after step 40"] == "bad"
    assert new["Started 3 times"] == "note"
    assert new["update takes more memory than planned"] == "warn"
    assert new["Evaluation confirms the learning: a"] == "good"
    assert new["Evaluation is below its start: b"] == "bad"


@pytest.mark.parametrize("num_steps", [1, 8, 40, 150])
def test_noise_gives_no_warnings(num_steps: int) -> None:
    """Noise of each metric as in a small run, where it is the largest."""
    alarms: list[Finding] = []
    shares = {"accuracy/raw": 0.06, "policy/grad_norm": 0.3, "memory/update_gib": 0.01}
    for seed in range(8):
        series = {
            name: noisy([value] * num_steps, shares.get(name, 0.1), seed * 100 + at)
            for at, (name, value) in enumerate(HEALTHY.items())
            if not name.startswith(("groups/", "grading/", "sync/"))
        }
        run = run_of(series, num_steps)
        alarms += [item for item in findings(run) if item.level in ("bad", "warn")]
    real = [alarm for alarm in alarms if not alarm.title.startswith("No trend")]
    assert not real, real


def is_key(key: str) -> bool:
    """Whether a config has this dotted key, possibly in an optional section."""
    models: list[Any] = [Config]
    for name in key.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        inside = {
            type_ for field in fields for type_ in (field.annotation, *get_args(field.annotation))
        }
        models = [type_ for type_ in inside if hasattr(type_, "model_fields")]
    return True


def test_every_setting_of_a_finding_is_a_config_key() -> None:
    shown = [finding for series, *_ in SHOWN for finding in findings(run_of(series))]
    bounds = [bound for chart in all_charts() for bound in chart.bounds]
    shown += [Finding("note", bound.title, "", None, bound.setting) for bound in bounds]
    keys = {key for finding in shown for key, _ in finding.settings}
    assert len(keys) > 20
    assert [key for key in keys if not is_key(key)] == []


# ---------------------------------------------------------------------------- derived series


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
        step = {name: float(count) for name, count in ledger.close_step(held).items()}
        counts.append({f"groups/{name}": count for name, count in step.items()})
        truth.append((mixed, decided))
    return counts, truth


@given(steps_of_a_ledger())
def test_the_derived_keep_rate_equals_that_of_the_ledger(
    made: tuple[list[dict[str, float]], list[tuple[int, int]]],
) -> None:
    counts, truth = made
    columns = {name: [step[name] for step in counts] for name in counts[0]}
    run = run_of(columns, len(counts), metrics=frame_of(range(1, len(counts) + 1), columns))
    assert list(run.series(DECIDED)) == [decided for _, decided in truth]
    assert run.values(KEPT) == [mixed / decided for mixed, decided in truth if decided]
    sums = totals(run)
    if sums:
        assert sums["unaccounted"] == 0
        assert sums["open"] == counts[-1]["groups/carried"]
        assert sums["issued"] == sum(sums[outcome] for outcome in OUTCOMES) + sums["open"]


def test_the_phases_of_a_step_add_up_and_have_a_chart() -> None:
    run = run_of({"time/grade": 5.0, "time/checkpoint": 1.0})
    [chart] = [chart for chart in all_charts() if chart.draws("derived/time_rest")]
    assert sum(run.series(name).fillna(0) for name in chart.series).tolist() == [100.0] * 40
    for phase in STEP_PHASES:
        assert phase in chart.series.values()
        assert chart_of(f"memory/{phase}_gib") is not None
