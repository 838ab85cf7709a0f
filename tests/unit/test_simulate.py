"""Simulated engines run at the speed of their model; the coordinator meets its targets on them."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rollout_policies import Figures, LogNormal, Policy, Setting, run
from simulate_rollouts import COMPARED, changed, main
from virtual_engines import Answers, EngineModel, VirtualDriver, VirtualEngine, VirtualRequest

from dapo_megatron.engine.messages import GroupRequest, Sampling
from dapo_megatron.types import Completion, Finish, Prompt

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


def test_sequences_speed_up_continue_and_are_prefilled() -> None:
    engine = VirtualEngine(EngineModel(capacity=60, per_sequence=60))
    engine.submit(request(0), 100)
    engine.submit(request(1), 400)
    # 30 tokens/s each until 100 are done, then 60.
    assert [ended.ticket for ended, _ in engine.run_until(200 / 60 + 0.01)] == [0]
    assert engine.next_end() == pytest.approx((200 + 300) / 60)
    assert [(asked.ticket, tokens) for asked, tokens in engine.interrupt()] == [(1, 100)]
    assert engine.next_end() == math.inf
    engine = VirtualEngine(EngineModel(prefill=50))
    engine.submit(request(0, so_far=97), 157)
    assert engine.next_end() == pytest.approx((3 + 97) / 50 + 60 / 60)


class Fixed:
    """Groups of one right answer, of the given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def group(self, ticket: int) -> Answers:
        return Answers((self._lengths[ticket],), (True,))


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
    driver = VirtualDriver(model, 2, Fixed(lengths), 0.5)
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
        started, made = driver.clock, driver.tokens_of.total()
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
        assert driver.tokens_of.total() - made <= 2 * 300 * (driver.clock - started) + 1
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


# ---------------------------------------------------------------------------- policies


SMALL = Setting(
    replicas=4,
    engine=EngineModel(max_sequences=64, capacity=2_250, turn_seconds=0.0003),
    overhead_seconds=0.1,
    overhead_per_token=4e-8,
    training_seconds=20.0,
    prompts_per_step=32,
    samples=8,
    steps=24,
    warmup=8,
    batch_prompts=96,
)


@pytest.fixture(scope="module")
def figures() -> dict[Policy, Figures]:
    """Results of each policy on a small cluster."""
    workload = LogNormal(1_500.0, 0.5, samples=SMALL.samples)
    return {policy: run(policy, SMALL, workload) for policy in COMPARED}


def test_policies_differ_as_the_docs_say(figures: dict[Policy, Figures]) -> None:
    """Carrying keeps engines busy and loses nothing. Only finish order with dropping prefers short
    answers. On policy beats whole batches."""
    carrying, whole = figures[Policy.CARRYING], figures[Policy.WHOLE_BATCHES]
    dropping, on_policy = figures[Policy.FIRST_FINISHED], figures[Policy.ON_POLICY]
    assert carrying.busy >= 0.97
    assert carrying.seconds_per_step <= 0.5 * whole.seconds_per_step
    assert (carrying.lost_groups, carrying.wasted_tokens) == (0, 0.0)
    assert carrying.age_mean <= 2.0 and carrying.age_max <= SMALL.max_age
    for name in (Policy.WHOLE_BATCHES, Policy.CARRYING, Policy.ON_POLICY):
        assert figures[name].length_p >= 0.01, name
    assert dropping.length_ratio < 0.95 and dropping.length_p < 0.01
    assert dropping.lost_groups > 0
    assert on_policy.seconds_per_step <= 0.95 * whole.seconds_per_step
    assert on_policy.age_max == 0
    assert on_policy.prompts_per_step < whole.prompts_per_step


@pytest.mark.parametrize("training_seconds", [5.0, 200.0])
def test_an_asynchronous_step_takes_as_long_as_the_slower_side(training_seconds: float) -> None:
    """Test with a shorter and a longer training than the sampling of a step takes."""
    setting = replace(SMALL, training_seconds=training_seconds, overhead_seconds=0.0, steps=12)
    workload = LogNormal(1_500.0, 0.5, samples=SMALL.samples)
    figures = run(Policy.ASYNCHRONOUS, setting, workload)
    carrying = run(Policy.CARRYING, setting, workload)
    generating = carrying.steady_seconds - training_seconds
    slower = max(training_seconds, generating)
    assert slower - 0.05 * generating <= figures.steady_seconds <= 1.07 * slower
    assert figures.lost_groups == 0 and figures.wasted_tokens == 0.0
    assert figures.age_mean <= 2.0


def test_strict_order_makes_data_older() -> None:
    workload = LogNormal(1_500, 0.5, samples=SMALL.samples)
    bound = replace(SMALL, steps=12, max_age=1_000, lookahead=4.0)
    strict = run(Policy.CARRYING, replace(bound, max_overtake=0), workload)
    assert strict.age_mean > 1.3 * run(Policy.CARRYING, bound, workload).age_mean
    assert strict.lost_groups == 0


def test_the_program_prints_json_on_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replicas=2", "prompts_per_step=8", "samples=4", "steps=3", "warmup=1"]
    main([*words, "batch_prompts=24", "engine.prefill=1e5"], mean=[1_500.0], keep_rate=[0.5])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"commit", "machine", "python", "sigma"} <= summary.keys()
    assert summary["setting"]["engine"]["prefill"] == 1e5
    assert [result["policy"] for result in summary["results"]] == COMPARED


@pytest.mark.parametrize("text", ["engine.speed=1", "engine=1", "steps.x=1", "steps=many"])
def test_a_setting_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=text.partition("=")[0].split(".")[0]):
        changed(Setting(), [text])
