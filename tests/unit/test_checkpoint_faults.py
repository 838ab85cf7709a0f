"""Faults while a checkpoint is written: kills, disks that are full, ranks that fail, another
attempt that takes the run over. One checkpoint is lost at most, and never one that was there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_megatron.checkpoints import Checkpoints, fault_of, read_state
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import CheckpointError, Fenced
from tests.helpers.configs import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.saving import KIB, MIB, OnTheWay, Run, half_written, names, part

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
    start = run.checkpoints.save(2, {"step": 2})
    print(os.getpid(), flush=True)
    start()
    run.checkpoints.wait()
    print("written", flush=True)
    time.sleep(1000)
"""


@contextmanager
def writer() -> Iterator[subprocess.Popen[str]]:
    """Forks a process for every folder that it is told, which saves step 1 and then begins to save
    step 2, saying its pid."""
    command = [sys.executable, "-c", WRITER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=REPOSITORY, **pipes) as process:
        yield process
        process.kill()


def test_a_kill_at_any_moment_of_a_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    found = set()
    rng = random.Random(6)
    with writer() as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def begin(name: str) -> tuple[Path, int]:
            process.stdin.write(f"{tmp_path / name}\n")
            process.stdin.flush()
            while not (said := process.stdout.readline()).strip().isdigit():
                assert said == "written\n"  # just before it was killed
            return tmp_path / name, int(said)

        _, pid = begin("undisturbed")
        started = time.monotonic()
        assert process.stdout.readline() == "written\n"
        seconds = time.monotonic() - started
        end(pid)
        for number in range(30):
            if number >= 10 and ("step_000001", True) in found:
                break
            path, pid = begin(str(number))
            if number < 10:
                time.sleep(seconds * rng.uniform(0.05, 0.8))
            else:  # the machine is busy, and the random kills missed the write
                wait_for_partial_file(path)
            end(pid)
            was_half_written = any((path / "checkpoints").glob(".partial/*/*/rank_*"))
            run = Run(path)  # verifies
            assert run.source is not None
            assert run.folder.notes == []
            assert not half_written(run)
            found.add((run.source.name, was_half_written))
    assert ("step_000001", True) in found, f"no kill in the middle of a write: {found}"


def wait_for_partial_file(path: Path) -> None:
    """Wait until a rank's file of an unpublished step 2 exists, or step 2 is published."""
    checkpoints = path / "checkpoints"
    deadline = time.monotonic() + 60.0
    while not any(checkpoints.glob(".partial/*/step_000002/rank_*")):
        if (checkpoints / "step_000002").exists():
            return
        assert time.monotonic() < deadline, f"{path}: nothing was written in 60 s"
        time.sleep(0.001)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid):
        time.sleep(0.001)


def test_a_part_that_cannot_be_written_costs_that_checkpoint_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "x")
    kept = run.save(1)
    with pytest.raises(CheckpointError) as caught:
        run.save(2, OnTheWay(lambda: (_ for _ in ()).throw(OSError(122, "Disk quota exceeded"))))
    said = str(caught.value)
    why = f"rank 0: {run.folder.checkpoints}: Disk quota exceeded"
    assert said.startswith(f"step_000002 was NOT saved: {why}; it needs")
    assert f"the newest checkpoint remains {kept}" in said
    [note] = run.notes
    assert note.startswith(f"CHECKPOINT FAILED: step_000002 was NOT saved: {why}; it needs")
    assert note.endswith(f"the newest checkpoint remains {kept}")  # whatever the run does now
    assert note.removeprefix("CHECKPOINT FAILED: ") in said
    assert said.endswith("resume=auto continues from the newest checkpoint")
    assert f"{note}\n" in capfd.readouterr().err
    assert names(run.folder.checkpoints) == ["step_000001"]
    assert not half_written(run)
    with pytest.raises(CheckpointError):  # still so
        run.checkpoints.wait()
    run.part = None
    run.checkpoints.save(3, {})()  # the run goes on, and tries again
    run.checkpoints.wait()
    assert names(run.folder.checkpoints) == ["step_000001", "step_000003"]


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
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


def test_a_full_disk(small_disk: Path) -> None:
    run = Run(small_disk / "x", keep=1)
    kept = run.save(1, part(200 * KIB))
    with pytest.raises(CheckpointError, match=r"no room; it needs 2,09\d,\d{3} bytes"):
        run.save(2, part(2 * MIB))
    # Room there was, when it was looked for.
    filler = small_disk / "filler"
    full = OnTheWay(lambda: filler.write_bytes(bytes(600 * KIB)), part(300 * KIB))
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.save(3, full)
    assert names(run.folder.checkpoints) == ["step_000001"]
    assert not half_written(run)
    filler.unlink()
    run.unlock()
    run = Run(small_disk / "x", keep=1)
    assert run.source == kept
    run.save(4, part(300 * KIB))
    assert names(run.folder.checkpoints) == ["step_000004"]


