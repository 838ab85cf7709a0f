"""Each finding on a series that has it and on one that has not; no finding on noise."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config import Config
from dapo_megatron.report import finding, health_rules, work_rules
from dapo_megatron.report.charts import CHARTS, chart_of
from dapo_megatron.report.curves import ghost
from dapo_megatron.report.finding import Finding, Track
from dapo_megatron.report.finding_rule import track
from dapo_megatron.report.health_rules import findings
from dapo_megatron.report.models import Attempt
from dapo_megatron.report.run_data import (
    Evaluation,
    Metrics,
    RunData,
    RunState,
    StateWord,
    frame_of,
    read_metrics,
)

REPOSITORY = Path(__file__).resolve().parents[2]

KNOBS: dict[str, Any] = {
    "rollout": {
        "prompts_per_step": 32,
        "samples_per_prompt": 16,
        "on_policy": False,
        "dynamic_sampling": True,
        "lookahead": 1.8,
        "max_response_tokens": 1024,
    },
    "sync": {"max_gap": 1e-3},
    "optimizer": {"clip_grad": 1.0},
}

HEALTHY = {
    "accuracy/raw": 0.5,
    "policy/entropy": 0.5,
    "policy/grad_norm": 0.3,
    "policy/loss": 0.01,
    "policy/clip_fraction_high": 0.005,
    "policy/clip_fraction_low": 0.005,
    "policy/dual_clip_fraction": 0.0,
    "policy/approx_kl": 0.001,
    "response_tokens/mean": 300.0,
    "response_tokens/clipped_fraction": 0.02,
    "mismatch/gap_mean": 1e-6,
    "mismatch/gap_max": 1e-5,
    "groups/issued": 40.0,
    "groups/trained": 32.0,
    "groups/all_correct": 5.0,
    "groups/all_wrong": 3.0,
    "groups/overlong": 0.0,
    "groups/abstained": 0.0,
    "groups/expired": 0.0,
    "groups/carried": 0.0,
    "groups/carried_ready": 0.0,
    "groups/age_mean": 0.5,
    "grading/unparsed": 3.0,
    "grading/timeout": 0.0,
    "grading/crash": 0.0,
    "grading/memory": 0.0,
    "grading/error": 0.0,
    "sync/fingerprinted": 1.0,
    "sync/unread_tensors": 0.0,
    "sync/canary_gap": 1e-6,
    "time/step": 100.0,
    "time/generate": 60.0,
    "time/engine_idle": 3.0,
    "time/logprobs": 8.0,
    "time/update": 28.0,
    "time/sync": 3.0,
    "throughput/tokens_per_second": 1000.0,
    "memory/generate_gib": 60.0,
    "memory/update_gib": 70.0,
}

Series = float | Sequence[float | None]


def run_of(num_steps: int = 40, **changes: Any) -> RunData:
    """A healthy run of constant series but for `series`; settings by dotted key in `settings`."""
    series: dict[str, Series] = {**HEALTHY, **changes.pop("series", {})}
    config = {section: dict(values) for section, values in KNOBS.items()}
    for key, value in changes.pop("settings", {}).items():
        section, name = key.split(".")
        config[section][name] = value
    columns = {
        name: [value] * num_steps if isinstance(value, int | float) else list(value)
        for name, value in series.items()
    }
    standing: dict[str, Any] = {
        "path": Path("runs/made"),
        "name": "made",
        "config": config,
        "config_text": "",
        "metrics": Metrics(frame_of(range(1, num_steps + 1), columns)),
        "evaluations": [],
        "state": RunState(StateWord.FINISHED, "it wrote its summary"),
        "summary": None,
        "attempts": [Attempt("a", step=0)],
        "plan": None,
        "provenance": None,
        "warnings": [],
    }
    return RunData(**standing | changes)


def titles(run: RunData, *levels: str) -> list[str]:
    wanted = levels or ("bad", "warn", "note")
    return [one.title for one in findings(run) if one.level in wanted]


def noisy(values: Sequence[float], share: float = 0.05, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [value * (1 + chance.gauss(0, share)) for value in values]


def ramp(begin: float, end: float, num_steps: int = 40) -> list[float]:
    return [begin + (end - begin) * at / (num_steps - 1) for at in range(num_steps)]


def peaks(at: dict[int, float], base: float = 0.3, num_steps: int = 40) -> list[float]:
    """Noise around `base`, but for what is `at` some places."""
    values = noisy([base] * num_steps, 0.1)
    for place, value in at.items():
        values[place] = value
    return values


def fall(begin: float, share: float, num_steps: int = 40) -> list[float]:
    """Exponential, to a share (or a multiple) of its begin."""
    return [begin * share ** (at / (num_steps - 1)) for at in range(num_steps)]


# name: (what is different, the title (a pattern), the level, the metric)
FIRES: dict[str, tuple[dict[str, Any], str, str, str | None]] = {
    "learning": (
        {"accuracy/raw": noisy(ramp(0.3, 0.7))},
        r"Learning: accuracy 0\.\d+ → 0\.\d+",
        "good",
        "accuracy/raw",
    ),
    "falling": ({"accuracy/raw": noisy(ramp(0.7, 0.3))}, "is falling", "bad", "accuracy/raw"),
    "from its best": (
        {"accuracy/raw": noisy(ramp(0.3, 0.8, 24) + ramp(0.8, 0.5, 16))},
        "fallen by 0\\.[23]",
        "warn",
        "accuracy/raw",
    ),
    "top": ({"accuracy/raw": 0.97}, "Flat at the top", "good", "accuracy/raw"),
    "entropy low": ({"policy/entropy": noisy(fall(0.7, 0.3))}, "down to", "note", "policy/entropy"),
    "entropy lower": (
        {"policy/entropy": noisy(fall(0.7, 0.08))},
        "down to",
        "warn",
        "policy/entropy",
    ),
    "entropy gone": (
        {"policy/entropy": noisy(fall(0.7, 0.01))},
        "has collapsed",
        "bad",
        "policy/entropy",
    ),
    "entropy grows": (
        {"policy/entropy": noisy(ramp(0.7, 4))},
        "has grown",
        "warn",
        "policy/entropy",
    ),
    "length": (
        {"response_tokens/mean": noisy(fall(200, 5))},
        "longer while accuracy does not rise",
        "warn",
        "response_tokens/mean",
    ),
    "short": (
        {"response_tokens/mean": noisy(fall(300, 0.2))},
        "become short",
        "note",
        "response_tokens/mean",
    ),
    "cut off": (
        {"response_tokens/clipped_fraction": 0.4},
        "40% of answers are cut off",
        "warn",
        "response_tokens/clipped_fraction",
    ),
    "more cut off": (
        {"response_tokens/clipped_fraction": noisy(ramp(0.01, 0.18))},
        "of answers are cut off",
        "warn",
        "response_tokens/clipped_fraction",
    ),
    "spike": (
        {"policy/grad_norm": peaks({20: 9.0, 30: 5.0})},
        "spikes at steps 21, 31",
        "note",
        "policy/grad_norm",
    ),
    "spikes": (
        {"policy/grad_norm": peaks({12: 9.0, 20: 9.0, 25: 9.0, 33: 9.0})},
        "spikes at steps 13, 21, 26, 34",
        "warn",
        "policy/grad_norm",
    ),
    "clipped gradient": ({"policy/grad_norm": 3.0}, "clipped at 100%", "note", "policy/grad_norm"),
    "clipped tokens": (
        {"policy/clip_fraction_low": 0.2},
        "of tokens are clipped",
        "warn",
        "derived/clipped_tokens",
    ),
    "dual clip": (
        {"policy/dual_clip_fraction": 0.05},
        "dual clip stops 5%",
        "warn",
        "policy/dual_clip_fraction",
    ),
    "kl": ({"policy/approx_kl": -0.4}, "nats of KL", "warn", "policy/approx_kl"),
    "gap near": (
        {"mismatch/gap_max": [*[1e-5] * 39, 9e-4]},
        "came near sync.max_gap at step 40",
        "warn",
        "mismatch/gap_max",
    ),
    "gap grows": (
        {"mismatch/gap_mean": noisy(ramp(1e-6, 2e-5))},
        "gap between engine and policy grows",
        "warn",
        "mismatch/gap_mean",
    ),
    "starved": (
        {"groups/trained": [*[32.0] * 39, 20.0]},
        "Starved: 1 step trained on fewer than 32",
        "warn",
        "groups/trained",
    ),
    "starving": ({"groups/trained": 20.0}, "Starved: 40 steps", "bad", "groups/trained"),
    "keep low": (
        {"groups/all_correct": 300.0, "groups/issued": 335.0},
        "Only 9.55% of groups are mixed",
        "warn",
        "derived/keep_rate",
    ),
    "keep fell": (
        {"groups/all_correct": [round(one) for one in ramp(0, 60)]},
        "Only",
        "note",
        "derived/keep_rate",
    ),
    "abstained": (
        {"groups/abstained": 1.0, "groups/issued": 41.0},
        "of groups abstained",
        "warn",
        "groups/abstained",
    ),
    "expired": (
        {"groups/expired": 1.0, "groups/issued": 41.0},
        "of groups expired",
        "warn",
        "groups/expired",
    ),
    "unaccounted": ({"groups/issued": 41.0}, "40 groups are unaccounted", "warn", "groups/issued"),
    "stale": ({"groups/age_mean": 5.0}, "5.0 versions old", "note", "groups/age_mean"),
    "graders": (
        {"grading/timeout": [*[0.0] * 39, 2.0]},
        "failed on 2 completions",
        "note",
        "grading/timeout",
    ),
    "graders often": ({"grading/error": 20.0}, "failed on 800 comp", "warn", "grading/error"),
    "graders always": ({"grading/crash": 300.0}, "failed on 12,000", "bad", "grading/crash"),
    "unparsed": (
        {"grading/unparsed": 500.0},
        "No answer is found",
        "warn",
        "derived/unparsed_share",
    ),
    "unread": ({"sync/unread_tensors": 3.0}, "3 tensors", "note", "sync/unread_tensors"),
    "not compared": ({"sync/fingerprinted": 0.0}, "never compared", "note", "sync/fingerprinted"),
    "verified": ({}, "Sync verified at each of 40 syncs", "good", "sync/fingerprinted"),
    "accounted": ({}, "Every prompt is accounted for", "good", "groups/trained"),
    "graded": ({}, "Every completion was graded", "good", "grading/timeout"),
    "idle": ({"time/engine_idle": 20.0}, "idle for 33%", "note", "derived/engine_idle"),
    "idle much": ({"time/engine_idle": 40.0}, "idle for 67%", "warn", "derived/engine_idle"),
    "phase grew": (
        {"time/update": noisy(ramp(20, 44), 0.02)},
        "update takes 2.. times as long",
        "note",
        "time/update",
    ),
    "phase grew much": (
        {"time/sync": noisy(ramp(3, 30), 0.02)},
        "sync takes .* times as long",
        "warn",
        "time/sync",
    ),
    "slow step": (
        {"time/step": peaks({20: 900.0}, 100.0)},
        "Slow at step 21",
        "note",
        "derived/step_without_extras",
    ),
    "throughput": (
        {"throughput/tokens_per_second": noisy(ramp(1000, 600))},
        "Throughput is down",
        "note",
        "throughput/tokens_per_second",
    ),
    "throughput much": (
        {"throughput/tokens_per_second": noisy(ramp(1000, 300))},
        "Throughput is down",
        "warn",
        "throughput/tokens_per_second",
    ),
    "leak": (
        {"memory/update_gib": ramp(40, 70)},
        "Memory keeps growing: update",
        "warn",
        "memory/update_gib",
    ),
    "missing": (
        {"policy/loss": [*[0.1] * 30, None, *[0.1] * 9]},
        "policy/loss is missing at 1 step",
        "warn",
        "policy/loss",
    ),
}


def is_key(key: str) -> bool:
    """Whether a config has it, itself or as an optional section's."""
    models: list[Any] = [Config]
    for name in key.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        inside = {
            one for field in fields for one in (field.annotation, *get_args(field.annotation))
        }
        models = [one for one in inside if hasattr(one, "model_fields")]
    return True


