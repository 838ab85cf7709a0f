"""A job that gets no further is not started for ever; one that is stopped again and again is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dapo_megatron.cluster.attempt import (
    MAX_CRASHES,
    MAX_CUT_SHORT,
    attempt,
    begin_attempt,
    end_attempt,
)
from dapo_megatron.types import ConfigError


def slurm(restart: int, job: str = "7") -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)}


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
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


def run(book: Path, restart: int, end: str | None, *, step: int = 20, job: str = "7") -> None:
    environ = slurm(restart, job)
    begin_attempt(book, step, environ)
    if end is not None:
        end_attempt(book, end, environ)


@pytest.mark.parametrize("end", ["crashed", "hung"])
def test_a_crash_loop_ends(tmp_path: Path, end: str) -> None:
    book = tmp_path / "attempts.jsonl"
    run(book, 0, end, step=10)
    for restart in range(1, 1 + MAX_CRASHES):
        run(book, restart, end)  # after step 20: the first one got further
    with pytest.raises(ConfigError, match=r"3 starts of job 7 .* step 20.*doctor run"):
        run(book, 9, None)
    run(book, 0, None, job="8")  # submitted anew by a person


def test_stops_do_not_count(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    for restart in range(100):
        run(book, restart, "stopped")


def test_preemption_without_time_to_save_is_borne_for_long_and_not_for_ever(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    for restart in range(MAX_CUT_SHORT):
        run(book, restart, None)
    with pytest.raises(ConfigError, match=r"checkpoint\.max_minutes"):
        run(book, MAX_CUT_SHORT, None)


def test_without_slurm_there_is_a_person(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    for number in range(10):
        environ = {"DAPO_MEGATRON_ATTEMPT": str(number)}
        begin_attempt(book, 0, environ)
        end_attempt(book, "crashed", environ)


def test_half_a_line_is_passed_over(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    run(book, 0, "crashed")
    with book.open("a") as file:
        file.write('\n{"attempt": "7.')
    with book.open("ab") as file:
        file.write(b"\n\xff\xfe\n")
    for restart in (1, 2):
        run(book, restart, "crashed")
    with pytest.raises(ConfigError):
        run(book, 3, None)
