"""Attempts: their names, and the limit on restarts of a job that makes no progress."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dapo_megatron.cluster.attempt import (
    MAX_CRASHES,
    MAX_CUT_SHORT,
    attempt,
    end_attempt,
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


def record_start(
    attempts_file: Path, restart: int, end: str | None, *, step: int = 20, job: str = "7"
) -> None:
    environ = slurm(restart, job)
    start_attempt(attempts_file, step, environ)
    if end is not None:
        end_attempt(attempts_file, end, environ)


@pytest.mark.parametrize("end", ["crashed", "hung"])
def test_a_crash_loop_is_refused_after_the_limit(tmp_path: Path, end: str) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    record_start(attempts_file, 0, end, step=10)
    for restart in range(1, 1 + MAX_CRASHES):
        record_start(attempts_file, restart, end)  # after step 20, later than the first start
    with pytest.raises(ConfigError, match=r"3 starts of job 7 .* step 20.*doctor run"):
        record_start(attempts_file, 9, None)
    record_start(attempts_file, 0, None, job="8")  # a new job, submitted by a person, may start


def test_stopped_starts_do_not_count_as_crashes(tmp_path: Path) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    for restart in range(100):
        record_start(attempts_file, restart, "stopped")


def test_starts_cut_short_are_refused_only_after_a_higher_limit(tmp_path: Path) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    for restart in range(MAX_CUT_SHORT):
        record_start(attempts_file, restart, None)
    with pytest.raises(ConfigError, match=r"checkpoint\.max_minutes"):
        record_start(attempts_file, MAX_CUT_SHORT, None)


def test_without_slurm_restarts_are_not_limited(tmp_path: Path) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    for number in range(10):
        environ = {"DAPO_MEGATRON_ATTEMPT": str(number)}
        start_attempt(attempts_file, 0, environ)
        end_attempt(attempts_file, "crashed", environ)


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    attempts_file = tmp_path / "attempts.jsonl"
    record_start(attempts_file, 0, "crashed")
    with attempts_file.open("a") as file:
        file.write('\n{"attempt": "7.')
    with attempts_file.open("ab") as file:
        file.write(b"\n\xff\xfe\n")
    for restart in (1, 2):
        record_start(attempts_file, restart, "crashed")
    with pytest.raises(ConfigError):
        record_start(attempts_file, 3, None)
