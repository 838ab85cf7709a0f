"""Collecting on rank 0 and on leaders: what a checkpoint keeps, also with other replicas."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.completion_files import read_completions, write_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.store import CompletionStore
from dapo_megatron.types import (
    CheckpointError,
    Completion,
    CompletionSummary,
    DataError,
    Finish,
    Outcome,
    Prompt,
    Segment,
    StarvedError,
    Stopped,
)
from tests.helpers.configs import tiny_config
from tests.helpers.rollouts import MAX_TOKENS, ScriptedDriver, collect, make_coordinator

Key = tuple[int, int]


@dataclass
class Replayed:
    """Exchange of one rank after another: the others receive what rank 0 has broadcast."""

    rank: int
    world_size: int
    sent: list[Any]
    received: int = 0

    @property
    def names(self) -> range:
        return range(self.world_size)

    def broadcast(self, value: Any, of: Any, source: int = 0) -> Any:
        if self.rank == source:
            self.sent.append(encode(value))
            return value
        self.received += 1
        return decode(self.sent[self.received - 1], of, "rank 0")

    def all_gather(self, value: Any, of: Any) -> list[Any]:
        return [value if rank == self.rank else None for rank in range(self.world_size)]


@dataclass
class Rank:
    """The collector of one rank, and what it holds."""

    collector: EngineCollector
    store: CompletionStore = field(default_factory=CompletionStore)


def make_ranks(num_replicas: int, **settings: Any) -> list[Rank]:
    """Make a rank for each replica, and one more that leads none."""
    driver = ScriptedDriver(
        lambda ticket, sample: sample == 0,
        lambda ticket, sample: 1 + (3 * ticket + 5 * sample) % MAX_TOKENS,
        num_replicas=num_replicas,
        rng=random.Random(4),
        grade_at_once=False,
    )
    sent: list[Any] = []
    ranks = []
    for rank in range(num_replicas + 1):
        store = CompletionStore()
        collector = EngineCollector(
            config=tiny_config(**settings),
            coordinator=make_coordinator(driver, lookahead=4.0) if rank == 0 else None,
            engines=SimpleNamespace(exchange=Replayed(rank, num_replicas + 1, sent)),  # type: ignore[arg-type]
            exchange_tokens=SimpleNamespace(leaders=list(range(num_replicas))),  # type: ignore[arg-type]
            data_parallel=None,  # type: ignore[arg-type]
            recorder=None,  # type: ignore[arg-type]
            replica=rank if rank < num_replicas else None,
            store=store,
        )
        ranks.append(Rank(collector, store))
    return ranks


def coordinator_of(ranks: list[Rank]) -> Coordinator:
    coordinator = ranks[0].collector.coordinator
    assert coordinator is not None
    return coordinator


def summaries(ranks: list[Rank]) -> dict[Key, CompletionSummary]:
    groups = coordinator_of(ranks).groups.values()
    return {(g.ticket, c.sample): c for g in groups for c in g.completions.values()}


def random_completion(summary: CompletionSummary) -> Completion:
    rng = random.Random(summary.num_tokens)
    return Completion(
        sample=summary.sample,
        tokens=array("i", [rng.randrange(2**31) for _ in range(summary.num_tokens)]),
        logprobs=array("f", [-rng.random() for _ in range(summary.num_tokens)]),
        text="",
        finish=summary.finish,
        segments=summary.segments,
        grade=summary.grade,
    )


def save(folder: Path, num_replicas: int) -> tuple[str, dict[Key, CompletionRow]]:
    """Write a checkpoint of a run with carried groups. Return its state and its completions."""
    ranks = make_ranks(num_replicas)
    coordinator = coordinator_of(ranks)
    for version in range(3):
        collect(coordinator, coordinator._driver, version)  # type: ignore[arg-type]
    for (ticket, _), summary in summaries(ranks).items():
        prompt = coordinator.groups[ticket].prompt
        ranks[summary.replica].store.put(ticket, prompt, random_completion(summary))
    for rank in ranks:
        rank.collector.snapshot().write(folder)
    assert len(list(folder.iterdir())) == num_replicas
    rows = [row for rank in ranks for row in rank.store.rows()]
    finishes = {row.completion.finish for row in rows}
    assert Finish.UNFINISHED in finishes and len(finishes) > 1
    return json.dumps(ranks[0].collector.state()), {
        (r.ticket, r.completion.sample): r for r in rows
    }


def restore(state: str, folder: Path, num_replicas: int) -> list[Rank]:
    ranks = make_ranks(num_replicas)
    for rank in ranks:
        rank.collector.restore(json.loads(state), folder)
    return ranks


@pytest.mark.parametrize(("num_saved", "num_restored"), [(2, 1), (2, 2), (2, 3), (3, 2), (1, 3)])
def test_completions_are_restored_where_the_coordinator_expects_them(
    num_saved: int, num_restored: int, tmp_path: Path
) -> None:
    state, rows = save(tmp_path, num_saved)
    ranks = restore(state, tmp_path, num_restored)
    expected = summaries(ranks)
    assert expected.keys() == rows.keys()
    for replica, rank in enumerate(ranks):
        held = {key for key, summary in expected.items() if summary.replica == replica}
        assert {(row.ticket, row.completion.sample) for row in rank.store.rows()} == held
        assert rank.store.rows() == [rows[key] for key in sorted(held)]
    assert not ranks[-1].store.rows()  # it leads no replica
    # Written again, the checkpoint is the same but for the replicas.
    assert ranks[1].collector.state() == {}
    if num_restored == num_saved:
        assert json.loads(state) == json.loads(json.dumps(ranks[0].collector.state()))


def test_a_checkpoint_may_lack_tokens_of_ended_groups_that_a_lost_engine_had(
    tmp_path: Path,
) -> None:
    """They ended while the policy trained, and are recorded with the next step."""
    state, _ = save(tmp_path, 2)
    ranks = restore(state, tmp_path, 2)
    coordinator = coordinator_of(ranks)
    ended = [group for group in coordinator.groups.values() if group.completions][::2]
    for group in ended:
        coordinator._end(group, Outcome.EXPIRED)
    kept = make_ranks(1)  # the engine of replica 0 is lost; replica 1 has its number now
    coordinator_of(kept).restore(coordinator.state())
    coordinator_of(kept).find_completions([ranks[1].store.inventory()])
    kept[0].store.fill(ranks[1].store.rows())
    folder = tmp_path / "next"
    folder.mkdir()
    kept[0].collector.snapshot().write(folder)
    state = json.dumps(kept[0].collector.state())

    resumed = restore(state, folder, 3)
    held = {(ticket, sample) for ticket, sample, *_ in coordinator_of(resumed).held()}
    wanted = {(group.ticket, sample) for group in ended for sample in group.completions}
    assert wanted & held and wanted - held
    assert len(coordinator_of(resumed)._ended) == len(ended)


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
            r"carried_00001\.parquet",
        ),
        (lambda path, rows: path.write_bytes(b"PAR1"), DataError, r"carried_00001\.parquet"),
    ],
    ids=["no file", "a row is missing", "a token is missing", "truncated", "not Parquet"],
)
@pytest.mark.parametrize("num_restored", [1, 2, 3])
def test_carried_files_that_do_not_match_the_state_are_refused(
    damage: Callable[[Path, list[CompletionRow]], None],
    error: type[Exception],
    message: str,
    num_restored: int,
    tmp_path: Path,
) -> None:
    state, _ = save(tmp_path, 2)
    path = tmp_path / "carried_00001.parquet"
    damage(path, list(read_completions(path)))
    with pytest.raises(error, match=message) as raised:
        restore(state, tmp_path, num_restored)
    assert str(tmp_path) in str(raised.value)
    if error is CheckpointError:
        assert "ticket " in str(raised.value) and "resume from another" in str(raised.value)


# ------------------------------------------------------------------ a stop within a step

PROMPT = Prompt("sums", 0, (1, 2), "3+4", "7")


def completion(num_tokens: int) -> Completion:
    tokens = [5] * num_tokens
    return Completion(0, tokens, tokens, "", Finish.UNFINISHED, (Segment(0, num_tokens),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("deterministic", "error", "num_tokens"),
    [(True, Stopped, 2), (False, Stopped, 6), (True, StarvedError, 6)],
)
def test_only_a_deterministic_run_that_is_stopped_returns_to_the_tokens_before_the_step(
    deterministic: bool, error: type[Exception], num_tokens: int
) -> None:
    [rank, _] = make_ranks(1, rollout__deterministic=str(deterministic).lower())
    rank.store.put(4, PROMPT, completion(2))

    def run(task: Any, of: Any) -> None:
        rank.store.put(4, PROMPT, completion(6))
        rank.store.put(5, PROMPT, completion(1))
        raise error("in the step")

    rank.collector.engines = SimpleNamespace(run=run)  # type: ignore[assignment]
    with pytest.raises(error, match="in the step"):
        rank.collector.collect(0, lambda done: None)
    assert rank.store.num_tokens(4, 0) == num_tokens
    assert rank.store.num_tokens(5, 0) == (1 if num_tokens == 6 else 0)
