"""Dynamic sampling: the groups that a step trains on, the outcome of others, exact resuming."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.engine.messages import sample_seed
from dapo_megatron.rollout.coordinator import BOUND, Coordinator, SavePoint
from dapo_megatron.types import (
    CheckpointError,
    Collected,
    DapoError,
    EnginesLost,
    Finish,
    Outcome,
    StarvedError,
    Stopped,
)
from tests.helpers.rollouts import (
    MAX_TOKENS,
    Correct,
    Killed,
    Length,
    ScriptedDriver,
    collect,
    make_coordinator,
    moved,
    resume,
)


def by_ticket(kind: Callable[[int], str]) -> Correct:
    """Return correctness by kind of ticket: m(ixed), r(ight), w(rong), n(o grade for sample 1)."""
    outcomes: dict[str, tuple[bool | None, bool | None]] = {
        "m": (True, False), "r": (True, True), "w": (False, False), "n": (True, None),
    }  # fmt: skip
    return lambda ticket, sample: outcomes[kind(ticket)][sample % 2]


def mixed_every(number: int) -> Correct:
    """Make every `number`th ticket mixed, and the others alternately all right and all wrong."""
    return by_ticket(lambda ticket: "m" if ticket % number == 0 else "rw"[ticket % 2])


def trained(collected: Collected) -> list[int]:
    return [group.ticket for group in collected.train]


def fates_of(collected: Collected) -> dict[int, Outcome]:
    return {group.ticket: outcome for group, outcome in collected.ended}


# ---------------------------------------------------------------------------- trained groups


def test_the_first_mixed_groups_are_trained_and_the_rest_gets_a_fate() -> None:
    driver = ScriptedDriver(mixed_every(3))
    coordinator = make_coordinator(driver, on_policy=True)
    first = collect(coordinator, driver, 0)
    assert trained(first) == [0, 3, 6, 9]
    ended = fates_of(first)
    assert [ended[ticket] for ticket in range(10)] == [
        Outcome.TRAINED, Outcome.ALL_WRONG, Outcome.ALL_CORRECT, Outcome.TRAINED,
        Outcome.ALL_CORRECT, Outcome.ALL_WRONG, Outcome.TRAINED, Outcome.ALL_WRONG,
        Outcome.ALL_CORRECT, Outcome.TRAINED,
    ]  # fmt: skip
    assert first.counts["issued"] == len(first.ended)
    assert first.counts["carried"] == 0
    # The next step starts with the next ticket, not with a group left over from this one.
    assert trained(collect(coordinator, driver, 1))[0] >= first.counts["issued"]


def test_on_policy_trains_only_on_tokens_of_the_current_weights() -> None:
    driver = ScriptedDriver(mixed_every(2), lambda ticket, sample: 1 + ticket % MAX_TOKENS)
    coordinator = make_coordinator(driver, on_policy=True)
    for version in range(4):
        collected = collect(coordinator, driver, version)
        for group in collected.train:
            assert {p.version for c in group.completions for p in c.segments} == {version}
        assert not coordinator.groups


def test_a_running_group_is_overtaken_for_at_most_max_overtake_steps() -> None:
    slow = 1
    without_progress = {0, 1}  # versions in which the slow group gets no token

    class Stubborn(ScriptedDriver):
        def _move_on(self, replica: int) -> Any:
            held_back, running = {}, self._running[replica]
            if self.version in without_progress:
                held_back = {key: running.pop(key) for key in list(running) if key[0] == slow}
            finished = super()._move_on(replica)
            running.update(held_back)
            return finished

    driver = Stubborn(mixed_every(1))
    coordinator = make_coordinator(driver, max_overtake=2, lookahead=1.5)
    assert slow not in trained(collect(coordinator, driver, 0))
    assert slow not in trained(collect(coordinator, driver, 1))
    assert coordinator.groups[slow].overtaken == 2
    assert trained(collect(coordinator, driver, 2))[0] == slow


def test_max_overtake_zero_trains_in_ticket_order() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: 1 if ticket % 3 else MAX_TOKENS)
    coordinator = make_coordinator(driver, max_overtake=0)
    tickets = [t for version in range(5) for t in trained(collect(coordinator, driver, version))]
    assert tickets == list(range(20))


def test_without_dynamic_sampling_every_group_is_trained() -> None:
    driver = ScriptedDriver(mixed_every(3))
    coordinator = make_coordinator(driver, on_policy=True, dynamic_sampling=False)
    first = collect(coordinator, driver, 0)
    assert trained(first) == [0, 1, 2, 3]
    assert first.counts["issued"] == 4


def test_a_group_with_an_ungraded_completion_abstains() -> None:
    driver = ScriptedDriver(by_ticket(lambda ticket: "n" if ticket == 1 else "m"))
    collected = collect(make_coordinator(driver, on_policy=True), driver, 0)
    assert trained(collected) == [0, 2, 3, 4]
    assert fates_of(collected)[1] is Outcome.ABSTAINED
    assert collected.gradings["sums", "timeout"] == 1
    assert collected.gradings["sums", "graded"] >= 9


TRUNCATED = {
    # Lengths in a group of a right sample 0 and a wrong sample 1. Ticket 1 has overlong samples.
    "one": lambda ticket, sample: MAX_TOKENS if (ticket, sample) == (1, 1) else 2,
    "both": lambda ticket, sample: MAX_TOKENS if ticket == 1 else 2,
}


@pytest.mark.parametrize(
    ("overlong_samples", "overlong", "outcome"),
    [
        ("both", {"filter": False}, Outcome.TRAINED),
        ("one", {"filter": True, "filtered_in_mean": True}, Outcome.TRAINED),
        ("both", {"filter": True, "filtered_in_mean": True}, Outcome.OVERLONG),
        ("one", {"filter": True, "filtered_in_mean": False}, Outcome.OVERLONG),
        ("both", {"filter": True, "filtered_in_mean": False}, Outcome.OVERLONG),
    ],
)
def test_overlong_filtering_decides_whether_a_group_is_trained(
    overlong_samples: str, overlong: dict[str, Any], outcome: Outcome
) -> None:
    driver = ScriptedDriver(mixed_every(1), TRUNCATED[overlong_samples])
    coordinator = make_coordinator(driver, on_policy=True, overlong=overlong)
    assert fates_of(collect(coordinator, driver, 0))[1] is outcome


# ---------------------------------------------------------------------------- issued prompts


def test_the_number_of_issued_prompts_follows_the_observed_keep_rate() -> None:
    driver = ScriptedDriver(mixed_every(4), max_sequences=1000)
    coordinator = make_coordinator(driver, on_policy=True, prompts_per_step=20)
    collected = [collect(coordinator, driver, version) for version in range(4)]
    assert collected[0].keep_rate < 0.5  # the guess was 0.5
    assert collected[-1].keep_rate == pytest.approx(0.25, abs=0.03)
    # Usually enough prompts at once, and not many more.
    assert 80 <= collected[-1].counts["issued"] <= 140


def test_lookahead_bounds_carried_groups_and_their_age() -> None:
    def run(lookahead: float) -> tuple[float, int]:
        driver = ScriptedDriver(
            mixed_every(1), lambda ticket, sample: 1 + (7 * ticket + sample) % MAX_TOKENS,
            num_replicas=1, max_sequences=1000,
        )  # fmt: skip
        coordinator = make_coordinator(driver, lookahead=lookahead, expected_keep_rate=1.0)
        ages, max_carried = [], 0
        for version in range(30):
            collected = collect(coordinator, driver, version)
            ages += [
                version - min(c.oldest_version for c in g.completions) for g in collected.train
            ]
            max_carried = max(max_carried, collected.counts["carried"])
        return sum(ages) / len(ages), max_carried

    for lookahead in (1.0, 2.0, 4.0):
        age, carried = run(lookahead)
        assert age <= lookahead
        assert carried <= lookahead * 4
    assert run(4.0)[0] > run(1.0)[0]


def test_groups_go_whole_to_the_replica_with_free_capacity() -> None:
    driver = ScriptedDriver(mixed_every(1), num_replicas=2, max_sequences=4)
    running: list[list[tuple[int, int]]] = []
    driver.on_advance = lambda: running.append([tuple(sorted(r)) for r in driver._running])
    collect(make_coordinator(driver, on_policy=True), driver, 0)
    assert running[0] == [((0, 0), (0, 1), (2, 0), (2, 1)), ((1, 0), (1, 1), (3, 0), (3, 1))]


# ---------------------------------------------------------------------------- at the bound


def test_train_partial_trains_on_fewer_groups_at_the_bound() -> None:
    driver = ScriptedDriver(by_ticket(lambda ticket: "m" if ticket in (3, 9) else "w"))
    coordinator = make_coordinator(driver, on_policy=True, max_prompts_per_step=12)
    collected = collect(coordinator, driver, 0)
    assert trained(collected) == [3, 9]
    assert collected.counts["issued"] == 12


def test_wait_continues_beyond_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    driver = ScriptedDriver(by_ticket(lambda ticket: "m" if ticket > 200 else "w"))
    coordinator = make_coordinator(driver, on_policy=True, at_bound="wait")
    assert trained(collect(coordinator, driver, 0)) == [201, 202, 203, 204]
    assert "0 of 4 mixed groups after" in caplog.text


@pytest.mark.parametrize(
    ("at_bound", "mixed", "message"),
    [
        ("fail", {9}, "1 of 4 mixed groups after 12 prompts"),
        ("train_partial", set(), "0 of 4 mixed groups after 12 prompts"),
    ],
)
def test_starving_reports_the_data_set_and_leaves_a_resumable_state(
    at_bound: str, mixed: set[int], message: str
) -> None:
    driver = ScriptedDriver(by_ticket(lambda ticket: "m" if ticket in mixed else "w"))
    settings = {"at_bound": at_bound, "max_prompts_per_step": 12, "max_overtake": 0}
    coordinator = make_coordinator(driver, **settings)
    with pytest.raises(StarvedError, match=message) as raised:
        collect(coordinator, driver, 0)
    assert "sums: 1" in str(raised.value)  # 11 or 12 all_wrong
    assert "all_wrong" in str(raised.value)
    assert "rollout.max_prompts_per_step" in str(raised.value)
    assert "change data.train" in str(raised.value)

    easier = ScriptedDriver(mixed_every(1))
    resumed = make_coordinator(easier, **settings)
    resume(resumed, easier, coordinator.save_point())
    collected = collect(resumed, easier, 0)
    assert trained(collected) == sorted([*mixed, 12, 13, 14, 15])[:4]


def test_a_grader_that_always_fails_ends_the_run_early_with_its_error() -> None:
    driver = ScriptedDriver(by_ticket(lambda ticket: "n"))
    driver.correct = lambda ticket, sample: None
    driver.last_errors["sums"] = "ZeroDivisionError: division by zero"
    coordinator = make_coordinator(driver)
    with pytest.raises(StarvedError, match="ZeroDivisionError") as raised:
        collect(coordinator, driver, 0)
    assert "data set 'sums': its grader failed on every completion" in str(raised.value)
    assert coordinator.ledger.next_ticket < BOUND * 4 / 2  # long before max_prompts_per_step

    # With a working grader the run continues, however late its first grade arrives.
    fixed = ScriptedDriver(mixed_every(1), grade_at_once=False)
    fixed.rng.seed(4)
    resumed = make_coordinator(fixed)
    resume(resumed, fixed, coordinator.save_point())
    assert len(collect(resumed, fixed, 0).train) == 4


# ---------------------------------------------------------------------------- kills and resumes


def random_script(seed: int, keep: float) -> tuple[Correct, Length]:
    """Return correctness and length functions: uneven lengths, and some gradings fail."""

    def draw(ticket: int, sample: int, quantity: str) -> random.Random:
        return random.Random(f"{seed}/{ticket}/{sample}/{quantity}")

    def correct(ticket: int, sample: int) -> bool | None:
        if draw(ticket, sample, "dead").random() < 0.02:
            return None
        mixed = draw(ticket, 0, "mixed").random() < keep
        return sample == 0 if mixed else ticket % 2 == 0

    def length(ticket: int, sample: int) -> int:
        return min(MAX_TOKENS, 1 + int(draw(ticket, sample, "length").expovariate(0.4)))

    return correct, length


RUNS = st.fixed_dictionaries(
    {
        "on_policy": st.booleans(),
        "max_overtake": st.integers(0, 3),
        "lookahead": st.floats(1.0, 4.0),
        "prompts_per_step": st.integers(1, 6),
        "samples_per_prompt": st.integers(2, 4),
        "max_prompts_per_step": st.just(500),
        "max_staleness": st.none() | st.integers(0, 4),
    }
).filter(lambda run: run["max_staleness"] is None or not run["on_policy"])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    keep=st.sampled_from([0.15, 0.5, 0.9, 1.0]),
    run=RUNS,
    num_replicas=st.integers(1, 3),
    max_sequences=st.integers(1, 12),
    kills=st.lists(st.integers(1, 60), max_size=3),
    ahead=st.integers(0, 30),
)
def test_no_ticket_is_lost_or_ends_twice_in_any_order_and_after_any_kill(
    seed: int,
    keep: float,
    run: dict[str, Any],
    num_replicas: int,
    max_sequences: int,
    kills: list[int],
    ahead: int,
) -> None:
    correct, length = random_script(seed, keep)
    driver = ScriptedDriver(
        correct, length, num_replicas, max_sequences, random.Random(seed), grade_at_once=False
    )
    coordinator = make_coordinator(driver, **run)
    history = History(coordinator, run)
    version, pending = 0, list(kills)
    while version < 6:
        schedule_saves_and_kills(driver, coordinator, history, pending)
        try:
            history.record_step(collect(coordinator, driver, version))
            version += 1
            if not run["on_policy"] and version < 6:
                turns = iter([False] * ahead)
                coordinator.sample_ahead(version - 1, lambda turns=turns: next(turns, True))  # type: ignore[misc]
        except Killed:
            # Resume from any moment, also within a step, with another number of replicas.
            driver = moved(driver, 1 + (driver.num_replicas % 3))
            coordinator = make_coordinator(driver, **run)
            resume(coordinator, driver, history.saved)
            version = history.return_to_saved(coordinator)
    history.check_totals()


def schedule_saves_and_kills(
    driver: ScriptedDriver, coordinator: Coordinator, history: History, kills: list[int]
) -> None:
    """Save the run now and at every third exchange. Kill it at the exchange that `kills` gives."""
    calls = iter(range(1, 10**9))
    kill_at = kills.pop() if kills else None

    def on_advance() -> None:
        call = next(calls)
        if call % 3 == 0:
            history.save(coordinator)
        if call == kill_at:
            raise Killed

    driver.on_advance = on_advance
    driver.on_interrupt = history.note_ready
    history.save(coordinator)


class History:
    """Independent record of a run's steps, to check the coordinator against."""

    def __init__(self, coordinator: Coordinator, run: dict[str, Any]) -> None:
        self.coordinator = coordinator
        self.run = run
        self.steps: list[Collected] = []
        self.saved: SavePoint = {}, {}
        self._saved_steps = 0
        self._ready: set[int] = set()

    def note_ready(self) -> None:
        """Note which groups are ready before an interrupt, with which more grades may come."""
        groups = self.coordinator.groups.values()
        self._ready = {group.ticket for group in groups if group.is_ready}

    def save(self, coordinator: Coordinator) -> None:
        self.saved = coordinator.save_point()
        self._saved_steps = len(self.steps)

    def return_to_saved(self, coordinator: Coordinator) -> int:
        self.coordinator = coordinator
        del self.steps[self._saved_steps :]
        return self._saved_steps

    def record_step(self, collected: Collected) -> None:
        version, tickets = len(self.steps), trained(collected)
        self.steps.append(collected)
        self.coordinator.ledger.audit(self.coordinator._open_groups())
        assert collected.version == version
        assert tickets == sorted(tickets)
        assert len(tickets) == self.run["prompts_per_step"]
        for group in collected.train:
            assert len(group.completions) == self.run["samples_per_prompt"]
            for completion in group.completions:
                assert completion.grade is not None
                assert completion.finish is not Finish.UNFINISHED
                versions = [part.version for part in completion.segments]
                assert versions == sorted(set(versions))
                num_tokens = sum(part.num_tokens for part in completion.segments)
                assert completion.num_tokens == num_tokens
                if self.run["max_staleness"] is not None:
                    assert version - versions[0] <= self.run["max_staleness"]
        self._check_order(tickets, version)

    def _check_order(self, tickets: list[int], version: int) -> None:
        """Check that overtaken groups were still running, and were not overtaken too often."""
        for group in self.coordinator.groups.values():
            assert not (group.ticket in self._ready and group.ticket < tickets[-1])
            assert group.overtaken <= self.run["max_overtake"]
        if self.run["on_policy"]:
            assert not self.coordinator.groups
        elif self.run["max_overtake"] == 0:
            assert all(ticket > tickets[-1] for ticket in self.coordinator.groups)

    def check_totals(self) -> None:
        ended = [(group.ticket, outcome) for step in self.steps for group, outcome in step.ended]
        tickets = [ticket for ticket, _ in ended]
        assert len(set(tickets)) == len(tickets)
        issued = set(range(self.coordinator.ledger.next_ticket))
        assert issued == set(tickets) | set(self.coordinator.groups)
        counted: Counter[str] = Counter(outcome.value for _, outcome in ended)
        assert counted == self.coordinator.ledger.totals
        assert sum(step.counts["issued"] for step in self.steps) == len(issued)
        if not self.run["on_policy"]:
            assert counted["expired"] == 0  # no group waits that long in this test


