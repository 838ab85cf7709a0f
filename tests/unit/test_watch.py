"""The watchdog, on real processes: who hangs is named, by ranks that end with HUNG."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dapo_megatron.cluster import verdict
from dapo_megatron.cluster.attempt import HUNG
from dapo_megatron.cluster.pulse import pulse_file, read

LIMIT_SECONDS = 2.0
PROMISE_SECONDS = LIMIT_SECONDS + 5.0


@dataclass
class Job:
    logs: Path
    ranks: list[subprocess.Popen[bytes]]

    def log(self, rank: int) -> str:
        return (self.logs / f"rank_{rank}.log").read_text()

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: (self.logs / f"exchange_{step}_0").exists())

    @property
    def verdict(self) -> verdict.Verdict | None:
        return verdict.read(self.logs / "verdict")


def wait_until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs = []

    def start(fault: str = "none", world_size: int = 3, limit: float = LIMIT_SECONDS) -> Job:
        ranks = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "tests.helpers.watched_rank", str(tmp_path)]
            environment = {
                **os.environ,
                "DAPO_MEGATRON_ATTEMPT": "17.0",
                verdict.VARIABLE: str(tmp_path / "verdict"),
            }
            with (tmp_path / f"rank_{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), str(world_size), str(limit), fault],
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                )
        jobs.append(Job(tmp_path, ranks))
        return jobs[-1]

    yield start
    for job in jobs:
        for rank in job.ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_by_the_others(start: Start, stopped: int) -> None:
    job = start()
    job.wait_for_step(3)
    wait_until(lambda: (seen := read(pulse_file(job.logs, stopped))) and seen.step)
    job.ranks[stopped].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: job.verdict)
    assert LIMIT_SECONDS - 0.2 < time.monotonic() - began < PROMISE_SECONDS
    others = [rank for number, rank in enumerate(job.ranks) if number != stopped]
    assert [rank.wait(10) for rank in others] == [HUNG, HUNG]
    assert job.ranks[stopped].poll() is None

    assert job.verdict is not None
    assert job.verdict.code == HUNG
    assert f"rank {stopped} (" in job.verdict.reason
    assert "does not answer" in job.verdict.reason
    named = job.verdict.text.splitlines()[1:]
    assert len(named) == 1, "nobody else is to blame"
    assert "phase update" in named[0]
    # Both others left their stacks and what was told.
    for number in {0, 1, 2} - {stopped}:
        assert "watched_rank.py" in job.log(number)
        assert "in exchange" in job.log(number) or "in all_gather" in job.log(number)
        assert f"requests in flight: {number + 7} of them" in job.log(number)
    report = json.loads((job.logs / "hang_17.0.json").read_text())
    assert [one["state"] for one in report["pulses"]].count("hung") == 2