def test_every_knob_in_the_sources_is_a_key() -> None:
    """Those that no series above brings, too."""
    named = set(re.findall(r'["; ]([a-z]+\.[a-z_]+)(?:: |; |")', sources()))
    sections = set(Config.model_fields)
    settings = {one for one in named if one.split(".")[0] in sections}
    assert len(settings) > 20
    assert [one for one in sorted(settings) if not is_key(one)] == []


@pytest.mark.parametrize("name", FIRES)
def test_it_is_found(name: str) -> None:
    series, title, level, metric = FIRES[name]
    found = [one for one in findings(run_of(series=series)) if re.search(title, one.title)]
    assert [(one.level, one.metric) for one in found] == [(level, metric)]
    assert found[0].text.endswith((".", "?"))
    for key, way in found[0].settings:
        assert is_key(key), key
        assert not way.startswith(("or ", "and "))


@pytest.mark.parametrize("name", [name for name, row in FIRES.items() if row[2] != "good"])
def test_nothing_else_is_found(name: str) -> None:
    """What a series brings besides is known: a step cannot starve without the books noticing."""
    series, title, *_ = FIRES[name]
    beside = {
        "starved": {"Starved", "unaccounted"},
        "starving": {"Starved", "unaccounted"},
        "keep fell": {"unaccounted"},
        "phase grew": set[str](),
    }.get(name, set())
    other = [
        one
        for one in titles(run_of(series=series))
        if not re.search(title, one)
        and not one.startswith("No trend")
        and not any(word in one for word in beside)
    ]
    assert not other


