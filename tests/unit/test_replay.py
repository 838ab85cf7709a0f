"""Replay trains on the groups that a run recorded, and reports missing or damaged records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.data.batch import assemble
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.types import (
    Completion,
    DataError,
    Finish,
    Grade,
    Group,
    Outcome,
    Prompt,
    Segment,
    SyncReport,
)
from tests.helpers.batches import ONE_INDEX, assemble_groups, described
from tests.helpers.configs import tiny_config
from tests.helpers.groups import step_record


def group(ticket: int, *, step: int = 1, logprob: float = -0.1) -> Group:
    """A mixed group of two, sampled with the weights that `step` starts with and older ones."""
    prompt = Prompt("chain_sum", ticket, (12, 9, 3), "4 + 3 =", "7", {"entry": {"a": [1.5]}})
    older, newer = Segment(step - 1, 1), Segment(step, 1)
    correct = Completion(
        0, (9, 2), (logprob, -0.7), "7", Finish.STOP, (newer, older), Grade(1.0, True, "7")
    )
    incorrect = Completion(1, (8,), (-2.5,), "8", Finish.LENGTH, (older,), Grade(-1.0, False, "8"))
    return Group(ticket, prompt, (correct, incorrect))


CONFIG = tiny_config()


def replay_of(folder: Path) -> Replay:
    delivery = Delivery(ONE_INDEX, ONE_INDEX.exchange)
    return Replay(CONFIG, folder, ONE_INDEX.exchange, delivery)


def record(folder: Path, *steps: list[tuple[Group, str]]) -> Replay:
    """Write a run folder in which the groups of `steps` ended in steps 1, 2, ..."""
    for step, ended in enumerate(steps, start=1):
        step_record(ended).write(folder / "samples", step)
    return replay_of(folder)


def test_a_step_trains_on_the_groups_recorded_as_trained(tmp_path: Path) -> None:
    first = [
        (group(0), Outcome.ALL_WRONG),
        (group(1), Outcome.TRAINED),
        (group(2), Outcome.ABSTAINED),
        (group(4), Outcome.TRAINED),
        (group(5), Outcome.EXPIRED),
    ]
    second = [(group(3, step=2), Outcome.TRAINED)]
    replay = record(tmp_path, first, second)
    step = replay.collect(0)
    assert step.sequences == described([group(1), group(4)], CONFIG.overlong)
    metrics = step.metrics
    assert [metrics[f"groups/{name}"] for name in ("trained", "expired", "issued")] == [2, 1, 0]
    assert (metrics["groups/interrupted_completions"], metrics["time/grade"]) == (0.0, 0.0)
    assert metrics["groups/keep_rate"] == 2 / 4
    assert metrics["accuracy/raw"] == 0.5
    second_step = replay.collect(1)
    assert second_step.sequences == described([group(3, step=2)], CONFIG.overlong)


@settings(max_examples=25)
@given(st.lists(st.floats(max_value=0.0, allow_infinity=False), min_size=1, max_size=6))
def test_the_replayed_batch_equals_the_recorded_one_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, logprobs: list[float]
) -> None:
    trained = [group(ticket, logprob=value) for ticket, value in enumerate(logprobs)]
    folder = tmp_path_factory.mktemp("run")
    recorded = [(trained_group, Outcome.TRAINED) for trained_group in trained]
    replayed = record(folder, recorded).collect(0)
    batches = [
        assemble(replayed.sequences, replayed.tokens),
        assemble_groups(trained, CONFIG.overlong),
    ]
    for name in ("tokens", "lengths", "loss_mask", "advantages", "engine_logprobs", "group_ids"):
        assert getattr(batches[0], name).equal(getattr(batches[1], name)), name


def test_a_step_without_trained_groups_is_reported(tmp_path: Path) -> None:
    replay = record(tmp_path, [(group(0), Outcome.ALL_WRONG)])
    with pytest.raises(DataError, match=r"step_000001: no group was trained on"):
        replay.collect(0)


@pytest.mark.parametrize("name", ["completions.parquet", "state.json", "manifest.json"])
def test_a_damaged_step_is_reported(tmp_path: Path, name: str) -> None:
    replay = record(tmp_path, [(group(0), Outcome.TRAINED)], [(group(1), Outcome.TRAINED)])
    file = tmp_path / "samples" / "step_000002" / name
    file.write_bytes(file.read_bytes()[:-1])
    replay.collect(0)
    with pytest.raises(DataError, match=f"^{file}: "):
        replay.collect(1)


def test_an_unknown_outcome_is_reported(tmp_path: Path) -> None:
    replay = record(tmp_path, [(group(0), "lost")])
    with pytest.raises(DataError, match="step_000001: ticket 0: 'lost' is not a valid"):
        replay.collect(0)


def test_a_record_without_routes_is_reported_if_they_are_needed(tmp_path: Path) -> None:
    config = tiny_config(policy__router_replay="engine")
    replay = replace(record(tmp_path, [(group(0), Outcome.TRAINED)]), config=config)
    with pytest.raises(DataError, match="step_000001: recorded without routes, which policy"):
        replay.collect(0)


def test_unfinished_and_ungraded_completions_are_read(tmp_path: Path) -> None:
    finished = group(0)
    unfinished = replace(
        finished,
        ticket=1,
        completions=(replace(finished.completions[0], finish=Finish.UNFINISHED, grade=None),),
    )
    replay = record(tmp_path, [(finished, Outcome.TRAINED), (unfinished, Outcome.EXPIRED)])
    step = replay.collect(0)
    assert step.metrics["groups/expired"] == 1
    assert {sequence.ticket for sequence in step.sequences} == {0}


def test_without_an_engine_nothing_is_synced_or_evaluated() -> None:
    report = NoSync()(7)
    assert report == SyncReport(
        version=7,
        num_tensors=0,
        num_bytes=0,
        seconds=0.0,
        verify_seconds=0.0,
        turn_seconds=0.0,
        fingerprinted=False,
        unread_tensors=0,
    )
    assert not NoEvaluation().due(0, 0)
    assert NoEvaluation().run(3) == {}


def test_the_state_of_a_replay_names_the_recorded_run(tmp_path: Path) -> None:
    assert replay_of(tmp_path).state() == {"replay": str(tmp_path)}
