"""A run folder: fresh starts, resuming, one process at a time, and complete checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.checkpoints.folder import newest, read_state, write_manifest
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.files import write_json
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.types import CheckpointError, ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
ALONE = Ranks(0, 1, 0)


def add_checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    write_json(path / "state.json", {"step": step})
    write_manifest(path, {})
    return path


def old_run(path: Path) -> RunFolder:
    """Make the folder of a run that has ended; it is no longer locked."""
    folder = RunFolder(path)
    enter(folder, "never")
    folder.metrics.write_text("old metrics", encoding="utf-8")
    (folder.samples / "step_000001.jsonl").write_text("old samples", encoding="utf-8")
    assert folder._lock is not None
    folder._lock.close()
    return folder


def enter(folder: RunFolder, resume: str) -> Path | None:
    """Enter the folder in the same way as run/context.py."""
    folder.acquire(lock_seconds=0.0)
    source = folder.find_checkpoint(resume, ALONE)
    folder.prepare(resume, source)
    return source


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


# ---------------------------------------------------------------------------- opening


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_new_run_gets_an_empty_folder(tmp_path: Path, resume: str) -> None:
    folder = RunFolder(tmp_path / "deep" / "x")
    assert enter(folder, resume) is None
    assert names(folder.path) == ["checkpoints", "logs", "samples"]
    assert names(tmp_path / "deep") == ["x"]


def test_resume_never_keeps_older_runs_under_numbered_names(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for number in (1, 2, 3):
        old_run(path).metrics.write_text(f"run {number}", encoding="utf-8")
    folder = RunFolder(path)
    assert enter(folder, "never") is None
    assert not folder.is_continued
    assert names(tmp_path) == ["x", "x.1", "x.2", "x.3"]
    for number in (1, 2, 3):
        aside = tmp_path / f"x.{number}"
        assert (aside / "metrics.jsonl").read_text(encoding="utf-8") == f"run {number}"
        assert (aside / "samples" / "step_000001.jsonl").exists()
    assert names(path) == ["checkpoints", "logs", "samples"]
    assert names(folder.samples) == []


def test_resume_never_skips_names_that_exist(tmp_path: Path) -> None:
    old_run(tmp_path / "x")
    (tmp_path / "x.1").write_text("a user's file", encoding="utf-8")
    enter(RunFolder(tmp_path / "x"), "never")
    assert names(tmp_path) == ["x", "x.1", "x.2"]
    assert (tmp_path / "x.1").read_text(encoding="utf-8") == "a user's file"


def test_resume_auto_continues_in_the_same_folder(tmp_path: Path) -> None:
    path = tmp_path / "x"
    old_run(path)
    add_checkpoint(path, 2)
    last = add_checkpoint(path, 10)
    folder = RunFolder(path)
    assert enter(folder, "auto") == last
    assert folder.is_continued
    assert folder.metrics.read_text(encoding="utf-8") == "old metrics"
    assert names(tmp_path) == ["x"]
    assert names(folder.checkpoints) == ["step_000002", "step_000010"]


def test_resume_auto_without_a_checkpoint_starts_again_in_the_same_folder(tmp_path: Path) -> None:
    old_run(tmp_path / "x")
    folder = RunFolder(tmp_path / "x")
    assert enter(folder, "auto") is None
    assert folder.is_continued
    assert names(tmp_path) == ["x"]


def test_resuming_from_an_own_checkpoint_sets_later_ones_aside(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    old_run(path)
    steps = {step: add_checkpoint(path, step) for step in (2, 4, 6)}
    (path / "checkpoints" / "step_000006.1").mkdir()  # set aside earlier
    folder = RunFolder(path)
    # A relative path is accepted, too.
    assert enter(folder, os.path.relpath(steps[4])) == Path(os.path.relpath(steps[4]))
    assert folder.is_continued
    assert names(folder.checkpoints) == [
        "step_000002",
        "step_000004",
        "step_000006.1",
        "step_000006.2",
    ]
    assert newest(folder.checkpoints) == steps[4]


def test_a_checkpoint_that_was_set_aside_can_be_resumed_from(tmp_path: Path) -> None:
    path = tmp_path / "x"
    old_run(path)
    for step in (2, 4):
        add_checkpoint(path, step)
    aside = (path / "checkpoints" / "step_000004").rename(path / "checkpoints" / "step_000004.1")
    folder = RunFolder(path)
    assert enter(folder, str(aside)) == aside
    assert folder.is_continued
    assert read_state(aside) == {"step": 4}
    assert newest(folder.checkpoints) == path / "checkpoints" / "step_000002"


def test_a_checkpoint_of_another_run_starts_a_new_one(tmp_path: Path) -> None:
    source = add_checkpoint(tmp_path / "other", 7)
    old_run(tmp_path / "x")
    folder = RunFolder(tmp_path / "x")
    assert enter(folder, str(source)) == source
    assert not folder.is_continued
    assert names(tmp_path) == ["other", "x", "x.1"]
    assert names(folder.checkpoints) == []
    assert source.exists()


def test_a_path_that_is_no_checkpoint_is_refused_before_anything_is_renamed(tmp_path: Path) -> None:
    old_run(tmp_path / "x")
    with pytest.raises(CheckpointError, match="resume: nowhere is not a checkpoint"):
        enter(RunFolder(tmp_path / "x"), "nowhere")
    assert names(tmp_path) == ["x"]


# ---------------------------------------------------------------------------- the lock

HOLDER = """
import sys, time
from pathlib import Path
from dapo_megatron.run.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.acquire()
print("open", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def holder(path: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the lock of the folder."""
    command = [sys.executable, "-c", HOLDER, str(path), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_second_start_is_refused_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    monkeypatch.setenv("DAPO_MEGATRON_ATTEMPT", "7.0")
    with holder(path, seconds=1000) as process:
        (path / "metrics.jsonl").write_text("of the first run", encoding="utf-8")
        named = rf"in use by attempt 7\.0, node .*, process {process.pid}\b"
        for resume in ("never", "auto"):
            with pytest.raises(ConfigError, match=named):
                enter(RunFolder(path), resume)
        monkeypatch.setenv("SLURM_JOB_ID", "8")  # whose requeue may find the folder free
        with pytest.raises(CheckpointError, match=named):
            enter(RunFolder(path), "auto")
        assert names(tmp_path) == ["x"]
        assert (path / "metrics.jsonl").read_text(encoding="utf-8") == "of the first run"
    # Its lock is released however it ends.
    folder = RunFolder(path)
    enter(folder, "auto")
    assert folder.is_continued


OTHER = 65534
"""Id of another user and their group."""
WRITTEN = (
    *(".", ".lock", ".pulse", ".pulse/rank_00000.json", "checkpoints/.partial"),
    *("checkpoints/step_000001/state.json", "config.yaml", "logs", "metrics.jsonl"),
    *("policy/step_000001_00000.parquet", "samples/step_000001/state.json"),
)
"""Paths in a run's folder, and the folder itself."""
PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, secret: path.symlink_to(secret),
    "link to a folder": lambda path, secret: path.symlink_to(secret.parent),
    "link to nothing": lambda path, secret: path.symlink_to(secret.with_name("bash_profile")),
    "file": lambda path, secret: path.write_text("{}"),
    "FIFO": lambda path, secret: os.mkfifo(path),
    "folder": lambda path, secret: path.mkdir(),
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    yield
    os.umask(before)


def prepared(folder: Path, name: str) -> tuple[Path, Path]:
    """Make the folders up to `name` in a run's folder, and a private file of the victim."""
    secret = folder / "home" / "bashrc"
    secret.parent.mkdir()
    secret.write_text("my settings", encoding="utf-8")
    path = folder / "runs" / "x" / name
    path.parent.mkdir(parents=True)
    return path, secret


def tree(folder: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(path), path.lstat().st_ino, path.lstat().st_mtime_ns) for path in folder.rglob("*")
    )


@as_root
@settings(max_examples=66)
@given(name=st.sampled_from(WRITTEN), kind=st.sampled_from(list(PLANTED)))
def test_entries_of_another_user_are_refused_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: str
) -> None:
    tmp_path = tmp_path_factory.mktemp("planted")
    path, secret = prepared(tmp_path, name)
    PLANTED[kind](path, secret)
    os.lchown(path, OTHER, OTHER)
    before = tree(tmp_path / "home")
    with pytest.raises(ConfigError, match=rf"^run\.name: {path} is .* that user {OTHER} has"):
        RunFolder(tmp_path / "runs" / "x").acquire(lock_seconds=0.0)
    assert tree(tmp_path / "home") == before
    assert secret.read_text(encoding="utf-8") == "my settings"
    with suppress(IsADirectoryError):  # the remedy
        path.unlink()
    if path.is_dir():
        path.rmdir()
    path.parent.mkdir(exist_ok=True)
    RunFolder(tmp_path / "runs" / "x").acquire(lock_seconds=0.0)


