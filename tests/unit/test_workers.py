"""Engine workers of real processes over a real channel, with engines that give canned answers."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dapo_megatron.rollout.driver import DISCONNECTED_SECONDS, EngineDriver
from dapo_megatron.rollout.messages import STEPS, GroupRequest, Report, sample_seed
from dapo_megatron.rollout.roles import SeparateTraining
from dapo_megatron.rollout.worker import NUM_SHOWN, Leader, describe

from dapo_megatron.cluster.collectives import EnginesChanged
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout import driver as driver_module
from dapo_megatron.rollout import messages
from dapo_megatron.rollout.dispatch import Dispatcher, Events
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.evaluate import sample_all
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.types import (
    Completion,
    ConfigError,
    Finish,
    Grade,
    Group,
    SampleRequest,
    Segment,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.rollouts import completion_of, with_random_tokens
from tests.helpers.workers import (
    CannedEngine,
    InstantGrading,
    prompt,
    sampling,
    started,
    strangers,
    wait_until,
)

ANSWERS = {0: "7", 1: "hang", 2: "raise", 3: "die", 4: "8", 5: "7"}
"""Response to sample 0 of each ticket. The response to other samples is 7."""
NUM_SAMPLES = 3
TRAINING = sampling("3/train", is_seeded=False)


# ------------------------------------------------------------------ two replicas of one rank


def two_replicas(rank: int, deterministic: bool, folder: Path) -> Any:
    """Evaluate a set, train with an interrupt and a grade that is late, and evaluate again."""
    gate = folder / "gate"
    if deterministic:  # in lock step no grade is late
        gate.touch()
    ranks, dispatchers = Ranks(rank, 2, rank), list[Dispatcher]()
    engine = CannedEngine(
        rank,
        num_replicas=2,
        answers={(ticket, 0): text for ticket, text in ANSWERS.items()},
        holds=lambda request: "gate" in request.prompt.extra and request.sample > 0,
    )
    progress: list[int] = []
    groups: dict[int, OpenGroup] = {}

    def train(driver: EngineDriver) -> list[Events]:
        """Interrupt two groups, each with a finished completion and two unfinished ones."""
        groups.update(
            (ticket, OpenGroup(ticket, prompt(ticket, gate=str(gate)), 3)) for ticket in (0, 5)
        )
        dispatcher = Dispatcher(driver, TRAINING, groups)
        dispatchers.append(dispatcher)
        dispatcher.start(0)
        for group in groups.values():
            dispatcher.submit(group)
        news: list[Events] = []
        while sum(len(events.sampled) for events in news) < 2:
            news.append(dispatcher.advance())
            for ticket, completion in news[-1].sampled:
                groups[ticket].completions[completion.sample] = completion
        news.append(dispatcher.interrupt())
        # A grade that arrives now, after the answer to the interrupt, is late.
        gate.touch()
        wait_until(lambda: not pool.pending, "the late grade is here")
        return news

    def train_again(driver: EngineDriver) -> list[Events]:
        """Return the events of the next step of the same training, until both grades are there."""
        [dispatcher] = dispatchers
        groups.clear()  # the tickets have expired
        dispatcher.start(1)
        news = []
        while not deterministic and sum(len(events.graded) for events in news) < 2:
            news.append(dispatcher.advance())
        news.append(dispatcher.interrupt())
        return news

    with (
        GradingPool({"sums": "tests.helpers.graders:gated"}, 1, 5.0) as pool,
        started(engine, ranks, pool, deterministic=deterministic) as engines,
    ):
        tickets = [(ticket, prompt(ticket)) for ticket in ANSWERS]
        with ExitStack() as stack:
            garbage: list[bytes] = []
            if engines.driver is not None:
                garbage = stack.enter_context(strangers(engines.driver._hub.address.endpoint))
            evaluated = engines.run(
                lambda driver: sample_all(
                    driver, tickets, sampling("first"), NUM_SAMPLES, progress.append
                ),
                list[Group],
            )
        submitted = list(engine.submitted)
        events = engines.run(train, list[Events])
        # Tickets of an evaluation have the same numbers as those of the training.
        second = engines.run(
            lambda driver: sample_all(driver, tickets[::5], sampling("second"), 1), list[Group]
        )
        late = engines.run(train_again, list[Events])
        in_flight = engines.worker.in_flight()
        errors = {} if engines.driver is None else engines.driver.last_errors
    return SimpleNamespace(
        groups=evaluated,
        progress=progress,
        submitted=submitted,
        all_submitted=engine.submitted,
        events=events,
        second=second,
        late=late,
        in_flight=in_flight,
        errors=errors,
        num_garbage=len(garbage),
    )


@pytest.fixture(scope="module", params=[True, False], ids=["deterministic", "timed"])
def replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(two_replicas, 2, request.param, tmp_path_factory.mktemp("replicas"))


def test_every_rank_gets_the_same_groups(replicas: list[Any]) -> None:
    groups = replicas[0].groups
    assert groups == replicas[1].groups
    assert [group.ticket for group in groups] == list(ANSWERS)
    assert all([c.sample for c in group.completions] == [0, 1, 2] for group in groups)
    assert replicas[0].progress[-1] == len(ANSWERS)
    assert replicas[1].progress == []  # the coordinator is on rank 0 only
    assert replicas[0].num_garbage >= 4  # strangers sent to the coordinator's port meanwhile


def test_groups_are_split_between_replicas_by_free_capacity(
    replicas: list[Any], request: pytest.FixtureRequest
) -> None:
    # Engines run 5 requests. In a timed run one more is queued, so ticket 2 stays together.
    is_timed = "timed" in request.node.name
    size = 6 if is_timed else 5
    first = [Counter(request.ticket for request in rank.submitted[:size]) for rank in replicas]
    together = [Counter({0: 3, 2: 3}), Counter({1: 3, 3: 3})]
    assert first == (together if is_timed else [{0: 3, 2: 2}, {1: 3, 2: 1, 3: 1}])
    requests = [(r.ticket, r.sample) for rank in replicas for r in rank.submitted]
    assert sorted(requests) == [(ticket, sample) for ticket in ANSWERS for sample in range(3)]


def test_a_grader_that_hangs_dies_or_raises_loses_one_grade(replicas: list[Any]) -> None:
    first = {group.ticket: group.completions[0].grade for group in replicas[0].groups}
    assert [ticket for ticket, grade in first.items() if grade is None] == [1, 2, 3]
    assert first[0] is not None and first[0].correct
    assert first[4] is not None and not first[4].correct
    others = [c.grade for group in replicas[0].groups for c in group.completions[1:]]
    assert all(grade is not None and grade.correct for grade in others)
    assert "sums" in replicas[0].errors


def test_an_interrupt_returns_unfinished_completions_with_their_tokens(
    replicas: list[Any],
) -> None:
    events = replicas[0].events
    assert events == replicas[1].events
    finished = [(t, c.sample) for e in events for t, c in e.sampled]
    unfinished = [(t, c.sample) for t, c in events[-1].unfinished]
    assert sorted(finished) == [(0, 0), (5, 0)]
    assert sorted(unfinished) == [(0, 1), (0, 2), (5, 1), (5, 2)]
    for _, completion in events[-1].unfinished:
        assert (completion.tokens.tolist(), completion.logprobs.tolist()) == ([5], [-0.5])


def test_a_late_grade_belongs_to_the_use_of_its_completion(
    replicas: list[Any], request: pytest.FixtureRequest
) -> None:
    """The evaluation has the same tickets. Their right answer is graded by its own grader call."""
    graded = [item for events in replicas[0].events for item in events.graded]
    late = [item for events in replicas[0].late for item in events.graded]
    is_timed = "timed" in request.node.name
    assert sorted(item[:2] for item in (late if is_timed else graded)) == [(0, 0), (5, 0)]
    assert len(graded) + len(late) == 2
    assert [[c.sample for c in group.completions] for group in replicas[0].second] == [[0], [0]]
    assert all(c.grade is not None for group in replicas[0].second for c in group.completions)


def test_only_a_seeded_use_gives_requests_seeds(replicas: list[Any]) -> None:
    for rank in replicas:
        assert [r.seed for r in rank.submitted] == [
            sample_seed("first", r.ticket, r.sample) for r in rank.submitted
        ]
        seeds = [r.seed for r in rank.all_submitted if "gate" in r.prompt.extra]
        assert seeds == [None] * 3


def test_an_idle_leader_has_nothing_in_flight(replicas: list[Any]) -> None:
    assert [rank.in_flight for rank in replicas] == [
        f"0 completions of replica {replica} (ticket/sample: ); 0 gradings" for replica in (0, 1)
    ]


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


# ------------------------------------------------------------------ two replicas of two ranks

NUM_AFTER = 200
"""Completions of the fast replica during one step of the slow one."""


class SlowEngine(CannedEngine):
    """Engine whose first step ends when the fast replica has finished NUM_AFTER completions that it
    was asked for after this step had started."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(rank, 2, 2, max_sequences=16)
        self._folder = folder

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        (self._folder / "slow step").touch()
        wait_until((self._folder / "enough").exists, "the fast replica has finished enough")
        return super().step()


