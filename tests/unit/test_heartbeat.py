"""Heartbeats: written atomically, and read to find ranks that are missing or behind."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dapo_megatron.cluster.heartbeat import (
    NUM_NAMED,
    Alarm,
    Heartbeat,
    RankState,
    describe_suspects,
    find_suspects,
    heartbeat_file,
    heartbeat_folder,
    read_heartbeat,
    read_heartbeats,
    write_heartbeat,
)
from dapo_megatron.cluster.watchdog import hang_file
from dapo_megatron.doctor import run
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError


def a_heartbeat(rank: int, **changed: object) -> Heartbeat:
    heartbeat = Heartbeat(
        rank=rank,
        world_size=4,
        attempt="17.0",
        host=f"node{rank}",
        pid=100 + rank,
        state=RankState.HUNG,
        time=time.time(),
        phase="update",
        step=3,
        limit_seconds=60.0,
        silent_seconds=61.0,
        sign="micro-batch 2",
        num_exchanges=12,
        in_exchange=True,
        exchange="all_gather 12",
    )
    return replace(heartbeat, **changed)  # type: ignore[arg-type]


def reasons_by_rank(heartbeats: list[Heartbeat | None]) -> dict[int, str]:
    return {suspect.rank: suspect.why for suspect in find_suspects(heartbeats, "17.0")}


heartbeats_of_any_state = st.builds(
    a_heartbeat,
    st.just(0),
    state=st.sampled_from(RankState),
    attempt=st.sampled_from(["17.0", "16.0"]),
    phase=st.sampled_from(["update", "sync", ""]),
    step=st.integers(0, 3),
    num_exchanges=st.integers(0, 3),
    in_exchange=st.booleans(),
    sign=st.text(),
    num_collectives=st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)),
)


@given(heartbeat=heartbeats_of_any_state)
def test_a_heartbeat_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, heartbeat: Heartbeat
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_heartbeat(folder, heartbeat)
    assert read_heartbeats(folder, 2) == [heartbeat, None]


def test_a_truncated_or_malformed_heartbeat_is_ignored(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, a_heartbeat(0))
    path = heartbeat_file(tmp_path, 0)
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        assert read_heartbeat(path) is None, length
    for text in ("[]", "7", '{"rank": 1}', json.dumps({**asdict(a_heartbeat(0)), "new": 1})):
        path.write_text(text)
        assert read_heartbeat(path) is None


def _write_for_ever(folder: Path) -> None:
    for step in range(10**9):
        write_heartbeat(folder, a_heartbeat(0, step=step, sign="x" * 3000))


def test_heartbeats_are_complete_while_being_written_and_after_sigkill(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, a_heartbeat(0, step=-1))
    writer = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(tmp_path,))
    writer.start()
    steps: set[int] = set()
    end = time.monotonic() + 120.0
    while len(steps) < 50 and time.monotonic() < end:
        heartbeat = read_heartbeat(heartbeat_file(tmp_path, 0))
        assert heartbeat is not None
        steps.add(heartbeat.step)
    writer.kill()
    writer.join()
    assert len(steps) >= 50
    assert read_heartbeat(heartbeat_file(tmp_path, 0)) is not None


@pytest.mark.parametrize(
    ("heartbeat", "why"),
    [
        (None, "never wrote"),
        (a_heartbeat(2, state=RankState.RUNNING), "does not answer"),
        (a_heartbeat(2, state=RankState.ENDED), "had ended"),
        (a_heartbeat(2, attempt="16.0"), "of 16.0"),
        (a_heartbeat(2, num_exchanges=11), "entered 11 exchanges, others 12"),
        (a_heartbeat(2, phase="sync"), "3 ranks are in phase update"),
        (a_heartbeat(2, num_collectives={"dp": 4}), "collectives 4 of 5 in group dp"),
    ],
)
def test_only_the_rank_that_is_missing_or_behind_is_named(
    heartbeat: Heartbeat | None, why: str
) -> None:
    others = [a_heartbeat(rank, num_collectives={"dp": 5}) for rank in range(4)]
    reasons = reasons_by_rank([*others[:2], heartbeat, others[3]])
    assert list(reasons) == [2]
    assert why in reasons[2]


def test_ranks_that_wait_for_a_missing_rank_are_not_behind() -> None:
    reasons = reasons_by_rank(
        [a_heartbeat(0), a_heartbeat(1, num_exchanges=3), None, a_heartbeat(3, phase="sync")]
    )
    assert list(reasons) == [2]


def test_a_rank_still_in_an_exchange_that_others_left_is_behind() -> None:
    left = [a_heartbeat(rank, in_exchange=False) for rank in range(3)]
    assert "has not left all_gather 12" in reasons_by_rank([*left, a_heartbeat(3)])[3]


def test_no_rank_is_named_if_all_are_at_the_same_place() -> None:
    heartbeats: list[Heartbeat | None] = [a_heartbeat(rank) for rank in range(4)]
    assert reasons_by_rank(heartbeats) == {}
    assert "all 4 are in phase update, step 3, in all_gather 12" in describe_suspects(
        heartbeats, "17.0"
    )


@given(st.lists(st.none() | heartbeats_of_any_state, min_size=1, max_size=40))
def test_the_report_of_suspects_is_short_and_names_missing_ranks(
    heartbeats: list[Heartbeat | None],
) -> None:
    heartbeats = [
        heartbeat and replace(heartbeat, rank=rank) for rank, heartbeat in enumerate(heartbeats)
    ]
    named_ranks = find_suspects(heartbeats, "17.0")
    assert len({suspect.rank for suspect in named_ranks}) == len(named_ranks)
    missing = {rank for rank, heartbeat in enumerate(heartbeats) if heartbeat is None}
    assert missing <= {suspect.rank for suspect in named_ranks}
    text = describe_suspects(heartbeats, "17.0")
    assert text
    for suspect in named_ranks[:NUM_NAMED]:
        assert f"rank {suspect.rank}" in text


def test_an_alarm_is_seen_only_in_its_own_attempt(tmp_path: Path) -> None:
    alarm, other_alarm = Alarm.of(tmp_path, "17.0"), Alarm.of(tmp_path, "17.1")
    alarm.prepare(fresh=False)
    assert alarm.triggered() is None
    other_alarm.trigger("rank 1: hangs")
    assert alarm.triggered() is None
    alarm.trigger("rank 2: hangs")
    assert alarm.triggered() == "rank 2: hangs"
    alarm.path.write_text("17.0\trank 2: ha")  # half written
    assert alarm.triggered() is None
    alarm.trigger("rank 2: hangs")
    alarm.prepare(fresh=False)
    assert alarm.triggered() == "rank 2: hangs"
    alarm.prepare(fresh=True)
    assert alarm.triggered() is None


def test_doctor_run_names_the_rank_that_stopped_first(tmp_path: Path) -> None:
    now = time.time()
    for rank in range(4):
        died = rank == 2
        heartbeat = a_heartbeat(
            rank, state=RankState.RUNNING, time=now - (100 if died else 40), num_exchanges=20 - rank
        )
        write_heartbeat(tmp_path, heartbeat)
    report = run.report(tmp_path, tmp_path / "no_verdict")
    assert [suspect.rank for suspect in report.suspects] == [2]
    assert not report.is_alive
    console = Console(record=True, width=200)
    run.render(report, console)
    shown = console.export_text()
    assert "node2" in shown
    assert "rank 2: missing: silent 60 s before others" in shown
    assert json.loads(run.to_json(report))["suspects"][0]["rank"] == 2


def test_doctor_run_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    for rank, num_exchanges in enumerate((12, 7, 12, 12)):
        heartbeat = a_heartbeat(
            rank, state=RankState.RUNNING, num_exchanges=num_exchanges, silent_seconds=20.0
        )
        write_heartbeat(tmp_path, heartbeat)
    assert [suspect.rank for suspect in run.report(tmp_path).suspects] == [1]


HOSTILE: dict[str, dict[str, Any]] = {
    "markup": {"attempt": "x[/nope]", "host": "[bold]h[/bold]", "sign": "[/]"},
    "control characters": {"sign": "\x1b]0;pwned\x07\x1b[2J", "host": "\x1b[8m", "phase": "a\rb"},
    "newlines": {"host": "h\nrank 1: fine", "sign": "\n" * 1000},
    "65,536 ranks": {"world_size": 65_536},
    "times": {"time": -1e12, "silent_seconds": 1e12, "limit_seconds": 0},
    "large numbers": {"step": 2**63 - 1, "num_exchanges": 2**63 - 1, "pid": 2**63 - 1},
}
"""Fields of heartbeats that are shown, without effect on the terminal."""
INVALID: dict[str, dict[str, Any]] = {
    "text as number": {"step": "3"},
    "number as text": {"sign": 7},
    "null": {"phase": None},
    "list": {"host": ["a"]},
    "attempt": {"attempt": 5},
    "a million ranks": {"world_size": 1_000_000},
    "no ranks": {"world_size": 0},
    "rank": {"rank": -1},
    "rank beyond": {"rank": 4},
    "bool": {"rank": False},
    "NaN": {"time": math.nan},
    "infinity": {"silent_seconds": math.inf},
    "year": {"time": 1e30},
    "digits": {"step": 10**400},
    "state": {"state": "fine"},
    "counts": {"num_collectives": {"0": "x"}},
    "negative count": {"num_collectives": [1]},
    "unknown": {"new": 1},
}


@pytest.mark.parametrize("kind", HOSTILE | INVALID)
def test_doctor_run_shows_or_ignores_hostile_heartbeats(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {**asdict(a_heartbeat(0)), **HOSTILE.get(kind, {}), **INVALID.get(kind, {})}
    heartbeat_folder(tmp_path).mkdir()
    heartbeat_file(tmp_path, 0).write_text(json.dumps(changed))
    hang = {"text": "\x1b[2Jfine [/nope]"}
    with suppress(FileNotFoundError):  # of an attempt with a slash
        hang_file(tmp_path, changed["attempt"]).write_text(json.dumps(hang))
    started = time.monotonic()
    if kind in INVALID:
        with pytest.raises(ConfigError, match="no heartbeats"):
            run.report(tmp_path)
        return
    out = io.StringIO()
    run.render(run.report(tmp_path), LiteralConsole(file=out, width=200))
    assert visible(out.getvalue()) == out.getvalue()
    assert len(out.getvalue().splitlines()) < 1200
    assert time.monotonic() - started < 30.0


def test_doctor_run_names_no_rank_of_a_healthy_run(tmp_path: Path) -> None:
    for rank in range(4):
        write_heartbeat(
            tmp_path,
            a_heartbeat(rank, state=RankState.RUNNING, silent_seconds=0.1, num_exchanges=rank),
        )
    report = run.report(tmp_path)
    assert report.is_alive
    assert report.suspects == []
    with pytest.raises(ConfigError, match="no heartbeats"):
        run.report(tmp_path / "elsewhere")