LOSSES = st.lists(
    st.tuples(st.sampled_from(["start", "advance", "interrupt"]), st.integers(0, 25)), max_size=8
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    run=RUNS,
    num_replicas=st.integers(1, 4),
    losses=LOSSES,
    come_back=st.booleans(),
    ahead=st.integers(0, 30),
)
def test_groups_of_lost_replicas_are_sampled_again_as_a_whole(
    seed: int,
    run: dict[str, Any],
    num_replicas: int,
    losses: list[tuple[str, int]],
    come_back: bool,
    ahead: int,
) -> None:
    """Replicas are lost at any moment, also all of them, and others come back with a sync."""
    correct, length = random_script(seed, 0.5)
    rng = random.Random(seed)
    driver = ScriptedDriver(correct, length, num_replicas, 4, rng, grade_at_once=False)
    coordinator = make_coordinator(driver, **run)
    history = History(coordinator, run)

    def losing(kind: str) -> Callable[[], None]:
        calls = itertools.count()

        def on_call() -> None:
            if kind == "interrupt":
                history.note_ready()
            if (kind, next(calls)) in losses:
                present = sorted(set(range(num_replicas)) - driver.lost)
                driver.lose(rng.choice(present or [0]))

        return on_call

    driver.on_start, driver.on_advance = losing("start"), losing("advance")
    driver.on_interrupt = losing("interrupt")
    version = 0
    while version < 5:
        try:
            history.record_step(collect(coordinator, driver, version))
            version += 1
            if not run["on_policy"] and version < 5:
                turns = iter([False] * ahead)
                coordinator.sample_ahead(version - 1, lambda turns=turns: next(turns, True))  # type: ignore[misc]
        except EnginesLost:
            driver.lost.clear()
        if come_back:
            driver.lost.clear()
    history.check_totals()
    for group, outcome in (item for step in history.steps for item in step.ended):
        for completion in group.completions:
            if completion.finish is not Finish.UNFINISHED:
                assert completion.num_tokens == length(group.ticket, completion.sample)
        if group.ticket in driver.orphaned and outcome is not Outcome.EXPIRED:
            requests = driver.requests[driver.orphaned[group.ticket] :]
            again = [s for r in requests if r.ticket == group.ticket for s, c in r.samples if not c]
            assert sorted(set(again)) == list(range(run["samples_per_prompt"]))