def test_a_healthy_run_of_constants_is_flat_and_nothing_else() -> None:
    assert [one[:8] for one in titles(run_of())] == ["No trend"]
    assert titles(run_of(200), "warn") == titles(run_of(200))  # flat for so long is a warning


def noise(num_steps: int, seed: int, accuracy: float) -> RunData:
    """Every series of a clock or a policy off by a tenth, accuracy by `accuracy`."""
    chance = random.Random(seed)
    kept = ("groups/", "sync/", "grading/")
    series: dict[str, Any] = {
        name: [value * (1 + chance.gauss(0, 0.1)) for _ in range(num_steps)]
        for name, value in HEALTHY.items()
        if not name.startswith(kept)
    }
    series["accuracy/raw"] = [0.5 + chance.gauss(0, accuracy) for _ in range(num_steps)]
    return run_of(num_steps, series=series)


@pytest.mark.parametrize("num_steps", [8, 9, 20, 40])
@pytest.mark.parametrize("accuracy", [0.03, 0.15])
def test_noise_is_no_finding(num_steps: int, accuracy: float) -> None:
    alarms = [
        (one.title, seed)
        for seed in range(60)
        for one in findings(noise(num_steps, seed, accuracy))
        if not one.title.startswith(("No trend", "Sync", "Every"))
    ]
    # Of some 40 series in each of 60 runs.
    assert len(alarms) <= 1, alarms


