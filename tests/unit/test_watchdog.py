"""The watchdog on real processes: a hanging rank is named, and the ranks exit with HUNG."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dapo_megatron.cluster import exit_reason
from dapo_megatron.cluster.attempt import HUNG
from dapo_megatron.cluster.heartbeat import (
    RankState,
    heartbeat_file,
    read_heartbeat,
    read_heartbeats,
)
from dapo_megatron.cluster.watchdog import Watchdog, hang_file
from dapo_megatron.doctor import run
from dapo_megatron.tracking.console import RunConsole
from tests.helpers.screen import Screen, Terminal

LIMIT_SECONDS = 3.0
EVENTUALLY_SECONDS = 300.0
"""Timeout for events that happen much earlier, except on a heavily loaded machine."""


@dataclass
class Job:
    folder: Path
    ranks: list[subprocess.Popen[bytes]]

    def log(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text()

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: (self.folder / f"exchange_{step}_0").exists())

    @property
    def verdict(self) -> exit_reason.ExitReason | None:
        return exit_reason.read(self.folder / "verdict")


def wait_until(condition: Callable[[], object], seconds: float = EVENTUALLY_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs = []

    def start(
        fault: str = "none",
        world_size: int = 3,
        limit: float = LIMIT_SECONDS,
        stderr: int | None = None,
    ) -> Job:
        ranks = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "tests.helpers.watched_rank", str(tmp_path)]
            environment = {
                **os.environ,
                "DAPO_MEGATRON_ATTEMPT": "17.0",
                "OMP_NUM_THREADS": "1",
                exit_reason.VARIABLE: str(tmp_path / "verdict"),
            }
            with (tmp_path / f"rank_{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), str(world_size), str(limit), fault],
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
    wait_until(
        lambda: (
            (heartbeat := read_heartbeat(heartbeat_file(job.folder, stopped))) and heartbeat.step
        )
    )
    started = time.monotonic()
    job.ranks[stopped].send_signal(signal.SIGSTOP)
    wait_until(lambda: job.verdict)
    assert time.monotonic() - started > LIMIT_SECONDS / 2
    others = [rank for number, rank in enumerate(job.ranks) if number != stopped]
    assert [rank.wait(EVENTUALLY_SECONDS) for rank in others] == [HUNG, HUNG]
    assert job.ranks[stopped].poll() is None

    assert job.verdict is not None
    assert job.verdict.code == HUNG
    assert f"rank {stopped} (" in job.verdict.reason
    assert "does not answer" in job.verdict.reason
    suspects = job.verdict.text.splitlines()
    assert len(suspects) == 1, "no other rank is named"
    assert "phase update" in suspects[0]
    # Both others logged their stacks and their diagnostics.
    for number in {0, 1, 2} - {stopped}:
        assert "watched_rank.py" in job.log(number)
        assert "in all_gather" in job.log(number)
        assert f"engine {number + 7}\n" in job.log(number)
    assert len(list(job.folder.glob("noted_*"))) == 1
    report = json.loads(hang_file(job.folder, "17.0").read_text())
    assert [heartbeat["state"] for heartbeat in report["pulses"]].count("hung") == 2


@pytest.mark.parametrize(
    ("fault", "why", "code"),
    [
        ("sleep", "behind: it entered 2 exchanges, others 3", HUNG),
        ("elsewhere", "behind: it entered 2 exchanges, others 3", HUNG),
        ("gil", "missing: it does not answer", 1),
        ("end", "missing: it had ended already", 0),
    ],
)
def test_a_hanging_rank_is_named_and_logs_its_stacks(
    start: Start, fault: str, why: str, code: int
) -> None:
    job = start(fault)
    job.wait_for_step(3)
    assert [rank.wait(EVENTUALLY_SECONDS) for rank in job.ranks[:2]] == [HUNG, HUNG]
    assert job.verdict is not None
    assert job.verdict.reason.startswith("hung: rank 2 (")
    assert why in job.verdict.reason
    assert "rank 0 (" not in job.verdict.text
    assert "rank 1 (" not in job.verdict.text
    # The backstop needs no GIL, but takes longer.
    assert job.ranks[2].wait(EVENTUALLY_SECONDS) == code
    assert ("watched_rank.py" in job.log(2)) == (fault != "end")


def test_the_flight_recorder_of_torch_names_the_rank_that_did_not_join(start: Start) -> None:
    job = start("torch", world_size=2, limit=3.0)
    assert [rank.wait(EVENTUALLY_SECONDS) for rank in job.ranks] == [HUNG, HUNG]
    assert job.verdict is not None
    assert "rank 1 (" in job.verdict.reason
    assert "behind: collectives 4 of 5 in group 0" in job.verdict.reason
    assert "gloo:all_reduce 5 in group 0 (default_pg), 3x2, " in job.log(0)
    assert "not finished" in job.log(0)
    assert "not finished" not in job.log(1)


def test_beats_keep_a_slow_rank_running(start: Start) -> None:
    """The step takes three times the limit, with a beat after every tenth of the limit."""
    job = start("slow", world_size=1)
    job.wait_for_step(4)
    assert job.ranks[0].poll() is None
    assert job.verdict is None


def test_heartbeats_survive_sigkill(start: Start) -> None:
    job = start("sleep", limit=600.0)  # all ranks stay in step 3
    wait_until(
        lambda: all(
            heartbeat and (heartbeat.phase, heartbeat.step) == ("update", 3)
            for heartbeat in read_heartbeats(job.folder, 3)
        )
    )
    for rank in job.ranks:
        rank.kill()
        rank.wait()
    for number, last in enumerate(read_heartbeats(job.folder, 3)):
        assert last is not None
        assert (last.rank, last.pid) == (number, job.ranks[number].pid)
        assert (last.state, last.phase, last.attempt) == (
            RankState.RUNNING,
            "update",
            "17.0",
        )
    report = run.report(job.folder, job.folder / "verdict")
    assert report.hang == ""
    assert report.exit_reason is None


def full_pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a full pipe. Writing to it blocks."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    return reading, writing


@pytest.mark.parametrize("log", ["writes", "hangs", "full"])
@pytest.mark.parametrize("fault", ["sleep", pytest.param("disk", marks=pytest.mark.long)])
def test_a_hanging_rank_exits_even_if_its_log_or_disk_blocks(
    start: Start, fault: str, log: str
) -> None:
    reading, writing = full_pipe()
    if log == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    try:
        job = start(fault, world_size=1, limit=2.0, stderr=None if log == "writes" else writing)
        job.wait_for_step(2)
        code = job.ranks[0].wait(EVENTUALLY_SECONDS)
        assert code == HUNG, "by itself, not by faulthandler's timer"
    finally:
        os.close(reading)
        os.close(writing)
    if fault == "sleep":
        assert job.verdict is not None
        assert "all 1 are in phase update, step 3" in job.verdict.reason
        assert (job.folder / "noted_0").exists()
    if log == "writes":
        assert "no sign of life for 2 s, phase update, step 3" in job.log(0)
        assert "watched_rank.py" in job.log(0)
        assert ("the disk or a log hangs as well" in job.log(0)) == (fault == "disk")


HANGING_RANK = """
import sys, time
from pathlib import Path
from dapo_megatron.cluster.watchdog import Watchdog
watch = Watchdog(Path(sys.argv[1]), 1, 2, {"update": 0.5}, "17.0")
watch.start()
watch.terminal_fd = 1
with watch.phase("update", 3):
    time.sleep(1000)