def test_a_step_without_its_last_replica_goes_on_after_a_sync() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda *_: 3, num_replicas=1, grade_at_once=False)
    coordinator = make_coordinator(driver, lookahead=2.0)
    collect(coordinator, driver, 0)
    carried = set(coordinator.groups)
    driver.on_advance = lambda: driver.lose(0)
    with pytest.raises(EnginesLost):
        collect(coordinator, driver, 1)
    assert carried <= set(coordinator.groups)
    with pytest.raises(EnginesLost):  # nothing has changed
        collect(coordinator, driver, 1)
    saved = coordinator.save_point()
    driver.lost.clear()
    driver.on_advance = lambda: None
    other = ScriptedDriver(mixed_every(1), num_replicas=1)
    resumed = make_coordinator(other, lookahead=2.0)
    resume(resumed, other, saved)
    for goes_on, its_driver in ((coordinator, driver), (resumed, other)):
        collected = collect(goes_on, its_driver, 1)
        assert trained(collected)[0] == min(carried)
        assert collected.counts["resampled"] > 0


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_resumed_run_continues_exactly_like_an_uninterrupted_one(on_policy: bool) -> None:
    correct, length = random_script(5, 0.5)

    def fresh() -> tuple[ScriptedDriver, Coordinator]:
        driver = ScriptedDriver(correct, length, rng=random.Random(1))
        return driver, make_coordinator(driver, on_policy=on_policy, max_overtake=2)

    driver, straight = fresh()
    expected = [collect(straight, driver, version) for version in range(3)]
    state = straight.save_point()
    driver.rng.seed(2)
    expected = [collect(straight, driver, version) for version in range(3, 6)]

    driver, resumed = fresh()
    resume(resumed, driver, state)
    driver.rng.seed(2)
    driver.grade_seconds = expected[0].grade_seconds  # a measured time, which affects no decision
    resumed_steps = [collect(resumed, driver, version) for version in range(3, 6)]
    assert [trained(step) for step in resumed_steps] == [trained(step) for step in expected]
    assert [step.train for step in resumed_steps] == [step.train for step in expected]
    assert [step.counts for step in resumed_steps] == [step.counts for step in expected]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), stop_at=st.integers(1, 30), on_policy=st.booleans())
