"""The exit reason: the first one is kept, and a lost connection waits for the cause."""

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


def test_the_first_reason_is_kept(path: Path) -> None:
    assert exit_reason.record(1, "rank 3: ValueError:\n  bad", "Traceback\nline\n")
    assert not exit_reason.record(98, "hung")
    assert path.read_text() == "1 rank 3: ValueError: bad\nTraceback\nline\n"
    assert exit_reason.read(path) == exit_reason.ExitReason(
        1, "rank 3: ValueError: bad", "Traceback\nline\n"
    )
    assert [entry.name for entry in path.parent.iterdir()] == ["verdict"]


def test_without_the_variable_or_a_writable_folder_nothing_is_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.write_text("a file where a folder should be")
    assert not exit_reason.record(1, "reason")
    monkeypatch.delenv(exit_reason.VARIABLE)
    assert not exit_reason.record(1, "reason")
    assert exit_reason.read(path) is None


def _lose(path: Path, started: Barrier) -> None:
    exit_reason.SECONDARY_SECONDS = 600.0  # longer than the failing rank takes on a loaded machine
    started.wait()
    exit_reason.record(1, LOST, environ={exit_reason.VARIABLE: str(path)})


def test_the_reason_of_the_failing_rank_precedes_lost_connections(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(3)
    losers = [context.Process(target=_lose, args=(path, started)) for _ in range(2)]
    for loser in losers:
        loser.start()
    started.wait()
    time.sleep(0.5)
    assert exit_reason.record(1, "rank 1: OutOfMemoryError: CUDA out of memory")
    for loser in losers:
        loser.join()
    verdict = exit_reason.read(path)
    assert verdict is not None
    assert verdict.reason.startswith("rank 1: OutOfMemoryError")


def test_a_lost_connection_without_another_reason_suggests_a_killed_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_reason, "SECONDARY_SECONDS", 0.3)
    assert exit_reason.record(1, LOST)
    verdict = exit_reason.read(path)
    assert verdict is not None
    assert verdict.reason.startswith("lost its connection to another rank, which reported no error")
    assert "Connection closed by peer" in verdict.reason


def _race(path: Path, number: int) -> None:
    exit_reason.record(
        number, f"rank {number}", "x" * 100_000, environ={exit_reason.VARIABLE: str(path)}
    )


def test_of_concurrent_reasons_exactly_one_is_recorded(path: Path) -> None:
    racers = [
        multiprocessing.get_context("spawn").Process(target=_race, args=(path, number))
        for number in range(6)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    verdict = exit_reason.read(path)
    assert verdict is not None
    assert verdict.reason == f"rank {verdict.code}"
    assert len(verdict.text) == 100_000


@pytest.mark.parametrize("text", ["", "\n", "soon reason\n"])
def test_a_malformed_exit_reason_is_read_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict").write_text(text)
    assert exit_reason.read(tmp_path / "verdict") is None