"""


def test_a_hang_report_is_shown_above_the_live_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    console = RunConsole(num_steps=20, file=terminal.file)
    with console.live() as view, (tmp_path / "log").open("wb") as log:
        view.groups(1, 2)
        view.log(1, {"time/step": 2.0, "time/update": 1.0}, 30.0)
        rank_1 = subprocess.run(
            [sys.executable, "-c", HANGING_RANK, str(tmp_path)],
            stdout=terminal.file.fileno(), stderr=log, timeout=300, check=False,
        )  # fmt: skip
        time.sleep(1.0)
    assert rank_1.returncode == HUNG
    screen = Screen()
    screen.feed(terminal.close())
    lines = json.loads(hang_file(tmp_path, "17.0").read_text())["text"].splitlines()
    assert lines[0].startswith("hung: rank 0: missing")
    first = screen.lines.index(lines[0])
    assert screen.lines[first : first + len(lines)] == lines


LIMITS = {"start": 60.0, "update": 50.0, "sync": 40.0, "other": 30.0}


def test_phases_nest(tmp_path: Path) -> None:
    watch = Watchdog(tmp_path, 0, 1, LIMITS)
    states = []

    def note_state() -> None:
        heartbeat = watch.heartbeat()
        states.append((heartbeat.phase, heartbeat.step, heartbeat.limit_seconds))

    note_state()
    with watch.phase("other"):
        note_state()
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
        ("other", 0, 30.0),
        ("update", 3, 50.0),
        ("sync", 3, 40.0),
        ("update", 3, 50.0),
        ("other", 3, 30.0),
        ("", 3, 60.0),
    ]
    with pytest.raises(ValueError, match="'lunch'"), watch.phase("lunch"):
        pass


def test_a_heartbeat_distinguishes_exchanges_from_other_beats(tmp_path: Path) -> None:
    watch = Watchdog(tmp_path, 0, 1, LIMITS)
    watch.record_activity("all_gather 7")
    watch.record_activity("micro-batch 2")
    heartbeat = watch.heartbeat()
    assert (heartbeat.num_exchanges, heartbeat.in_exchange, heartbeat.sign) == (
        7,
        True,
        "micro-batch 2",
    )
    assert heartbeat.place == "outside of phases, step 0, in all_gather 7"
    watch.record_activity("all_gather 7 done")
    assert (watch.heartbeat().num_exchanges, watch.heartbeat().in_exchange) == (7, False)


def test_recording_activity_costs_less_than_5_microseconds(tmp_path: Path) -> None:
    watch = Watchdog(tmp_path, 0, 1, LIMITS)
    watch.start()
    try:
        best = min(
            timeit.timeit(
                lambda: watch.record_activity("all_gather 123 done"),
                number=10_000,
                timer=time.thread_time,
            )
            / 10_000
            for _ in range(5)
        )
    finally:
        watch.close()
    assert best < 5e-6
    ended = read_heartbeat(heartbeat_file(tmp_path, 0))
    assert ended is not None
    assert ended.state is RankState.ENDED


def test_a_stalled_disk_does_not_end_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock thread keeps restarting the backstop while the heartbeat cannot be written."""
    restarts: list[str] = []
    arm = Watchdog._arm

    def note(watch: Watchdog, seconds: float) -> None:
        restarts.append(threading.current_thread().name)
        arm(watch, seconds)

    monkeypatch.setattr(Watchdog, "_arm", note)
    watch = Watchdog(tmp_path, 0, 1, {"update": 600.0})
    watch.start()
    is_stalled, is_back = threading.Event(), threading.Event()
    monkeypatch.setattr(
        "dapo_megatron.cluster.watchdog.write_heartbeat",
        lambda *_: (is_stalled.set(), is_back.wait()),
    )
    with watch.phase("update", 1):
        assert is_stalled.wait(EVENTUALLY_SECONDS)
        before = restarts.count("watch_watch")
        wait_until(lambda: restarts.count("watch_watch") >= before + 3)
    is_back.set()
    watch.close()


def test_a_stalled_disk_does_not_keep_a_rank_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watchdog(tmp_path, 0, 1, LIMITS)
    watch.start()
    is_back = threading.Event()
    monkeypatch.setattr("dapo_megatron.cluster.watchdog.write_heartbeat", lambda *_: is_back.wait())
    watch.close()  # returns while the disk is stalled
    is_back.set()