NUMBERS = st.none() | st.floats(-1e100, 1e100)
"""What read_metrics lets through."""


@given(
    st.integers(0, 12).flatmap(
        lambda n: st.dictionaries(
            st.sampled_from(sorted(HEALTHY)),
            st.lists(NUMBERS, min_size=n, max_size=n),
            min_size=1,
            max_size=8,
        ).map(lambda series: (n, series))
    ),
    st.sampled_from([0, 1, 32, None, "x", 1e-300]),
)
@settings(max_examples=150, deadline=None)
def test_no_series_of_numbers_stops_a_report(made: tuple[int, dict[str, Any]], odd: Any) -> None:
    num_steps, series = made
    settings = {"sync.max_gap": odd, "optimizer.clip_grad": odd, "rollout.prompts_per_step": odd}
    plan = {"phases": {"update": 1e-300, "generate": "much"}}
    for one in findings(run_of(num_steps, series=series, settings=settings, plan=plan)):
        assert one.title
        assert one.level in ("good", "note", "warn", "bad")


def test_figures_too_large_to_add_are_as_good_as_missing() -> None:
    lines = [{"step": step, "grading/timeout": 1e308} for step in (1, 2)]
    broken = read_metrics(lines)[0].frame
    assert "Every completion was graded" in titles(run_of(2, series=dict(broken.items())), "good")


