"""Test that a run goes on when engines are lost and join: the coordinator's decisions with scripted
replicas, the meetings of ranks with threads, and who leaves after a failed sync."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from dapo_megatron.cluster import entry
from dapo_megatron.cluster import members as meetings
from dapo_megatron.cluster.collectives import EnginesChanged, agreed
from dapo_megatron.cluster.entry import OtherJob, enter, find_peers, report_failure
from dapo_megatron.cluster.members import Members
from dapo_megatron.cluster.store import num_starts, register
from dapo_megatron.rollout.roles import SeparateSync
from dapo_megatron.types import (
    ConfigError,
    DapoError,
    RankError,
    Stopped,
    SyncError,
    SyncReport,
    TooFewEnginesError,
)
from tests.helpers.rollouts import (
    ScriptedDriver,
    collect,
    make_coordinator,
    resume,
    without_lost,
)
from tests.unit.test_coordinator import RUNS, History, random_script

# ---------------------------------------------------------------------- the coordinator


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    keep=st.sampled_from([0.3, 0.5, 0.9]),
    run=RUNS,
    losses=st.sets(st.integers(1, 60), max_size=8),
    in_interrupts=st.sets(st.integers(1, 10), max_size=4),
    in_starts=st.sets(st.integers(1, 10), max_size=4),
    joins=st.booleans(),
)
def test_no_ticket_is_lost_or_ends_twice_when_replicas_are_lost(
    seed: int,
    keep: float,
    run: dict[str, Any],
    losses: set[int],
    in_interrupts: set[int],
    in_starts: set[int],
    joins: bool,
) -> None:
    """A step in which a replica was lost is collected to its end, taken back, as in a run, and
    collected again by the next generation. Of a group with requests that a lost replica had, no
    part is kept."""
    correct, length = random_script(seed, keep)
    driver = ScriptedDriver(correct, length, 4, 6, random.Random(seed), grade_at_once=False)
    coordinator = make_coordinator(driver, is_elastic=True, **run)
    history = History(coordinator, run)

    def lose_some(calls: Iterator[int], at: set[int]) -> None:
        left = [replica for replica in range(driver.num_replicas) if replica not in driver.lost]
        if next(calls) in at and len(left) > 1:
            driver.lose(driver.rng.choice(left))

    on_advance = partial(lose_some, count(1), losses)
    on_interrupt = partial(lose_some, count(1), in_interrupts)
    on_start = partial(lose_some, count(1), in_starts)

    version = 0
    while version < 6:
        driver.on_start, driver.on_advance, driver.on_interrupt = on_start, on_advance, on_interrupt
        collected = collect(coordinator, driver, version)
        if not driver.lost:
            for group in collected.train:
                for completion in group.completions:
                    assert completion.segments == driver.reported[group.ticket, completion.sample]
            coordinator.confirm()
            history.record_step(collected)
            version += 1
            continue
        coordinator.revert()
        saved, orphans = coordinator.save_point(), driver.orphans
        driver = without_lost(driver, num_new=int(joins))
        coordinator = make_coordinator(driver, is_elastic=True, **run)
        resume(coordinator, driver, saved)
        for ticket in orphans & coordinator.groups.keys():
            assert not coordinator.groups[ticket].completions
        history.coordinator = coordinator
    history.check_totals()


def test_a_replica_that_is_lost_by_the_start_of_a_step_does_not_keep_the_step_from_ending() -> None:
    """It would get requests of groups that others overtake in no step."""
    driver = ScriptedDriver(
        lambda ticket, sample: sample == 0, lambda ticket, sample: 1 + ticket % 8, max_sequences=4
    )
    coordinator = make_coordinator(driver, is_elastic=True, max_overtake=0, lookahead=4.0)
    collect(coordinator, driver, 0)
    coordinator.confirm()
    calls = count()
    driver.on_start = lambda: driver.lose(1) if next(calls) == 0 else None

    def stop_soon() -> None:
        assert next(calls) < 1000, "the step does not end"

    driver.on_advance = stop_soon
    assert len(collect(coordinator, driver, 1).train) == 4


def test_groups_with_requests_on_a_lost_replica_are_sampled_again_as_a_whole() -> None:
    """Completions that have finished elsewhere tend to be short."""
    driver = ScriptedDriver(
        lambda ticket, sample: sample == 0, lambda ticket, sample: 1 + 7 * sample, max_sequences=4
    )
    coordinator = make_coordinator(driver, is_elastic=True)
    calls, again, others = count(), set[int](), dict[tuple[int, int], Any]()

    def lose_one() -> None:
        if next(calls) == 3:
            again.update(ticket for ticket, _ in driver._running[1])
            others.update(
                (key, completion)
                for key, completion in coordinator.completions().items()
                if key[0] not in again
            )
            driver.lose(1)

    driver.on_advance = lose_one
    collected = collect(coordinator, driver, 0)
    assert again and others
    assert collected.counts["resampled"] == len(again)
    coordinator.revert()
    kept = coordinator.completions()
    for key, completion in others.items():
        assert kept[key].segments[0].num_tokens >= completion.segments[0].num_tokens


# ---------------------------------------------------------------------- meetings of ranks


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the processes that rank 0 would kill: here all ranks are in this one."""
    killed: list[int] = []
    for module in (meetings, entry):
        monkeypatch.setattr(module, "kill_here", lambda _, process_id: killed.append(process_id))
    monkeypatch.setattr(meetings, "LEAVING_SECONDS", 0.0)
    return killed