class FastEngine(CannedEngine):
    """Engine that finishes one request in each step of 3 ms. It starts with the slow engine."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(rank, 2, 2, max_sequences=16)
        self._folder = folder
        self._is_first = True
        self._new: set[tuple[int, int]] = set()
        self.num_after = 0
        """Completions that were requested and finished during the slow step."""
        self.busy: list[tuple[float, bool]] = []
        """Times at which the engine got requests or finished some, and whether it has any left."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        super().submit(requests)
        if (self._folder / "slow step").exists() and not (self._folder / "enough").exists():
            self._new.update((request.ticket, request.sample) for request in requests)
        if requests:
            self.busy.append((time.monotonic(), True))

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        if self._is_first:
            wait_until((self._folder / "slow step").exists, "the slow replica has started")
        self._is_first = False
        time.sleep(0.003)
        done, self.requests = self.requests[:1], self.requests[1:]
        self.num_after += sum((r.ticket, r.sample) in self._new for r in done)
        if self.num_after >= NUM_AFTER:
            (self._folder / "enough").touch()
        if not self.requests:
            self.busy.append((time.monotonic(), False))
        return [(request, self._answer(request, Finish.STOP)) for request in done]

    def busy_share(self, num_requests: int) -> float:
        """Return the share of the time with requests, until `num_requests` were submitted."""
        first, last = self.busy[0][0], self.busy[0][0]
        idle, num_left = 0.0, num_requests
        since: float | None = None
        for when, is_busy in self.busy:
            last = when
            if is_busy and since is not None:
                idle, since = idle + when - since, None
            elif not is_busy:
                since = when
            num_left -= is_busy
            if not num_left:
                break
        return 1.0 - idle / max(last - first, 1e-9)