def test_the_worst_is_first() -> None:
    found = findings(run_of(series={"accuracy/raw": ramp(0.7, 0.3), "policy/approx_kl": 0.5}))
    order = ["bad", "warn", "note", "good"]
    places = [order.index(one.level) for one in found]
    assert places == sorted(places)
    assert found[0].level == "bad"


def test_whether_it_learns_comes_before_the_notes_and_after_the_trouble() -> None:
    series = {"accuracy/raw": ramp(0.3, 0.7), "policy/grad_norm": 9.0, "policy/approx_kl": 0.5}
    levels = [one.level for one in findings(run_of(series=series))]
    learning = [one.title.startswith("Learning") for one in findings(run_of(series=series))]
    at = learning.index(True)
    assert set(levels[:at]) <= {"bad", "warn"} and levels[:at]
    assert not {"bad", "warn"} & set(levels[at:])
    assert "note" in levels[at:]


# ---------------------------------------------------------------------------- short runs


@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
def test_a_short_run_is_told_of_facts_alone(num_steps: int) -> None:
    wild: dict[str, Any] = {
        "accuracy/raw": ramp(0.9, 0.1, 7)[:num_steps],
        "policy/entropy": fall(1, 0.001, 7)[:num_steps],
        "time/update": ramp(1, 100, 7)[:num_steps],
    }
    [one] = titles(run_of(num_steps, series=wild))
    assert one.startswith(f"{num_steps} step")


def test_a_short_run_is_told_that_it_starves() -> None:
    found = findings(run_of(1, series={"groups/trained": [5.0]}))
    assert any(one.title.startswith("Starved") and one.level == "warn" for one in found)


def test_a_run_that_recorded_next_to_nothing() -> None:
    run = run_of(20, series={})
    bare = Metrics(frame_of(run.metrics.steps, {"accuracy/raw": noisy(ramp(0.1, 0.5, 20))}))
    [one] = findings(run_of(20, metrics=bare, config={}))
    assert one.level == "good"


# ---------------------------------------------------------------------------- the run itself


@pytest.mark.parametrize(
    ("word", "level"),
    [("crashed", "bad"), ("hung", "bad"), ("stopped", "note"), ("unknown", "note")],
)
def test_how_it_ended(word: str, level: str) -> None:
    run = run_of(state=RunState(StateWord(word), "said so"))
    [one] = [one for one in findings(run) if "Said so." in one.text]
    assert one.level == level
    assert "after step 40" in one.title


def test_starts() -> None:
    def starts(*ends: str | None) -> list[Attempt]:
        return [Attempt(str(i), step=5 * i, end=end) for i, end in enumerate(ends)]

    assert not [one for one in titles(run_of(attempts=starts(None))) if "Started" in one]
    [stopped] = [
        one
        for one in findings(run_of(attempts=starts("stopped", "stopped", None)))
        if "Started" in one.title
    ]
    assert (stopped.level, stopped.setting) == ("note", None)
    assert "2 stopped" in stopped.text
    [crashed] = [
        one
        for one in findings(run_of(attempts=starts("crashed", None, "hung", None)))
        if "Started" in one.title
    ]
    assert crashed.level == "warn"
    assert "1 crashed, 1 cut short, 1 hung" in crashed.text


def test_steps_without_a_line() -> None:
    lacking = Metrics(run_of(4).metrics.frame.set_axis([3, 4, 7, 8]))
    found = [one for one in findings(run_of(4, metrics=lacking)) if "without metrics" in one.title]
    assert [one.title for one in found] == ["2 steps without metrics"]
    assert "no line for steps 5, 6" in found[0].text


def test_on_policy_expects_groups_to_expire() -> None:
    series = {"groups/expired": 8.0, "groups/issued": 48.0}
    assert any("expired" in one for one in titles(run_of(series=series)))
    calm = titles(run_of(series=series, settings={"rollout.on_policy": True}))
    assert not any("expired" in one for one in calm)


