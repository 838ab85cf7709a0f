"""The driver over two replicas in two real processes, with an engine that gives canned answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout import driver as driver_module
from dapo_megatron.rollout.dispatch import Sampling, sample_seed
from dapo_megatron.rollout.driver import MIN_SECONDS, NUM_SHOWN, EngineDriver
from dapo_megatron.rollout.evaluate import sample_all
from dapo_megatron.types import Completion, Finish, Grade, Prompt, SampleRequest, Segment
from tests.helpers.ranks import run_ranks

ANSWERS = {0: "7", 1: "hang", 2: "raise", 3: "die", 4: "8", 5: "7"}
"""Response to sample 0 of each ticket. The response to other samples is 7."""
SAMPLING = Sampling(3, 8, 1.0, 1.0, "seed")


class CannedEngine:
    """Engine that finishes two requests per step, the newest first."""

    num_replicas = 2
    is_leader = True
    max_sequences = 5

    def __init__(self, rank: int) -> None:
        self.replica = rank
        self.submitted: list[SampleRequest] = []
        self.requests: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.submitted += requests
        self.requests += requests
        assert len(self.requests) <= self.max_sequences

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        done = [self.requests.pop() for _ in range(min(2, len(self.requests)))]
        return [(request, self._answer(request, Finish.STOP)) for request in done]

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        waiting, self.requests = self.requests, []
        return [(request, self._answer(request, Finish.UNFINISHED)) for request in waiting]

    def _answer(self, request: SampleRequest, finish: Finish) -> Completion:
        text = ANSWERS[request.ticket] if request.sample == 0 else "7"
        return Completion(request.sample, (5,), (-0.5,), text, finish, (Segment(0, 1),))


def prompts() -> list[tuple[int, Prompt]]:
    return [(ticket, Prompt("sums", ticket, (1, 2), "3+4", "7")) for ticket in ANSWERS]


def roll_out(rank: int, deterministic: bool) -> Any:
    engine = CannedEngine(rank)
    grader = {"sums": "tests.helpers.graders:moody"}
    progress: list[int] = []
    with GradingPool(grader, workers=1, timeout_seconds=5.0) as pool:
        driver = EngineDriver(engine, pool, Ranks(rank, 2, rank), deterministic=deterministic)  # type: ignore[arg-type]
        groups = sample_all(driver, prompts(), SAMPLING, progress.append)
        # All ranks get the unfinished completions. A late grade is kept for the use it belongs to.
        requests = [
            [SAMPLING.request(ticket, prompt, sample) for sample in range(3)]
            for ticket, prompt in prompts()[::5]
        ]
        driver.advance(requests, use="train")
        unfinished = driver.interrupt()
        sample_all(driver, prompts()[4:], Sampling(1, 8, 1.0, 1.0, "evaluation"))
        late = driver.advance([[], []], use="train")
    submitted = [request.ticket for request in engine.submitted]
    return groups, progress, submitted, unfinished, late, driver.last_errors


@pytest.fixture(scope="module", params=[True, False], ids=["deterministic", "timed"])
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(roll_out, 2, request.param)


def test_every_rank_gets_the_same_events(ranks: list[Any]) -> None:
    groups = ranks[0][0]
    assert groups == ranks[1][0]
    assert [group.ticket for group in groups] == list(ANSWERS)
    assert all([c.sample for c in group.completions] == [0, 1, 2] for group in groups)
    assert ranks[0][3] == ranks[1][3]
    assert ranks[0][4] == ranks[1][4]


def test_groups_are_split_between_replicas_by_free_capacity(ranks: list[Any]) -> None:
    first = [Counter(rank[2][:5]) for rank in ranks]
    assert first == [Counter({0: 3, 2: 2}), Counter({1: 3, 2: 1, 3: 1})]
    assert ranks[0][1][-1] == ranks[1][1][-1] == len(ANSWERS)


def test_a_grader_that_hangs_dies_or_raises_loses_one_grade(ranks: list[Any]) -> None:
    first = {group.ticket: group.completions[0].grade for group in ranks[0][0]}
    assert [ticket for ticket, grade in first.items() if grade is None] == [1, 2, 3]
    assert first[0] is not None
    assert first[0].correct
    assert first[4] is not None
    assert not first[4].correct
    others = [c.grade for group in ranks[0][0] for c in group.completions[1:]]
    assert all(grade is not None and grade.correct for grade in others)


def advance_with_a_stop_on_rank_1(rank: int) -> Any:
    driver = EngineDriver(
        CannedEngine(rank),  # type: ignore[arg-type]
        None,
        Ranks(rank, 2, rank),
        deterministic=True,
        stop=lambda: "SIGUSR1" if rank == 1 else "",
    )
    [request] = [SAMPLING.request(ticket, prompt, 0) for ticket, prompt in prompts()[:1]]
    events = driver.advance([[request], []])
    return events, driver.in_flight()


def test_a_stop_signal_reaches_all_ranks_at_the_next_exchange() -> None:
    (events, _), (other, in_flight) = run_ranks(advance_with_a_stop_on_rank_1, 2)
    assert events == other
    assert events.stop == "SIGUSR1"
    assert len(events.sampled) == 1  # sampled completions are never lost
    assert events.graded == []  # grades after a signal are not trusted
    assert in_flight.startswith("0 completions of replica 1")


def test_seeds_depend_only_on_use_ticket_sample_and_tokens_so_far() -> None:
    seeds = {
        sample_seed(use, ticket, sample, tokens)
        for use in ("a", "b")
        for ticket in range(10)
        for sample in range(10)
        for tokens in (0, 1, 11)
    }
    assert len(seeds) == 600
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert sample_seed("0/train", 3, 1) == sample_seed("0/train", 3, 1)


class Clock:
    """Replaces `time` in the driver: seconds pass only while an engine runs a step."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(driver_module, "time", clock)
    monkeypatch.setattr(TimedEngine, "clock", clock)
    return clock


