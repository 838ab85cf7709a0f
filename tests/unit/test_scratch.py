"""Scratch folders on a node: those prepared by another user are not used, and those of killed
processes are removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dapo_megatron.cluster.scratch import CACHES, SOCKETS, clear_abandoned, locked

REPOSITORY = Path(__file__).resolve().parents[2]
UID = os.geteuid()
OTHER = 65534

PREPARE = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import os, sys, time
from dapo_megatron.cluster.scratch import prepare_scratch
prepare_scratch()
print(*(os.environ.get(name) for name in {[*CACHES, SOCKETS]!r}), flush=True)
time.sleep(float(sys.argv[1]))
"""


@contextmanager
def rank(parent: Path, **environ: str) -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """Start a process with scratch folders in `parent`; yield it and the folders."""
    kept = {name: value for name, value in os.environ.items() if name not in (*CACHES, SOCKETS)}
    kept.pop("SLURM_JOB_ID", None)
    environ = {**kept, "TMPDIR": str(parent), "PYTHONPATH": str(REPOSITORY), **environ}
    command = [sys.executable, "-c", PREPARE, "1000"]
    with subprocess.Popen(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield process, [Path(word) for word in line.split()]
        finally:
            process.kill()


@pytest.fixture
def parent() -> Iterator[Path]:
    """A short path such as /tmp, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("job", "name"), [("", f"dapo-{UID}"), ("4711", f"dapo-{UID}-4711")])
def test_ranks_of_a_node_share_private_caches(parent: Path, job: str, name: str) -> None:
    environ = {"SLURM_JOB_ID": job} if job else {}
    with rank(parent, **environ) as (_, first), rank(parent, **environ) as (_, second):
        assert first[:3] == second[:3] == [parent / name / folder for folder in CACHES.values()]
        assert first[3] != second[3]
        for folder in (parent / name, first[3]):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.stat().st_uid == UID


def test_folders_set_by_the_user_are_kept(parent: Path) -> None:
    given = {name: f"/my/{name}" for name in (*CACHES, SOCKETS)}
    with rank(parent, **given) as (_, folders):
        assert folders == [Path(value) for value in given.values()]
    assert names(parent) == []


def of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, OTHER, OTHER)


PREPARED = {
    "a link": lambda folder: folder.symlink_to("/etc"),
    "a link to nothing": lambda folder: folder.symlink_to("/no/such/folder"),
    "a file": lambda folder: folder.touch(),
    "open to all": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
    "of another user": of_another_user,
}


@pytest.mark.parametrize("kind", PREPARED)
def test_a_folder_that_another_user_may_have_prepared_is_not_used(parent: Path, kind: str) -> None:
    if UID != 0 and kind == "of another user":
        pytest.skip("needs root, to make a folder of another user")
    folder = parent / f"dapo-{UID}-7"
    PREPARED[kind](folder)
    with rank(parent, SLURM_JOB_ID="7") as (process, folders):
        for cache in folders[:3]:
            assert cache.parent.parent == parent and cache.parent != folder
            assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
        process.kill()
        assert process.stderr is not None
        assert f"warning: {folder}: it " in process.stderr.read()


def test_the_next_start_removes_folders_of_a_killed_job(parent: Path) -> None:
    with rank(parent, SLURM_JOB_ID="1") as (killed, folders):
        (folders[0] / "deep").mkdir(parents=True)
        (folders[3] / "socket").touch()
        with rank(parent, SLURM_JOB_ID="2") as (_, others):
            assert (folders[0] / "deep").exists(), "the folder of a running job is kept"
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            with rank(parent, SLURM_JOB_ID="3") as (_, third):
                kept = {f"dapo-{UID}-2", f"dapo-{UID}-3", others[3].name, third[3].name}
                assert set(names(parent)) == kept


def test_caches_of_a_requeued_job_are_kept(parent: Path) -> None:
    with rank(parent, SLURM_JOB_ID="1") as (_, folders):
        folders[0].mkdir()
    with rank(parent, SLURM_JOB_ID="1") as (_, again):
        assert again[0] == folders[0] and folders[0].exists()


def test_a_rank_that_ends_deletes_its_sockets(parent: Path) -> None:
    with rank(parent) as (process, folders):
        assert folders[3].exists()
        process.send_signal(signal.SIGINT)
        process.wait()
        assert names(parent) == [f"dapo-{UID}"]


def test_a_long_tmpdir_is_not_used_for_sockets(tmp_path: Path) -> None:
    parent = tmp_path / ("x" * 60)
    parent.mkdir()
    with rank(parent) as (_, folders):
        assert str(folders[3]) == "None"


def test_shared_memory_is_removed_after_the_last_rank_that_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / f"dapo-{UID}-29500"
    segment, other = tmp_path / f"{folder.name}-tp", tmp_path / f"dapo-{UID}-295000-tp"
    with locked(folder):
        with locked(folder):
            segment.touch()
            other.touch()
        clear_abandoned(tmp_path)
        assert segment.exists(), "a rank still holds it"
    assert names(tmp_path) == [other.name]


def test_files_of_other_users_are_not_removed(tmp_path: Path) -> None:
    if UID != 0:
        pytest.skip("needs root, to make files of another user")
    of_another_user(tmp_path / f"dapo-{UID}-1")
    (tmp_path / f"dapo-{UID}-2").mkdir()
    (tmp_path / f"dapo-{UID}-2-segment").touch()
    os.chown(tmp_path / f"dapo-{UID}-2-segment", OTHER, OTHER)
    (tmp_path / f"dapo-{UID}-3").symlink_to(REPOSITORY)
    (tmp_path / "dapo-29500-older").touch()
    clear_abandoned(tmp_path)
    remaining = [f"dapo-{UID}-1", f"dapo-{UID}-2-segment", f"dapo-{UID}-3", "dapo-29500-older"]
    assert names(tmp_path) == sorted(remaining)
    with locked(tmp_path / f"dapo-{UID}-1"):  # another user's folder cannot be locked; no error
        pass


def port_of_rank_in(parent: Path) -> str | None:
    """MASTER_PORT of the ranks whose TMPDIR is `parent`."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            ports = [text for text in variables if text.startswith(b"MASTER_PORT=")]
            if ports and f"TMPDIR={parent}".encode() in variables:
                return ports[0].partition(b"=")[2].decode()
    return None


@pytest.mark.long
def test_the_next_start_removes_everything_of_a_run_killed_while_building_its_engine(
    parent: Path,
) -> None:
    command = [sys.executable, "-m", "dapo_megatron", "train", "model_configs/tiny_cpu.yaml"]
    options = [f"run.directory={parent}/runs", "tracking.mlflow=false"]
    environ = {**os.environ, "TMPDIR": str(parent)}

    def remaining() -> list[str]:
        shared = names(Path("/dev/shm"))
        return [name for name in shared if f"dapo-{UID}-{port_of_run}" in name]

    with subprocess.Popen([*command, *options], cwd=REPOSITORY, env=environ) as run:
        deadline = time.monotonic() + 240
        while (port_of_run := port_of_rank_in(parent)) is None:
            assert time.monotonic() < deadline
        while not any("cpushm" in name for name in remaining()):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.01)
        run.kill()
    while port_of_rank_in(parent) is not None:  # the ranks end with it
        assert time.monotonic() < deadline
    assert len(remaining()) >= 3  # a lock, and the segments that two ranks share
    assert len(names(parent)) == 5, (
        "runs, caches, rendezvous folder, and socket folders of two ranks"
    )
    with rank(parent) as (_, [*_, sockets]):
        clear_abandoned(Path("/dev/shm"))
        assert remaining() == []
        assert names(parent) == sorted([f"dapo-{UID}", sockets.name, "runs"])