WITHOUT_A_BYTE = """
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
    print(text, flush=True)  # as a console on a full disk

run.checkpoints.note = note
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
    run.checkpoints.save(step, {})()

fill()
try:
    os.write(2, bytes(8 * KIB))
except OSError as error:
    print("log:", error, file=terminal)
save(2, None)  # no room
run.checkpoints._join()  # the run goes on
os.ftruncate(filler, 0)
os.lseek(filler, 0, os.SEEK_SET)
save(3, OnTheWay(fill))  # and then there was none
run.checkpoints._join()
try:
    run.checkpoints.wait()
except CheckpointError as error:
    print(error, file=terminal)
os.ftruncate(filler, 0)
save(4, None)
run.checkpoints.wait()
print(names(run.folder.checkpoints), len(run.notes), file=terminal, flush=True)
os._exit(0)  # what Python could not print it tries again at its end
"""


def test_a_disk_without_a_byte_left_and_the_logs_on_it(small_disk: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_BYTE, str(small_disk)],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    said = ran.stdout + ran.stderr + (small_disk / "log").read_text(encoding="utf-8")
    assert ran.returncode == 0, said
    log, error, left = ran.stdout.splitlines()
    assert log == "log: [Errno 28] No space left on device"
    assert error.startswith("step_000003 was NOT saved: rank 0: ")
    assert "No space left on device" in error
    assert left == "['step_000001', 'step_000004'] 2"


LIMITED = """
import resource, sys
from pathlib import Path
from tests.helpers.saving import MIB, Run, part
run = Run(Path(sys.argv[1]))
run.save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
run.save(2, part(2 * MIB))
"""


def test_a_file_that_may_not_grow_so_long(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "x")],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert "CheckpointError: step_000002 was NOT saved: rank 0: " in ran.stderr
    assert "File too large" in ran.stderr
    assert Run(tmp_path / "x").source == tmp_path / "x" / "checkpoints" / "step_000001"


@IN_THREAD
def test_an_error_of_another_kind_is_raised_where_the_run_sees_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    with pytest.raises(ZeroDivisionError):
        run.save(1, OnTheWay(lambda: 1 / 0))


# ---------------------------------------------------------------------------- two attempts


@IN_THREAD
@pytest.mark.parametrize("while_it_writes", [True, False])
def test_an_attempt_that_was_cut_off_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_it_writes: bool
) -> None:
    monkeypatch.setenv("DAPO_MEGATRON_ATTEMPT", "7.0")
    first = Run(tmp_path / "x")
    first.save(1)
    begun, go_on = threading.Event(), threading.Event()
    first.part = OnTheWay(lambda: begun.set() or go_on.wait())
    start = first.checkpoints.save(2, {"of": "7.0"})
    if while_it_writes:  # the new owner clears that away
        start()
        assert begun.wait(60)
    first.unlock()  # as a file system does that was cut off
    monkeypatch.setenv("DAPO_MEGATRON_ATTEMPT", "7.1")
    second = Run(tmp_path / "x")
    assert second.source == tmp_path / "x" / "checkpoints" / "step_000001"
    path = second.save(2, of="7.1")
    go_on.set()
    if not while_it_writes:  # it comes as far as publishing
        start()
    for _ in range(2):
        with pytest.raises(Fenced, match=r"taken by attempt 7\.1, so this attempt \(7\.0\)"):
            first.checkpoints.wait()
    assert names(second.folder.checkpoints) == ["step_000001", "step_000002"]
    assert read_state(path)["of"] == "7.1"


# ---------------------------------------------------------------------------- several ranks


def save_together(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Step 1 is whole, of step 2 rank 1 cannot write its part, step 3 is whole again."""
    ranks = Ranks(rank, world_size, rank)
    name = f"rank_{rank:05d}.safetensors"
    said: dict[str, Any] = {}
    one: list[Any] = []
    checkpoints = Checkpoints(
        tiny_config(checkpoint__keep=3), root, ranks, ranks.second(), snapshot=lambda: one[-1]
    )
    for step in (1, 2, 3):
        one.append(part(name=name))
        if step == 2 and rank == 1:
            one.append(OnTheWay(fail, part(name=name)))
        checkpoints.save(step, {"step": step})()
        ranks.all_gather(step, int)  # the run has exchanges of its own meanwhile
        try:
            checkpoints.wait()
            said[f"published {step}"] = (root / f"step_{step:06d}").exists()
        except CheckpointError as error:
            said[f"error {step}"] = str(error)
    said["due"] = checkpoints.due(7)
    said["whole"] = fault_of(root / "step_000003", ranks)
    ranks.barrier()
    if rank == 0:
        path = root / "step_000003" / "rank_00001.safetensors"
        path.write_bytes(path.read_bytes().replace(b"F32", b"F16", 1))
    ranks.barrier()
    said["damaged"] = fault_of(root / "step_000003", ranks)
    return said


def fail() -> None:
    raise OSError(5, "Input/output error")


def test_ranks_publish_together_or_not_at_all(tmp_path: Path) -> None:
    both = run_ranks(save_together, 2, 2, tmp_path)
    assert both[0] == both[1]
    said = both[0]
    assert said["published 1"]
    why = f"rank 1: {tmp_path}: Input/output error"
    assert said["error 2"].startswith(f"step_000002 was NOT saved: {why}; it needs")
    assert said["published 3"]
    assert names(tmp_path) == ["step_000001", "step_000003"]
    assert read_state(tmp_path / "step_000003")["step"] == 3
    assert said["whole"] is None
    assert "rank_00001.safetensors: its SHA-256 differs" in said["damaged"]
