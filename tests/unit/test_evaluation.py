"""Evaluation figures and their intervals, of groups graded by hand."""

from __future__ import annotations

import math
import random
import time
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo.evaluation import avg_at_k, bootstrap_interval, cons_at_k, pass_at_k
from dapo_megatron.rollout.evaluate import evaluation_figures
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment

# ------------------------------------------------------------------------ bootstrap


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40),
    st.integers(0, 2**40),
    st.integers(1, 50),
)
@settings(max_examples=50)
def test_an_interval_is_ordered_within_the_values_and_repeats(
    values: list[float], seed: int, resamples: int
) -> None:
    low, high = bootstrap_interval(values, resamples=resamples, seed=seed)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert (low, high) == bootstrap_interval(values, resamples=resamples, seed=seed)


def test_another_seed_draws_other_problems() -> None:
    values = [random.Random(i).random() for i in range(30)]
    assert bootstrap_interval(values, resamples=1000, seed=1) != bootstrap_interval(
        values, resamples=1000, seed=2
    )


def test_problems_that_are_alike_leave_no_doubt() -> None:
    assert bootstrap_interval([0.25] * 7, resamples=100, seed=0) == (0.25, 0.25)


def test_the_interval_is_that_of_the_mean() -> None:
    """Of n fair coins: 0.5 -+ 1.96 * 0.5 / sqrt(n), by the central limit theorem."""
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values, resamples=4000, seed=3)
    half = 1.96 * 0.5 / math.sqrt(len(values))
    assert low == pytest.approx(0.5 - half, abs=0.005)
    assert high == pytest.approx(0.5 + half, abs=0.005)


def test_it_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    trials, hits = 300, 0
    for trial in range(trials):
        values = [float(rng.random() < 0.4) for _ in range(100)]
        low, high = bootstrap_interval(values, resamples=400, seed=trial)
        hits += low <= 0.4 <= high
    assert 0.90 <= hits / trials <= 0.985


def test_a_thousand_resamples_of_500_problems_take_little_time() -> None:
    values = [i / 500 for i in range(500)]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        bootstrap_interval(values, resamples=1000, seed=0)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.1  # 7 ms on an idle core


@pytest.mark.parametrize(("values", "resamples"), [([], 10), ([0.5], 0)])
def test_nothing_to_draw_from_is_refused(values: list[float], resamples: int) -> None:
    with pytest.raises(ValueError, match="resamples of"):
        bootstrap_interval(values, resamples=resamples, seed=0)


# ------------------------------------------------------------------------ figures


def graded(ticket: int, answers: str) -> Group:
    """A letter per completion: R right, W wrong, X another wrong answer, - without a grade."""
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
            Completion(sample, (9, 2), (-0.1, -0.2), "", Finish.STOP, (Segment(0, 2),), grades[one])
            for sample, one in enumerate(answers)
        ),
    )


def test_figures_by_hand() -> None:
    groups = [graded(0, "RRWX"), graded(1, "WWRX"), graded(2, "WWWW")]
    figures = evaluation_figures(groups, resamples=0, seed=0)
    assert figures == {
        "avg@4": pytest.approx((0.5 + 0.25 + 0) / 3),
        "pass@4": pytest.approx(2 / 3),
        "cons@4": pytest.approx(1 / 3),
        "pass@1": pytest.approx((0.5 + 0.25 + 0) / 3),
        "pass@2": pytest.approx(((1 - 1 / 6) + 0.5 + 0) / 3),
        "ungraded": 0.0,
    }


def test_an_ungraded_completion_is_wrong_and_counted() -> None:
    figures = evaluation_figures([graded(0, "R--W"), graded(1, "----")], resamples=0, seed=0)
    assert figures["avg@4"] == 0.125
    assert figures["cons@4"] == 0.0  # the most frequent "answer" of both is none at all
    assert figures["ungraded"] == 6.0


@pytest.mark.parametrize(
    ("samples", "fewer"), [(1, []), (2, [1]), (3, [1, 2]), (8, [1, 2, 4]), (9, [1, 2, 4, 8])]
)
def test_pass_at_powers_of_two_below_k(samples: int, fewer: list[int]) -> None:
    figures = evaluation_figures([graded(0, "R" * samples)], resamples=0, seed=0)
    found = {int(name.removeprefix("pass@")) for name in figures if name.startswith("pass@")}
    assert found == {*fewer, samples}


@given(
    st.integers(2, 9).flatmap(
        lambda k: st.lists(st.text("RWX-", min_size=k, max_size=k), min_size=1, max_size=8)
    )
)
@settings(max_examples=60)
def test_figures_agree_with_the_formulas_and_lie_in_their_intervals(rows: list[str]) -> None:
    groups = [graded(ticket, row) for ticket, row in enumerate(rows)]
    correct = [[one == "R" for one in row] for row in rows]
    answers = [[{"R": "7", "W": "8", "X": "9", "-": ""}[one] for one in row] for row in rows]
    figures = evaluation_figures(groups, resamples=50, seed=1)
    k = len(rows[0])
    assert figures[f"avg@{k}"] == pytest.approx(avg_at_k(correct))
    assert figures[f"pass@{k}"] == pytest.approx(pass_at_k(correct))
    assert figures[f"cons@{k}"] == pytest.approx(cons_at_k(correct, answers))
    for name in ("avg", "pass", "cons"):
        low, high = figures[f"{name}@{k}_low"], figures[f"{name}@{k}_high"]
        assert 0.0 <= low <= high <= 1.0
    # The more samples, the likelier a right one.
    passes = [figures[f"pass@{j}"] for j in (1, 2, 4, 8) if j < k] + [figures[f"pass@{k}"]]
    assert all(fewer <= more + 1e-12 for fewer, more in pairwise(passes))
    assert figures["pass@1"] == pytest.approx(fmean(map(fmean, correct)))


def test_a_set_without_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        evaluation_figures([], resamples=10, seed=0)
