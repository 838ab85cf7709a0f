"""Replay trains on the groups that a run recorded, and reports missing or damaged records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dapo_megatron.data.batch import assemble
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.segments import Segment
from dapo_megatron.types import (
    Completion,
    DataError,
    Finish,
    Grade,
    Group,
    Outcome,
    Prompt,
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
    unfinished = replace(group(6).completions[0], finish=Finish.UNFINISHED, grade=None)
    first = [
        (group(0), Outcome.ALL_WRONG),
        (group(1), Outcome.TRAINED),
        (group(2), Outcome.ABSTAINED),
        (group(4), Outcome.TRAINED),
        (replace(group(6), completions=(unfinished,)), Outcome.EXPIRED),
    ]
    second = [(group(3, step=2), Outcome.TRAINED)]
    replay = record(tmp_path, first, second)
    step = replay.collect(0)
    assert step.sequences == described([group(1), group(4)], CONFIG.overlong)
    batches = [
        assemble(step.sequences, step.tokens),
        assemble_groups([group(1), group(4)], CONFIG.overlong),
    ]
    for name in ("tokens", "lengths", "loss_mask", "advantages", "engine_logprobs", "group_ids"):
        assert getattr(batches[0], name).equal(getattr(batches[1], name)), name
    metrics = step.metrics
    assert [metrics[f"groups/{name}"] for name in ("trained", "expired", "issued")] == [2, 1, 0]
    assert (metrics["groups/interrupted_completions"], metrics["time/grade"]) == (0.0, 0.0)
    assert metrics["groups/keep_rate"] == 2 / 4
    assert metrics["accuracy/raw"] == 0.5
    second_step = replay.collect(1)
    assert second_step.sequences == described([group(3, step=2)], CONFIG.overlong)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome.ALL_WRONG, "step_000001: no group was trained on"),
        ("lost", "step_000001.*'lost' is not a valid"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_reported(
    tmp_path: Path, outcome: str, message: str
) -> None:
    replay = record(tmp_path, [(group(0), outcome)])
    with pytest.raises(DataError, match=message):
        replay.collect(0)


def test_a_step_that_was_not_recorded_is_reported_with_those_that_were(tmp_path: Path) -> None:
    for recorded, shown in ((0, "none"), (3, "step_000001 to step_000003")):
        replay = record(tmp_path, *[[(group(0), Outcome.TRAINED)]] * recorded)
        with pytest.raises(DataError) as raised:
            replay.collect(6)
        assert str(raised.value).startswith(f"{tmp_path}/samples/step_000007: not recorded")
        assert f"step 7 cannot be replayed. Recorded steps: {shown}. Set" in str(raised.value)


def test_a_damaged_step_is_reported(tmp_path: Path) -> None:
    replay = record(tmp_path, [(group(0), Outcome.TRAINED)], [(group(1), Outcome.TRAINED)])
    file = tmp_path / "samples" / "step_000002" / "state.json"
    file.write_bytes(file.read_bytes()[:-1])
    replay.collect(0)
    with pytest.raises(DataError, match=f"^{file}: "):
        replay.collect(1)


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


def test_a_checkpoint_of_a_replay_names_the_recorded_run_and_has_no_groups(tmp_path: Path) -> None:
    assert replay_of(tmp_path).state() == {"replay": str(tmp_path)}
    assert replay_of(tmp_path).snapshot().num_bytes == 0
