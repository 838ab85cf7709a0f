"""Dynamic sampling: a run that is disturbed at any moment keeps its promises; and single rules."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dapo_megatron.rollout.coordinator import BOUND
from dapo_megatron.rollout.judge import check_lengths
from dapo_megatron.types import (
    CheckpointError,
    Collected,
    DapoError,
    EnginesLost,
    Finish,
    Outcome,
    RankError,
    StarvedError,
    Stopped,
)
from tests.helpers.rollouts import (
    MAX_TOKENS,
    Correct,
    History,
    Killed,
    ScriptedDriver,
    collect,
    make_coordinator,
    moved,
    random_script,
    resume,
    sample_ahead,
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


def outcomes_of(collected: Collected) -> dict[int, Outcome]:
    return {group.ticket: outcome for group, outcome in collected.ended}


# ---------------------------------------------------------------------------- any run

ROLLOUT = st.fixed_dictionaries(
    {
        "on_policy": st.booleans(),
        "max_overtake": st.integers(0, 3),
        "lookahead": st.floats(1.0, 4.0),
        "prompts_per_step": st.integers(1, 6),
        "samples_per_prompt": st.integers(2, 4),
        "max_prompts_per_step": st.just(500),
        "max_staleness": st.none() | st.integers(0, 4),
        "dynamic_sampling": st.sampled_from([True, True, False]),
        "deterministic": st.booleans(),
    }
).filter(lambda rollout: rollout["max_staleness"] is None or not rollout["on_policy"])
DISTURBANCES = st.lists(
    st.tuples(
        st.sampled_from(["lose", "lose", "save", "kill", "stop"]),
        st.sampled_from(["start", "advance", "advance", "interrupt"]),
        st.integers(0, 15),
    ),
    max_size=3,
)
"""(what, at which call of the driver, number of the call in this step)."""


class Run(RuleBasedStateMachine):
    """A run that loses replicas, also all of them, is stopped, and is killed and resumed from a
    state that was saved at any moment. `History` and the driver check what it does."""

    @initialize(
        seed=st.integers(0, 10**6),
        keep=st.sampled_from([0.15, 0.5, 0.9, 1.0]),
        rollout=ROLLOUT,
        num_replicas=st.integers(1, 4),
        max_sequences=st.integers(1, 12),
    )
    def start(
        self, seed: int, keep: float, rollout: dict[str, Any], num_replicas: int, max_sequences: int
    ) -> None:
        self.rollout, self.rng = rollout, random.Random(seed)
        correct, length = random_script(seed, keep)
        self.driver = ScriptedDriver(
            correct, length, num_replicas, max_sequences, self.rng, grade_at_once=False
        )
        self.history = History(rollout, correct, length)
        self.coordinator = make_coordinator(self.driver, **rollout)
        self.disturb([])
        self.save()
        self.is_training = False  # on what the last call collected

    @rule(disturbances=DISTURBANCES)
    def collect(self, disturbances: list[tuple[str, str, int]]) -> None:
        self.disturb(disturbances)
        self.is_training = False
        start = json.dumps(self.coordinator.state())
        try:
            collected = collect(self.coordinator, self.driver, len(self.history.steps))
        except EnginesLost:
            self.driver.lost.clear()  # a sync waits for engines
        except Stopped:
            self.resume_stopped(start)
        except Killed:
            self.resume_saved()
        else:
            self.check_resampled(collected)
            self.history.add(self.coordinator, collected)
            self.is_training = True

    @precondition(lambda self: self.is_training and not self.rollout["on_policy"])
    @rule(disturbances=DISTURBANCES, num_turns=st.integers(1, 30))
    def sample_while_training(
        self, disturbances: list[tuple[str, str, int]], num_turns: int
    ) -> None:
        self.disturb(disturbances)
        self.driver.version = len(self.history.steps) - 1
        try:
            sample_ahead(self.coordinator, self.driver.version, num_turns)
        except EnginesLost:
            self.driver.lost.clear()
        except Killed:
            self.resume_saved()

    @rule()
    def sync_with_all_engines(self) -> None:
        self.driver.lost.clear()

    @precondition(lambda self: len(self.driver.lost) < self.driver.num_replicas)
    @rule()
    def a_resumed_run_continues_like_an_uninterrupted_one(self) -> None:
        self.disturb([])
        self.driver.stop = ""
        other = copy.deepcopy(self.driver)
        resumed = make_coordinator(other, **self.rollout)
        state, completions = self.coordinator.save_point()
        resumed.restore(json.loads(json.dumps(state)), completions)
        version = len(self.history.steps)
        expected = collect(resumed, other, version)
        collected = collect(self.coordinator, self.driver, version)
        assert collected == expected
        self.history.add(self.coordinator, collected)
        self.is_training = True

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "history"):
            self.history.check_books(self.coordinator)

    # ------------------------------------------------------------------ disturbances

    def disturb(self, disturbances: list[tuple[str, str, int]]) -> None:
        """Let the driver disturb the next step."""
        calls = {"start": 0, "advance": 0, "interrupt": 0}

        def called(hook: str) -> None:
            if hook == "interrupt":
                groups = self.coordinator.groups.values()
                self.history.ready = {group.ticket for group in groups if group.is_ready}
            for what, where, call in disturbances:
                if (where, call) == (hook, calls[hook]):
                    getattr(self, what)()
            calls[hook] += 1

        self.driver.on_start = lambda: called("start")
        self.driver.on_advance = lambda: called("advance")
        self.driver.on_interrupt = lambda: called("interrupt")

    def lose(self) -> None:
        present = sorted(set(range(self.driver.num_replicas)) - self.driver.lost)
        self.driver.lose(self.rng.choice(present or [0]))

    def stop(self) -> None:
        self.driver.stop = "SIGUSR1"

    def kill(self) -> None:
        raise Killed

    def save(self) -> None:
        self.saved = self.coordinator.save_point(), len(self.history.steps)

    def resume_saved(self) -> None:
        """Resume from the saved state, with another number of replicas."""
        self.is_training = False
        state, num_steps = self.saved
        del self.history.steps[num_steps:]
        self.driver = moved(self.driver, 1 + self.driver.num_replicas % 3)
        self.coordinator = make_coordinator(self.driver, **self.rollout)
        resume(self.coordinator, self.driver, state)

    def resume_stopped(self, start: str) -> None:
        """Resume with engines that refuse to continue from other tokens than they reported."""
        self.driver.stop = ""
        state = self.coordinator.save_point()
        self.coordinator = make_coordinator(self.driver, **self.rollout)
        if self.rollout["deterministic"]:  # the step is repeated
            assert json.dumps(state[0]) == start
            resume(self.coordinator, self.driver, state)
        else:
            self.coordinator.restore(json.loads(json.dumps(state[0])), state[1])
        self.save()

    def check_resampled(self, collected: Collected) -> None:
        """Check that groups that lost replicas had were sampled again as a whole."""
        for ticket, outcome in outcomes_of(collected).items():
            if ticket in self.driver.orphaned and outcome is not Outcome.EXPIRED:
                requests = self.driver.requests[self.driver.orphaned[ticket] :]
                samples = [pair for r in requests if r.ticket == ticket for pair in r.samples]
                new = {sample for sample, so_far in samples if so_far is None}
                assert new == set(range(self.rollout["samples_per_prompt"]))


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=70, stateful_step_count=12)


# ---------------------------------------------------------------------------- which groups


def test_only_tokens_of_the_step_are_trained_if_a_run_becomes_on_policy() -> None:
    """Groups that an earlier run carries expire, also those that are not graded yet."""

    class NeverGraded(ScriptedDriver):
        def _graded(self, replica: int) -> list[Any]:
            return []

    earlier = NeverGraded(mixed_every(1), lambda ticket, sample: 1 + 7 * (ticket % 2))
    earlier.on_advance = lambda: setattr(earlier, "stop", "SIGTERM" * (len(earlier.reported) > 4))
    carrying = make_coordinator(earlier)
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        collect(carrying, earlier, 0)
    num_carried = sum(bool(group.completions) for group in carrying.groups.values())
    driver = ScriptedDriver(mixed_every(1))
    coordinator = make_coordinator(driver, on_policy=True)
    resume(coordinator, driver, carrying.save_point())
    collected = collect(coordinator, driver, 1)
    assert {s.version for g in collected.train for c in g.completions for s in c.segments} == {1}
    assert len(collected.train) == 4 and collected.counts["expired"] >= num_carried > 0


@pytest.mark.parametrize(
    ("rollout", "step"),
    [({"max_overtake": 0}, 0), ({"max_overtake": 1}, 1), ({"max_staleness": 0}, 0),
     ({"max_staleness": 1}, 1), ({}, 2)],
)  # fmt: skip
def test_a_slow_group_is_overtaken_until_a_bound(rollout: dict[str, Any], step: int) -> None:
    """Ticket 1 takes as long as three steps."""
    driver = ScriptedDriver(
        mixed_every(1), lambda ticket, sample: MAX_TOKENS if ticket == 1 else 1, 1, 8
    )
    coordinator = make_coordinator(driver, **rollout)
    steps = [trained(collect(coordinator, driver, version)) for version in range(MAX_TOKENS)]
    [at] = [at for at, tickets in enumerate(steps) if 1 in tickets]
    assert at == step if rollout else at >= step
    assert all(len(tickets) == 4 for tickets in steps)


@pytest.mark.parametrize("max_age", [1, 2])
def test_only_finished_groups_older_than_max_age_expire(max_age: int) -> None:
    driver = ScriptedDriver(
        mixed_every(1), lambda ticket, sample: MAX_TOKENS if ticket > 9 else 1, max_sequences=64
    )
    coordinator = make_coordinator(driver, max_overtake=0, max_age=max_age, lookahead=3.0)
    collect(coordinator, driver, 0)
    waiting = {group.ticket for group in coordinator.groups.values() if group.is_ready}
    running = {g.ticket for g in coordinator.groups.values() if g.completions} - waiting
    assert waiting and running
    outcomes = outcomes_of(collect(coordinator, driver, 2))
    expired = {ticket for ticket, outcome in outcomes.items() if outcome is Outcome.EXPIRED}
    assert expired == (waiting if max_age == 1 else set())


TRUNCATED = {
    # Lengths in a group of a right sample 0 and a wrong sample 1. Ticket 1 has overlong samples.
    "one": lambda ticket, sample: MAX_TOKENS if (ticket, sample) == (1, 1) else 2,
    "both": lambda ticket, sample: MAX_TOKENS if ticket == 1 else 2,
}


@pytest.mark.parametrize(
    ("overlong_samples", "is_filtered", "is_in_mean", "outcome"),
    [
        ("both", False, False, Outcome.TRAINED),
        ("one", True, True, Outcome.TRAINED),
        ("both", True, True, Outcome.OVERLONG),
        ("one", True, False, Outcome.OVERLONG),
        ("both", True, False, Outcome.OVERLONG),
    ],
)
def test_overlong_filtering_decides_whether_a_group_is_trained(
    overlong_samples: str, is_filtered: bool, is_in_mean: bool, outcome: Outcome
) -> None:
    driver = ScriptedDriver(mixed_every(1), TRUNCATED[overlong_samples])
    overlong = {"filter": is_filtered, "filtered_in_mean": is_in_mean}
    coordinator = make_coordinator(driver, on_policy=True, overlong=overlong)
    assert outcomes_of(collect(coordinator, driver, 0))[1] is outcome


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
    ages = []
    for lookahead in (1.0, 2.0, 4.0):
        driver = ScriptedDriver(
            mixed_every(1), lambda ticket, sample: 1 + (7 * ticket + sample) % MAX_TOKENS,
            num_replicas=1, max_sequences=1000,
        )  # fmt: skip
        coordinator = make_coordinator(driver, lookahead=lookahead, expected_keep_rate=1.0)
        steps = [collect(coordinator, driver, version) for version in range(30)]
        tokens = [c for step in steps for group in step.train for c in group.completions]
        ages.append(mean_age(steps))
        assert tokens and ages[-1] <= lookahead
        assert max(step.counts["carried"] for step in steps) <= lookahead * 4
    assert ages[2] > ages[0]


def mean_age(steps: list[Collected]) -> float:
    ages = [
        step.version - min(completion.oldest_version for completion in group.completions)
        for step in steps
        for group in step.train
    ]
    return sum(ages) / len(ages)


@pytest.mark.parametrize("num_turns", [0, 1, 40])
def test_groups_sampled_during_training_are_bounded_and_count_in_the_next_step(
    num_turns: int,
) -> None:
    driver = ScriptedDriver(mixed_every(2), max_sequences=64)
    coordinator = make_coordinator(driver, lookahead=2.0)
    steps: list[Collected] = []
    for version in range(6):
        steps.append(collect(coordinator, driver, version))
        ended, counts = sum(len(step.ended) for step in steps), steps[-1].counts
        assert sum(step.counts["issued"] for step in steps) == ended + counts["carried"]
        assert sum(len(step.decided) for step in steps) == ended + counts["carried_ready"]
        sample_ahead(coordinator, version, num_turns)
        # lookahead 2 x 4 mixed groups, of which every second group is one, and a margin.
        num_ready = sum(group.is_ready for group in coordinator.groups.values())
        assert num_ready <= 12 and len(coordinator.groups) <= 32
        assert num_ready >= 6 or num_turns < 40
    assert mean_age(steps[-1:]) <= 3.0


def test_groups_sampled_during_training_have_the_version_of_the_weights() -> None:
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: MAX_TOKENS, version=3)
    coordinator = make_coordinator(driver)
    sample_ahead(coordinator, 3, 2)
    assert {group.issued_version for group in coordinator.groups.values()} == {3}
    with pytest.raises(RankError, match="its last tokens are of weights 3, not 4"):
        sample_ahead(coordinator, 4, 2)


def test_no_trained_token_is_older_than_max_staleness_and_some_are_as_old() -> None:
    """Engines could sample far ahead. A lowered bound trains on older groups in order."""

    def steps_of(coordinator: Any, first: int) -> list[Collected]:
        steps = []
        for version in range(first, first + 12):
            steps.append(collect(coordinator, driver, version))
            assert len(steps[-1].train) == 4 and steps[-1].counts["expired"] == 0
            sample_ahead(coordinator, version, 30)
        return steps

    oldest = {}
    for bound in (None, 0, 1, 2, 3):
        driver = ScriptedDriver(
            mixed_every(2), lambda ticket, sample: 1 + 7 * ticket % MAX_TOKENS, max_sequences=64
        )
        coordinator = make_coordinator(driver, lookahead=6.0, max_staleness=bound)
        steps = steps_of(coordinator, 0)
        ages = [
            step.version - completion.oldest_version
            for step in steps
            for group in step.train
            for completion in group.completions
        ]
        oldest[bound] = max(ages)
    assert oldest.pop(None) > 4 and oldest == {0: 0, 1: 1, 2: 2, 3: 3}

    driver = ScriptedDriver(mixed_every(1), max_sequences=64)
    before = make_coordinator(driver, lookahead=5.0)
    collect(before, driver, 0)
    carried = list(before.groups)
    assert len(carried) >= 20
    lower = make_coordinator(driver, lookahead=5.0, max_staleness=1)
    resume(lower, driver, before.save_point())
    tickets = [t for version in range(1, 6) for t in trained(collect(lower, driver, version))]
    assert tickets == carried[:20]


def test_groups_go_whole_to_the_replica_with_free_capacity() -> None:
    driver = ScriptedDriver(mixed_every(1), num_replicas=2, max_sequences=4)
    running: list[list[tuple[int, int]]] = []
    driver.on_advance = lambda: running.append([tuple(sorted(r)) for r in driver._running])
    collect(make_coordinator(driver, on_policy=True), driver, 0)
    assert running[0] == [((0, 0), (0, 1), (2, 0), (2, 1)), ((1, 0), (1, 1), (3, 0), (3, 1))]


# ---------------------------------------------------------------------------- at the bound


def test_at_the_bound_a_run_trains_on_fewer_groups_or_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = ScriptedDriver(by_ticket(lambda ticket: "m" if ticket in (3, 9) else "w"))
    coordinator = make_coordinator(driver, on_policy=True, max_prompts_per_step=12)
    collected = collect(coordinator, driver, 0)
    assert trained(collected) == [3, 9]
    assert collected.counts["issued"] == 12

    driver = ScriptedDriver(by_ticket(lambda ticket: "m" if ticket > 200 else "w"))
    coordinator = make_coordinator(driver, on_policy=True, at_bound="wait")
    assert trained(collect(coordinator, driver, 0)) == [201, 202, 203, 204]
    assert "0 of 4 mixed groups after" in caplog.text

    driver = ScriptedDriver(mixed_every(1))
    collect(make_coordinator(driver, at_bound="wait", max_prompts_per_step=4), driver, 0)
    assert "by data set: none; going on" in caplog.text


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
    rollout = {"at_bound": at_bound, "max_prompts_per_step": 12, "max_overtake": 0}
    coordinator = make_coordinator(driver, **rollout)
    with pytest.raises(StarvedError, match=message) as raised:
        collect(coordinator, driver, 0)
    assert f"sums: {12 - len(mixed)} all_wrong" in str(raised.value)
    assert "rollout.max_prompts_per_step" in str(raised.value)
    assert "change data.train" in str(raised.value)

    easier = ScriptedDriver(mixed_every(1))
    resumed = make_coordinator(easier, **rollout)
    resume(resumed, easier, coordinator.save_point())
    assert trained(collect(resumed, easier, 0)) == sorted([*mixed, 12, 13, 14, 15])[:4]


def test_a_grader_that_always_fails_ends_the_run_early_with_its_error() -> None:
    driver = ScriptedDriver(lambda ticket, sample: None)
    driver.last_errors["sums"] = "ZeroDivisionError: division by zero"
    coordinator = make_coordinator(driver)
    with pytest.raises(StarvedError, match="ZeroDivisionError") as raised:
        collect(coordinator, driver, 0)
    assert "data set 'sums': its grader failed on every completion" in str(raised.value)
    assert coordinator.ledger.next_ticket < BOUND * 4 / 2  # long before max_prompts_per_step

    # With a working grader the run continues, however late its first grade arrives.
    fixed = ScriptedDriver(mixed_every(1), grade_at_once=False, rng=random.Random(4))
    resumed = make_coordinator(fixed)
    resume(resumed, fixed, coordinator.save_point())
    assert len(collect(resumed, fixed, 0).train) == 4


# ---------------------------------------------------------------------------- refused states


def test_states_that_do_not_fit_are_refused_by_name() -> None:
    """A group that is missing, and a limit below completions that are carried."""
    driver = ScriptedDriver(mixed_every(1), lambda ticket, sample: MAX_TOKENS)
    coordinator = make_coordinator(driver, lookahead=4.0)
    collect(coordinator, driver, 0)
    carried = [c for group in coordinator.groups.values() for c in group.completions.values()]
    assert any(c.num_tokens > 1 and c.finish is Finish.UNFINISHED for c in carried)
    shorter = make_coordinator(driver, max_response_tokens=2)
    with pytest.raises(CheckpointError, match=r"rollout\.max_response_tokens: 2, but"):
        shorter.restore(*coordinator.save_point())
    # An environment may still decide about a completion that has reached the limit.
    longest = max(c.num_tokens for c in carried if c.finish is Finish.UNFINISHED)
    groups = list(coordinator.groups.values())
    talking = [replace(g, prompt=replace(g.prompt, environment="m:C")) for g in groups]
    check_lengths(talking, longest)
    for carried_groups, limit in ((groups, longest), (talking, longest - 1)):
        with pytest.raises(CheckpointError, match="is unfinished with"):
            check_lengths(carried_groups, limit)

    ticket = min(coordinator.groups)
    state, completions = coordinator.save_point()
    del coordinator.groups[ticket], state["groups"][0]
    missing = f"ticket {ticket} is .*, but the coordinator does not have"
    with pytest.raises(DapoError, match=missing):
        collect(coordinator, driver, 1)
    with pytest.raises(DapoError, match=missing):
        make_coordinator(driver).restore(state, completions)