def test_tokens_sampled_before_a_stop_signal_are_kept(
    seed: int, stop_at: int, on_policy: bool
) -> None:
    correct, length = random_script(seed, 0.5)
    driver = ScriptedDriver(correct, length, rng=random.Random(seed), grade_at_once=False)
    run: dict[str, Any] = {"on_policy": on_policy, "max_prompts_per_step": 500}
    coordinator = make_coordinator(driver, **run)
    calls = iter(range(1, 10**9))

    def on_advance() -> None:
        driver.stop = "SIGUSR1" if next(calls) == stop_at else ""

    driver.on_advance = on_advance
    version, steps = 0, []
    try:
        while version < 6:
            steps.append(collect(coordinator, driver, version))
            version += 1
    except Stopped as error:
        assert str(error) == "stopped by SIGUSR1"
    else:
        return  # the run ended before the signal
    state = coordinator.save_point()
    sampled_before = {
        (ticket, completion.sample): completion
        for ticket, group in coordinator.groups.items()
        for completion in group.completions.values()
    }
    driver = moved(driver, 1)
    driver.stop = ""
    coordinator = make_coordinator(driver, **run)
    resume(coordinator, driver, state)
    while version < 8:
        steps.append(collect(coordinator, driver, version))
        version += 1
    final = {
        (group.ticket, completion.sample): completion
        for step in steps
        for group, _ in step.ended
        for completion in group.completions
    }
    for key, completion in sampled_before.items():
        if key in final:
            # Its first tokens are still those, sampled by the same weights.
            older = completion.segments
            assert final[key].segments[: len(older) - 1] == older[:-1]
            assert final[key].segments[len(older) - 1].version == older[-1].version
    ended = [group.ticket for step in steps for group, _ in step.ended]
    assert len(ended) == len(set(ended))
    assert set(ended) | set(coordinator.groups) == set(range(coordinator.ledger.next_ticket))