class TimedEngine(CannedEngine):
    """Engine of the only replica. Each of its steps takes `seconds` on the fake clock."""

    num_replicas = 1
    max_sequences = 10**6
    seconds = 0.001
    clock = Clock()

    def __init__(self) -> None:
        super().__init__(0)
        self.num_steps = 0

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        self.num_steps += 1
        self.clock.sleep(self.seconds)
        return super().step()


def requests_for_samples(number: int, first: int = 0) -> list[SampleRequest]:
    sampling = Sampling(number, 8, 1.0, 1.0, "seed")
    prompt = Prompt("sums", 5, (1, 2), "3+4", "7")
    return [sampling.request(5, prompt, sample) for sample in range(first, first + number)]


def timed_driver() -> tuple[TimedEngine, EngineDriver]:
    engine = TimedEngine()
    return engine, EngineDriver(engine, None, Ranks(0, 1, 0), deterministic=False)  # type: ignore[arg-type]


def test_after_idling_an_engine_does_not_run_many_steps_without_an_exchange() -> None:
    engine, driver = timed_driver()
    for _ in range(5):
        driver.advance([[]])
    engine.seconds = 0.005
    driver.advance([requests_for_samples(400)])
    assert engine.num_steps * 0.005 < 20 * MIN_SECONDS  # the requests would allow 200 steps


def test_after_an_interrupt_the_number_of_steps_starts_at_one_again() -> None:
    engine, driver = timed_driver()
    driver.advance([requests_for_samples(4000)])
    for _ in range(8):
        driver.advance([[]])
    before = engine.num_steps
    driver.advance([[]])
    assert engine.num_steps - before >= 5  # fast steps: several between two exchanges
    driver.interrupt()
    engine.seconds, before = 0.1, engine.num_steps
    driver.advance([requests_for_samples(4000, 4000)])
    assert engine.num_steps - before == 1  # possibly slow steps: their duration is measured first


def test_the_number_of_steps_between_exchanges_at_most_doubles() -> None:
    engine, driver = timed_driver()
    driver.advance([requests_for_samples(4000)])
    steps = [engine.num_steps]
    for _ in range(6):
        driver.advance([[]])
        steps.append(engine.num_steps)
    steps_per_exchange = [after - before for before, after in pairwise(steps)]
    assert all(after <= 2 * before for before, after in pairwise(steps_per_exchange))


def test_the_last_grader_error_is_known_to_every_rank(ranks: list[Any]) -> None:
    assert ranks[0][5] == ranks[1][5]
    assert "sums" in ranks[0][5]


