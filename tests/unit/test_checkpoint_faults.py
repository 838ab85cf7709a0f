"""Faults while a checkpoint is written: kills, full disks, failing ranks, another attempt that
takes the run over. At most the checkpoint being written is lost, never an older one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_megatron.checkpoints.folder import fault_of, read_state
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import CheckpointError
from tests.helpers.configs import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.saving import (
    OnTheWay,
    Run,
    Source,
    companions,
    half_written,
    names,
    part,
)

REPOSITORY = Path(__file__).resolve().parents[2]
IN_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

# ---------------------------------------------------------------------------- faults while writing

WRITER = """
import os, sys, time
from pathlib import Path
from tests.helpers.saving import MIB, Run, part
for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    run = Run(Path(line.strip()), keep=1)
    run.save(1)
    run.part = part(64 * MIB)
    start = run.checkpoints.commit(2, {"step": 2})
    print(os.getpid(), flush=True)
    start()
    run.checkpoints.wait()
    print("written", flush=True)
    time.sleep(1000)
"""


@contextmanager
def writer_process() -> Iterator[subprocess.Popen[str]]:
    """Run a process that forks for every folder name on its standard input. The fork saves step 1,
    prints its pid and saves step 2."""
    command = [sys.executable, "-c", WRITER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=REPOSITORY, **pipes) as process:
        yield process
        process.kill()


def test_a_kill_at_any_moment_of_a_write_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    outcomes = set()
    rng = random.Random(6)
    with writer_process() as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def start_save(name: str) -> tuple[Path, int]:
            process.stdin.write(f"{tmp_path / name}\n")
            process.stdin.flush()
            while not (line := process.stdout.readline()).strip().isdigit():
                assert line == "written\n"  # printed just before the previous kill
            return tmp_path / name, int(line)

        _, pid = start_save("undisturbed")
        started = time.monotonic()
        assert process.stdout.readline() == "written\n"
        seconds = time.monotonic() - started
        kill(pid)
        for number in range(30):
            if number >= 10 and ("step_000001", True) in outcomes:
                break
            path, pid = start_save(str(number))
            if number < 10:
                time.sleep(seconds * rng.uniform(0.05, 0.8))
            else:  # the machine is busy, and the random kills missed the write
                wait_for_partial_file(path)
            kill(pid)
            was_half_written = any((path / "checkpoints").glob(".partial/*/*/__*"))
            run = Run(path)  # verifies
            assert run.source is not None
            assert run.folder.notes == []
            assert not half_written(run)
            outcomes.add((run.source.name, was_half_written))
    assert ("step_000001", True) in outcomes, f"no kill in the middle of a write: {outcomes}"


def wait_for_partial_file(path: Path) -> None:
    """Wait until a rank's file of an unpublished step 2 exists, or step 2 is published."""
    checkpoints = path / "checkpoints"
    deadline = time.monotonic() + 60.0
    while not any(checkpoints.glob(".partial/*/step_000002/__*")):
        if (checkpoints / "step_000002").exists():
            return
        assert time.monotonic() < deadline, f"{path}: nothing was written in 60 s"
        time.sleep(0.001)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid):
        time.sleep(0.001)


def test_a_failed_write_loses_only_that_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "x")
    kept = run.save(1)
    with pytest.raises(CheckpointError) as raised:
        run.save(2, OnTheWay(lambda: (_ for _ in ()).throw(OSError(122, "Disk quota exceeded"))))
    message = str(raised.value)
    reason = f"rank 0: {run.folder.checkpoints}: Disk quota exceeded"
    assert message.startswith(f"step_000002 was NOT saved: {reason}; it needs")
    assert f"the newest checkpoint remains {kept}" in message
    [note] = run.notes
    assert note.startswith(f"CHECKPOINT FAILED: step_000002 was NOT saved: {reason}; it needs")
    assert note.endswith(f"the newest checkpoint remains {kept}")
    assert note.removeprefix("CHECKPOINT FAILED: ") in message
    assert message.endswith("resume=auto continues from the newest checkpoint")
    assert f"{note}\n" in capfd.readouterr().err
    assert names(run.folder.checkpoints) == ["step_000001"]
    assert not half_written(run)
    with pytest.raises(CheckpointError):  # the failure stays until a later save succeeds
        run.checkpoints.wait()
    run.part = None
    run.checkpoints.commit(3, {})()  # the run continues and saves again
    run.checkpoints.wait()
    assert names(run.folder.checkpoints) == ["step_000001", "step_000003"]