def test_a_deterministic_run_stopped_within_a_step_repeats_that_step() -> None:
    correct, length = random_script(5, 0.5)
    driver = ScriptedDriver(correct, length, rng=random.Random(1))
    coordinator = make_coordinator(driver, deterministic=True)
    collect(coordinator, driver, 0)
    before = json.loads(json.dumps(coordinator.state())), coordinator.completions()
    driver.stop = "SIGTERM"
    with pytest.raises(Stopped, match="SIGTERM"):
        collect(coordinator, driver, 1)
    assert (json.loads(json.dumps(coordinator.state())), coordinator.completions()) == before


def test_a_continued_completion_gets_a_new_seed() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: MAX_TOKENS - ticket % 3)
    coordinator = make_coordinator(driver, max_overtake=8, deterministic=True)
    for version in range(4):
        collect(coordinator, driver, version)
    requests = [
        (request.ticket, sample, 0 if so_far is None else so_far.num_tokens)
        for request in driver.requests
        for sample, so_far in request.samples
    ]
    assert any(num_tokens for _, _, num_tokens in requests)
    # A request that was interrupted before its first token is repeated with the same seed.
    assert len({sample_seed("0/train", *request) for request in requests}) == len(set(requests))


def test_a_finished_group_that_waits_too_long_expires_and_is_counted() -> None:
    driver = ScriptedDriver(mixed_every(1))
    coordinator = make_coordinator(driver, max_overtake=0, max_age=1, lookahead=3.0)
    collect(coordinator, driver, 0)
    waiting = [group.ticket for group in coordinator.groups.values() if group.is_ready]
    assert waiting
    late = collect(coordinator, driver, 2)  # two versions later
    assert [
        ticket for ticket in waiting if fates_of(late).get(ticket) is Outcome.EXPIRED
    ] == waiting


