"""Attempts: their names, the first reason why one ended, and the limit on restarts of a job that
makes no progress."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from dapo_megatron.cluster import attempt as attempts
from dapo_megatron.cluster.attempt import (
    MAX_CRASHES,
    MAX_CUT_SHORT,
    REASON_FILE,
    ExitReason,
    attempt,
    end_attempt,
    read_reason,
    record_reason,
    start_attempt,
)
from dapo_megatron.types import ConfigError


def slurm(restart: int, job: str = "7") -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)}


def test_attempt_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt(slurm(2)) == "7.2"
    assert attempt({"SLURM_JOB_ID": "7"}) == "7.0"
    assert attempt({**slurm(2), "DAPO_MEGATRON_ATTEMPT": "mine"}) == "mine"
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
    place = {"MASTER_ADDR": "h1", "MASTER_PORT": "29400"}
    assert attempt({**slurm(2), **torchrun, **place}) == "none-h1-29400.1"
    first = attempt({})
    assert first
    monkeypatch.setattr(time, "strftime", lambda *_: "a later second")
    assert attempt({}) == first  # otherwise end_attempt would not find its start


# ---------------------------------------------------------------------------- the exit reason

LOST = (
    "rank 0: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
    "closed by peer [127.0.0.1]:50861. This is typically caused by a remote worker crashing."
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(REASON_FILE, str(tmp_path / "attempt" / "verdict"))
    return tmp_path / "attempt" / "verdict"


def test_the_first_reason_is_kept(path: Path) -> None:
    record_reason(1, "rank 3: ValueError:\n  bad", "Traceback\nline\n")
    record_reason(75, "stopped")
    assert path.read_text() == "1 rank 3: ValueError: bad\nTraceback\nline\n"
    assert read_reason(path) == ExitReason(1, "rank 3: ValueError: bad", "Traceback\nline\n")


def test_without_the_variable_or_a_writable_folder_nothing_is_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.write_text("a file where a folder should be")
    record_reason(1, "reason")
    monkeypatch.delenv(REASON_FILE)
    record_reason(1, "reason")
    assert read_reason(path) is None


def lose() -> None:
    attempts.SECONDARY_SECONDS = 600.0  # longer than the failing rank takes on a loaded machine
    record_reason(1, LOST)


def test_the_reason_of_the_failing_rank_precedes_lost_connections(path: Path) -> None:
    losers = [multiprocessing.get_context("spawn").Process(target=lose) for _ in range(2)]
    for loser in losers:
        loser.start()
    time.sleep(0.5)
    record_reason(1, "rank 1: OutOfMemoryError: CUDA out of memory")
    for loser in losers:
        loser.join()
    verdict = read_reason(path)
    assert verdict is not None
    assert verdict.reason.startswith("rank 1: OutOfMemoryError")


def test_a_lost_connection_without_another_reason_suggests_a_killed_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "SECONDARY_SECONDS", 0.3)
    record_reason(1, LOST)
    verdict = read_reason(path)
    assert verdict is not None
    assert verdict.reason.startswith("lost its connection to another rank, which reported no error")
    assert "Connection closed by peer" in verdict.reason


@pytest.mark.parametrize("text", ["", "\n", "soon reason\n"])
def test_a_malformed_exit_reason_is_read_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict").write_text(text)
    assert read_reason(tmp_path / "verdict") is None


# ---------------------------------------------------------------------------- restarts


def record_start(
    attempts_file: Path, restart: int, end: str | None, *, step: int = 20, job: str = "7"
) -> None:
    environ = slurm(restart, job)
    start_attempt(attempts_file, step, environ)
    if end is not None:
        end_attempt(attempts_file, environ, end=end)


@pytest.mark.parametrize("end", ["crashed", "hung"])
def test_a_crash_loop_is_refused_after_the_limit(tmp_path: Path, end: str) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    record_start(attempts_file, 0, end, step=10)
    with attempts_file.open("ab") as file:
        file.write(b'\n{"attempt": "7.\n\xff\xfe\n')  # cut off, or from a full disk
    for restart in range(1, 1 + MAX_CRASHES):
        record_start(attempts_file, restart, end)  # after step 20, later than the first start
    with pytest.raises(ConfigError, match=r"3 starts of job 7 .* step 20.*doctor run"):
        record_start(attempts_file, 9, None)
    record_start(attempts_file, 0, None, job="8")  # a new job, submitted by a person, may start


def test_starts_cut_short_are_refused_only_after_a_higher_limit(tmp_path: Path) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    for restart in range(MAX_CUT_SHORT):
        record_start(attempts_file, restart, None)
    with pytest.raises(ConfigError, match=r"checkpoint\.max_minutes"):
        record_start(attempts_file, MAX_CUT_SHORT, None)


def test_stops_and_restarts_without_slurm_are_not_limited(tmp_path: Path) -> None:
    for restart in range(2 * MAX_CUT_SHORT):
        record_start(tmp_path / "attempts.jsonl", restart, "stopped")
    for number in range(10):
        environ = {"DAPO_MEGATRON_ATTEMPT": str(number)}
        start_attempt(tmp_path / "attempts.jsonl", 0, environ)
        end_attempt(tmp_path / "attempts.jsonl", environ, end="crashed")