@as_root
@pytest.mark.parametrize("name", [".", ".pulse"])
def test_a_rank_checks_what_it_writes_before_rank_0_has_checked_everything(
    tmp_path: Path, name: str
) -> None:
    path, secret = prepared(tmp_path, name)
    path.symlink_to(secret)
    os.lchown(path, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"{path} is a link to {secret} that user {OTHER} has"):
        RunFolder(tmp_path / "runs" / "x").create()


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank_0.log", ".pulse/rank_00000.json"])
def test_a_second_name_of_a_private_file_is_refused_in_a_shared_folder(
    tmp_path: Path, name: str, mode: int
) -> None:
    path, secret = prepared(tmp_path, name)
    path.hardlink_to(secret)
    path.parent.chmod(mode)
    folder = RunFolder(tmp_path / "runs" / "x")
    if mode == 0o755:  # nobody else can have made it: a copy of the run by `cp -al`
        folder.acquire(lock_seconds=0.0)
    else:
        with pytest.raises(ConfigError, match=rf"{path} is a file with 2 names"):
            folder.acquire(lock_seconds=0.0)


@as_root
@pytest.mark.parametrize(
    ("mask", "group", "mode", "kind", "is_accepted"),
    [
        (0o007, 0, 0o770, "file", True),
        (0o007, 0, 0o2770, "folder", True),
        (0o002, 0, 0o775, "file", True),
        (0o007, 0, 0o770, "link", False),
        (0o007, 0, 0o770, "link to nothing", False),
        (0o007, 0, 0o770, "FIFO", False),
        (0o007, OTHER, 0o770, "file", False),  # of a group of which this user is no member
        (0o007, 0, 0o2777, "file", False),  # anyone can create a file of the folder's group
        (0o007, 0, 0o3777, "folder", False),
        (0o022, 0, 0o770, "file", False),
        (0o077, 0, 0o770, "folder", False),
        (0o027, 0, 0o770, "file", False),
    ],
)
def test_a_group_shares_a_run_if_the_umask_allows_it(
    tmp_path: Path, mask: int, group: int, mode: int, kind: str, is_accepted: bool
) -> None:
    path, secret = prepared(tmp_path, "logs")
    PLANTED[kind](path, secret)
    os.lchown(path, OTHER, group)
    path.parent.chmod(mode)
    with umask(mask):
        if is_accepted:
            RunFolder(path.parent).acquire(lock_seconds=0.0)
        else:
            with pytest.raises(ConfigError, match=f"user {OTHER} has created"):
                RunFolder(path.parent).acquire(lock_seconds=0.0)