def test_a_group_of_exactly_max_age_does_not_expire() -> None:
    driver = ScriptedDriver(mixed_every(1))
    coordinator = make_coordinator(driver, max_overtake=0, max_age=2, lookahead=3.0)
    collect(coordinator, driver, 0)
    waiting = {group.ticket for group in coordinator.groups.values() if group.is_ready}
    assert waiting
    collected = collect(coordinator, driver, 2)  # max_age versions later
    assert not {ticket for ticket in waiting if fates_of(collected).get(ticket) is Outcome.EXPIRED}


def test_a_group_missing_from_the_coordinator_stops_the_run() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: MAX_TOKENS)
    coordinator = make_coordinator(driver)
    collect(coordinator, driver, 0)
    missing_ticket = min(coordinator.groups)
    state, completions = coordinator.save_point()
    del coordinator.groups[missing_ticket]
    with pytest.raises(
        DapoError, match=f"ticket {missing_ticket} is .*, but the coordinator does not have"
    ):
        collect(coordinator, driver, 1)
    del state["groups"][0]
    with pytest.raises(
        DapoError, match=f"ticket {missing_ticket} is .*, but the coordinator does not have"
    ):
        make_coordinator(ScriptedDriver(mixed_every(1))).restore(state, completions)


def test_on_policy_expires_groups_carried_by_an_earlier_off_policy_run() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: 1 + ticket % MAX_TOKENS)
    carrying = make_coordinator(driver)
    for version in range(3):
        collect(carrying, driver, version)
    resumed = make_coordinator(driver, on_policy=True)
    resume(resumed, driver, carrying.save_point())
    collected = collect(resumed, driver, 3)
    assert {p.version for g in collected.train for c in g.completions for p in c.segments} == {3}
    assert collected.counts["expired"] > 0


