"""Signals: agreed on by all ranks, a second one at once, and never later than the deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.cluster.attempt import HUNG
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.loop import Progress
from dapo_megatron.run.session import _conclude
from dapo_megatron.types import Fenced, Stopped
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.ranks import run_ranks
from tests.unit.test_watchdog import full_pipe

PROGRAM = """
import sys, time
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.types import Stopped
stop = Stop(float(sys.argv[1]))
stop.listen()
if sys.argv[2] != "no":
    stop.hold()
try:
    print("ready", flush=True)
    for _ in range(3000):
        time.sleep(0.01)
        if sys.argv[2] == "done" and stop.signal:
            stop.lift_deadline()
            time.sleep(1.5)  # its report, MLflow
            break
except Stopped as error:
    print(error, flush=True)
    raise SystemExit(75)
"""


def start(seconds: float, hold: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(seconds), hold],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def agree(rank: int) -> Any:
    stop = Stop(100.0)
    stop.listen()
    stop.hold()
    exchange = Ranks(rank, 2, rank)
    stop.check(exchange)  # nobody was asked
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    try:
        stop.check(exchange)
    except Stopped as error:
        return str(error), stop.signal
    return None


def test_all_ranks_stop_together() -> None:
    assert run_ranks(agree, 2) == [("stopped by SIGUSR1", None), ("stopped by SIGUSR1", "SIGUSR1")]


def lose_the_folder(rank: int) -> Any:
    def check_owner() -> None:
        raise Fenced("taken by attempt 7.1")

    stop = Stop(100.0, check_owner)
    stop._owner_checked -= 100.0
    try:
        stop.check(Ranks(rank, 2, rank))
    except Fenced as error:
        return str(error)
    return None


def test_a_run_that_was_cut_off_ends_on_all_ranks() -> None:
    assert run_ranks(lose_the_folder, 2) == ["taken by attempt 7.1"] * 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_before_there_is_anything_to_save_it_stops_at_once(number: signal.Signals) -> None:
    process = start(100.0, "no")
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 75
    assert f"stopped by {number.name} before the first step" in out


def test_a_second_signal_ends_it_at_once_the_same_one_twice_does_not() -> None:
    process = start(100.0, "hold")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # a launcher passes on what the ranks got as well
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGTERM


def test_it_is_gone_by_the_deadline_and_says_where_it_was() -> None:
    process = start(0.5, "hold")
    begun = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=10)
    assert process.returncode == HUNG
    assert time.monotonic() - begun < 3
    assert "run.stop_seconds" in err
    assert "time.sleep" in err or "<string>" in err  # the stack


def test_a_run_that_is_done_when_the_signal_comes_is_not_one_that_hung() -> None:
    process = start(0.5, "done")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_with_its_summary_a_run_has_no_deadline_on_any_rank(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = SimpleNamespace(rank=rank, world_size=2, all_gather=lambda value, of: [value, value])
    folder, stop = SimpleNamespace(summary=tmp_path / "summary.json"), Stop(0.0)
    here: Any = SimpleNamespace(config=tiny_config(), ranks=ranks, folder=folder, stop=stop)
    _conclude(here, Progress(), 1.5)
    assert folder.summary.exists() == (rank == 0)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    stop._exit_at_deadline()


@pytest.mark.parametrize("log", ["full", "hangs"])
def test_it_is_gone_by_the_deadline_whatever_its_log_does(log: str) -> None:
    reading, writing = full_pipe()
    if log == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    try:
        process = start(0.5, "hold", stderr=writing)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=10)
    finally:
        os.close(reading)
        os.close(writing)
    assert process.returncode == HUNG