def test_the_number_of_running_requests_is_reported_until_zero() -> None:
    engine, driver = timed_driver()
    running_counts: list[int] = []
    driver.on_running = running_counts.append
    driver.advance([requests_for_samples(5)])
    while engine.requests:
        driver.advance([[]])
    assert running_counts == sorted(running_counts, reverse=True)
    assert set(running_counts) == {5, 3, 1, 0}  # each step finishes two
    driver.advance([requests_for_samples(4, 5)])
    driver.interrupt()
    assert running_counts[-1] == 0


class ScriptedGrading:
    """Grading pool that finishes all gradings, newest first, only when `collect` waits."""

    def __init__(self) -> None:
        self.submitted: list[tuple[object, ...]] = []
        self.last_errors = {"sums": "ValueError: no answer"}
        self._keys: list[tuple[str, int, int]] = []

    @property
    def pending(self) -> int:
        return len(self._keys)

    def submit(self, key: tuple[str, int, int], *arguments: object) -> None:
        self.submitted.append((key, *arguments))
        self._keys.append(key)

    def collect(self, wait: bool) -> list[tuple[tuple[str, int, int], Grade, str]]:
        ready = self._keys[::-1] if wait else []
        self._keys = [] if wait else self._keys
        return [(key, Grade(1.0, True, "7"), "graded") for key in ready]


def test_a_deterministic_run_waits_for_all_grades_and_keeps_them_by_use() -> None:
    engine, grading = TimedEngine(), ScriptedGrading()
    driver = EngineDriver(engine, grading, Ranks(0, 1, 0), deterministic=True)  # type: ignore[arg-type]
    events = driver.advance([requests_for_samples(5)], use="train")
    assert [completion.sample for _, completion in events.sampled] == [4, 3, 2, 1, 0]
    assert [(ticket, sample) for ticket, sample, _, _ in events.graded] == [
        (5, sample) for sample in range(5)
    ]
    assert {(grade, outcome) for _, _, grade, outcome in events.graded} == {
        (Grade(1.0, True, "7"), "graded")
    }
    assert grading.submitted[0] == (("train", 5, 4), "sums", "7", "7", {})
    assert driver.last_errors == {"sums": "ValueError: no answer"}
    # A resumed run requests grades of earlier completions. Another use does not get them.
    [(_, completion), *_] = events.sampled
    grading.submit(("train", 9, 0), "sums", "7", "7", {})
    late = driver.advance([[]], [(3, prompts()[0][1], completion)], use="evaluation")
    assert [(ticket, sample) for ticket, sample, _, _ in late.graded] == [(3, 4)]
    assert [item[:2] for item in driver.advance([[]], use="train").graded] == [(9, 0)]
    assert driver.advance([[]], use="train").graded == []


def test_only_the_leader_of_a_replica_reports_and_a_stop_drops_grades() -> None:
    for is_leader, stop in ((True, "SIGUSR1"), (False, "")):
        engine, grading = TimedEngine(), ScriptedGrading()
        engine.is_leader = is_leader
        driver = EngineDriver(
            engine,  # type: ignore[arg-type]
            grading if is_leader else None,  # type: ignore[arg-type]
            Ranks(0, 1, 0),
            deterministic=True,
            stop=lambda stop=stop: stop,  # type: ignore[misc]
        )
        events = driver.advance([requests_for_samples(20)])
        assert events.stop == stop
        assert len(events.sampled) == (16 if is_leader else 0)  # 8 steps of two
        assert events.graded == []
        unfinished = driver.interrupt()
        assert [(ticket, c.sample) for ticket, c in unfinished] == (
            [(5, sample) for sample in range(4)] if is_leader else []
        )


def test_in_flight_lists_a_limited_number_of_requests() -> None:
    engine, grading = TimedEngine(), ScriptedGrading()
    driver = EngineDriver(engine, grading, Ranks(0, 1, 0), deterministic=False)  # type: ignore[arg-type]
    assert driver.in_flight() == "0 completions of replica 0 (ticket/sample: ); 0 gradings"
    driver.advance([requests_for_samples(25)])  # one step
    shown = ", ".join(f"5/{sample}" for sample in range(NUM_SHOWN))
    assert driver.in_flight() == (
        f"23 completions of replica 0 (ticket/sample: {shown}); 2 gradings"
    )
    _, driver = timed_driver()
    assert driver.in_flight().endswith("; 0 gradings")