def in_threads(actions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
    """Run the action of each rank in a thread. Return its result or error, by rank."""
    results: dict[int, Any] = {}

    def run(rank: int, action: Callable[[], Any]) -> None:
        try:
            results[rank] = action()
        except Stopped as error:
            results[rank] = type(error)
        except DapoError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in actions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def meet_all(members: list[Members], lost: Collection[int] = (), **settings: Any) -> dict[int, Any]:
    """Let ranks meet in threads. Return what each then knows, or its error, by rank."""

    def meet(member: Members) -> tuple[int, tuple[int, ...]]:
        until = dict.fromkeys(lost, 0.0)
        member.meet(**{"at_least": 1, "wait_seconds": 60.0, "lost": until, **settings})
        return member.generation, member.current

    return in_threads({member.rank: partial(meet, member) for member in members})


def started(store: HashStore, replica_size: int = 1) -> list[Members]:
    """Return the first generation: a policy of two ranks and engines on four."""
    members = [start_rank(store, rank, replica_size) for rank in range(6)]
    results = in_threads(
        {member.rank: member.meet_all if member.rank < 2 else member.knock for member in members}
    )
    assert set(results.values()) == {None}, results
    assert {(member.generation, member.current) for member in members} == {(1, tuple(range(6)))}
    return members


def start_rank(store: HashStore, rank: int, replica_size: int = 1) -> Members:
    """Return a new start of a rank."""
    current = (0, 1) if rank < 2 else ()
    return Members(store, rank, 2, 6, replica_size, register(store, rank), current=current)


def first_meeting(
    members: list[Members], at_least: int | None, knocking: Collection[int]
) -> dict[int, Callable[[], None]]:
    """Return what the ranks of the policy, and those of engines that ask to join, do at first."""
    meeting = {rank: partial(members[rank].meet_all, at_least) for rank in (0, 1)}
    return {**meeting, **{rank: members[rank].knock for rank in knocking}}


def stop() -> None:
    raise Stopped("stopped by SIGTERM")


def test_the_ranks_that_are_left_form_the_next_generation() -> None:
    members = started(HashStore())
    left = [member for member in members if member.rank != 3]
    results = meet_all(left, lost={3})
    assert set(results) == {0, 1, 2, 4, 5}
    assert set(results.values()) == {(2, (0, 1, 2, 4, 5))}
    assert members[4].replica == 1
    assert members[0].replica == -1
    assert members[0].replaceable == [2, 4, 5]


def test_every_engine_is_replaceable_while_the_first_meeting_waits_for_it() -> None:
    store, seen = HashStore(), list[list[int]]()
    members = [start_rank(store, rank) for rank in range(2)]

    def see_and_stop() -> None:
        seen.append(members[0].replaceable)
        stop()

    meet_all(members, at_least=4, check_stop=see_and_stop)
    assert members[0].generation == 1
    assert seen == [[2, 3, 4, 5]]


def test_an_engine_without_one_of_its_ranks_is_left_out() -> None:
    members = started(HashStore(), replica_size=2)
    results = meet_all([member for member in members if member.rank != 3], lost={3})
    assert results.pop(2).startswith("rank 2: the run goes on without this engine")
    assert set(results.values()) == {(2, (0, 1, 4, 5))}


def test_a_new_start_joins_and_a_dead_start_does_not() -> None:
    store = HashStore()
    members = started(store)
    meet_all([member for member in members if member.rank not in (3, 4)], lost={3, 4})
    assert not members[0].wants_in()
    again = start_rank(store, 4)
    thread = threading.Thread(target=again.knock)
    thread.start()
    while not members[0].wants_in():
        pass
    results = meet_all([member for member in members if member.rank in (0, 1, 2, 5)])
    thread.join(20)
    assert set(results.values()) == {(3, (0, 1, 2, 4, 5))}
    assert (again.generation, again.current) == (3, (0, 1, 2, 4, 5))
    assert not members[0].wants_in()
    store.set(f"knock 3 {register(store, 3)}", "")  # waits, but
    register(store, 3)  # is followed by a newer start that does not wait yet
    assert not members[0].wants_in()


def test_a_rank_that_comes_too_late_is_left_out(
    monkeypatch: pytest.MonkeyPatch, killed: list[int]
) -> None:
    members = started(HashStore())
    monkeypatch.setattr(meetings, "ARRIVAL_SECONDS", 2.0)
    results = meet_all([member for member in members if member.rank != 5])
    assert set(results.values()) == {(2, (0, 1, 2, 3, 4))}
    assert len(killed) == 1
    assert "the run goes on without this engine" in meet_all([members[5]])[5]


def test_an_engine_that_freezes_after_it_asked_to_join_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never answers the decision that invites it."""
    store = HashStore()
    members = started(store)
    meet_all([member for member in members if member.rank != 3], lost={3})
    store.set(f"knock 3 {register(store, 3)}", "")
    monkeypatch.setattr(meetings, "READY_SECONDS", 1.0)  # less than ARRIVAL_SECONDS
    results = meet_all([member for member in members if member.rank != 3])
    assert set(results.values()) == {(4, (0, 1, 2, 4, 5))}, results


class Clock:
    """The module time, of which a minute passes until `sleep` raises Stopped. Calls `on_sleep` at
    each poll."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.seconds = 0.0
        self._start = time.monotonic()
        self._on_sleep = on_sleep
        self._is_nested = False

    def monotonic(self) -> float:
        return self._start + self.seconds

    def sleep(self, seconds: float) -> None:
        if self._is_nested:
            return
        self.seconds += seconds
        if self.seconds > 60.0:
            raise Stopped
        self._is_nested = True
        self._on_sleep()
        self._is_nested = False


@pytest.mark.parametrize(
    ("waiting", "seconds"), [(0, meetings.ARRIVAL_SECONDS), (1, 0.0)], ids=["policy", "rank 0"]
)
def test_a_rank_that_waits_for_a_hanging_one_of_the_policy_gives_no_sign_of_life(
    waiting: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, clock = started(HashStore())[waiting], Clock()
    signs: list[float] = []
    monkeypatch.setattr(meetings, "time", clock)
    member.on_activity = lambda _: signs.append(clock.seconds)
    with pytest.raises(Stopped):
        member.meet(at_least=1, wait_seconds=1e6)
    assert seconds - 0.1 < max(signs) < seconds + 1.0  # floats of a large clock round


def test_signs_of_life_of_rank_0_are_those_of_ranks_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, other, *_ = started(HashStore())
    clock = Clock(lambda: first.pause("waits for engines"))
    signs: list[float] = []
    monkeypatch.setattr(meetings, "time", clock)
    other.on_activity = lambda _: signs.append(clock.seconds)
    with pytest.raises(Stopped):
        other.meet(at_least=1, wait_seconds=1e6)
    assert len(signs) > 50 and max(signs) > 58.0


def test_the_end_of_an_engine_is_a_sign_of_life_while_the_first_meeting_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise another rank of the policy would give up before the engine is started again."""
    store, clock = HashStore(), Clock()
    members = [start_rank(store, rank) for rank in range(6)]
    signs: list[float] = []
    monkeypatch.setattr(meetings, "time", clock)
    monkeypatch.setattr(meetings, "has_ended", lambda *process: clock.seconds > 30.0)
    members[0].on_activity = lambda _: signs.append(clock.seconds)
    store.set("arrival 1 1", "")
    with pytest.raises(Stopped):
        members[0].meet_all()
    assert len(signs) == 2 and signs[0] < 1.0 and 30.0 < signs[1] < 31.0


def test_ranks_that_never_work_together_end_the_run() -> None:
    members = started(HashStore())
    members[0].note_progress()  # otherwise the engines that joined last would be left out
    for number in range(1, 5):
        assert set(meet_all(members).values()) == {(1 + number, tuple(range(6)))}
        assert {member.num_failures for member in members} == {number}
    results = meet_all(members, cause="Wait timeout")
    reason = "5 times in a row, the ranks could not work together, although all were there: Wait"
    assert all(result.startswith(reason) for result in results.values()), results


def test_failures_are_counted_anew_after_progress() -> None:
    members = started(HashStore())
    for _ in range(6):
        for member in members:
            member.note_progress()
        assert meet_all(members)[5][1] == tuple(range(6))
    assert members[0].num_failures == 1


def test_an_engine_that_others_cannot_reach_is_left_out() -> None:
    """It joined last, and since then no generation works. The third time, it stays out."""
    store = HashStore()
    members = started(store)
    members[0].note_progress()
    for number in range(1, 4):
        members[4] = start_rank(store, 4)
        joins = in_threads(
            {4: members[4].knock}
            | {
                m.rank: partial(m.meet, at_least=1, wait_seconds=60.0)
                for m in members
                if m.rank != 4
            }
        )
        assert set(joins.values()) == {None}, joins
        assert members[0].current == tuple(range(6))
        meet_all(members)
        assert {member.num_failures for member in members} == {1}
        results = meet_all(members)
        assert "goes on without this engine" in results.pop(4)
        assert {current for _, current in results.values()} == {(0, 1, 2, 3, 5)}
        store.set(f"knock 4 {register(store, 4)}", "")
        assert members[0].wants_in() == (number < 3)


def test_a_run_with_too_few_engines_waits_and_then_ends(killed: list[int]) -> None:
    members = started(HashStore())
    results = meet_all(members[:2], lost={2, 3, 4, 5}, at_least=1, wait_seconds=0.2)
    assert len(killed) == 4  # so that they can be started again, if they hang
    assert results == {0: (2, (0, 1)), 1: (2, (0, 1))}  # to save
    assert {str(member.ending) for member in members[:2]} == {
        "0 engines are left, fewer than engine.min_replicas = 1, and none returned within 0 s. See "
        "their logs"
    }
    # If this generation cannot be formed, the next one waits for no engine, either.
    assert meet_all(members[:2], at_least=1) == {0: (3, (0, 1)), 1: (3, (0, 1))}
    assert isinstance(members[1].ending, TooFewEnginesError)

    members = started(HashStore())
    results = meet_all(members[:3], lost={3, 4, 5}, at_least=2, check_stop=stop)
    assert set(results.values()) == {(2, (0, 1, 2))}
    assert {type(member.ending) for member in members[:3]} == {Stopped}


def test_an_engine_that_cannot_be_built_ends_the_run_before_the_first_generation() -> None:
    store = HashStore()
    members = [start_rank(store, rank) for rank in range(6)]

    def fail() -> None:
        assert report_failure(members[4], ConfigError("engine.memory_gib: too little"))

    results = in_threads({0: members[0].meet_all, 1: members[1].meet_all, 4: fail})
    assert results[0] == "rank 4: engine.memory_gib: too little"
    assert results[1] == results[0]
    # An engine whose other rank was killed is started again.
    member = start_rank(HashStore(), 4)
    assert not report_failure(member, RankError("Connection closed by peer [127.0.0.1]:1"))
    # Later, the run goes on without it.
    members = started(HashStore())
    assert not report_failure(start_rank(members[0].store, 4), ConfigError("another config"))
    results = meet_all([member for member in members if member.rank != 4], lost={4})
    assert set(results.values()) == {(2, (0, 1, 2, 3, 5))}


def test_the_first_generation_goes_on_without_an_engine_that_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node was lost, or the launcher has given it up. If it is built after all, it joins."""
    store = HashStore()
    members = [start_rank(store, rank) for rank in range(6)]
    monkeypatch.setattr(meetings, "LATE_SECONDS", 0.5)
    results = in_threads(first_meeting(members, 3, (2, 3, 5)))
    assert set(results.values()) == {None}, results
    assert members[0].current == (0, 1, 2, 3, 5)
    assert members[0].absent == {4}
    thread = threading.Thread(target=members[4].knock, daemon=True)
    thread.start()
    while not members[0].wants_in():
        pass
    results = meet_all([member for member in members if member.rank != 4])
    assert set(results.values()) == {(2, tuple(range(6)))}


@pytest.mark.parametrize(("at_least", "returns"), [(3, False), (3, True), (None, True)])
def test_the_first_generation_goes_on_without_an_engine_that_is_lost_as_it_joins(
    at_least: int | None, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked to join, and never answered. Those that wait already count in the next try."""
    store = HashStore()
    members = [start_rank(store, rank) for rank in range(6)]
    monkeypatch.setattr(meetings, "LATE_SECONDS", 1.0)
    monkeypatch.setattr(meetings, "READY_SECONDS", 1.0)
    store.set("knock 4 1", "")
    actions = first_meeting(members, at_least, (2, 3, 5))
    if returns:

        def knock_again() -> None:
            while members[0].generation < 2:
                pass
            start_rank(store, 4).knock()

        actions[4] = knock_again
    results = in_threads(actions)
    assert set(results) == set(actions) and set(results.values()) == {None}, results
    assert members[0].current == ((0, 1, 2, 3, 4, 5) if returns else (0, 1, 2, 3, 5))


def test_the_first_generation_does_not_wait_for_one_that_crashes_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    members = [start_rank(store, rank) for rank in range(6)]
    monkeypatch.setattr(meetings, "LATE_SECONDS", 1.0)
    is_over = threading.Event()

    def crash_again_and_again() -> None:
        while not is_over.wait(0.2):
            register(store, 4)

    actions = first_meeting(members, 3, (2, 3, 5))

    def lead() -> None:
        actions[0]()
        is_over.set()

    results = in_threads({**actions, 0: lead, 4: crash_again_and_again})
    assert set(results.values()) == {None} and is_over.is_set(), results
    assert members[0].current == (0, 1, 2, 3, 5)


def test_the_first_generation_waits_for_an_engine_that_is_started_again() -> None:
    store = HashStore()
    members = [start_rank(store, rank) for rank in range(6)]
    first = {rank: members[rank].meet_all for rank in (0, 1)}
    knocking = {rank: members[rank].knock for rank in (2, 3, 5)}
    again = start_rank(store, 4)  # the first start of rank 4 has died
    results = in_threads({**first, **knocking, 4: again.knock})
    assert set(results.values()) == {None}
    assert again.current == tuple(range(6))


def test_ranks_of_an_engine_find_each_other_after_unequal_numbers_of_starts(
    killed: list[int],
) -> None:
    store = HashStore()
    members = [start_rank(store, rank, 2) for rank in range(6)]
    numbers = in_threads({rank: partial(find_peers, members[rank]) for rank in range(2, 6)})
    assert numbers == {2: 1, 3: 1, 4: 1, 5: 1}
    for _ in range(3):  # rank 5 is killed more often than rank 4
        other = start_rank(store, 5, 2)
    first = start_rank(store, 4, 2)
    assert in_threads({4: partial(find_peers, first), 5: partial(find_peers, other)}) == {
        4: 2,
        5: 2,
    }
    # The first rank alone, with a rank that was in the engine before, kills it and waits.
    assert not killed
    first = start_rank(store, 4, 2)
    thread = threading.Thread(target=partial(find_peers, first), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and len(killed) == 1
    other = start_rank(store, 5, 2)
    assert in_threads({5: partial(find_peers, other)}) == {5: 3}
    thread.join(20)


FACTS = {"version": "1", "seed": 1}


def test_a_second_job_with_the_same_store_is_refused() -> None:
    store, job = HashStore(), {"SLURM_JOB_ID": "7"}
    assert [enter(store, rank, 2, job, FACTS) for rank in (0, 1, 4, 4)] == [1, 1, 1, 2]
    for rank in (0, 1):
        with pytest.raises(OtherJob, match=f"MASTER_PORT: rank {rank} has been started before"):
            enter(store, rank, 2, job, FACTS)
    with pytest.raises(OtherJob, match="SLURM_JOB_ID: '8' on rank 0, but '7' on rank 0; start"):
        enter(store, 0, 2, {"SLURM_JOB_ID": "8"}, FACTS)
    # Its policy may have another number of ranks. None counts as a start of the first job's.
    for rank in (1, 3, 4):
        with pytest.raises(OtherJob, match=f"SLURM_JOB_ID: '8' on rank {rank}, but '7' on rank 0"):
            enter(store, rank, 4, {"SLURM_JOB_ID": "8"}, FACTS)
    assert [num_starts(store, rank) for rank in (3, 4)] == [0, 2]


@pytest.mark.parametrize("other", [{"seed": 1}, {"version": "2", "seed": 1}, {**FACTS, "x": 1}])
def test_a_rank_with_another_version_or_config_is_refused_by_name(other: dict[str, Any]) -> None:
    store = HashStore()
    enter(store, 0, 2, {}, FACTS)
    [name] = {name for name in {**FACTS, **other} if FACTS.get(name) != other.get(name)}
    for rank in (1, 5):
        with pytest.raises(ConfigError, match=f"^{name}: .* on rank {rank}, but .* on rank 0; sta"):
            enter(store, rank, 2, {}, other)
        assert num_starts(store, rank) == 0


class Policy:
    """Exchange of two ranks with a policy, of which the other one answers `others`."""

    def __init__(self, others: bool) -> None:
        self._others = others

    def all_gather(self, value: bool, of: object) -> list[bool]:
        return [value, self._others]


def test_ranks_with_a_policy_go_on_together() -> None:
    def fail() -> None:
        raise EnginesChanged("lost")

    assert agreed(Policy(others=True), lambda: 5) == 5  # type: ignore[arg-type]
    with pytest.raises(EnginesChanged):
        agreed(Policy(others=False), lambda: 5)  # type: ignore[arg-type]
    with pytest.raises(EnginesChanged, match="lost"):
        agreed(Policy(others=True), fail)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- engines that fail a sync


@dataclass
class FailingSync:
    """Sync in which `ranks` are at fault."""

    ranks: set[int]

    def __call__(self, version: int) -> SyncReport:
        raise SyncError(f"weights {version}: fingerprints differ", self.ranks)

    def switch_to_policy(self) -> None: ...


def errors_of(ranks: set[int]) -> tuple[dict[int, DapoError], set[int]]:
    """Let a policy of two ranks and two engines of two ranks fail a sync. Return the error of each
    rank, and the replicas that rank 0 knows to be lost."""
    errors: dict[int, DapoError] = {}
    driver = ScriptedDriver(lambda ticket, sample: True)
    for member in started(HashStore(), replica_size=2):
        driver_here = driver if member.rank == 0 else None
        sync = SeparateSync(FailingSync(ranks), member, driver_here)  # type: ignore[arg-type]
        with pytest.raises(DapoError) as raised:
            sync(3)
        errors[member.rank] = raised.value
    return errors, driver.lost


@pytest.mark.parametrize("ranks", [{4}, {4, 5}])
def test_an_engine_that_alone_fails_a_sync_leaves_with_all_its_ranks(ranks: set[int]) -> None:
    errors, lost = errors_of(ranks)
    assert lost == {1}
    leaving = {rank for rank, error in errors.items() if isinstance(error, SyncError)}
    assert leaving == {4, 5}
    for rank in (0, 1, 2, 3):
        assert isinstance(errors[rank], EnginesChanged)
        assert str(errors[rank]) == (
            "replica 1 (rank 4, 5): failed the check of a sync, which other engines passed; the run"
            " goes on without it: weights 3: fingerprints differ"
        )


def test_an_engine_that_failed_too_many_syncs_does_not_join() -> None:
    store = HashStore()
    first, *_ = started(store)
    store.set(f"knock 4 {register(store, 4)}", "")
    assert [first.add_fault(2) for _ in range(2)] == [True, True]
    assert first.wants_in()
    assert not first.add_fault(2)
    assert not first.wants_in()


@pytest.mark.parametrize(
    "ranks", [{2, 5}, {0, 4}, {0, 1}, set()], ids=["all", "policy too", "policy", "unknown"]
)
def test_a_failed_sync_ends_the_run_if_not_only_some_engines_are_at_fault(ranks: set[int]) -> None:
    errors, lost = errors_of(ranks)
    assert {type(error) for error in errors.values()} == {SyncError}
    assert not lost