def test_on_policy_needs_no_grades_of_groups_that_expired_at_the_start() -> None:
    driver = ScriptedDriver(mixed_every(1), grade_at_once=False)
    driver._grade = lambda *_: pytest.fail("not yet")  # type: ignore[method-assign]
    coordinator = make_coordinator(driver)
    driver.rng = random.Random(1)
    driver.rng.random = lambda: 1.0  # type: ignore[method-assign] - no grade arrives
    turns = iter(range(5))

    def stop_later() -> None:
        driver.stop = "" if next(turns, None) is not None else "SIGTERM"

    driver.on_advance = stop_later
    with pytest.raises(Stopped):
        collect(coordinator, driver, 0)
    assert any(group.to_grade() for group in coordinator.groups.values())
    fresh = ScriptedDriver(mixed_every(1))
    resumed = make_coordinator(fresh, on_policy=True)
    resume(resumed, fresh, coordinator.save_point())
    collected = collect(resumed, fresh, 1)
    assert len(collected.train) == 4
    assert collected.counts["expired"] > 0


def test_a_response_limit_below_carried_completions_is_rejected() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: MAX_TOKENS)
    coordinator = make_coordinator(driver, lookahead=4.0)
    for version in range(4):
        collect(coordinator, driver, version)
    assert any(
        c.num_tokens > 2 and c.finish is Finish.UNFINISHED
        for group in coordinator.groups.values()
        for c in group.completions.values()
    )
    shorter = make_coordinator(driver, lookahead=4.0, max_response_tokens=2)
    with pytest.raises(CheckpointError, match=r"rollout\.max_response_tokens: 2, but"):
        shorter.restore(*coordinator.save_point())


