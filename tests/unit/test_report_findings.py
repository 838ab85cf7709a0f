"""Findings: each one on a series that shows it and on one that does not, and none on noise."""

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
from dapo_megatron.report.chart import chart_of
from dapo_megatron.report.charts import CHARTS
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
    """A healthy run of constant series, changed by `series`. `settings`: config values by key."""
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
    return [item.title for item in findings(run) if item.level in wanted]


def noisy(values: Sequence[float], share: float = 0.05, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [value * (1 + rng.gauss(0, share)) for value in values]


def ramp(begin: float, end: float, num_steps: int = 40) -> list[float]:
    return [begin + (end - begin) * at / (num_steps - 1) for at in range(num_steps)]


def peaks(at: dict[int, float], base: float = 0.3, num_steps: int = 40) -> list[float]:
    """Noise around `base`, with the values of `at` at its indices."""
    values = noisy([base] * num_steps, 0.1)
    for place, value in at.items():
        values[place] = value
    return values


def fall(begin: float, share: float, num_steps: int = 40) -> list[float]:
    """An exponential from `begin` to `begin * share`."""
    return [begin * share ** (at / (num_steps - 1)) for at in range(num_steps)]


# name: (changed series, pattern of the title, level, metric)
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
        {"groups/all_correct": [round(count) for count in ramp(0, 60)]},
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
    "masked": (
        {"correction/masked_tokens": 0.2, "correction/effective_sample_share": 0.8},
        "Corrections mask 20% of the tokens",
        "note",
        "correction/masked_tokens",
    ),
    "masked much": (
        {"correction/masked_tokens": 0.7, "correction/effective_sample_share": 0.3},
        "Corrections mask 70% of the tokens",
        "warn",
        "correction/masked_tokens",
    ),
    "few heavy tokens": (
        {"correction/masked_tokens": 0.01, "correction/effective_sample_share": 0.3},
        "effective sample size is 30%",
        "warn",
        "correction/effective_sample_share",
    ),
    "policy waits": (
        {"throughput/overlap": 0.9},
        "^The policy waits for 60% of a step",
        "warn",
        "derived/policy_waits",
    ),
    "engines wait": (
        {
            "throughput/overlap": 0.0,
            "time/generate": 20.0,
            "time/logprobs": 10.0,
            "time/update": 60.0,
        },
        "^Engines wait for 73% of a step",
        "warn",
        "derived/engines_wait",
    ),
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


def test_every_setting_named_by_a_finding_is_a_config_key() -> None:
    """Including the keys of findings that no series above triggers."""
    named = set(re.findall(r'["; ]([a-z]+\.[a-z_]+)(?:: |; |")', sources()))
    sections = set(Config.model_fields)
    settings = {name for name in named if name.split(".")[0] in sections}
    assert len(settings) > 20
    assert [setting for setting in sorted(settings) if not is_key(setting)] == []


@pytest.mark.parametrize(
    "share, weights", [(1.0, "of all weights were"), (0.1, "of all compared weights were")]
)
def test_a_sync_that_compared_a_tenth_does_not_claim_all_weights(
    share: float, weights: str
) -> None:
    shown = findings(run_of(series={"sync/fingerprinted": share}))
    [finding] = [each for each in shown if each.metric == "sync/fingerprinted"]
    assert finding.title == "Sync verified at each of 40 syncs"
    assert weights in finding.text


@pytest.mark.parametrize("name", FIRES)
def test_a_finding_is_reported_on_a_series_that_shows_it(name: str) -> None:
    series, title, level, metric = FIRES[name]
    matches = [item for item in findings(run_of(series=series)) if re.search(title, item.title)]
    assert [(item.level, item.metric) for item in matches] == [(level, metric)]
    assert matches[0].text.endswith((".", "?"))
    for key, way in matches[0].settings:
        assert is_key(key), key
        assert not way.startswith(("or ", "and "))


@pytest.mark.parametrize("name", [name for name, row in FIRES.items() if row[2] != "good"])
def test_a_series_with_one_finding_gives_no_others(name: str) -> None:
    """Side effects are listed: a starved step also has groups that are unaccounted for."""
    series, title, *_ = FIRES[name]
    side_effects = {
        "starved": {"Starved", "unaccounted"},
        "starving": {"Starved", "unaccounted"},
        "keep fell": {"unaccounted"},
        "phase grew": set[str](),
    }.get(name, set())
    other_titles = [
        other_title
        for other_title in titles(run_of(series=series))
        if not re.search(title, other_title)
        and not other_title.startswith("No trend")
        and not any(word in other_title for word in side_effects)
    ]
    assert not other_titles


def test_a_healthy_constant_run_has_only_the_finding_no_trend() -> None:
    assert [title[:8] for title in titles(run_of())] == ["No trend"]
    assert titles(run_of(200), "warn") == titles(run_of(200))  # flat for so long is a warning


def noise(num_steps: int, seed: int, accuracy: float) -> RunData:
    """A run with 10% noise on all series except counts, and noise of `accuracy` on the accuracy."""
    rng = random.Random(seed)
    kept = ("groups/", "sync/", "grading/")
    series: dict[str, Any] = {
        name: [value * (1 + rng.gauss(0, 0.1)) for _ in range(num_steps)]
        for name, value in HEALTHY.items()
        if not name.startswith(kept)
    }
    series["accuracy/raw"] = [0.5 + rng.gauss(0, accuracy) for _ in range(num_steps)]
    return run_of(num_steps, series=series)


@pytest.mark.parametrize("num_steps", [8, 9, 20, 40])
@pytest.mark.parametrize("accuracy", [0.03, 0.15])
def test_noise_gives_no_findings(num_steps: int, accuracy: float) -> None:
    alarms = [
        (item.title, seed)
        for seed in range(60)
        for item in findings(noise(num_steps, seed, accuracy))
        if not item.title.startswith(("No trend", "Sync", "Every"))
    ]
    # Out of about 40 series in each of 60 runs.
    assert len(alarms) <= 1, alarms


NUMBERS = st.none() | st.floats(-1e100, 1e100)
"""Values that read_metrics accepts."""


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
def test_no_series_of_numbers_stops_a_report(
    num_steps_and_series: tuple[int, dict[str, Any]], knob_value: Any
) -> None:
    num_steps, series = num_steps_and_series
    settings = {
        "sync.max_gap": knob_value,
        "optimizer.clip_grad": knob_value,
        "rollout.prompts_per_step": knob_value,
    }
    plan = {"phases": {"update": 1e-300, "generate": "much"}}
    for item in findings(run_of(num_steps, series=series, settings=settings, plan=plan)):
        assert item.title
        assert item.level in ("good", "note", "warn", "bad")


def test_values_too_large_to_add_count_as_missing() -> None:
    lines = [{"step": step, "grading/timeout": 1e308} for step in (1, 2)]
    broken = read_metrics(lines)[0].frame
    assert "Every completion was graded" in titles(run_of(2, series=dict(broken.items())), "good")


def test_findings_are_sorted_from_the_worst_level() -> None:
    sorted_findings = findings(
        run_of(series={"accuracy/raw": ramp(0.7, 0.3), "policy/approx_kl": 0.5})
    )
    order = ["bad", "warn", "note", "good"]
    places = [order.index(item.level) for item in sorted_findings]
    assert places == sorted(places)
    assert sorted_findings[0].level == "bad"


def test_the_finding_on_learning_comes_after_warnings_and_before_notes() -> None:
    series = {"accuracy/raw": ramp(0.3, 0.7), "policy/grad_norm": 9.0, "policy/approx_kl": 0.5}
    levels = [item.level for item in findings(run_of(series=series))]
    learning = [item.title.startswith("Learning") for item in findings(run_of(series=series))]
    at = learning.index(True)
    assert set(levels[:at]) <= {"bad", "warn"} and levels[:at]
    assert not {"bad", "warn"} & set(levels[at:])
    assert "note" in levels[at:]


# ---------------------------------------------------------------------------- short runs


@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
def test_a_short_run_gets_no_findings_about_trends(num_steps: int) -> None:
    wild: dict[str, Any] = {
        "accuracy/raw": ramp(0.9, 0.1, 7)[:num_steps],
        "policy/entropy": fall(1, 0.001, 7)[:num_steps],
        "time/update": ramp(1, 100, 7)[:num_steps],
    }
    [title] = titles(run_of(num_steps, series=wild))
    assert title.startswith(f"{num_steps} step")


def test_a_short_run_gets_the_finding_that_it_starves() -> None:
    items = findings(run_of(1, series={"groups/trained": [5.0]}))
    assert any(item.title.startswith("Starved") and item.level == "warn" for item in items)


def test_a_run_with_only_one_metric_gives_one_finding() -> None:
    run = run_of(20, series={})
    bare = Metrics(frame_of(run.metrics.steps, {"accuracy/raw": noisy(ramp(0.1, 0.5, 20))}))
    [item] = findings(run_of(20, metrics=bare, config={}))
    assert item.level == "good"


# ---------------------------------------------------------------------------- the run itself


@pytest.mark.parametrize(
    ("word", "level"),
    [("crashed", "bad"), ("hung", "bad"), ("stopped", "note"), ("unknown", "note")],
)
def test_the_end_of_a_run_is_a_finding(word: str, level: str) -> None:
    run = run_of(state=RunState(StateWord(word), "said so"))
    [item] = [item for item in findings(run) if "Said so." in item.text]
    assert item.level == level
    assert "after step 40" in item.title


def test_restarts_are_a_finding_with_their_reasons() -> None:
    def starts(*ends: str | None) -> list[Attempt]:
        return [Attempt(str(i), step=5 * i, end=end) for i, end in enumerate(ends)]

    assert not [title for title in titles(run_of(attempts=starts(None))) if "Started" in title]
    [stopped] = [
        item
        for item in findings(run_of(attempts=starts("stopped", "stopped", None)))
        if "Started" in item.title
    ]
    assert (stopped.level, stopped.setting) == ("note", None)
    assert "2 stopped" in stopped.text
    [crashed] = [
        item
        for item in findings(run_of(attempts=starts("crashed", None, "hung", None)))
        if "Started" in item.title
    ]
    assert crashed.level == "warn"
    assert "1 crashed, 1 cut short, 1 hung" in crashed.text


def test_steps_without_metrics_are_a_finding() -> None:
    incomplete = Metrics(run_of(4).metrics.frame.set_axis([3, 4, 7, 8]))
    [item] = [
        item for item in findings(run_of(4, metrics=incomplete)) if "without metrics" in item.title
    ]
    assert item.title == "2 steps without metrics"
    assert "no line for steps 5, 6" in item.text


def test_clipped_completions_of_gspo_are_no_finding() -> None:
    run = run_of(series={"policy/clip_fraction_high": 0.2})
    assert any("are clipped" in title for title in titles(run))
    run.config["loss"] = {"objective": "gspo"}
    assert not any("are clipped" in title for title in titles(run))


def test_expired_groups_are_no_finding_on_policy() -> None:
    series = {"groups/expired": 8.0, "groups/issued": 48.0}
    assert any("expired" in title for title in titles(run_of(series=series)))
    calm = titles(run_of(series=series, settings={"rollout.on_policy": True}))
    assert not any("expired" in title for title in calm)


def test_a_slower_update_explained_by_more_tokens_is_no_finding() -> None:
    series = {
        "time/update": ramp(20, 60),
        "time/step": ramp(80, 120),
        # The number of trained tokens grows in proportion to the seconds.
        "throughput/tokens_per_second": [
            1000 * a / b for a, b in zip(ramp(20, 60), ramp(80, 120), strict=True)
        ],
    }
    assert not [title for title in titles(run_of(series=series)) if "times as long" in title]
    assert [
        title
        for title in titles(run_of(series={"time/update": ramp(20, 60)}))
        if "times as" in title
    ]


def test_entropy_that_recovers_is_no_finding() -> None:
    fallen = [*fall(0.7, 0.3, 20), *ramp(0.21, 0.225, 20)]
    assert not [
        title for title in titles(run_of(series={"policy/entropy": fallen})) if "Entr" in title
    ]
    falls = [*fall(0.7, 0.3, 20), *ramp(0.21, 0.18, 20)]
    assert [title for title in titles(run_of(series={"policy/entropy": falls})) if "Entr" in title]


def test_an_alternating_phase_duration_has_not_grown() -> None:
    slow = ramp(10, 17, 88)
    series = {"time/update": [40.0 if at % 2 else slow[at] for at in range(88)]}
    assert track(run_of(88, series=series), "time/update").growth > 3
    assert not [title for title in titles(run_of(88, series=series)) if "times as long" in title]


def test_memory_that_stops_growing_is_no_leak() -> None:
    grown = {"memory/update_gib": [*ramp(40, 60, 30), *[60.0] * 10]}
    assert not [title for title in titles(run_of(series=grown)) if "Memory" in title]
    grows = {"memory/update_gib": [*ramp(40, 60, 30), *ramp(60, 66, 10)]}
    assert [title for title in titles(run_of(series=grows)) if "Memory" in title]


def test_longer_responses_with_rising_accuracy_are_no_finding() -> None:
    series: dict[str, Any] = {"response_tokens/mean": noisy(fall(200, 5))}
    series["accuracy/raw"] = noisy(ramp(0.2, 0.8))
    assert not [title for title in titles(run_of(series=series)) if "longer" in title]


def test_memory_above_the_plan_is_a_finding() -> None:
    plan = {"device": "gpu", "phases": {"update": 60.0, "generate": 59.0}, "note": ""}
    [item] = [item for item in findings(run_of(plan=plan)) if "planned" in item.title]
    assert item.title == "update takes more memory than planned"
    assert "update 70 GiB (planned 60)" in item.text
    plan["phases"] = {"update": 69.0, "generate": 59.0}
    assert not [title for title in titles(run_of(plan=plan)) if "planned" in title]


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
def test_evaluations_are_compared_by_their_intervals(points: Any, level: str, title: str) -> None:
    evaluations = [Evaluation("held", "avg@4", *point) for point in points]
    evaluations += [Evaluation("held", "pass@4", 0, 0.9), Evaluation("other", "avg@4", 0, 0.9)]
    [item] = [
        item for item in findings(run_of(evaluations=evaluations)) if "valuation" in item.title
    ]
    assert (item.level, item.metric) == (level, "eval/held/avg@4")
    assert title in item.title


def test_curves_of_the_dapo_paper_are_judged_as_in_the_paper() -> None:
    def judged(key: str) -> list[Finding]:
        values = [value for _, value in ghost(key)[1]]
        run = run_of(len(values), series={"policy/entropy": values})
        return [item for item in findings(run) if item.metric == "policy/entropy"]

    assert judged("entropy") == []
    assert [item.level for item in judged("entropy_collapse")] == ["bad"]


def test_each_finding_links_to_a_chart() -> None:
    ids = {chart.id for chart in CHARTS}
    without = set()
    for series, *_ in FIRES.values():
        for item in findings(run_of(series=series)):
            if (item.chart or chart_of(item.metric, CHARTS)) not in ids:
                without.add(item.metric)
    assert without == {"sync/unread_tensors"}  # a count that no chart shows


# ---------------------------------------------------------------------------- trends


def test_mann_kendall_by_hand() -> None:
    # 1 2 4 3: 5 of 6 pairs rise and 1 falls, S = 4; variance 4 * 3 * 13 / 18.
    statistic = finding.mann_kendall(np.array([1, 2, 4, 3]))
    assert statistic == pytest.approx(3 / math.sqrt(4 * 3 * 13 / 18))
    # A tie of two reduces the variance by 2 * 1 * 9 / 18.
    statistic = finding.mann_kendall(np.array([1, 2, 2, 3]))
    assert statistic == pytest.approx(4 / math.sqrt((156 - 18) / 18))
    assert finding.mann_kendall(np.array([5, 5, 5, 5])) == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=30))
