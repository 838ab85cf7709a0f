"""Collecting on rank 0: what a checkpoint keeps of open groups."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.completion_files import read_completions, write_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.types import CheckpointError, Completion, DataError, Finish, Outcome
from tests.helpers.configs import tiny_config
from tests.helpers.rollouts import (
    MAX_TOKENS,
    ScriptedDriver,
    collect,
    make_coordinator,
    with_random_tokens,
)

Completions = dict[tuple[int, int], Completion]


def make_collector() -> tuple[EngineCollector, Coordinator, ScriptedDriver]:
    driver = ScriptedDriver(
        lambda ticket, sample: sample == 0,
        lambda ticket, sample: 1 + (3 * ticket + 5 * sample) % MAX_TOKENS,
        rng=random.Random(4),
        grade_at_once=False,
    )
    coordinator = make_coordinator(driver, lookahead=4.0)
    collector = EngineCollector(
        config=tiny_config(),
        coordinator=coordinator,
        engines=SimpleNamespace(exchange=Ranks(0, 1, 0)),  # type: ignore[arg-type]
        delivery=None,
        recorder=None,  # type: ignore[arg-type]
    )
    return collector, coordinator, driver


def save(folder: Path) -> tuple[str, Completions]:
    """Write a checkpoint of a run with open and ended groups. Return its state and completions."""
    collector, coordinator, driver = make_collector()
    for version in range(3):
        collect(coordinator, driver, version)
    rng = random.Random(7)
    for group in coordinator.groups.values():
        for sample, completion in group.completions.items():
            text = "".join(rng.choices("abc \n\0\ud800", k=5))
            group.completions[sample] = replace(with_random_tokens(completion, rng), text=text)
    # Groups that ended while the policy trained are recorded with the next step.
    coordinator._end(next(group for group in coordinator.groups.values() if group.completions),
                     Outcome.EXPIRED)  # fmt: skip
    collector.snapshot().write(folder)
    completions = coordinator.completions()
    finishes = {completion.finish for completion in completions.values()}
    assert Finish.UNFINISHED in finishes and len(finishes) > 1
    assert any(completion.grade for completion in completions.values())
    return json.dumps(collector.state()), completions


def restore(state: str, folder: Path) -> Coordinator:
    collector, coordinator, _ = make_collector()
    collector.restore(json.loads(state), folder)
    return coordinator


@pytest.mark.parametrize("num_files", [1, 3])
def test_completions_are_restored_exactly(num_files: int, tmp_path: Path) -> None:
    """Earlier versions wrote a file per engine."""
    state, completions = save(tmp_path)
    path = tmp_path / "carried_00000.parquet"
    rows = list(read_completions(path))
    for number in range(num_files):
        write_completions(tmp_path / f"carried_{number:05}.parquet", rows[number::num_files])
    coordinator = restore(state, tmp_path)
    assert coordinator.completions() == completions
    assert len(coordinator._ended) == 1
    assert json.loads(json.dumps(coordinator.state())) == json.loads(state)


def test_only_rank_0_writes_completions(tmp_path: Path) -> None:
    collector, _, _ = make_collector()
    collector.coordinator = None
    collector.snapshot().write(tmp_path)
    assert not list(tmp_path.iterdir()) and collector.state() == {}


def drop_row(path: Path, rows: list[CompletionRow]) -> None:
    write_completions(path, rows[1:])


def drop_token(path: Path, rows: list[CompletionRow]) -> None:
    first = rows[0].completion
    shorter = replace(first, tokens=first.tokens[1:], logprobs=first.logprobs[1:])
    write_completions(path, [replace(rows[0], completion=shorter), *rows[1:]])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path, rows: path.unlink(), CheckpointError, "and 0 in carried_"),
        (drop_row, CheckpointError, "and 0 in carried_"),
        (drop_token, CheckpointError, r"has \d+ tokens in state.json, and \d+ in carried_"),
        (
            lambda path, rows: path.write_bytes(path.read_bytes()[:-9]),
            DataError,
            r"carried_00000\.parquet",
        ),
        (lambda path, rows: path.write_bytes(b"PAR1"), DataError, r"carried_00000\.parquet"),
    ],
    ids=["no file", "a row is missing", "a token is missing", "truncated", "not Parquet"],
)
def test_carried_files_that_do_not_match_the_state_are_refused(
    damage: Callable[[Path, list[CompletionRow]], None],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    state, _ = save(tmp_path)
    path = tmp_path / "carried_00000.parquet"
    damage(path, list(read_completions(path)))
    with pytest.raises(error, match=message) as raised:
        restore(state, tmp_path)
    if error is CheckpointError:
        assert "ticket " in str(raised.value) and "resume from another" in str(raised.value)
    else:
        assert str(tmp_path) in str(raised.value)
