"""The driver over two replicas in two real processes; the engine hands out canned answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.dispatch import Sampling, sample_seed
from dapo_megatron.rollout.driver import MIN_SECONDS, EngineDriver
from dapo_megatron.rollout.evaluate import sample_all
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest, Segment
from tests.helpers.ranks import run_ranks

ANSWERS = {0: "7", 1: "hang", 2: "raise", 3: "die", 4: "8", 5: "7"}
"""Response to each ticket's sample 0; the others answer 7."""
SAMPLING = Sampling(3, 8, 1.0, 1.0, "seed")


class CannedEngine:
    """Finishes two requests per step, the newest first."""

    num_replicas = 2
    is_leader = True
    max_sequences = 5

    def __init__(self, rank: int) -> None:
        self.replica = rank
        self.asked: list[SampleRequest] = []
        self.requests: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.asked += requests
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
    seen: list[int] = []
    with GradingPool(grader, workers=1, timeout_seconds=1.0) as pool:
        driver = EngineDriver(engine, pool, Ranks(rank, 2, rank), deterministic=deterministic)  # type: ignore[arg-type]
        groups = sample_all(driver, prompts(), SAMPLING, seen.append)
        # What is stopped is told to all, and what comes late is kept for whoever asked for it.
        requests = [
            [SAMPLING.request(ticket, prompt, sample) for sample in range(3)]
            for ticket, prompt in prompts()[::5]
        ]
        driver.advance(requests, use="train")
        unfinished = driver.interrupt()
        sample_all(driver, prompts()[4:], Sampling(1, 8, 1.0, 1.0, "evaluation"))
        late = driver.advance([[], []], use="train")
    asked = [request.ticket for request in engine.asked]
    return groups, seen, asked, unfinished, late, driver.last_errors


@pytest.fixture(scope="module", params=[True, False], ids=["deterministic", "by the clock"])
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(roll_out, 2, request.param)


def test_every_rank_hears_the_same(ranks: list[Any]) -> None:
    groups = ranks[0][0]
    assert groups == ranks[1][0]
    assert [group.ticket for group in groups] == list(ANSWERS)
    assert all([c.sample for c in group.completions] == [0, 1, 2] for group in groups)
    assert ranks[0][3] == ranks[1][3]
    assert ranks[0][4] == ranks[1][4]


def test_replicas_share_the_work_by_room(ranks: list[Any]) -> None:
    first = [Counter(rank[2][:5]) for rank in ranks]
    assert first == [Counter({0: 3, 2: 2}), Counter({1: 3, 2: 1, 3: 1})]
    assert ranks[0][1][-1] == ranks[1][1][-1] == len(ANSWERS)


def test_a_grader_that_hangs_dies_or_raises_costs_one_grade(ranks: list[Any]) -> None:
    first = {group.ticket: group.completions[0].grade for group in ranks[0][0]}
    assert [ticket for ticket, grade in first.items() if grade is None] == [1, 2, 3]
    assert first[0] is not None
    assert first[0].correct
    assert first[4] is not None
    assert not first[4].correct
    others = [c.grade for group in ranks[0][0] for c in group.completions[1:]]
    assert all(grade is not None and grade.correct for grade in others)


def hear_of_a_stop(rank: int) -> Any:
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


def test_a_signal_to_one_rank_is_known_to_all_at_the_next_exchange() -> None:
    (events, _), (other, in_flight) = run_ranks(hear_of_a_stop, 2)
    assert events == other
    assert events.stop == "SIGUSR1"
    assert len(events.sampled) == 1  # what is sampled is never lost, ...
    assert events.graded == []  # ... what graders say of it then is not believed
    assert in_flight.startswith("0 completions of replica 1")


def test_seeds_depend_on_ticket_sample_use_and_tokens_so_far_alone() -> None:
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


class Timed(CannedEngine):
    """One replica alone, whose steps take a while."""

    num_replicas = 1
    max_sequences = 10**6
    seconds = 0.001

    def __init__(self) -> None:
        super().__init__(0)
        self.num_steps = 0

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        self.num_steps += 1
        time.sleep(self.seconds)
        return super().step()


def many(number: int, first: int = 0) -> list[SampleRequest]:
    sampling = Sampling(number, 8, 1.0, 1.0, "seed")
    prompt = Prompt("sums", 5, (1, 2), "3+4", "7")
    return [sampling.request(5, prompt, sample) for sample in range(first, first + number)]


def timed() -> tuple[Timed, EngineDriver]:
    engine = Timed()
    return engine, EngineDriver(engine, None, Ranks(0, 1, 0), deterministic=False)  # type: ignore[arg-type]


def test_an_engine_that_was_idle_does_not_run_on_without_events() -> None:
    engine, driver = timed()
    for _ in range(5):
        driver.advance([[]])
    engine.seconds = 0.005
    driver.advance([many(400)])
    assert engine.num_steps * 0.005 < 20 * MIN_SECONDS  # of 200 steps that it could make


def test_an_engine_that_gets_slow_with_a_new_step_keeps_nobody_waiting() -> None:
    engine, driver = timed()
    driver.advance([many(4000)])
    for _ in range(8):
        driver.advance([[]])
    before = engine.num_steps
    driver.advance([[]])
    assert engine.num_steps - before >= 5  # light steps: several between two exchanges
    driver.interrupt()
    engine.seconds, before = 0.1, engine.num_steps
    driver.advance([many(4000, 4000)])
    assert engine.num_steps - before == 1  # full ones: how long they take is seen first


def test_steps_between_exchanges_at_most_double() -> None:
    engine, driver = timed()
    driver.advance([many(4000)])
    steps = [engine.num_steps]
    for _ in range(6):
        driver.advance([[]])
        steps.append(engine.num_steps)
    made = [after - before for before, after in pairwise(steps)]
    assert all(after <= 2 * before for before, after in pairwise(made))


def test_what_a_grader_said_last_is_known_to_every_rank(ranks: list[Any]) -> None:
    assert ranks[0][5] == ranks[1][5]
    assert "sums" in ranks[0][5]


def test_requests_are_told_from_the_order_to_the_last_answer() -> None:
    engine, driver = timed()
    told: list[int] = []
    driver.on_running = told.append
    driver.advance([many(5)])
    while engine.requests:
        driver.advance([[]])
    assert told == sorted(told, reverse=True)
    assert set(told) == {5, 3, 1, 0}  # two are answered in each of its steps
    driver.advance([many(4, 5)])
    driver.interrupt()
    assert told[-1] == 0
