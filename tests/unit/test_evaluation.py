"""Evaluation metrics and their confidence intervals, for groups graded by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo.evaluation import avg_at_k, bootstrap_interval, cons_at_k, pass_at_k
from dapo_megatron.config import EvaluationConfig
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.rollout.evaluate import Evaluator, evaluation_metrics, sample_all
from dapo_megatron.segments import Segment
from dapo_megatron.types import Finish, Grade, Group, Prompt, Stopped
from tests.helpers.rollouts import MAX_TOKENS, ScriptedDriver, completion_of, random_script

# ------------------------------------------------------------------------ bootstrap


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40),
    st.integers(0, 2**40),
    st.integers(1, 50),
)
@settings(max_examples=50)
def test_an_interval_is_ordered_within_the_values_and_reproducible(
    values: list[float], seed: int, resamples: int
) -> None:
    low, high = bootstrap_interval(values, resamples=resamples, seed=seed)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert (low, high) == bootstrap_interval(values, resamples=resamples, seed=seed)
    mirrored = bootstrap_interval([1 - value for value in values], resamples=resamples, seed=seed)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_the_95_percent_interval_covers_the_mean_in_about_95_percent_of_trials() -> None:
    rng = random.Random(0)
    trials, hits = 300, 0
    for trial in range(trials):
        values = [float(rng.random() < 0.4) for _ in range(100)]
        low, high = bootstrap_interval(values, resamples=400, seed=trial)
        hits += low <= 0.4 <= high
    assert 0.90 <= hits / trials <= 0.985


# ------------------------------------------------------------------------ metrics


def graded(ticket: int, answers: str) -> Group:
    """Make a group from a letter per completion: R(ight), W(rong), X (wrong, another answer) or
    - (no grade)."""
    grades = {
        "R": Grade(1.0, True, "7"),
        "W": Grade(-1.0, False, "8"),
        "X": Grade(-1.0, False, "9"),
        "-": None,
    }
    prompt = Prompt("set", ticket, (5,), "4 + 3 =", "7")
    return Group(
        ticket,
        prompt,
        tuple(
            completion_of(sample, (Segment(0, 2),), Finish.STOP, grades[letter])
            for sample, letter in enumerate(answers)
        ),
    )


def test_metrics_of_a_hand_made_example() -> None:
    groups = [graded(0, "RRWX"), graded(1, "WWRX"), graded(2, "WWWW")]
    metrics = evaluation_metrics(groups, resamples=0, seed=0)
    assert metrics == {
        "avg@4": pytest.approx((0.5 + 0.25 + 0) / 3),
        "pass@4": pytest.approx(2 / 3),
        "cons@4": pytest.approx(1 / 3),
        "pass@1": pytest.approx((0.5 + 0.25 + 0) / 3),
        "pass@2": pytest.approx(((1 - 1 / 6) + 0.5 + 0) / 3),
        "ungraded": 0.0,
    }
    metrics = evaluation_metrics([graded(0, "R--W"), graded(1, "----")], resamples=0, seed=0)
    assert (metrics["avg@4"], metrics["ungraded"]) == (0.125, 6.0)
    assert metrics["cons@4"] == 0.0  # the most frequent "answer" of both is the missing one


@given(
    st.integers(1, 9).flatmap(
        lambda k: st.lists(st.text("RWX-", min_size=k, max_size=k), min_size=1, max_size=8)
    )
)
@settings(max_examples=60)
def test_metrics_agree_with_the_formulas_and_intervals_are_valid(rows: list[str]) -> None:
    groups = [graded(ticket, row) for ticket, row in enumerate(rows)]
    correct = [[letter == "R" for letter in row] for row in rows]
    answers = [[{"R": "7", "W": "8", "X": "9", "-": ""}[letter] for letter in row] for row in rows]
    metrics = evaluation_metrics(groups, resamples=50, seed=1)
    k = len(rows[0])
    assert metrics[f"avg@{k}"] == pytest.approx(avg_at_k(correct))
    assert metrics[f"pass@{k}"] == pytest.approx(pass_at_k(correct))
    assert metrics[f"cons@{k}"] == pytest.approx(cons_at_k(correct, answers))
    for name in ("avg", "pass", "cons"):
        low, high = metrics[f"{name}@{k}_low"], metrics[f"{name}@{k}_high"]
        assert 0.0 <= low <= high <= 1.0
    # For powers of two up to k. More samples make a right one more likely.
    names = {name for name in metrics if name.startswith("pass@") and name[5:].isdigit()}
    assert names == {f"pass@{j}" for j in (1, 2, 4, 8, k) if j <= k}
    passes = [metrics[f"pass@{j}"] for j in (1, 2, 4, 8) if j < k] + [metrics[f"pass@{k}"]]
    assert all(fewer <= more + 1e-12 for fewer, more in pairwise(passes))
    assert metrics["pass@1"] == pytest.approx(fmean(map(fmean, correct)))


# ------------------------------------------------------------------------ sampling


@dataclass
class EvaluationDriver(ScriptedDriver):
    """Driver that notes the phases, in which nothing is continued.

    lose_at  turn -> replica that is lost then
    """

    phases: list[Sampling] = field(default_factory=list)
    lose_at: dict[int, int] = field(default_factory=dict)
    num_turns: int = 0

    def start(self, sampling: Sampling) -> None:
        super().start(sampling)
        self.phases.append(sampling)
        self.reported.clear()

    def advance(self, requests: Any) -> Any:
        self.num_turns += 1
        if (replica := self.lose_at.pop(self.num_turns, None)) is not None:
            requests = [[] if number == replica else r for number, r in enumerate(requests)]
            self.lose(replica)
        return super().advance(requests)


class DriverOnly:
    """Engines of which the test sees the driver only."""

    def __init__(self, driver: ScriptedDriver) -> None:
        self._driver = driver

    def run(self, task: Any, of: object) -> Any:
        return task(self._driver)


SAMPLING = Sampling("use", MAX_TOKENS, 0.5, 0.25, is_seeded=True)


def never(version: int) -> NoReturn:
    """Replace a sync where none is needed."""
    raise AssertionError("a sync")


def problems(number: int) -> list[Prompt]:
    return [Prompt("set", index, (5,), "4 + 3 =", "7") for index in range(number)]


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    tickets=st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True),
    lose_at=st.none() | st.integers(1, 12),
)
def test_all_groups_are_returned_in_order_with_their_grades(
    seed: int, tickets: list[int], lose_at: int | None
) -> None:
    """Also if a replica is lost, whose groups are sampled again."""
    correct, length = random_script(seed, 0.5)
    driver = EvaluationDriver(
        correct, length, 2, 3, random.Random(seed), grade_at_once=False,
        lose_at={} if lose_at is None else {lose_at: seed % 2},
    )  # fmt: skip
    prompts = list(zip(tickets, problems(len(tickets)), strict=True))
    groups = sample_all(driver, prompts, SAMPLING, 3)
    assert [(group.ticket, group.prompt) for group in groups] == prompts
    for group in groups:
        assert [c.sample for c in group.completions] == [0, 1, 2]
        grades = [c.grade and c.grade.correct for c in group.completions]
        assert grades == [correct(group.ticket, sample) for sample in range(3)]
    for ticket, num_requests in driver.orphaned.items():
        again = [r for r in driver.requests[num_requests:] if r.ticket == ticket]
        assert {sample for r in again for sample, _ in r.samples} == {0, 1, 2}
    assert not any(driver._running)  # the phase has ended
    driver.stop = "SIGTERM"
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        sample_all(driver, prompts, SAMPLING, 3)
    assert not any(driver._running)


def correct(ticket: int, sample: int) -> bool | None:
    """Let sample 0 of an even row be right, and sample 1 of row 1 get no grade."""
    return None if (ticket, sample) == (1, 1) else sample == 0 and ticket % 2 == 0


SETS = {"easy": problems(2), "hard": problems(4)}


def test_a_set_is_evaluated_again_with_new_weights_if_all_engines_are_lost() -> None:
    syncs: list[int] = []
    driver = EvaluationDriver(correct, lose_at={1: 0, 2: 1})

    def sync(version: int) -> Any:
        syncs.append(version)
        driver.lost.clear()

    config = EvaluationConfig(samples=2)
    other = DriverOnly(EvaluationDriver(correct))
    lossy = Evaluator(config, SETS, DriverOnly(driver), sync, MAX_TOKENS, seed=5)  # type: ignore[arg-type]
    intact = Evaluator(config, SETS, other, never, MAX_TOKENS, seed=5)  # type: ignore[arg-type]
    assert lossy.run(7) == intact.run(7)
    assert syncs == [7]


@pytest.mark.parametrize(("limit", "max_tokens"), [(None, MAX_TOKENS), (7, 7)])
def test_each_set_is_sampled_with_the_configured_settings(
    limit: int | None, max_tokens: int
) -> None:
    config = EvaluationConfig(
        samples=2, temperature=0.75, top_p=0.5, max_response_tokens=limit, resamples=20
    )
    driver = EvaluationDriver(correct)
    evaluator = Evaluator(config, SETS, DriverOnly(driver), never, MAX_TOKENS, seed=5)  # type: ignore[arg-type]
    metrics = evaluator.run(3)
    assert metrics == evaluator.run(4)
    expected = [
        Sampling(f"5/evaluate/{name}", max_tokens, 0.75, 0.5, is_seeded=True) for name in SETS
    ]
    assert driver.phases == expected * 2
    assert {name.split("/")[1] for name in metrics} == {"easy", "hard"}
    assert (metrics["eval/easy/avg@2"], metrics["eval/hard/pass@2"]) == (0.25, 0.5)
    assert metrics["eval/easy/ungraded"] == metrics["eval/hard/ungraded"] == 1.0
    interval = bootstrap_interval([0.5, 0.0], resamples=20, seed=5)
    assert interval == (metrics["eval/easy/avg@2_low"], metrics["eval/easy/avg@2_high"])


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 9]), (1, list(range(10))), (4, [0, 4, 8, 9])])
def test_evaluation_is_due_first_last_and_every_n_steps(every: int, steps: list[int]) -> None:
    evaluator = Evaluator(EvaluationConfig(every=every), {"set": problems(1)}, None, never, 8, 0)  # type: ignore[arg-type]
    assert [step for step in range(10) if evaluator.due(step, 9)] == steps
    no_sets = Evaluator(EvaluationConfig(every=every), {}, None, never, 8, 0)  # type: ignore[arg-type]
    assert not any(no_sets.due(step, 9) for step in range(10))
