"""The driver over two replicas in two real processes; the engine hands out canned answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout import driver as driver_module
from dapo_megatron.rollout.driver import RolloutDriver, Sampling, sample_seed
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest
from tests.helpers.ranks import run_ranks

ANSWERS = {0: "7", 1: "hang", 2: "raise", 3: "die", 4: "8", 5: "7"}
"""Response to each ticket's sample 0; the others answer 7."""


class CannedEngine:
    """Finishes two requests per step, the newest first."""

    num_replicas = 2
    is_leader = True

    def __init__(self, rank: int) -> None:
        self.replica = rank
        self.asked: list[SampleRequest] = []
        self._waiting: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.asked += requests
        self._waiting += requests

    def step(self) -> list[tuple[int, Completion]]:
        done = [self._waiting.pop() for _ in range(min(2, len(self._waiting)))]
        return [(request.ticket, self._answer(request)) for request in done]

    def has_work(self) -> bool:
        return bool(self._waiting)

    def _answer(self, request: SampleRequest) -> Completion:
        text = ANSWERS[request.ticket] if request.sample == 0 else "7"
        return Completion(request.sample, (5,), (-0.5,), text, Finish.STOP, version=0)


def roll_out(rank: int) -> Any:
    from dapo_megatron.cluster.ranks import Ranks

    driver_module.HEARTBEAT_SECONDS = 0.2  # several beats while a grader hangs
    prompts = [(ticket, Prompt("sums", ticket, (1, 2), "3+4", "7")) for ticket in ANSWERS]
    engine = CannedEngine(rank)
    grader = {"sums": "tests.helpers.graders:moody"}
    seen: list[int] = []
    with GradingPool(grader, workers=1, timeout_seconds=1.0) as pool:
        driver = RolloutDriver(engine, pool, Ranks(rank, 2, rank))
        groups = driver.run(prompts, Sampling(3, 8, 1.0, 1.0, "seed"), seen.append)
    return groups, driver.abstentions, seen, [request.ticket for request in engine.asked]


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(roll_out, 2)


def test_every_rank_has_every_group_in_ticket_order(ranks: list[Any]) -> None:
    groups = ranks[0][0]
    assert groups == ranks[1][0]
    assert [group.ticket for group in groups] == list(ANSWERS)
    assert all([c.sample for c in group.completions] == [0, 1, 2] for group in groups)


def test_replicas_share_the_work(ranks: list[Any]) -> None:
    assert [set(rank[3]) for rank in ranks] == [{0, 2, 4}, {1, 3, 5}]
    assert ranks[0][2][-1] == ranks[1][2][-1] == len(ANSWERS)  # progress over both


def test_a_grader_that_hangs_dies_or_raises_costs_one_grade_and_is_counted(
    ranks: list[Any],
) -> None:
    first = {group.ticket: group.completions[0].grade for group in ranks[0][0]}
    assert [ticket for ticket, grade in first.items() if grade is None] == [1, 2, 3]
    assert first[0] is not None
    assert first[0].correct
    assert first[4] is not None
    assert not first[4].correct
    others = [c.grade for group in ranks[0][0] for c in group.completions[1:]]
    assert all(grade is not None and grade.correct for grade in others)
    assert ranks[0][1] == ranks[1][1] == {"timeout": 1, "crash": 1, "error": 1}


def test_seeds_depend_on_ticket_sample_and_use_alone() -> None:
    seeds = {sample_seed(use, t, s) for use in ("a", "b") for t in range(20) for s in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert sample_seed("0/train", 3, 1) == sample_seed("0/train", 3, 1)