def test_a_running_group_never_expires() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: MAX_TOKENS)
    coordinator = make_coordinator(driver, max_overtake=0, max_age=1)
    collect(coordinator, driver, 0)
    running = [
        group.ticket
        for group in coordinator.groups.values()
        if group.completions and not group.is_ready
    ]
    assert running
    late = collect(coordinator, driver, 20)
    assert not any(fates_of(late).get(ticket) is Outcome.EXPIRED for ticket in running)


# ---------------------------------------------------------------------------- separate roles


@pytest.mark.parametrize("num_turns", [0, 1, 40])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_groups_sampled_during_training_are_bounded_and_count_in_the_next_step(
    num_turns: int, is_resumed: bool
) -> None:
    driver = ScriptedDriver(mixed_every(2), max_sequences=64)
    coordinator = make_coordinator(driver, lookahead=2.0)
    issued = ended = decided = 0
    for version in range(6):
        collected = collect(coordinator, driver, version)
        issued += collected.counts["issued"]
        ended += len(collected.ended)
        decided += len(collected.decided)
        assert issued == ended + collected.counts["carried"]
        assert decided == ended + collected.counts["carried_ready"]
        turns = iter([False] * num_turns)
        coordinator.sample_ahead(version, lambda turns=turns: next(turns, True))  # type: ignore[misc]
        # lookahead 2 x 4 mixed groups, of which every second group is one, and a margin.
        num_ready = sum(group.is_ready for group in coordinator.groups.values())
        assert num_ready <= 12 and len(coordinator.groups) <= 32
        if num_turns == 40:
            assert num_ready >= 6
        if is_resumed:
            state, coordinator = coordinator.save_point(), make_coordinator(driver, lookahead=2.0)
            resume(coordinator, driver, state)
    ages = [version - c.segments[0].version for g in collected.train for c in g.completions]
    assert sum(ages) / len(ages) <= 3.0
    driver.stop = "SIGTERM"
    coordinator.sample_ahead(version, lambda: False)  # a stop ends it


# ---------------------------------------------------------------------------- max_staleness


def oldest_age(max_staleness: int | None) -> int:
    """Return the largest age of a trained token, with engines that could sample far ahead."""
    driver = ScriptedDriver(
        mixed_every(2), lambda ticket, sample: 1 + 7 * ticket % MAX_TOKENS, max_sequences=64
    )
    coordinator = make_coordinator(driver, lookahead=6.0, max_staleness=max_staleness)
    ages = []
    for version in range(12):
        collected = collect(coordinator, driver, version)
        assert len(collected.train) == 4 and collected.counts["expired"] == 0
        ages += [version - c.oldest_version for g in collected.train for c in g.completions]
        turns = iter([False] * 30)
        coordinator.sample_ahead(version, lambda turns=turns: next(turns, True))  # type: ignore[misc]
    return max(ages)


def test_no_trained_token_is_older_than_max_staleness() -> None:
    assert oldest_age(None) > 4
    assert [oldest_age(bound) for bound in (0, 1, 2, 3)] == [0, 1, 2, 3]


def test_a_step_waits_for_a_group_that_would_become_too_old() -> None:
    """Ticket 1 takes as long as three steps. Without the bound, later groups overtake it."""

    def run(max_staleness: int | None) -> int:
        driver = ScriptedDriver(
            mixed_every(1), lambda ticket, sample: MAX_TOKENS if ticket == 1 else 1, 1, 8
        )
        coordinator = make_coordinator(driver, max_staleness=max_staleness)
        for version in range(MAX_TOKENS):
            if 1 in trained(collect(coordinator, driver, version)):
                return version
        raise AssertionError("never trained")

    assert run(None) >= 2
    assert run(1) == 1
    assert run(0) == 0


def test_groups_older_than_a_lowered_bound_are_trained_in_order() -> None:
    driver = ScriptedDriver(mixed_every(1), max_sequences=64)
    coordinator = make_coordinator(driver, lookahead=5.0)
    collect(coordinator, driver, 0)
    carried = list(coordinator.groups)
    assert len(carried) >= 20
    state, lower = (
        coordinator.save_point(),
        make_coordinator(driver, lookahead=5.0, max_staleness=1),
    )
    resume(lower, driver, state)
    tickets = [t for version in range(1, 6) for t in trained(collect(lower, driver, version))]
    assert tickets == carried[:20]
