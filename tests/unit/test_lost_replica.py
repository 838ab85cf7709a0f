"""Replicas that fall silent or send garbage during a phase: an error names them and ends it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dapo_megatron.cluster.messages import Member
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.messages import GroupRequest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout import driver as driver_module
from dapo_megatron.rollout import worker as worker_module
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.types import Completion, DapoError, RankError, SampleRequest
from tests.helpers.ranks import run_ranks
from tests.helpers.workers import (
    CannedEngine,
    InstantGrading,
    prompt,
    sampling,
    started,
    wait_until,
)

ALIVE_SECONDS = 0.5
SILENCE_SECONDS = 6.0
KINDS = ("silent", "stopped", "garbage")
LOST = 1
"""The rank that is lost. Rank 0 has the coordinator, and rank 2 is idle all the time."""


class Ended(Exception):
    """The test is over."""


class StoppingEngine(CannedEngine):
    """Engine whose process is stopped in a step."""

    def __init__(self, rank: int, pid_file: Path, end: Path) -> None:
        super().__init__(rank, 3)
        self._pid_file, self._end = pid_file, end

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        self._pid_file.with_suffix(".part").write_text(str(os.getpid()))
        self._pid_file.with_suffix(".part").rename(self._pid_file)
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(self._end.exists, "the run has ended")
        raise Ended


def lose_a_replica(rank: int, kind: str, folder: Path) -> str | None:
    driver_module.ALIVE_SECONDS = worker_module.ALIVE_SECONDS = ALIVE_SECONDS
    worker_module.IDLE_SECONDS = ALIVE_SECONDS / 4
    end, pid_file = folder / "end", folder / "pid"
    engine: Any = CannedEngine(rank, 3)
    if kind == "stopped" and rank == LOST:
        engine = StoppingEngine(rank, pid_file, end)

    def check_end() -> str:
        """Replace the stop signal, which healthy workers ask for now and then."""
        if end.exists():
            raise Ended
        return ""

    try:
        with started(
            engine,
            Ranks(rank, 3, rank),
            InstantGrading(),
            silence_seconds=SILENCE_SECONDS,
            stop=check_end,
        ) as engines:
            if rank == 0:
                return _error_of_the_coordinator(engines, kind, pid_file, end)
            if rank == LOST and kind == "silent":  # its thread does nothing any more
                wait_until(end.exists, "the run has ended")
                return None
            if rank == LOST and kind == "garbage":
                _member_of(engines).send(b"\xc1 no report")
            engines.run(lambda driver: None, None)
    except Ended:
        return None
    except DapoError as error:
        wait_until(end.exists, "the run has ended")  # else its connection would be lost
        return str(error)
    raise AssertionError("the phase ended as if nothing had happened")


def _member_of(engines: Engines) -> Member:
    return engines.worker._member  # type: ignore[attr-defined, no-any-return]


def _error_of_the_coordinator(engines: Engines, kind: str, pid_file: Path, end: Path) -> str:
    def task(driver: EngineDriver) -> None:
        driver.start(sampling("use"))
        requests: list[Sequence[GroupRequest]] = [[], [], []]
        requests[LOST] = [GroupRequest(7, prompt(7), ((2, None),))]
        driver.advance(requests, [[], [], []])
        while True:
            driver.advance([[], [], []], [[], [], []])

    try:
        engines.run(task, None)
    except RankError as error:
        return str(error)
    finally:
        end.touch()
        if kind == "stopped":
            os.kill(int(pid_file.read_text()), signal.SIGCONT)
    raise AssertionError("no error")


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_replica_is_named_and_no_other(kind: str, tmp_path: Path) -> None:
    error, of_lost_rank, of_healthy_rank = run_ranks(lose_a_replica, 3, kind, tmp_path)
    assert re.match(r"replica 1 \(rank 1, host \S+\): ", error), error
    if kind == "garbage":
        assert "sent a message that cannot be read" in error
    else:
        assert "no sign of life for" in error
        assert "watchdog.generate" in error
        seconds = float(re.search(r"for (\d+) s", error)[1])  # type: ignore[index]
        assert seconds >= SILENCE_SECONDS
    assert (of_lost_rank, of_healthy_rank) == (None, None)


NUM_IDLE_TURNS = 40
"""Turns of 0.1 s: together longer than the limit of three times ALIVE_SECONDS."""


def test_an_idle_replica_is_not_lost_however_short_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shows signs of life only every ALIVE_SECONDS."""
    for module in (driver_module, worker_module):
        monkeypatch.setattr(module, "ALIVE_SECONDS", 1.0)
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(driver_module, "WAIT_SECONDS", 0.1)
    num_turns = 0

    def task(driver: EngineDriver) -> int:
        nonlocal num_turns
        driver.start(sampling("use"))
        for _ in range(NUM_IDLE_TURNS):
            assert driver.advance([[]], [[]]) == []
            num_turns += 1
        return num_turns

    ranks = Ranks(0, 1, 0)
    with started(CannedEngine(0), ranks, InstantGrading(), silence_seconds=0.01) as engines:
        assert engines.run(task, int) == NUM_IDLE_TURNS


def test_an_error_of_the_coordinator_ends_the_phase_of_its_worker() -> None:
    def task(driver: EngineDriver) -> None:
        driver.start(sampling("use"))
        raise ZeroDivisionError("in the coordinator")

    ranks = Ranks(0, 1, 0)
    with (
        started(CannedEngine(0), ranks, InstantGrading()) as engines,
        pytest.raises(ZeroDivisionError, match="in the coordinator"),
    ):
        engines.run(task, None)
    assert "coordinator" not in [thread.name for thread in threading.enumerate()]


def test_a_stop_signal_of_a_rank_without_an_engine_reaches_the_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "WAIT_SECONDS", 0.1)

    def task(driver: EngineDriver) -> list[str]:
        driver.start(sampling("use"))
        driver.stop_signal = "SIGUSR1"
        return [report.stop for _, report in driver.advance([[]], [[]])]

    with started(CannedEngine(0), Ranks(0, 1, 0), InstantGrading()) as engines:
        assert engines.run(task, list[str]) == ["SIGUSR1"]