def test_growth_that_tokens_explain_is_none() -> None:
    series = {
        "time/update": ramp(20, 60),
        "time/step": ramp(80, 120),
        # Tokens trained on grow as the seconds do.
        "throughput/tokens_per_second": [
            1000 * a / b for a, b in zip(ramp(20, 60), ramp(80, 120), strict=True)
        ],
    }
    assert not [one for one in titles(run_of(series=series)) if "times as long" in one]
    assert [
        one for one in titles(run_of(series={"time/update": ramp(20, 60)})) if "times as" in one
    ]


def test_entropy_that_recovers_is_none() -> None:
    fallen = [*fall(0.7, 0.3, 20), *ramp(0.21, 0.225, 20)]
    assert not [one for one in titles(run_of(series={"policy/entropy": fallen})) if "Entr" in one]
    falls = [*fall(0.7, 0.3, 20), *ramp(0.21, 0.18, 20)]
    assert [one for one in titles(run_of(series={"policy/entropy": falls})) if "Entr" in one]


def test_a_phase_that_jumps_to_and_fro_has_not_grown() -> None:
    slow = ramp(10, 17, 88)
    series = {"time/update": [40.0 if at % 2 else slow[at] for at in range(88)]}
    assert track(run_of(88, series=series), "time/update").growth > 3
    assert not [one for one in titles(run_of(88, series=series)) if "times as long" in one]


def test_memory_that_stops_growing_is_no_leak() -> None:
    grown = {"memory/update_gib": [*ramp(40, 60, 30), *[60.0] * 10]}
    assert not [one for one in titles(run_of(series=grown)) if "Memory" in one]
    grows = {"memory/update_gib": [*ramp(40, 60, 30), *ramp(60, 66, 10)]}
    assert [one for one in titles(run_of(series=grows)) if "Memory" in one]


def test_growth_with_accuracy_is_no_running_away() -> None:
    series: dict[str, Any] = {"response_tokens/mean": noisy(fall(200, 5))}
    series["accuracy/raw"] = noisy(ramp(0.2, 0.8))
    assert not [one for one in titles(run_of(series=series)) if "longer" in one]


def test_memory_against_the_plan() -> None:
    plan = {"device": "gpu", "phases": {"update": 60.0, "generate": 59.0}, "note": ""}
    [one] = [one for one in findings(run_of(plan=plan)) if "planned" in one.title]
    assert one.title == "update takes more memory than planned"
    assert "update 70 GiB (planned 60)" in one.text
    plan["phases"] = {"update": 69.0, "generate": 59.0}
    assert not [one for one in titles(run_of(plan=plan)) if "planned" in one]


@pytest.mark.parametrize(
    ("points", "level", "title"),
    [
        ([(0, 0.2, 0.15, 0.25), (40, 0.5, 0.45, 0.55)], "good", "confirms"),
        ([(0, 0.2, 0.15, 0.25), (40, 0.24, 0.2, 0.3)], "note", "no change beyond"),
        ([(0, 0.5, 0.45, 0.55), (40, 0.2, 0.15, 0.25)], "bad", "below its start"),
        (
            [(0, 0.2, 0.15, 0.25), (20, 0.7, 0.65, 0.75), (40, 0.5, 0.45, 0.55)],
            "warn",
            "fallen from its best",
        ),
        ([(0, 0.2, None, None), (40, 0.5, None, None)], "good", "confirms"),
        ([(0, 0.2, None, None), (40, 0.23, None, None)], "note", "no change beyond"),
    ],
)
def test_evaluations_by_their_intervals(points: Any, level: str, title: str) -> None:
    evaluations = [Evaluation("held", "avg@4", *point) for point in points]
    evaluations += [Evaluation("held", "pass@4", 0, 0.9), Evaluation("other", "avg@4", 0, 0.9)]
    found = [one for one in findings(run_of(evaluations=evaluations)) if "valuation" in one.title]
    assert [(one.level, one.metric) for one in found] == [(level, "eval/held/avg@4")]
    assert title in found[0].title


