"""Dynamic sampling: which groups a step trains on, what becomes of the others, exact resuming."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algo.mismatch import GapStatistics
from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.rollout.coordinator import Collected, Coordinator, KeepRate
from dapo_megatron.rollout.driver import Sampling
from dapo_megatron.rollout.ledger import Fate
from dapo_megatron.rollout.metrics import (
    mismatch_metrics,
    rollout_metrics,
    sync_metrics,
    update_metrics,
)
from dapo_megatron.types import (
    Completion,
    DapoError,
    Finish,
    Grade,
    Group,
    Prompt,
    StepStats,
    SyncReport,
)

MIXED, RIGHT, WRONG = (True, False), (True, True), (False, False)
Outcome = Sequence[bool | None]
"""Correctness of each completion; None where the grader did not answer."""


@dataclass
class ScriptedDriver:
    """In the place of RolloutDriver: groups that come out as a function of the ticket says."""

    outcome: Callable[[int], Outcome]
    truncated: Callable[[int, int], bool] = lambda ticket, sample: False
    version: int = 0
    grade_seconds: float = 0.0
    abstentions: Counter[str] = field(default_factory=Counter)
    rounds: list[int] = field(default_factory=list)
    """Prompts of each round so far."""
    samplings: list[Sampling] = field(default_factory=list)

    def run(
        self,
        tickets: Sequence[tuple[int, Prompt]],
        sampling: Sampling,
        on_progress: Callable[[int], None],
    ) -> list[Group]:
        self.rounds.append(len(tickets))
        self.samplings.append(sampling)
        self.grade_seconds += 0.5
        on_progress(len(tickets))
        return [Group(ticket, prompt, self._completions(ticket)) for ticket, prompt in tickets]

    def _completions(self, ticket: int) -> tuple[Completion, ...]:
        return tuple(
            Completion(
                sample=sample,
                tokens=(5,) * (sample + 1),
                logprobs=(-0.1 * (ticket % 7),) * (sample + 1),
                text="7",
                finish=Finish.LENGTH if self.truncated(ticket, sample) else Finish.STOP,
                version=self.version,
                grade=None if right is None else Grade(1.0 if right else -1.0, right, "7"),
            )
            for sample, right in enumerate(self.outcome(ticket))
        )


def make(
    outcome: Callable[[int], Outcome],
    truncated: Callable[[int, int], bool] = lambda ticket, sample: False,
    *,
    filter_truncated: bool = False,
    **rollout: Any,
) -> tuple[Coordinator, ScriptedDriver]:
    settings = {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "temperature": 0.9,
        "top_p": 1.0,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "on_policy": False,
        "dynamic_sampling": True,
        "max_rounds": 3,
        "at_bound": "train_partial",
        "max_age": 4,
        "expected_keep_rate": 0.5,
    }
    driver = ScriptedDriver(outcome, truncated)
    coordinator = Coordinator(
        config=RolloutConfig(**{**settings, **rollout}),
        overlong=OverlongConfig(
            max_tokens=8, buffer_tokens=4, penalty=True, filter=filter_truncated
        ),
        stream=PromptStream(
            [Prompt("s", index, (index,), str(index), "7") for index in range(10)],
            seed=0,
            shuffle=True,
        ),
        driver=driver,  # type: ignore[arg-type]
        seed=3,
    )
    return coordinator, driver


def collect(coordinator: Coordinator, version: int) -> Collected:
    coordinator.driver.version = version  # type: ignore[attr-defined]
    return coordinator.collect(version, lambda done: None)


def trained(collected: Collected) -> list[int]:
    return [group.ticket for group in collected.train]


def fates(collected: Collected) -> dict[int, Fate]:
    return {group.ticket: fate for group, fate in collected.seen}


def every(number: int) -> Callable[[int], Outcome]:
    """Mixed at every `number`th ticket; the others in turn all right and all wrong."""
    return lambda ticket: MIXED if ticket % number == 0 else (RIGHT, WRONG)[ticket % 2]


# ---------------------------------------------------------------------------- what is trained on


def test_the_first_mixed_groups_in_ticket_order_over_as_many_rounds_as_it_takes() -> None:
    coordinator, driver = make(every(3))
    collected = collect(coordinator, version=0)
    # At one half, 4 groups take 8 prompts: 3 are mixed (0, 3, 6); then 2 more: 9 is.
    assert driver.rounds == [8, 2]
    assert trained(collected) == [0, 3, 6, 9]
    assert collected.rounds == 2
    assert fates(collected) == {
        ticket: Fate.TRAINED
        if ticket % 3 == 0
        else (Fate.ALL_WRONG if ticket % 2 else Fate.ALL_CORRECT)
        for ticket in range(10)
    }
    assert collected.counts == {
        "issued": 10,
        "trained": 4,
        "all_correct": 3,
        "all_wrong": 3,
        "overlong": 0,
        "ungraded": 0,
        "expired": 0,
        "carried": 0,
    }
    assert collected.grade_seconds == 1.0


def test_samples_are_asked_for_as_configured() -> None:
    coordinator, driver = make(lambda ticket: MIXED, samples_per_prompt=5)
    collect(coordinator, version=0)
    assert driver.samplings == [
        Sampling(num_samples=5, max_tokens=8, temperature=0.9, top_p=1.0, seed_name="3/train")
    ]


def test_surplus_is_carried_and_trained_on_first() -> None:
    coordinator, driver = make(lambda ticket: MIXED)
    first = collect(coordinator, version=0)
    assert trained(first) == [0, 1, 2, 3]
    assert [ticket for ticket, fate in fates(first).items() if fate is Fate.CARRIED] == [4, 5, 6, 7]
    assert first.counts["carried"] == 4
    second = collect(coordinator, version=1)
    assert trained(second) == [4, 5, 6, 7]  # without a new prompt
    assert driver.rounds == [8]
    assert (second.rounds, second.seen) == (0, [])
    assert (second.counts["issued"], second.counts["trained"]) == (0, 4)
    third = collect(coordinator, version=2)
    assert trained(third) == [8, 9, 10, 11]


def test_carried_groups_and_fresh_ones_fill_a_step_together() -> None:
    coordinator, _ = make(lambda ticket: MIXED if ticket != 6 else RIGHT, expected_keep_rate=0.7)
    assert trained(collect(coordinator, version=0)) == [0, 1, 2, 3]  # of 6 issued
    assert trained(collect(coordinator, version=1)) == [4, 5, 7, 8]


def test_on_policy_the_surplus_expires() -> None:
    coordinator, driver = make(lambda ticket: MIXED, on_policy=True)
    first = collect(coordinator, version=0)
    assert trained(first) == [0, 1, 2, 3]
    assert [ticket for ticket, fate in fates(first).items() if fate is Fate.EXPIRED] == [4, 5, 6, 7]
    assert (first.counts["expired"], first.counts["carried"]) == (4, 0)
    assert trained(collect(coordinator, version=1)) == [8, 9, 10, 11]
    assert driver.rounds[0] == 8


@pytest.mark.parametrize(("age", "still_trained"), [(2, True), (3, False)])
def test_a_carried_group_expires_when_it_is_too_old(age: int, still_trained: bool) -> None:
    coordinator, _ = make(lambda ticket: MIXED, max_age=2)
    collect(coordinator, version=5)
    later = collect(coordinator, version=5 + age)
    assert trained(later) == ([4, 5, 6, 7] if still_trained else [8, 9, 10, 11])
    assert later.counts["expired"] == (0 if still_trained else 4)


def test_without_dynamic_sampling_every_group_is_trained_on() -> None:
    coordinator, driver = make(lambda ticket: (RIGHT, WRONG)[ticket % 2], dynamic_sampling=False)
    assert trained(collect(coordinator, version=0)) == [0, 1, 2, 3]
    assert trained(collect(coordinator, version=1)) == [4, 5, 6, 7]
    assert driver.rounds == [4, 4]


# ---------------------------------------------------------------------------- grades and lengths


@pytest.mark.parametrize(
    ("outcome", "fate"),
    [
        ((None, None, None), Fate.UNGRADED),
        ((None, True, None), Fate.UNGRADED),  # nothing to compare it with
        ((None, True, False), Fate.TRAINED),
        ((None, True, True), Fate.ALL_CORRECT),
        ((None, False, False), Fate.ALL_WRONG),
        ((True, True, False), Fate.TRAINED),
    ],
)
def test_a_verdict_is_on_what_was_graded(outcome: Outcome, fate: Fate) -> None:
    coordinator, _ = make(lambda ticket: MIXED if ticket else outcome)
    assert fates(collect(coordinator, version=0))[0] is fate


@pytest.mark.parametrize(
    ("filter_truncated", "truncated_samples", "fate"),
    [
        (True, {0, 1}, Fate.OVERLONG),
        (True, {1}, Fate.TRAINED),  # a token is left in the loss
        (False, {0, 1}, Fate.TRAINED),
    ],
)
def test_a_group_that_the_overlong_filter_empties(
    filter_truncated: bool, truncated_samples: set[int], fate: Fate
) -> None:
    coordinator, _ = make(
        lambda ticket: MIXED,
        lambda ticket, sample: ticket == 0 and sample in truncated_samples,
        filter_truncated=filter_truncated,
    )
    assert fates(collect(coordinator, version=0))[0] is fate


def test_an_ungraded_completion_does_not_keep_the_overlong_filter_from_emptying() -> None:
    coordinator, _ = make(
        lambda ticket: (True, False, None),
        lambda ticket, sample: ticket == 0 and sample < 2,
        filter_truncated=True,
    )
    assert fates(collect(coordinator, version=0))[0] is Fate.OVERLONG


# ---------------------------------------------------------------------------- the bound


def test_at_the_bound_a_step_trains_on_what_it_has() -> None:
    coordinator, driver = make(lambda ticket: MIXED if ticket == 9 else WRONG, max_rounds=2)
    collected = collect(coordinator, version=0)
    assert trained(collected) == [9]
    assert len(driver.rounds) == collected.rounds == 2


@pytest.mark.parametrize(
    ("settings", "mixed", "said"),
    [
        ({"at_bound": "fail"}, {9}, "1 of 4 mixed groups after 3 rounds"),
        ({}, set(), "0 of 4 mixed groups after 3 rounds"),
    ],
)
def test_at_the_bound_a_run_stops_and_says_what_it_saw(
    settings: dict[str, str], mixed: set[int], said: str
) -> None:
    coordinator, _ = make(lambda ticket: MIXED if ticket in mixed else WRONG, **settings)
    with pytest.raises(DapoError, match=said) as caught:
        collect(coordinator, version=0)
    assert "rollout.max_rounds" in str(caught.value)
    assert f"{{'all_wrong': {coordinator.ledger.next_ticket - len(mixed)}}}" in str(caught.value)


# ---------------------------------------------------------------------------- the forecast


def test_rounds_are_sized_by_the_observed_share() -> None:
    coordinator, driver = make(every(4), max_rounds=20, on_policy=True)
    for version in range(6):
        collect(coordinator, version)
    assert coordinator.keep_rate.value == pytest.approx(0.25, abs=0.04)  # the prior still counts
    driver.rounds.clear()
    collect(coordinator, version=6)
    assert 14 <= driver.rounds[0] <= 16


@given(
    prior=st.floats(0.01, 1.0),
    seen=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8),
    needed=st.integers(1, 64),
)
def test_a_round_is_never_too_small_nor_without_bound(
    prior: float, seen: list[tuple[int, int]], needed: int
) -> None:
    rate = KeepRate(prior, prior_weight=8)
    for kept, others in seen:
        rate.observe(kept, kept + others)
    assert 0.0 < rate.value <= 1.0
    assert needed <= rate.prompts_for(needed) <= 4 * needed


def test_the_forecast_follows_and_forgets() -> None:
    rate = KeepRate(prior=0.5, prior_weight=10)
    assert (rate.value, rate.prompts_for(8)) == (0.5, 16)
    for _ in range(20):
        rate.observe(0, 100)
    assert rate.value < 0.05
    assert rate.prompts_for(8) == 32  # found out in bounded rounds
    for _ in range(5):
        rate.observe(100, 100)
    assert rate.value > 0.9
    before = rate.value
    for _ in range(3):
        rate.observe(0, 0)  # steps filled by carried groups alone tell nothing against it
    assert rate.value > 0.5
    assert rate.value < before


# ---------------------------------------------------------------------------- progress


def test_progress_counts_towards_the_groups_of_the_step() -> None:
    coordinator, driver = make(every(3))
    told: list[int] = []
    driver.version = 0
    coordinator.collect(0, told.append)
    assert told == [4, 4]  # 8 prompts for 4 groups; then, with 3 found, 2 prompts for the last


# ---------------------------------------------------------------------------- properties

RUNS = st.fixed_dictionaries(
    {
        "on_policy": st.booleans(),
        "dynamic_sampling": st.booleans(),
        "max_age": st.integers(1, 3),
        "prompts_per_step": st.integers(1, 6),
        "expected_keep_rate": st.sampled_from([0.2, 0.5, 1.0]),
        "filter_truncated": st.booleans(),
    }
)


def random_run(seed: int, settings: dict[str, Any]) -> Coordinator:
    def outcome(ticket: int) -> Outcome:
        return random.Random(f"{seed}/{ticket}").choices([True, False, None], [4, 4, 1], k=3)

    def truncated(ticket: int, sample: int) -> bool:
        return random.Random(f"{seed}/{ticket}/{sample}").random() < 0.4

    return make(outcome, truncated, max_rounds=50, **settings)[0]


@given(seed=st.integers(0, 2**32), settings=RUNS, cut=st.integers(0, 5))
def test_a_run_cut_at_any_step_continues_as_if_it_had_not_been(
    seed: int, settings: dict[str, Any], cut: int
) -> None:
    whole, resumed = random_run(seed, settings), random_run(seed, settings)
    for version in range(cut):
        collect(whole, version)
    resumed.restore(json.loads(json.dumps(whole.state())))
    for version in range(cut, 6):
        expected, continued = collect(whole, version), collect(resumed, version)
        assert continued == expected
    assert resumed.state() == whole.state()


@given(seed=st.integers(0, 2**32), settings=RUNS)
def test_every_ticket_has_one_fate_and_the_books_tell_it(
    seed: int, settings: dict[str, Any]
) -> None:
    coordinator = random_run(seed, settings)
    trained_ever: Counter[int] = Counter()
    waiting = 0
    next_ticket = 0
    for version in range(5):
        collected = collect(coordinator, version)
        counts = collected.counts
        tickets = [group.ticket for group, _ in collected.seen]
        assert tickets == list(range(next_ticket, next_ticket + len(tickets)))
        next_ticket += len(tickets)
        assert counts["issued"] == len(tickets)
        settled = sum(count for name, count in counts.items() if name not in ("issued", "carried"))
        assert waiting + counts["issued"] == settled + counts["carried"]
        waiting = counts["carried"]
        assert trained(collected) == sorted(trained(collected))
        assert counts["trained"] == len(collected.train) == settings["prompts_per_step"]
        trained_ever.update(trained(collected))
        assert all(
            version - completion.version <= settings["max_age"]
            for group in collected.train
            for completion in group.completions
        )
        seen = Counter(fate for _, fate in collected.seen)
        for fate in (Fate.ALL_CORRECT, Fate.ALL_WRONG, Fate.OVERLONG, Fate.UNGRADED):
            assert counts[fate] == seen[fate]
        if settings["on_policy"]:
            assert waiting == 0
    assert max(trained_ever.values()) == 1


# ---------------------------------------------------------------------------- metrics


def test_metrics_are_over_every_group_before_filtering() -> None:
    # Tickets 0 and 2 are mixed; 1 is all right with a completion that nobody graded; 3 is wrong.
    outcomes: list[Outcome] = [(True, False), (True, None, True), (False, True), (False, False)]
    coordinator, _ = make(
        lambda ticket: outcomes[ticket],
        lambda ticket, sample: ticket == 3,
        prompts_per_step=2,
    )
    collected = collect(coordinator, version=0)
    metrics = rollout_metrics(collected, coordinator.overlong)
    assert metrics["accuracy/raw"] == pytest.approx(4 / 8)
    assert metrics["reward/mean"] == pytest.approx(0.0)
    assert metrics["response_tokens/mean"] == pytest.approx((1 + 2 + 1 + 2 + 3 + 1 + 2 + 1 + 2) / 9)
    assert metrics["response_tokens/max"] == 3.0
    assert metrics["response_tokens/clipped_fraction"] == pytest.approx(2 / 9)
    assert metrics["time/grade"] == 0.5
    groups = {name: value for name, value in metrics.items() if name.startswith("groups/")}
    assert groups == {
        "groups/issued": 4.0,
        "groups/trained": 2.0,
        "groups/all_correct": 1.0,
        "groups/all_wrong": 1.0,
        "groups/overlong": 0.0,
        "groups/ungraded": 0.0,
        "groups/expired": 0.0,
        "groups/carried": 0.0,
        "groups/rounds": 1.0,
    }


def test_the_mean_reward_is_the_shaped_one() -> None:
    coordinator, _ = make(lambda ticket: MIXED, prompts_per_step=1, expected_keep_rate=1.0)
    collected = collect(coordinator, version=0)  # one group, of 1 and 2 tokens

    def mean_reward(**overlong: Any) -> float:
        config = OverlongConfig(**{"filter": False, "penalty": True, **overlong})
        return rollout_metrics(collected, config)["reward/mean"]

    assert mean_reward(max_tokens=2, buffer_tokens=1) == pytest.approx((1.0 - 2.0) / 2)
    assert mean_reward(max_tokens=2, buffer_tokens=1, penalty=False) == pytest.approx(0.0)


def test_a_step_of_carried_groups_has_no_accuracy() -> None:
    coordinator, _ = make(lambda ticket: MIXED)
    collect(coordinator, version=0)
    metrics = rollout_metrics(collect(coordinator, version=1), coordinator.overlong)
    assert "accuracy/raw" not in metrics
    assert "response_tokens/mean" not in metrics
    assert metrics["groups/trained"] == 4.0


def test_update_metrics_are_means_over_tokens() -> None:
    stats = [
        StepStats(loss=1.0, grad_norm=2.0, lr=0.1, num_tokens=30, means={"entropy": 1.0}),
        StepStats(loss=5.0, grad_norm=6.0, lr=0.2, num_tokens=10, means={"entropy": 3.0}),
    ]
    assert update_metrics(stats) == {
        "policy/entropy": 1.5,
        "policy/loss": 2.0,
        "policy/grad_norm": 3.0,
        "policy/lr": 0.2,
    }
    assert update_metrics([]) == {}


def test_metrics_of_the_gap_and_of_a_sync() -> None:
    gap = GapStatistics(mean=0.1, max=0.3, kl=0.2, worst_token=5, num_tokens=9)
    assert mismatch_metrics(gap) == {
        "mismatch/gap_mean": 0.1,
        "mismatch/gap_max": 0.3,
        "mismatch/kl": 0.2,
    }
    report = SyncReport(
        version=1,
        num_tensors=3,
        num_bytes=12,
        seconds=0.1,
        verify_seconds=0.2,
        fingerprinted=True,
        unread_tensors=0,
        canary_gap=1e-6,
    )
    assert sync_metrics(report) == {
        "sync/bytes": 12.0,
        "sync/tensors": 3.0,
        "sync/fingerprinted": 1.0,
        "sync/canary_gap": 1e-6,
        "time/sync_verify": 0.2,
    }
