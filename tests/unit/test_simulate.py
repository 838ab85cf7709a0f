"""Simulated engines run at the speed of their model; the coordinator meets its targets on them."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_frontier import Point, draw
from rollout_policies import (
    CARRYING,
    FIRST_FINISHED,
    ON_POLICY,
    POLICIES,
    WHOLE_BATCHES,
    Figures,
    asynchronous,
    kolmogorov_smirnov,
    run,
)
from rollout_workload import Answers, LogNormal, Recorded, concentration, location, read_recorded
from scipy.stats import ks_2samp
from simulate_rollouts import MAX_AGE_MEAN, MIN_BUSY, MIN_P, PRESETS, Preset, main
from virtual_engines import EngineModel, VirtualDriver, VirtualEngine, VirtualRequest

from dapo_megatron.engine.messages import GroupRequest, Sampling
from dapo_megatron.types import (
    Completion,
    Finish,
    Grade,
    Group,
    Prompt,
    Segment,
)
from tests.helpers.groups import step_record

LIMIT = 500
PROMPT = Prompt("simulated", 0, (1, 2, 3), "", "")
SAMPLING = Sampling("test", LIMIT, 1.0, 1.0, is_seeded=False)


def request(ticket: int, so_far: int = 0) -> VirtualRequest:
    return VirtualRequest(ticket, 0, len(PROMPT.tokens), so_far)


# ---------------------------------------------------------------------------- engines


@pytest.mark.parametrize(
    ("num", "slots", "seconds"),
    [
        (1, 256, 600 / 60),  # one sequence at its maximum speed
        (150, 256, 600 / 60),  # the most sequences at full speed
        (300, 512, 300 * 600 / 9_000),  # limited by the engine's capacity
        (30, 10, 3 * 600 / 60),  # three waves of 10 slots
    ],
)
def test_an_engine_runs_at_the_speed_of_its_model(num: int, slots: int, seconds: float) -> None:
    engine = VirtualEngine(EngineModel(max_sequences=slots))
    for ticket in range(num):
        engine.submit(request(ticket), 600)
    early = len(engine.run_until(seconds - 0.01))
    assert early == max(0, num - slots)
    assert early + len(engine.run_until(seconds + 0.01)) == num
    assert engine.next_end() == math.inf


def test_a_long_sequence_speeds_up_when_short_ones_have_ended() -> None:
    engine = VirtualEngine(EngineModel(capacity=60, per_sequence=60))
    engine.submit(request(0), 100)
    engine.submit(request(1), 400)
    # 30 tokens/s each until 100 are done, then 60.
    assert [ended.ticket for ended, _ in engine.run_until(200 / 60 + 0.01)] == [0]
    assert engine.next_end() == pytest.approx((200 + 300) / 60)


def test_an_interrupted_sequence_has_the_tokens_sampled_so_far() -> None:
    engine = VirtualEngine(EngineModel(max_sequences=1))
    engine.submit(request(0), 100)
    engine.submit(request(1), 100)
    engine.run_until(1.01)
    assert [(asked.ticket, tokens) for asked, tokens in engine.interrupt()] == [(0, 60), (1, 0)]
    assert engine.next_end() == math.inf


def test_the_prefill_of_a_continued_sequence_takes_time() -> None:
    engine = VirtualEngine(EngineModel(prefill=50))
    engine.submit(request(0, so_far=97), 157)
    assert engine.next_end() == pytest.approx((3 + 97) / 50 + 60 / 60)


@given(
    lengths=st.lists(st.integers(1, LIMIT), min_size=1, max_size=30),
    slots=st.integers(1, 8),
    seconds=st.lists(st.floats(0.05, 5.0), min_size=1, max_size=6),
    prefill=st.sampled_from([None, 100.0]),
)
def test_interrupts_neither_lose_nor_add_tokens(
    lengths: list[int], slots: int, seconds: list[float], prefill: float | None
) -> None:
    model = EngineModel(max_sequences=slots, capacity=300, per_sequence=60, prefill=prefill)
    driver = VirtualDriver(model, 2, lambda ticket, _: (lengths[ticket], True), 0.5)
    so_far: dict[int, Completion | None] = dict.fromkeys(range(len(lengths)))
    ended: dict[int, Completion] = {}
    driver.start(SAMPLING)
    for version in range(10_000):
        if not so_far:
            break
        driver.version = version // 2  # not every interrupt is the end of a step
        requests: list[list[GroupRequest]] = [[], []]
        for ticket, unfinished in so_far.items():
            requests[ticket % 2].append(GroupRequest(ticket, PROMPT, ((0, unfinished),)))
        started, made = driver.clock, driver.num_generated
        until = started + seconds[version % len(seconds)] + 2.0 * (prefill is not None)
        while driver.clock < until and so_far:
            reports = driver.advance(requests)
            requests = [[], []]
            for replica, report in reports:
                for ticket, completion, why in report.returned:
                    assert replica == ticket % 2 and why == "graded"
                    ended[ticket] = completion
                    del so_far[ticket]
        for _, report in driver.interrupt():
            so_far |= {ticket: completion for ticket, completion, _ in report.returned}
        assert driver.num_generated - made <= 2 * 300 * (driver.clock - started) + 1
        driver.sleep(3.0)
    assert not so_far
    for ticket, length in enumerate(lengths):
        completion = ended[ticket]
        assert completion.num_tokens == length
        assert sum(segment.num_tokens for segment in completion.segments) == length
        versions = [segment.version for segment in completion.segments]
        assert versions == sorted(set(versions))
        assert all(segment.num_tokens > 0 for segment in completion.segments)
        assert completion.finish is (Finish.LENGTH if length == LIMIT else Finish.STOP)
    assert driver.tokens_of == Counter(dict(enumerate(lengths)))


# ---------------------------------------------------------------------------- answers


@pytest.mark.parametrize(("mean", "keep_rate"), [(1_500, 0.3), (4_500, 0.7)])
def test_drawn_answers_have_the_requested_mean_length_and_keep_rate(
    mean: float, keep_rate: float
) -> None:
    workload = LogNormal(mean, keep_rate, between=0.5)
    groups = [workload.group(ticket) for ticket in range(5_000)]
    assert fmean(group.mean_length for group in groups) == pytest.approx(mean, rel=0.04)
    assert fmean(group.is_mixed for group in groups) == pytest.approx(keep_rate, abs=0.03)
    assert max(length for group in groups for length in group.lengths) == 20_480
    again = LogNormal(mean, keep_rate, between=0.5)
    assert [again.group(ticket) for ticket in (4_999, 0)] == [groups[4_999], groups[0]]


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and the cap, 100"):
        location(100, 1.0, 100)
    with pytest.raises(ValueError, match=r"between 0 and 0\.875"):
        concentration(0.9, 4)


def recorded_group(correct: list[bool | None]) -> Group:
    completions = (
        Completion(
            sample=sample,
            tokens=(7,) * (sample + 1),
            logprobs=(-0.5,) * (sample + 1),
            text="",
            finish=Finish.STOP,
            segments=(Segment(0, sample + 1),),
            grade=None
            if is_correct is None
            else Grade(1.0 if is_correct else -1.0, is_correct, ""),
        )
        for sample, is_correct in enumerate(correct)
    )
    return Group(0, PROMPT, tuple(completions))


def test_groups_of_a_recorded_run_are_drawn(tmp_path: Path) -> None:
    groups = [recorded_group([True, False]), replace(recorded_group([True, None]), ticket=1)]
    step_record([(group, "trained") for group in groups]).write(tmp_path, 1)
    drawn = Recorded(read_recorded(tmp_path))
    assert drawn.groups == [
        Answers((1, 2), (True, False))
    ]  # the other group has no verdict, because a grade is missing
    assert (drawn.mean, drawn.keep_rate, drawn.group(9)) == (1.5, 1.0, drawn.groups[0])
    with pytest.raises(ValueError, match="no step_"):
        read_recorded(tmp_path / "elsewhere")


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.0, 0.6), st.integers(60, 300), st.integers(60, 300))
def test_the_kolmogorov_smirnov_test_agrees_with_scipy(
    seed: int, shift: float, num_first: int, num_second: int
) -> None:
    shifted, other = LogNormal(1_500, 0.5, seed=seed), LogNormal(1_500, 0.5, seed=seed + 1)
    first = [shifted.group(t).mean_length * (1 + shift) for t in range(num_first)]
    second = [other.group(t).mean_length for t in range(num_second)]
    distance, p = kolmogorov_smirnov(first, second)
    scipy = ks_2samp(first, second, method="asymp")
    assert distance == pytest.approx(scipy.statistic)
    assert p == pytest.approx(scipy.pvalue, abs=0.06)


# ---------------------------------------------------------------------------- policies


SMALL = PRESETS[Preset.small]


@pytest.fixture(scope="module", params=[(1_500.0, 0.5), (4_500.0, 0.7)], ids=str)
def figures(request: pytest.FixtureRequest) -> dict[str, Figures]:
    """Results of each policy on a small cluster."""
    mean, keep_rate = request.param
    workload = LogNormal(mean, keep_rate, samples=SMALL.samples)
    return {name: run(policy, SMALL, workload) for name, policy in POLICIES.items()}


def test_carrying_keeps_engines_busy_and_loses_nothing(figures: dict[str, Figures]) -> None:
    carrying, whole = figures[CARRYING], figures[WHOLE_BATCHES]
    assert carrying.busy >= MIN_BUSY
    assert carrying.seconds_per_step <= 0.5 * whole.seconds_per_step
    assert carrying.lost_groups == 0
    assert carrying.wasted_tokens == 0.0
    assert carrying.age_mean <= MAX_AGE_MEAN
    assert carrying.age_max <= SMALL.max_age


def test_trained_lengths_are_those_of_mixed_groups(figures: dict[str, Figures]) -> None:
    for name in (WHOLE_BATCHES, CARRYING, ON_POLICY):
        assert figures[name].length_p >= MIN_P, name


def test_finish_order_with_dropping_prefers_short_answers(figures: dict[str, Figures]) -> None:
    dropping = figures[FIRST_FINISHED]
    assert dropping.length_ratio < 0.95
    assert dropping.length_p < MIN_P
    assert dropping.lost_groups > 0


def test_on_policy_is_faster_than_whole_batches_and_has_age_0(figures: dict[str, Figures]) -> None:
    on_policy, whole = figures[ON_POLICY], figures[WHOLE_BATCHES]
    assert on_policy.seconds_per_step <= 0.95 * whole.seconds_per_step
    assert on_policy.age_max == 0
    assert on_policy.prompts_per_step < whole.prompts_per_step


@pytest.mark.parametrize("training_seconds", [5.0, 200.0])
def test_an_asynchronous_step_takes_as_long_as_the_slower_side(training_seconds: float) -> None:
    """Test with a shorter and a longer training than the sampling of a step takes."""
    setting = replace(SMALL, training_seconds=training_seconds, overhead_seconds=0.0, steps=16)
    workload = LogNormal(1_500.0, 0.5, samples=SMALL.samples)
    figures = run(asynchronous, setting, workload)
    carrying = run(POLICIES[CARRYING], setting, workload)
    generating = carrying.steady_seconds - training_seconds
    slower = max(training_seconds, generating)
    assert slower - 0.05 * generating <= figures.steady_seconds <= 1.07 * slower
    assert figures.lost_groups == 0 and figures.wasted_tokens == 0.0
    assert figures.age_mean <= MAX_AGE_MEAN


def test_strict_order_makes_data_older() -> None:
    workload = LogNormal(1_500, 0.5, samples=SMALL.samples)
    bound = replace(SMALL, steps=16, max_age=1_000, lookahead=4.0)
    strict = run(POLICIES[CARRYING], replace(bound, max_overtake=0), workload)
    assert strict.age_mean > 1.3 * run(POLICIES[CARRYING], bound, workload).age_mean
    assert strict.lost_groups == 0


def test_the_program_prints_json_on_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(preset=Preset.small, mean=[1_500.0], keep_rate=[0.5], steps=9, jobs=1)
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert {"commit", "machine", "python", "sigma", "seconds"} <= summary.keys()
    assert [result["policy"] for result in summary["results"]] == list(POLICIES)
    assert any("ours, carrying: 0 mixed groups lost, none: target met" in line for line in lines)


def test_the_plot_is_valid_svg() -> None:
    point = Point(1_500, 0.5, "lookahead", 1.0, 1.0, 8, 256, 200.0, 0.8, 1.0, 4)
    points = [point, replace(point, value=2.0, age_mean=2.0, seconds_per_step=145.0)]
    points += [replace(point, mean=4_500.0) for point in points]
    picture = ElementTree.fromstring(draw(points))
    assert picture.tag.endswith("svg")
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert "mean length 1,500, keep rate 0.5" in texts
    assert "mean length 4,500, keep rate 0.5" in texts