def test_the_papers_own_curves_are_judged_as_the_paper_does() -> None:
    def judged(key: str) -> list[Finding]:
        values = [value for _, value in ghost(key)[1]]
        run = run_of(len(values), series={"policy/entropy": values})
        return [one for one in findings(run) if one.metric == "policy/entropy"]

    assert judged("entropy") == []
    assert [one.level for one in judged("entropy_collapse")] == ["bad"]


def test_each_finding_has_a_chart_to_jump_to() -> None:
    ids = {chart.id for chart in CHARTS}
    without = set()
    for series, *_ in FIRES.values():
        for one in findings(run_of(series=series)):
            if (one.chart or chart_of(one.metric, CHARTS)) not in ids:
                without.add(one.metric)
    assert without == {"sync/unread_tensors"}  # a count that is drawn nowhere


# ---------------------------------------------------------------------------- trends


def test_mann_kendall_by_hand() -> None:
    # 1 2 4 3: of 6 pairs 5 rise and 1 falls, S = 4; variance 4 * 3 * 13 / 18.
    statistic = finding.mann_kendall(np.array([1, 2, 4, 3]))
    assert statistic == pytest.approx(3 / math.sqrt(4 * 3 * 13 / 18))
    # A tie of two takes 2 * 1 * 9 / 18 off the variance.
    statistic = finding.mann_kendall(np.array([1, 2, 2, 3]))
    assert statistic == pytest.approx(4 / math.sqrt((156 - 18) / 18))
    assert finding.mann_kendall(np.array([5, 5, 5, 5])) == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=30))
def test_a_series_upside_down_has_the_opposite_trend(values: list[float]) -> None:
    series = pd.Series(values)
    assert Track(series).score == -Track(-series).score == -Track(series[::-1]).score


def test_a_long_series_has_its_trend() -> None:
    chance = random.Random(1)
    rising = pd.Series([at / 3000 + chance.gauss(0, 1) for at in range(3000)])
    assert Track(rising).rises
    assert Track(-rising).falls
    assert not Track(pd.Series([chance.gauss(0, 1) for _ in range(3000)])).rises
    assert not Track(pd.Series([5.0] * 20)).rises


def test_a_spike_is_outside_of_what_is_usual() -> None:
    def spikes(*values: float) -> list[int]:
        return Track(pd.Series(values, range(1, 22))).spikes(5.0)

    wide = [0.1 * (at % 20) for at in range(20)]  # 0 to 1.9, median 0.95, quartiles 0.95 apart
    assert spikes(*wide, 7.0) == []
    assert spikes(*wide, 9.0) == [21]
    narrow = [1.0 + 0.01 * (at % 3) for at in range(20)]
    assert spikes(*narrow, 4.9) == []
    assert spikes(*narrow, 5.2) == [21]


def test_gaps_are_left_out() -> None:
    run = run_of(4, series={"x": [None, 5.0, None, 7.0]})
    assert track(run, "x").series.to_dict() == {2: 5.0, 4: 7.0}


# ---------------------------------------------------------------------------- the table


def sources() -> str:
    names = ("health_rules", "work_rules", "finding")
    folder = Path(health_rules.__file__).parent
    return "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in names)


def thresholds() -> dict[str, float]:
    """Return the constants of the rules by the names they have in docs/report.md."""
    modules = (finding, health_rules, work_rules)
    return {
        name.lower().replace("_", ".", 1): value
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, int | float)
    }


def test_the_docs_list_every_threshold_with_its_value_and_reason() -> None:
    text = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")
    _, _, *rows = text.split("## Thresholds of")[1].split("\n## ")[0].split("\n|")[1:]
    cells = [row.split("\n")[0].removesuffix(" |").split(" | ") for row in rows]
    assert {row[0].strip(" `"): float(row[1]) for row in cells} == thresholds()
    assert len(cells) == len(thresholds())
    for _, _, *words in cells:
        assert len(words) == 3  # unit, meaning, why
        assert all(word.strip() for word in words)


def test_every_threshold_is_used() -> None:
    text = sources()
    for name in thresholds():
        constant = name.replace(".", "_").upper()
        assert len(re.findall(rf"\b{constant}\b", text)) > 1, constant
