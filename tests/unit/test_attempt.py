"""A job that gets no further is not started for ever; one that is stopped again and again is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_megatron.cluster.attempt import MAX_FRUITLESS, attempt, begin_attempt, end_attempt
from dapo_megatron.types import ConfigError


def slurm(restart: int, job: str = "7") -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)}


def test_names() -> None:
    assert attempt(slurm(2)) == "7.2"
    assert attempt({"SLURM_JOB_ID": "7"}) == "7.0"
    assert attempt({**slurm(2), "DAPO_MEGATRON_ATTEMPT": "mine"}) == "mine"
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
    place = {"MASTER_ADDR": "h1", "MASTER_PORT": "29400"}
    assert attempt({**slurm(2), **torchrun, **place}) == "none-h1-29400.1"
    assert attempt({})


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    begin_attempt(book, 10, slurm(0))
    for restart in range(1, 1 + MAX_FRUITLESS):
        begin_attempt(book, 20, slurm(restart))  # 20: the first one got further
    with pytest.raises(ConfigError, match=r"3 starts of job 7 .* step 20.*doctor run"):
        begin_attempt(book, 20, slurm(9))
    begin_attempt(book, 20, slurm(0, job="8"))  # submitted anew by a person


def test_stops_do_not_count(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    for restart in range(10):
        begin_attempt(book, 20, slurm(restart))
        end_attempt(book)


def test_without_slurm_there_is_a_person(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    for number in range(10):
        begin_attempt(book, 0, {"DAPO_MEGATRON_ATTEMPT": str(number)})


def test_half_a_line_is_passed_over(tmp_path: Path) -> None:
    book = tmp_path / "attempts.jsonl"
    begin_attempt(book, 0, slurm(0))
    with book.open("a") as file:
        file.write('{"attempt": "7.')
    begin_attempt(book, 0, slurm(1))