def four_ranks(rank: int, folder: Path) -> Any:
    ranks = Ranks(rank, 4, rank)
    return SimpleNamespace(
        speeds=_different_speeds(ranks, folder),
        calls={is_lock_step: _calls(ranks, is_lock_step) for is_lock_step in (False, True)},
        stop={
            is_lock_step: _stop_on_a_follower(ranks, is_lock_step) for is_lock_step in (False, True)
        },
    )


def _different_speeds(ranks: Ranks, folder: Path) -> tuple[int, float] | None:
    engine = (FastEngine if ranks.rank < 2 else SlowEngine)(ranks.rank, folder)
    tickets = [(ticket, prompt(ticket)) for ticket in range(NUM_AFTER // 2 + 30)]
    with started(engine, ranks, InstantGrading()) as engines:
        groups = engines.run(
            lambda driver: sample_all(driver, tickets, sampling("speeds"), 2), list[Group]
        )
    assert all(c.grade is not None for group in groups for c in group.completions)
    if not isinstance(engine, FastEngine):
        return None
    num_submits = sum(is_busy for _, is_busy in engine.busy)
    return engine.num_after, engine.busy_share(num_submits)


def _calls(ranks: Ranks, deterministic: bool) -> Any:
    """Send each replica requests while its engine runs. Return the calls of this rank's engine."""
    engine = CannedEngine(
        ranks.rank,
        2,
        2,
        holds=lambda r: r.ticket == 9 or (r.ticket == 0 and len(engine.submitted) < 5),
    )

    def has_run(num_calls: int) -> bool:
        return len(engine.calls) > num_calls + 2

    def task(driver: EngineDriver) -> list[int]:
        driver.start(TRAINING)
        first = [[GroupRequest(0, prompt(0), ((0, None), (1, None)))]] * 2
        second = [[GroupRequest(1, prompt(1), ((0, None), (2, None)))]] * 2
        third = [[GroupRequest(2, prompt(2), ((1, None),))]] * 2
        reports = driver.advance(first, [[], []])
        for requests in (second, third):
            # The engine of this rank runs, and holds the requests of ticket 0.
            if not deterministic:
                wait_until(partial(has_run, len(engine.calls)), "the engine has run")
            reports += driver.advance(requests, [[], []])
        while sum(len(report.sampled) for _, report in reports) < 10:
            reports += driver.advance([[], []], [[], []])
        driver.advance([[GroupRequest(9, prompt(9), ((0, None), (1, None)))]] * 2, [[], []])
        reports += driver.interrupt()
        return sorted(ticket for _, report in reports for ticket, _ in report.unfinished or ())

    with started(engine, ranks, InstantGrading(), deterministic=deterministic) as engines:
        unfinished = engines.run(task, list[int])
    return engine.calls, unfinished


def _stop_on_a_follower(ranks: Ranks, deterministic: bool) -> Any:
    """Let the last rank, which leads no replica, get a signal."""
    engine = CannedEngine(ranks.rank, 2, 2)
    grading = InstantGrading(is_slow=True)
    groups = {ticket: OpenGroup(ticket, prompt(ticket), 2) for ticket in (0, 1)}

    def task(driver: EngineDriver) -> tuple[list[Events], Events]:
        dispatcher = Dispatcher(driver, TRAINING, groups)
        dispatcher.start(0)
        for group in groups.values():
            dispatcher.submit(group)
        news = [dispatcher.advance()]
        while not news[-1].stop:
            for ticket, completion in news[-1].sampled:
                groups[ticket].completions[completion.sample] = completion
            news.append(dispatcher.advance())
        return news, dispatcher.interrupt()

    stop = "SIGUSR1" if ranks.rank == 3 else ""
    with started(engine, ranks, grading, deterministic=deterministic, stop=lambda: stop) as engines:
        return engines.run(task, tuple[list[Events], Events])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(four_ranks, 4, tmp_path_factory.mktemp("ranks"))


def test_no_replica_waits_for_another(ranks: list[Any]) -> None:
    """If anything waited for the slow replica, its step would not end."""
    num_after, busy_share = ranks[0].speeds
    print(
        f"completions of the fast replica during one step of the slow one: {num_after}; time with "
        f"requests while the queue was not empty: {busy_share:.1%}"
    )
    assert num_after >= NUM_AFTER
    assert 0.0 < busy_share <= 1.0


@pytest.mark.parametrize("deterministic", [False, True], ids=["timed", "deterministic"])
def test_ranks_of_an_engine_get_the_same_requests_between_the_same_steps(
    ranks: list[Any], deterministic: bool
) -> None:
    calls = [rank.calls[deterministic][0] for rank in ranks]
    assert calls[0] == calls[1]
    assert calls[2] == calls[3]
    # Requests arrived while the engine was running.
    of_rank_0 = calls[0]
    late = [
        place
        for place, (name, keys) in enumerate(of_rank_0)
        if name == "submit" and keys and place and of_rank_0[place - 1][0] == "step"
    ]
    assert len(late) >= 2
    assert [keys for name, keys in of_rank_0 if name == "interrupt"] != [[]]
    assert {tuple(rank.calls[deterministic][1]) for rank in ranks} == {(9, 9, 9, 9)}


@pytest.mark.parametrize("deterministic", [False, True], ids=["timed", "deterministic"])
def test_a_stop_signal_on_a_follower_reaches_the_coordinator(
    ranks: list[Any], deterministic: bool
) -> None:
    news, last = ranks[0].stop[deterministic]
    assert [rank.stop[deterministic] for rank in ranks] == [(news, last)] * 4
    assert [events.stop for events in news if events.stop] == ["SIGUSR1"]
    assert last.stop == "SIGUSR1"
    # No sampled completion is lost, and grades after a signal are not trusted.
    assert sum(len(e.sampled) + len(e.unfinished) for e in (*news, last)) == 4
    assert not news[-1].graded and not last.graded


# ------------------------------------------------------------------ one replica in this process


def one_replica(
    engine: Any, grading: Any, task: Any, *, deterministic: bool = True, **more: Any
) -> Any:
    with started(engine, Ranks(0, 1, 0), grading, deterministic=deterministic, **more) as engines:
        return engines.run(task, Any)


def request(ticket: int, num_samples: int) -> list[list[GroupRequest]]:
    samples = tuple((sample, None) for sample in range(num_samples))
    return [[GroupRequest(ticket, prompt(ticket), samples)]]


def test_a_deterministic_turn_has_a_fixed_number_of_steps_and_waits_for_all_grades() -> None:
    engine, grading = CannedEngine(0, max_sequences=100), InstantGrading(is_slow=True)

    def task(driver: EngineDriver) -> list[Report]:
        driver.start(TRAINING)
        reports = [*driver.advance(request(5, 20), [[]]), *driver.advance([[]], [[]])]
        return [report for _, report in [*reports, *driver.interrupt()]]

    first, second, last = one_replica(engine, grading, task)
    assert len(first.sampled) == 2 * STEPS
    assert [c.sample for _, c in first.sampled[:3]] == [19, 18, 17]  # as they finish
    # Sorted, because grades arrive in any order.
    assert [item[1] for item in first.graded] == list(range(4, 20))
    assert {item[2:] for item in first.graded} == {(Grade(1.0, True, "7"), "graded")}
    assert len(second.sampled) == len(second.graded) == 4
    assert (last.sampled, last.graded, last.unfinished) == ([], [], [])
    assert grading.submitted[0] == (("3/train", 5, 19, 0), "sums", "7", "7", {})


def test_completions_of_a_resumed_run_are_graded_again() -> None:
    engine, grading = CannedEngine(0), InstantGrading()

    def task(driver: EngineDriver) -> Report:
        driver.start(TRAINING)
        [(_, report)] = driver.advance([[]], [[(3, 4, prompt(3), "8")]])
        return report

    report = one_replica(engine, grading, task)
    assert [item[:2] for item in report.graded] == [(3, 4)]
    assert grading.submitted == [(("3/train", 3, 4, 0), "sums", "8", "7", {})]


def test_a_leader_leaves_a_generation_that_rank_0_has_left() -> None:
    """Otherwise it would wait for orders, if it has not noticed the loss that ended it."""

    class SilentMember:
        silence = DISCONNECTED_SECONDS + 0.1

        def receive(self, timeout_seconds: float) -> list[bytes]:
            return []

        def send(self, message: bytes) -> None:
            """Send nothing."""

    alone, member = Ranks(0, 1, 0), cast(Any, SilentMember())
    engine, grading = cast(Any, CannedEngine(0)), cast(Any, InstantGrading())
    leader = Leader(engine, grading, member, alone, deterministic=False, is_elastic=True)
    with pytest.raises(EnginesChanged):
        leader.serve()


def test_an_error_of_an_engine_during_the_training_is_raised_at_once() -> None:
    """It must not wait for the others, which may go on without this engine."""

    class FailingWorker:
        def serve(self) -> None:
            raise ConfigError("rewards.workers: a grader cannot be started")

        def in_flight(self) -> str:
            return ""

    nobody = cast(Any, None)
    engines = Engines(FailingWorker(), None, nobody)
    training = SeparateTraining(engines, None, None, nullcontext)
    with pytest.raises(ConfigError, match="a grader cannot be started"):
        training(0, lambda: ({}, 0))


def test_the_number_of_running_requests_is_reported_until_zero() -> None:
    engine, running = CannedEngine(0), list[int]()

    def task(driver: EngineDriver) -> None:
        driver.start(TRAINING)
        driver.advance(request(5, 5), [[]])
        engine._holds = lambda request: True
        driver.advance(request(6, 4), [[]])
        driver.interrupt()

    with started(engine, Ranks(0, 1, 0), InstantGrading(), deterministic=True) as engines:
        engines.worker.on_running = running.append  # type: ignore[attr-defined]
        engines.run(task, Any)
    changes = [
        number for place, number in enumerate(running) if running[place - 1 : place] != [number]
    ]
    assert changes[-6:] == [5, 3, 1, 0, 4, 0]  # each step finishes two


@pytest.mark.parametrize("deterministic", [True, False])
def test_completions_of_any_size_come_back_and_are_continued(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports and orders are divided: here each has room for less than one completion."""
    monkeypatch.setattr(messages, "MAX_PART_BYTES", 300)
    monkeypatch.setattr(driver_module, "MAX_ORDER_BYTES", 1500)
    rng = random.Random(3)

    def long(sample: int) -> Completion:
        num_tokens = rng.randint(1, 200)
        made = completion_of(sample, (Segment(0, num_tokens),), Finish.UNFINISHED)
        return replace(with_random_tokens(made, rng), routes=array("h", range(num_tokens)))

    so_far = tuple((sample, long(sample)) for sample in range(4))
    engine = CannedEngine(0, holds=lambda request: request.sample % 2 == 1)

    def task(driver: EngineDriver) -> list[Report]:
        driver.start(TRAINING)
        reports = driver.advance([[GroupRequest(7, prompt(7), so_far)]], [[]])
        while sum(len(report.sampled) for _, report in reports) < 2:
            reports += driver.advance([[]], [[]])
        return [report for _, report in (*reports, *driver.interrupt())]

    reports = one_replica(engine, InstantGrading(), task, deterministic=deterministic)
    assert [request.so_far for request in engine.submitted] == [each for _, each in so_far]
    finished = [completion for report in reports for _, completion in report.sampled]
    unfinished = [completion for _, completion in reports[-1].unfinished or ()]
    assert sorted(c.sample for c in finished) == [0, 2]
    assert sorted(c.sample for c in unfinished) == [1, 3]
    for completion in (*finished, *unfinished):
        before = so_far[completion.sample][1]
        assert completion.tokens == array("i", [*before.tokens, 5])
        assert completion.logprobs == array("f", [*before.logprobs, -0.5])
        assert completion.routes == before.routes


def test_in_flight_lists_a_limited_number_of_requests() -> None:
    requests = [SimpleNamespace(ticket=5, sample=sample) for sample in range(23)]
    engine: Any = SimpleNamespace(requests=requests, replica=3)
    shown = ", ".join(f"5/{sample}" for sample in range(NUM_SHOWN))
    assert describe(engine) == f"23 completions of replica 3 (ticket/sample: {shown})"
