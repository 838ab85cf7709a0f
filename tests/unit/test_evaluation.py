"""Evaluation metrics and their confidence intervals, for groups graded by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algo.evaluation import avg_at_k, bootstrap_interval, cons_at_k, pass_at_k
from dapo_megatron.config import EvaluationConfig
from dapo_megatron.engine.messages import (
    GroupRequest,
    Report,
    Returned,
    Sampling,
    sample_seed,
)
from dapo_megatron.rollout.evaluate import Evaluator, evaluation_metrics, sample_all
from dapo_megatron.types import (
    EnginesLost,
    Finish,
    Grade,
    Group,
    Prompt,
    Segment,
    Stopped,
)
from tests.helpers.rollouts import completion_of

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


class AnsweringDriver:
    """Driver of two replicas that answer newest first; grades arrive one exchange later.

    Sample 0 of an even row is right. Sample 1 of row 1 gets no grade.

    lose_at  turn -> replica that is lost then, with all that it has
    """

    num_replicas, max_sequences, grade_seconds = 2, 3, 0.0

    def __init__(
        self, stop_at: int = -1, lose_at: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self.requests: list[tuple[int, int]] = []
        """(ticket, sample) of all requests, in the order of the answers."""
        self.phases: list[Sampling] = []
        self.num_turns = self.interrupted = 0
        self.lost: set[int] = set()
        self.stop_signal = ""
        self.last_errors: dict[str, str] = {}
        self._stop_at, self._lose_at = stop_at, lose_at
        self._rows: dict[int, int] = {}
        self._ungraded: list[tuple[int, int, int]] = []
        self._num_sampled = [0, 0]

    def name(self, replica: int) -> str:
        return f"replica {replica}"

    def start(self, sampling: Sampling) -> None:
        if len(self.lost) == 2:
            raise EnginesLost("none is left")
        self.phases.append(sampling)

    def advance(self, requests: Sequence[Sequence[GroupRequest]]) -> list[tuple[int, Report]]:
        assert len(requests) == 2
        self.num_turns += 1
        self.stop_signal = "SIGTERM" if self.num_turns == self._stop_at else ""
        ungraded, self._ungraded = self._ungraded, []
        reports = []
        for replica, groups in reversed(list(enumerate(requests))):
            assert not (groups and replica in self.lost)
            self._rows |= {group.ticket: group.prompt.index for group in groups}
            new = [(group.ticket, sample) for group in groups for sample, _ in group.samples][::-1]
            assert len(new) <= 3
            assert all(so_far is None for g in groups for _, so_far in g.samples)
            self.requests += new
            self._ungraded += [(replica, *key) for key in new]
            self._num_sampled[replica] += len(new)
            returned = [
                self._graded(ticket, sample)
                for holder, ticket, sample in ungraded
                if holder == replica
            ]
            reports.append(
                (replica, Report(returned=returned, num_sampled=self._num_sampled[replica]))
            )
        if (lost := self._lose_at.get(self.num_turns)) is not None:
            self.lost.add(lost)
        return [item for item in reports if item[0] not in self.lost]

    def interrupt(self) -> list[tuple[int, Report]]:
        self.interrupted += 1
        self._num_sampled, self._ungraded = [0, 0], []
        return [(replica, Report(is_interrupted=True)) for replica in {0, 1} - self.lost]

    def _graded(self, ticket: int, sample: int) -> Returned:
        row = self._rows[ticket]
        answer = replace(completion_of(0, (Segment(0, 2),), Finish.STOP), sample=sample)
        if (row, sample) == (1, 1):
            return ticket, answer, "timeout"
        right = sample == 0 and row % 2 == 0
        grade = Grade(1.0 if right else -1.0, right, "7" if right else "8")
        return ticket, replace(answer, grade=grade), "graded"


class DriverOnly:
    """Engines of which the test sees the driver only."""

    def __init__(self, driver: AnsweringDriver) -> None:
        self._driver = driver

    def run(self, task: Any, of: object) -> Any:
        return task(self._driver)


SAMPLING = Sampling("use", 8, 0.5, 0.25, is_seeded=True)


def never(version: int) -> NoReturn:
    """Replace a sync where none is needed."""
    raise AssertionError("a sync")


def problems(number: int) -> list[Prompt]:
    return [Prompt("set", index, (5,), "4 + 3 =", "7") for index in range(number)]


def test_groups_are_returned_in_order_with_grades_and_progress_is_reported() -> None:
    driver, progress = AnsweringDriver(), []
    tickets = [(ticket, prompt) for ticket, prompt in zip((8, 4, 6), problems(3))]
    groups = sample_all(driver, tickets, SAMPLING, 3, progress.append)
    assert [(group.ticket, group.prompt.index) for group in groups] == [(8, 0), (4, 1), (6, 2)]
    assert [[c.sample for c in group.completions] for group in groups] == [[0, 1, 2]] * 3
    grades = [[c.grade and c.grade.correct for c in group.completions] for group in groups]
    assert grades == [[True, False, False], [False, None, False], [True, False, False]]
    # Six requests fill the engines: those of tickets 4 and 6.
    assert [ticket for ticket, _ in driver.requests] == [6, 6, 6, 4, 4, 4, 8, 8, 8]
    assert progress == [0, 2, 3]
    assert driver.phases == [SAMPLING]
    assert driver.interrupted == 1  # the phase ends
    stopped = AnsweringDriver(stop_at=2)
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        sample_all(stopped, tickets, SAMPLING, 3)
    assert (stopped.interrupted, stopped.num_turns) == (1, 2)


def without_engine(group: Group) -> Group:
    """Return the group without the replica that sampled it, which a loss changes."""
    completions = tuple(replace(c, segments=(Segment(0, 2),)) for c in group.completions)
    return replace(group, completions=completions)


def test_groups_of_a_lost_replica_are_sampled_again_as_a_whole() -> None:
    intact, driver, progress = AnsweringDriver(), AnsweringDriver(lose_at={2: 0}), []
    tickets = list(enumerate(problems(5)))
    expected = sample_all(intact, tickets, SAMPLING, 3)
    groups = sample_all(driver, tickets, SAMPLING, 3, progress.append)
    assert list(map(without_engine, groups)) == list(map(without_engine, expected))
    assert progress == sorted(progress) and progress[-1] == 5
    counts = Counter(driver.requests)
    assert set(counts.values()) == {1, 2}
    assert all(counts[ticket, 0] == counts[ticket, sample] for ticket, sample in counts)


def test_a_set_is_evaluated_again_with_new_weights_if_all_engines_are_lost() -> None:
    syncs: list[int] = []
    driver = AnsweringDriver(lose_at={1: 0, 2: 1})

    def sync(version: int) -> Any:
        syncs.append(version)
        driver.lost.clear()

    sets = {"easy": problems(2), "hard": problems(4)}
    config = EvaluationConfig(samples=2)
    lossy = Evaluator(config, sets, DriverOnly(driver), sync, max_tokens=16, seed=5)  # type: ignore[arg-type]
    other = DriverOnly(AnsweringDriver())
    intact = Evaluator(config, sets, other, never, max_tokens=16, seed=5)  # type: ignore[arg-type]
    assert lossy.run(7) == intact.run(7)
    assert syncs == [7]


@pytest.mark.parametrize(("limit", "max_tokens"), [(None, 16), (12, 12)])
def test_each_set_is_sampled_with_the_configured_settings(
    limit: int | None, max_tokens: int
) -> None:
    config = EvaluationConfig(
        samples=2, temperature=0.75, top_p=0.5, max_response_tokens=limit, resamples=20
    )
    driver = AnsweringDriver()
    sets = {"easy": problems(2), "hard": problems(4)}
    evaluator = Evaluator(config, sets, DriverOnly(driver), never, max_tokens=16, seed=5)  # type: ignore[arg-type]
    metrics = evaluator.run(3)
    assert metrics == evaluator.run(4)
    expected = [
        Sampling(f"5/evaluate/{name}", max_tokens, 0.75, 0.5, is_seeded=True) for name in sets
    ]
    assert driver.phases == expected * 2
    assert len(driver.requests) == 2 * 12
    request = driver.phases[0].request(3, sets["easy"][0], 1)
    assert (request.temperature, request.top_p, request.max_tokens) == (0.75, 0.5, max_tokens)
    assert request.seed == sample_seed("5/evaluate/easy", 3, 1)
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
