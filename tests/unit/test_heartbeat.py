"""Heartbeats: written atomically, and read to find ranks that are missing or behind."""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dapo_megatron.cluster.heartbeat import (
    NUM_NAMED,
    Heartbeat,
    RankState,
    describe_suspects,
    find_suspects,
    heartbeat_file,
    read_heartbeat,
    read_heartbeats,
    write_heartbeat,
)
from dapo_megatron.doctor import run
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError

NOW = 1e9


def a_heartbeat(rank: int, **changed: object) -> Heartbeat:
    heartbeat = Heartbeat(
        rank=rank,
        world_size=4,
        attempt="17.0",
        host=f"node{rank}",
        pid=100 + rank,
        state=RankState.HUNG,
        time=NOW,
        phase="update",
        step=3,
        limit_seconds=60.0,
        silent_seconds=61.0,
        sign="all_gather 12",
        collectives={"exchanges": 12, "dp": 5},
    )
    return replace(heartbeat, **changed)  # type: ignore[arg-type]


any_heartbeat = st.builds(
    a_heartbeat,
    st.just(0),
    state=st.sampled_from(RankState),
    attempt=st.sampled_from(["17.0", "16.0"]),
    time=st.sampled_from([NOW, NOW - 4, NOW - 100]),
    phase=st.sampled_from(["update", "sync", ""]),
    step=st.integers(0, 3),
    sign=st.text(),
    silent_seconds=st.sampled_from([0.0, 61.0]),
    collectives=st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)),
)


@settings(max_examples=30)
@given(heartbeat=any_heartbeat, length=st.floats(0, 1), damage=st.binary(max_size=1))
def test_a_heartbeat_is_read_as_it_was_written_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, heartbeat: Heartbeat, length: float, damage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_heartbeat(folder, heartbeat)
    assert read_heartbeats(folder) == [heartbeat, None, None, None]
    path = heartbeat_file(folder, 0)
    whole = path.read_bytes().strip()
    path.write_bytes(whole[: int(length * (len(whole) - 1))] + damage)
    assert read_heartbeat(path) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (None, "never wrote"),
        ({"state": RankState.RUNNING, "time": NOW - 60}, "silent 60 s before others"),
        ({"state": RankState.ENDED}, "had ended"),
        ({"attempt": "16.0", "time": NOW - 60}, "of 16.0"),
        ({"collectives": {"exchanges": 11, "dp": 5}}, "11 of 12 in exchanges"),
        ({"phase": "sync"}, "3 ranks are in phase update"),
        ({"collectives": {"dp": 4}}, "collectives 4 of 5 in dp"),
    ],
)
@pytest.mark.parametrize("state", [RankState.HUNG, RankState.RUNNING])
def test_only_the_rank_that_is_missing_or_behind_is_named(
    changed: dict[str, Any] | None, why: str, state: RankState, tmp_path: Path
) -> None:
    for rank in (0, 1, 3):
        write_heartbeat(tmp_path, a_heartbeat(rank, state=state))
    if changed is not None:
        write_heartbeat(tmp_path, a_heartbeat(2, **{"state": state, **changed}))
    report = run.report(tmp_path)
    if state is RankState.RUNNING and why == "had ended":
        assert not report.suspects, "ranks end one after another"
        return
    assert [suspect.rank for suspect in report.suspects] == [2]
    assert why in report.suspects[0].why
    assert bool(report.hang) == (state is RankState.HUNG)
    console = Console(record=True, width=200)
    run.render(report, console)
    assert why in console.export_text()
    assert json.loads(run.to_json(report))["suspects"][0]["rank"] == 2


def test_no_rank_of_a_healthy_run_is_named(tmp_path: Path) -> None:
    for rank in range(4):
        beat = a_heartbeat(rank, state=RankState.RUNNING, time=time.time() - rank)
        counts = {"exchanges": 12 + rank}
        write_heartbeat(tmp_path, replace(beat, silent_seconds=0.1, collectives=counts, step=rank))
    report = run.report(tmp_path)
    assert report.is_alive
    assert report.suspects == []
    with pytest.raises(ConfigError, match="no heartbeats"):
        run.report(tmp_path / "elsewhere")


@given(st.lists(st.none() | any_heartbeat, max_size=40))
def test_the_report_of_suspects_is_short_and_names_missing_ranks(
    heartbeats: list[Heartbeat | None],
) -> None:
    heartbeats = [beat and replace(beat, rank=rank) for rank, beat in enumerate(heartbeats)]
    heartbeats.append(a_heartbeat(len(heartbeats)))
    suspects = find_suspects(heartbeats)
    ranks = [suspect.rank for suspect in suspects]
    assert len(set(ranks)) == len(ranks)
    assert {rank for rank, beat in enumerate(heartbeats) if beat is None} <= set(ranks)
    text = describe_suspects(heartbeats)
    assert text
    assert all(f"rank {rank}" in text for rank in ranks[:NUM_NAMED])


HOSTILE: dict[str, dict[str, Any]] = {
    "markup": {"attempt": "x[/nope]", "host": "[bold]h[/bold]", "sign": "[/]"},
    "control characters": {"sign": "\x1b]0;pwned\x07\x1b[2J", "host": "\x1b[8m", "phase": "a\rb"},
    "65,536 ranks": {"world_size": 65_536},
    "times": {"time": -1e12, "silent_seconds": 1e12, "limit_seconds": 0},
    "large numbers": {"step": 2**63 - 1, "collectives": {"": 2**63 - 1}, "pid": 2**63 - 1},
}
"""Fields of heartbeats that are shown, without effect on the terminal."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_doctor_run_shows_hostile_heartbeats_literally(tmp_path: Path, kind: str) -> None:
    path = heartbeat_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(json.dumps({**asdict(a_heartbeat(0)), **HOSTILE[kind]}))
    out = io.StringIO()
    run.render(run.report(tmp_path), LiteralConsole(file=out, width=200))
    assert visible(out.getvalue()) == out.getvalue()
    assert len(out.getvalue().splitlines()) < 1200


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(asdict(a_heartbeat(0)).keys() | {"new"})),
    st.sampled_from([None, -1, 10**400, float("nan"), float("inf"), 1e30, False, [], {}, ["x"]]),
)
def test_a_heartbeat_of_wrong_values_is_ignored_or_shown(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = heartbeat_file(folder, 0)
    path.parent.mkdir()
    path.write_text(json.dumps({**asdict(a_heartbeat(0)), key: value}))
    if read_heartbeat(path) is None:
        with pytest.raises(ConfigError, match="no heartbeats"):
            run.report(folder)
    else:
        run.render(run.report(folder), LiteralConsole(file=io.StringIO()))
