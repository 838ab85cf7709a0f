"""Stop signals: all ranks stop together, a second signal ends a rank, and the deadline holds."""

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
from dapo_megatron.cluster.stop import SAME_SECONDS, Stop
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
    is_reported = False
    for _ in range(30_000):
        time.sleep(0.01)
        if stop.signal and not is_reported:
            is_reported = True
            print("signal", flush=True)
        if sys.argv[2] == "done" and stop.signal:
            stop.lift_deadline()
            time.sleep(stop._seconds + 1.0)  # time for the report and MLflow
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
    stop.check(exchange)  # no rank got a signal
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    try:
        stop.check(exchange)
    except Stopped as error:
        return str(error), stop.signal
    return None


def test_all_ranks_stop_together_on_a_signal() -> None:
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


def test_all_ranks_stop_when_another_attempt_owns_the_folder() -> None:
    assert run_ranks(lose_the_folder, 2) == ["taken by attempt 7.1"] * 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_before_the_first_step_stops_at_once(number: signal.Signals) -> None:
    process = start(100.0, "no")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"stopped by {number.name} before the first step" in out


def test_a_later_second_signal_ends_the_process_but_a_duplicate_does_not() -> None:
    process = start(100.0, "hold")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # a launcher forwards signals that its ranks also got
    assert process.stdout is not None
    assert process.stdout.readline() == "signal\n"
    time.sleep(SAME_SECONDS + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_at_the_deadline_the_process_exits_and_dumps_its_stacks() -> None:
    process = start(0.5, "hold")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)  # without a deadline it would run for 300 s
    assert process.returncode == HUNG
    assert "run.stop_seconds" in err
    assert "time.sleep" in err or "<string>" in err  # the stack


def test_a_run_that_has_finished_has_no_deadline() -> None:
    process = start(4.0, "done")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_writing_the_summary_lifts_the_deadline_on_every_rank(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = SimpleNamespace(rank=rank, world_size=2, all_gather=lambda value, of: [value, value])
    folder, stop = SimpleNamespace(summary=tmp_path / "summary.json"), Stop(0.0)
    session: Any = SimpleNamespace(config=tiny_config(), ranks=ranks, folder=folder, stop=stop)
    _conclude(session, Progress(), 1.5)
    assert folder.summary.exists() == (rank == 0)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exited with {code}"))
    stop._exit_at_deadline()


@pytest.mark.parametrize("log", ["full", "hangs"])
def test_at_the_deadline_the_process_exits_even_if_its_log_blocks(log: str) -> None:
    reading, writing = full_pipe()
    if log == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    try:
        process = start(0.5, "hold", stderr=writing)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
    finally:
        os.close(reading)
        os.close(writing)
    assert process.returncode == HUNG
