"""The watchdog on real processes: a rank that hangs is ended with its stacks, and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dapo_megatron.cluster import attempt, heartbeat
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.doctor import run
from tests.helpers.processes import PATIENCE_SECONDS, wait_until

LIMIT_SECONDS = 3.0


@dataclass
class Job:
    folder: Path
    ranks: list[subprocess.Popen[bytes]]

    def log(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text()

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: (self.folder / f"exchange_{step}_0").exists())

    def wait(self) -> list[int]:
        return [rank.wait(PATIENCE_SECONDS) for rank in self.ranks]

    @property
    def verdict(self) -> attempt.ExitReason:
        verdict = attempt.read_reason(self.folder / "verdict")
        assert verdict is not None
        return verdict


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.5)  # as in watched_rank.py
    jobs = []

    def start(fault: str = "none", world_size: int = 3, stderr: int | None = None) -> Job:
        environment = {
            **os.environ,
            "DAPO_MEGATRON_ATTEMPT": "17.0",
            "OMP_NUM_THREADS": "1",
            attempt.REASON_FILE: str(tmp_path / "verdict"),
        }
        ranks = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "tests.helpers.watched_rank", str(tmp_path)]
            command += [str(rank), str(world_size), str(LIMIT_SECONDS), fault]
            with (tmp_path / f"rank_{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=log if stderr is None else stderr,
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
    job.ranks[stopped].send_signal(signal.SIGSTOP)
    others = [rank for number, rank in enumerate(job.ranks) if number != stopped]
    assert [rank.wait(PATIENCE_SECONDS) for rank in others] == [1, 1]
    assert job.ranks[stopped].poll() is None
    assert job.verdict.code == 1
    assert job.verdict.reason.startswith(f"hung: rank {stopped} (")
    assert "missing: silent" in job.verdict.reason
    assert len(job.verdict.text.splitlines()) == 1, "no other rank is named"
    for number in {0, 1, 2} - {stopped}:
        assert "in exchange" in job.log(number), "its stack"
        assert "no sign of life for 3 s, phase update" in job.log(number)
    report = run.report(job.folder)
    assert [suspect.rank for suspect in report.suspects] == [stopped]
    assert report.hang


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("sleep", "behind: collectives 2 of 3 in exchanges"),
        ("gil", "missing: silent"),
        ("end", "missing: it had ended already"),
    ],
)
def test_a_hanging_rank_is_named_and_logs_its_stacks(start: Start, fault: str, why: str) -> None:
    job = start(fault)
    assert job.wait() == [1, 1, 0 if fault == "end" else 1]
    assert job.verdict.reason.startswith("hung: rank 2 (")
    assert why in job.verdict.reason
    assert len(job.verdict.text.splitlines()) == 1
    assert ("watched_rank.py" in job.log(2)) == (fault != "end")


def test_the_collectives_of_torch_name_the_rank_that_did_not_join(start: Start) -> None:
    job = start("torch", world_size=2)
    assert job.wait() == [1, 1]
    assert "rank 1 (" in job.verdict.reason
    assert "behind: collectives 4 of 5 in group 1 (DATA_PARALLEL)" in job.verdict.reason


def test_signs_of_life_keep_a_slow_rank_running(start: Start) -> None:
    """The step takes three times the limit, with a sign after every tenth of the limit."""
    job = start("slow", world_size=1)
    job.wait_for_step(4)
    assert job.ranks[0].poll() is None


@pytest.mark.parametrize("log", ["writes", "full"])
@pytest.mark.parametrize("fault", ["sleep", "disk"])
def test_a_hanging_rank_exits_even_if_its_log_or_disk_fails(
    start: Start, fault: str, log: str
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    job = start(fault, world_size=1, stderr=full if log == "full" else None)
    os.close(full)
    assert job.wait() == [1]
    if fault == "sleep":
        assert "all 1 are in phase update, step 3" in job.verdict.reason
    if log == "writes":
        assert "watched_rank.py" in job.log(0)


def test_phases_nest(tmp_path: Path) -> None:
    watch = Watchdog(tmp_path, 0, 1, {"start": 60.0, "update": 50.0, "sync": 40.0, "other": 30.0})
    states = []

    def note_state() -> None:
        beat = watch.heartbeat()
        states.append((beat.phase, beat.step, beat.limit_seconds))

    note_state()
    with watch.phase("other"):
        with watch.phase("update", 3):
            note_state()
            with pytest.raises(RuntimeError), watch.phase("sync"):
                note_state()
                raise RuntimeError
            note_state()
        note_state()
    note_state()
    assert states == [
        ("", 0, 60.0),
        ("update", 3, 50.0),
        ("sync", 3, 40.0),
        ("update", 3, 50.0),
        ("other", 3, 30.0),
        ("", 3, 60.0),
    ]
