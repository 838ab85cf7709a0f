"""The metrics of a hand-made step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dapo_megatron.algo.kl import KLStatistics
from dapo_megatron.algo.mismatch import GapStatistics
from dapo_megatron.config import OverlongConfig
from dapo_megatron.rollout.metrics import (
    kl_metrics,
    mismatch_metrics,
    penalty_metrics,
    rollout_metrics,
    sync_metrics,
    update_metrics,
)
from dapo_megatron.segments import ENVIRONMENT, Segment
from dapo_megatron.types import (
    Collected,
    Completion,
    Finish,
    Grade,
    Group,
    Outcome,
    Prompt,
    StepStats,
    SyncReport,
)

PROMPT = Prompt("sums", 0, (1, 2), "3+4", "7")


def completion(
    sample: int, segments: list[tuple[int, int]], right: bool | None, finish: Finish = Finish.STOP
) -> Completion:
    num_tokens = sum(number for _, number in segments)
    grade = None if right is None else Grade(1.0 if right else -1.0, right, "7")
    parts = tuple(Segment(*segment) for segment in segments)
    return Completion(sample, (5,) * num_tokens, (-0.1,) * num_tokens, "7", finish, parts, grade)


def overlong(**keys: Any) -> OverlongConfig:
    settings = {"max_tokens": 8, "buffer_tokens": 4, "penalty": True, "filter": False}
    return OverlongConfig(**{**settings, "filtered_in_mean": False, **keys})


MIXED = Group(0, PROMPT, (completion(0, [(3, 2), (5, 2)], True), completion(1, [(5, 1)], False)))
RIGHT = Group(
    1, PROMPT, (completion(0, [(5, 1)], True), completion(1, [(5, 8)], True, Finish.LENGTH))
)
UNGRADED = Group(2, PROMPT, (completion(0, [(5, 3)], False), completion(1, [(5, 6)], None)))
FAILED = [("sums", "timeout"), ("sums", "unparsed")]


def collected() -> Collected:
    return Collected(
        train=[MIXED],
        ended=[
            (MIXED, Outcome.TRAINED),
            (RIGHT, Outcome.ALL_CORRECT),
            (UNGRADED, Outcome.ABSTAINED),
        ],
        decided=[MIXED, RIGHT, UNGRADED],
        version=5,
        counts={"issued": 4, "trained": 1, "carried": 1},
        gradings=Counter([("sums", "graded"), *[("words", "timeout")] * 2, *FAILED]),
        keep_rate=0.25,
        interrupted=7,
        grade_seconds=0.5,
    )


def test_metrics_cover_every_decided_group_before_filtering() -> None:
    metrics = rollout_metrics(collected(), overlong())
    assert metrics["accuracy/raw"] == pytest.approx(3 / 5)
    assert metrics["accuracy/perfect_fraction"] == pytest.approx(1 / 3)
    assert metrics["response_tokens/mean"] == pytest.approx((4 + 1 + 1 + 8 + 3 + 6) / 6)
    assert metrics["response_tokens/max"] == 8.0
    assert metrics["response_tokens/clipped_fraction"] == pytest.approx(1 / 6)
    assert metrics["time/grade"] == 0.5
    groups = {name: value for name, value in metrics.items() if name.startswith("groups/")}
    assert groups == {
        "groups/issued": 4.0,
        "groups/trained": 1.0,
        "groups/carried": 1.0,
        "groups/keep_rate": 0.25,
        "groups/interrupted_completions": 7.0,
        "groups/age_mean": 2.0,  # started by version 3, trained at version 5
        "groups/age_max": 2.0,
        "groups/token_age_mean": pytest.approx(4 / 5),
        "groups/fresh_token_fraction": pytest.approx(3 / 5),
    }


def test_overlong_metrics_count_penalties_and_filtered_completions() -> None:
    soft = rollout_metrics(collected(), overlong())
    # The ungraded completion has no reward.
    assert soft["overlong/penalised_fraction"] == pytest.approx(1 / 5)
    assert soft["overlong/penalty_mean"] == pytest.approx(-1 / 5)
    assert soft["overlong/filtered_fraction"] == 0.0
    assert soft["reward/mean"] == pytest.approx((1 - 1 + 1 + 1 - 1 - 1) / 5)
    filtered = rollout_metrics(collected(), overlong(penalty=False, filter=True))
    assert filtered["overlong/penalised_fraction"] == filtered["overlong/penalty_mean"] == 0.0
    assert filtered["overlong/filtered_fraction"] == pytest.approx(1 / 6)
    assert filtered["reward/mean"] == pytest.approx((1 - 1 + 1 + 1 - 1) / 5)


def test_failed_gradings_are_counted_by_cause_and_by_data_set() -> None:
    metrics = rollout_metrics(collected(), overlong())
    assert {name: value for name, value in metrics.items() if name.startswith("grading/")} == {
        "grading/unparsed": 1.0,
        "grading/timeout": 3.0,
        "grading/crash": 0.0,
        "grading/memory": 0.0,
        "grading/error": 0.0,
        "grading/sums/timeout": 1.0,
        "grading/sums/unparsed": 1.0,
        "grading/words/timeout": 2.0,
    }


def test_turns_are_those_of_completions_with_an_environment() -> None:
    parts = (Segment(4, 2), Segment(5, 1), Segment(5, 3, ENVIRONMENT), Segment(5, 1))
    two_turns = replace(completion(0, [(5, 7)], True), segments=parts, finish=Finish.TURNS)
    talks = Group(3, replace(PROMPT, environment="e"), (two_turns, completion(1, [(5, 2)], False)))
    counts = Counter({"calls": 2, "failed/lost": 1})
    step = replace(collected(), decided=[MIXED, talks], turn_counts=counts)
    metrics = rollout_metrics(step, overlong())
    ends = {f"turns/ended/{end.value}": 0.0 for end in set(Finish) - {Finish.UNFINISHED}}
    assert {name: value for name, value in metrics.items() if name.startswith("turns/")} == {
        "turns/mean": 1.5,
        "turns/max": 2.0,
        "turns/branches": 0.0,
        "turns/observed_tokens_mean": 1.5,
        **(ends | {"turns/ended/turns": 0.5, "turns/ended/stop": 0.5}),
        "turns/calls": 2.0,
        "turns/failed/lost": 1.0,
        "turns/tool_errors": 0.0,
        **{f"turns/{name}": 0.0 for name in ("unread_calls", "restarts")},
    }
    assert not any(name.startswith("turns/") for name in rollout_metrics(collected(), overlong()))


def test_update_metrics_are_means_over_tokens() -> None:
    stats = [
        StepStats(loss=1.0, grad_norm=2.0, lr=0.1, num_tokens=30, means={"entropy": 1.0}),
        StepStats(loss=5.0, grad_norm=6.0, lr=0.3, num_tokens=5, means={"entropy": 3.0}),
        StepStats(loss=5.0, grad_norm=6.0, lr=0.2, num_tokens=5, means={"entropy": 3.0}),
    ]
    assert update_metrics(stats) == {
        "policy/entropy": 1.5,
        "policy/loss": 2.0,
        "policy/grad_norm": 3.0,
        "policy/lr": 0.2,
    }
    stats = [replace(update, router={"changed": 1 / update.num_tokens}) for update in stats]
    assert update_metrics(stats)["router/changed"] == pytest.approx(3 / 40)
    assert update_metrics([]) == {}
    assert update_metrics(stats[:1])["policy/entropy"] == 1.0


def test_metrics_of_the_mismatch_the_kl_and_a_sync() -> None:
    gap = GapStatistics(total=0.9, max=0.3, kl_total=1.8, num_tokens=9)
    assert mismatch_metrics(gap) == {
        "mismatch/gap_mean": 0.1,
        "mismatch/gap_max": 0.3,
        "mismatch/kl": 0.2,
    }
    assert mismatch_metrics(replace(gap, num_tokens=0)) == {}
    kl = KLStatistics(total=3.0, num_clamped=1, num_tokens=4)
    names = {"kl/reference": 0.75, "kl/clamped_fraction": 0.25}
    assert kl_metrics(kl, "kl/reference") == names
    assert kl_metrics(replace(kl, num_tokens=0), "kl/reference") == penalty_metrics([]) == {}
    assert penalty_metrics([1.0, 2.0]) == {"kl/reward_penalty": 1.5}
    report = SyncReport(
        version=1,
        num_tensors=3,
        num_bytes=12,
        seconds=0.1,
        turn_seconds=0.25,
        verify_seconds=0.2,
        fingerprinted=True,
        unread_tensors=2,
    )
    assert sync_metrics(report) == {
        "sync/bytes": 12.0,
        "sync/tensors": 3.0,
        "sync/fingerprinted": 1.0,
        "sync/unread_tensors": 2.0,
        "time/sync_verify": 0.2,
        "time/sync_turns": 0.25,
    }