def test_too_little_disk_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    written: list[int] = []
    with pytest.raises(CheckpointError, match=r"no room; it needs 1,152,921,504,606,846,976 bytes"):
        run.save(1, OnTheWay(lambda: written.append(1), num_bytes=2**60))
    assert not written
    assert "there is no older checkpoint" in run.notes[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


FULL_DISK = """
import os, sys
from pathlib import Path
from tests.helpers.saving import KIB, OnTheWay, Run, names, part
from dapo_megatron.types import CheckpointError
disk, terminal = Path(sys.argv[1]), os.fdopen(os.dup(1), "w")
run = Run(disk / "x")
kept = run.save(1)
log = os.open(disk / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)

def note(text):
    run.notes.append(text)
    print(text, flush=True)  # like a console whose log is on the full disk

run.note = note
filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)

def fill():
    for size in (64 * KIB, 1):
        try:
            while os.write(filler, bytes(size)):
                pass
        except OSError:
            pass

def save(step, part):
    run.part = part
    run.checkpoints.commit(step, {})()

fill()
try:
    os.write(2, bytes(8 * KIB))
except OSError as error:
    print("log:", error, file=terminal)
save(2, None)  # no room
run.checkpoints._join()  # the run continues
os.ftruncate(filler, 0)
os.lseek(filler, 0, os.SEEK_SET)
save(3, OnTheWay(fill))  # the disk fills up after the check
run.checkpoints._join()
try:
    run.checkpoints.wait()
except CheckpointError as error:
    print(error, file=terminal)
os.ftruncate(filler, 0)
save(4, None)
run.checkpoints.wait()
print(names(run.folder.checkpoints), len(run.notes), file=terminal, flush=True)
os._exit(0)  # at exit, Python would retry the failed print and fail
"""


def test_a_completely_full_disk_with_the_logs_on_it_does_not_end_the_run(small_disk: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(small_disk)],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    output = completed.stdout + completed.stderr + (small_disk / "log").read_text(encoding="utf-8")
    assert completed.returncode == 0, output
    log, error, left = completed.stdout.splitlines()
    assert log == "log: [Errno 28] No space left on device"
    assert error.startswith("step_000003 was NOT saved: rank 0: ")
    assert "No space left on device" in error
    assert left == "['step_000001', 'step_000004'] 2"


@IN_THREAD
def test_an_unexpected_error_is_raised_in_the_main_thread(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    with pytest.raises(ZeroDivisionError):
        run.save(1, OnTheWay(lambda: 1 / 0))


# ---------------------------------------------------------------------------- several ranks


def save_three_steps(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Save steps 1 to 4. Rank 1 cannot write its part of step 2, and nobody writes a third row in
    step 3. Return the outcomes."""
    ranks = Ranks(rank, world_size, rank)
    outcomes: dict[str, Any] = {}
    source = Source()
    checkpoints = CheckpointSaver(
        tiny_config(checkpoint__keep=3),
        root,
        ranks,
        ranks.second(),
        policy=source,
        recorder=source,
        companions=companions(root),
    )
    for step in (1, 2, 3, 4):
        source.part = part(rank=rank, num_ranks=3 if step == 3 else 2)
        if step == 2 and rank == 1:
            source.part = OnTheWay(fail, source.part)
        checkpoints.commit(step, {"step": step})()
        ranks.all_gather(step, int)  # meanwhile the run uses its own exchange
        try:
            checkpoints.wait()
            outcomes[f"published {step}"] = (root / f"step_{step:06d}").exists()
        except CheckpointError as error:
            outcomes[f"error {step}"] = str(error)
    outcomes["due"] = checkpoints.due(7)
    outcomes["whole"] = fault_of(root / "step_000004", ranks)
    ranks.barrier()
    if rank == 0:
        path = root / "step_000004" / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    ranks.barrier()
    outcomes["damaged"] = fault_of(root / "step_000004", ranks)
    return outcomes


def fail() -> None:
    raise OSError(5, "Input/output error")


def test_a_checkpoint_is_published_by_all_ranks_or_not_at_all(tmp_path: Path) -> None:
    by_rank = run_ranks(save_three_steps, 2, 2, tmp_path)
    assert by_rank[0] == by_rank[1]
    outcomes = by_rank[0]
    assert outcomes["published 1"]
    reason = f"rank 1: {tmp_path}: Input/output error"
    assert outcomes["error 2"].startswith(f"step_000002 was NOT saved: {reason}; it needs")
    reason = f"{tmp_path}/.partial/0/step_000003: 1,024 of 1,536 elements of 0 were written"
    assert outcomes["error 3"].startswith(f"step_000003 was NOT saved: {reason}; it needs")
    assert outcomes["published 4"]
    assert names(tmp_path) == ["step_000001", "step_000004"]
    assert read_state(tmp_path / "step_000004")["step"] == 4
    assert outcomes["whole"] is None
    assert "__1_0.distcp: its SHA-256 differs" in outcomes["damaged"]
