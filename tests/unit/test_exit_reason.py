"""The verdict file: the first reason stands, and a neighbor's death is not the first."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from dapo_megatron.cluster import exit_reason

LOST = (
    "rank 0: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
    "closed by peer [127.0.0.1]:50861. This is typically caused by a remote worker crashing."
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(exit_reason.VARIABLE, str(tmp_path / "attempt" / "verdict"))
    return tmp_path / "attempt" / "verdict"


def test_the_first_word_stands(path: Path) -> None:
    assert exit_reason.record(1, "rank 3: ValueError:\n  bad", "Traceback\nline\n")
    assert not exit_reason.record(98, "hung")
    assert path.read_text() == "1 rank 3: ValueError: bad\nTraceback\nline\n"
    assert exit_reason.read(path) == exit_reason.ExitReason(
        1, "rank 3: ValueError: bad", "Traceback\nline\n"
    )
    assert [entry.name for entry in path.parent.iterdir()] == ["verdict"]


def test_without_the_variable_or_a_disk_nothing_happens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.write_text("a file where a folder should be")
    assert not exit_reason.record(1, "reason")
    monkeypatch.delenv(exit_reason.VARIABLE)
    assert not exit_reason.record(1, "reason")
    assert exit_reason.read(path) is None


def _lose(path: Path, begun: Barrier) -> None:
    begun.wait()
    exit_reason.record(1, LOST, environ={exit_reason.VARIABLE: str(path)})


def test_the_guilty_rank_comes_before_those_that_lost_it(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begun = context.Barrier(3)
    losers = [context.Process(target=_lose, args=(path, begun)) for _ in range(2)]
    for loser in losers:
        loser.start()
    begun.wait()
    time.sleep(0.5)
    assert exit_reason.record(1, "rank 1: OutOfMemoryError: CUDA out of memory")
    for loser in losers:
        loser.join()
    found = exit_reason.read(path)
    assert found is not None
    assert found.reason.startswith("rank 1: OutOfMemoryError")


def test_a_rank_that_said_nothing_was_perhaps_killed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_reason, "SECONDARY_SECONDS", 0.3)
    assert exit_reason.record(1, LOST)
    found = exit_reason.read(path)
    assert found is not None
    assert found.reason.startswith("lost its connection to another rank, which reported no error")
    assert "Connection closed by peer" in found.reason


def _race(path: Path, number: int) -> None:
    exit_reason.record(
        number, f"rank {number}", "x" * 100_000, environ={exit_reason.VARIABLE: str(path)}
    )


def test_of_many_at_once_one_wins_whole(path: Path) -> None:
    racers = [
        multiprocessing.get_context("spawn").Process(target=_race, args=(path, number))
        for number in range(6)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    found = exit_reason.read(path)
    assert found is not None
    assert found.reason == f"rank {found.code}"
    assert len(found.text) == 100_000


@pytest.mark.parametrize("text", ["", "\n", "soon reason\n"])
def test_what_is_no_verdict_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict").write_text(text)
    assert exit_reason.read(tmp_path / "verdict") is None