def test_links_of_this_user_are_allowed(tmp_path: Path) -> None:
    path, _ = prepared(tmp_path, "checkpoints")
    path.symlink_to(tmp_path)  # to another disk
    RunFolder(path.parent).acquire(lock_seconds=0.0)


@as_root
@pytest.mark.parametrize("name", ["mlflow.db", "mlartifacts"])
def test_a_link_to_another_database_next_to_the_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/srv/cookies.db")
    os.lchown(tmp_path / name, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"{name} is a link to /srv/cookies.db"):
        RunFolder(tmp_path / "x").create()


@pytest.mark.parametrize(
    ("name", "mode", "is_reported"),
    [
        ("runs", 0o777, True),
        ("runs", 0o1777, False),
        ("runs", 0o775, False),
        ("runs/x", 0o777, True),
        ("runs/x", 0o1777, True),
        ("runs/x", 0o770, False),
        ("runs/x/logs", 0o777, True),
    ],
)
def test_folders_to_which_any_user_may_write_are_reported(
    tmp_path: Path, name: str, mode: int, is_reported: bool
) -> None:
    (tmp_path / "runs" / "x" / "logs").mkdir(parents=True)
    (tmp_path / name).chmod(mode)
    folder = RunFolder(tmp_path / "runs" / "x")
    folder.acquire(lock_seconds=0.0)
    assert [f"write to {tmp_path / name}," in note for note in folder.notes] == [True] * is_reported


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "a file": lambda path: (path.write_text(""), path)[1],
    "in a file": lambda path: (path.write_text(""), path / "runs")[1],
    "in /proc": lambda path: Path("/proc/nope"),
    "in /sys": lambda path: Path("/sys/nope"),
    "a device": lambda path: Path("/dev/null"),
    "a link to nothing": lambda path: (path.symlink_to("none"), path)[1],
    "a link to itself": lambda path: (path.symlink_to(path), path)[1],
    "a FIFO": lambda path: (os.mkfifo(path), path)[1],
    "too long": lambda path: path / ("x" * 300),
    "read-only": lambda path: (path.mkdir(0o555), path)[1],
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_run_directory_that_cannot_be_written_is_one_error(tmp_path: Path, kind: str) -> None:
    if kind == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = FOLDERS[kind](tmp_path / "directory")
    with pytest.raises(ConfigError) as raised:
        RunFolder(folder / "x").create()
    message = str(raised.value)
    assert message.startswith(f"run.directory: {folder}") and "\n" not in message
    assert message.endswith("name a folder that you can write to")


def test_acquire_waits_for_the_lock_of_a_process_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with holder(tmp_path / "x", seconds=1000) as process:

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                process.kill()
                process.wait()

        monkeypatch.setattr("dapo_megatron.run.folder.time.sleep", sleep)
        RunFolder(tmp_path / "x").acquire(lock_seconds=300.0)
    assert len(waits) == 3
