"""Stop signals: all ranks stop together, a second signal ends a rank, and the deadline holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.cluster.attempt import REASON_FILE, read_reason
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.stop import SAME_SECONDS, Stop
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.types import Stopped
from tests.helpers.configs import REPOSITORY
from tests.helpers.ranks import run_ranks

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from dapo_megatron.cluster import watchdog
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.types import Stopped
watchdog.REPORT_SECONDS = 1.0
watch = watchdog.Watchdog(Path(sys.argv[3]), 0, 1, {"start": 600.0})
watch.start()
stop = Stop(float(sys.argv[1]), watch)
stop.listen()
if sys.argv[2] != "no":
    stop.hold(object())
try:
    print("ready", flush=True)
    if sys.argv[2] == "done":
        os.kill(os.getpid(), signal.SIGTERM)
        stop.lift_deadline()
        time.sleep(5.0)  # time for the report and MLflow
        raise SystemExit
    is_reported = False
    for _ in range(30_000):
        time.sleep(0.01)
        if stop.signal and not is_reported:
            is_reported = True
            print("signal", flush=True)
except Stopped as error:
    print(error, flush=True)
    raise SystemExit(75)
"""


def start(seconds: float, hold: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(seconds), hold, str(folder)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, REASON_FILE: str(folder / "verdict")},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def agree(rank: int, folder: Path) -> Any:
    stop = Stop(100.0, Watchdog(folder, rank, 2, {"start": 600.0}))
    stop.listen()
    stop.hold(Ranks(rank, 2, rank))
    stop.check()  # no rank got a signal
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    try:
        stop.check()
    except Stopped as error:
        return str(error), stop.signal
    return None


def test_all_ranks_stop_together_on_a_signal(tmp_path: Path) -> None:
    stopped = "stopped by SIGUSR1"
    assert run_ranks(agree, 2, tmp_path) == [(stopped, None), (stopped, "SIGUSR1")]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_before_the_first_step_stops_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start(100.0, "no", tmp_path)
    process.send_signal(number)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 75
    assert f"stopped by {number.name} before the first step" in out


def test_a_later_second_signal_ends_the_process_but_a_duplicate_does_not(tmp_path: Path) -> None:
    process = start(100.0, "hold", tmp_path)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # a launcher forwards signals that its ranks also got
    assert process.stdout is not None
    assert process.stdout.readline() == "signal\n"
    time.sleep(SAME_SECONDS + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM


def test_at_the_deadline_the_process_exits_and_dumps_its_stacks(tmp_path: Path) -> None:
    process = start(0.5, "hold", tmp_path)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=200)  # without a deadline it would run for 300 s
    assert process.returncode == 1
    assert "Timeout" in err and "<string>" in err  # the stack
    verdict = read_reason(tmp_path / "verdict")
    assert verdict is not None
    assert "no checkpoint was saved within run.stop_seconds (0.5 s) after SIGUSR1" in verdict.reason


def test_a_run_that_has_finished_has_no_deadline(tmp_path: Path) -> None:
    process = start(3.0, "done", tmp_path)
    process.communicate(timeout=200)
    assert process.returncode == 0