def test_a_negated_or_reversed_series_has_the_opposite_trend(values: list[float]) -> None:
    series = pd.Series(values)
    assert Track(series).score == -Track(-series).score == -Track(series[::-1]).score


def test_the_trend_of_a_long_noisy_series_is_detected() -> None:
    rng = random.Random(1)
    rising = pd.Series([at / 3000 + rng.gauss(0, 1) for at in range(3000)])
    assert Track(rising).rises
    assert Track(-rising).falls
    assert not Track(pd.Series([rng.gauss(0, 1) for _ in range(3000)])).rises
    assert not Track(pd.Series([5.0] * 20)).rises


def test_a_spike_is_an_outlier_from_the_usual_spread() -> None:
    def spikes(*values: float) -> list[int]:
        return Track(pd.Series(values, range(1, 22))).spikes(5.0)

    wide = [0.1 * (at % 20) for at in range(20)]  # 0 to 1.9, median 0.95, quartiles 0.95 apart
    assert spikes(*wide, 7.0) == []
    assert spikes(*wide, 9.0) == [21]
    narrow = [1.0 + 0.01 * (at % 3) for at in range(20)]
    assert spikes(*narrow, 4.9) == []
    assert spikes(*narrow, 5.2) == [21]


def test_missing_values_are_left_out_of_a_track() -> None:
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
