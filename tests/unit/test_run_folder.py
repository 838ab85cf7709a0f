"""A run's folder: fresh starts and resuming, one process at a time, checkpoints whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config import Config
from dapo_megatron.config_file import load_config
from dapo_megatron.run_folder import (
    FolderCheckpoints,
    RunFolder,
    newest,
    read_state,
    write_json,
)
from dapo_megatron.types import CheckpointError, ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "model_configs" / "tiny_cpu.yaml"


def add_checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    write_json(path / "state.json", {"step": step})
    return path


def old_run(path: Path) -> RunFolder:
    """What a run that ended has left: its folder is not locked any more."""
    folder = RunFolder(path)
    folder.open("never")
    folder.metrics.write_text("old metrics", encoding="utf-8")
    (folder.samples / "step_000001.jsonl").write_text("old samples", encoding="utf-8")
    assert folder._lock is not None
    folder._lock.close()
    return folder


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


# ---------------------------------------------------------------------------- opening


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_new_run_gets_an_empty_folder(tmp_path: Path, resume: str) -> None:
    folder = RunFolder(tmp_path / "deep" / "x")
    assert folder.open(resume) is None
    assert names(folder.path) == ["checkpoints", "logs", "samples"]
    assert names(tmp_path / "deep") == ["x"]


def test_never_keeps_older_runs_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for number in (1, 2, 3):
        old_run(path).metrics.write_text(f"run {number}", encoding="utf-8")
    folder = RunFolder(path)
    assert folder.open("never") is None
    assert not folder.is_continued
    assert names(tmp_path) == ["x", "x.1", "x.2", "x.3"]
    for number in (1, 2, 3):
        aside = tmp_path / f"x.{number}"
        assert (aside / "metrics.jsonl").read_text(encoding="utf-8") == f"run {number}"
        assert (aside / "samples" / "step_000001.jsonl").exists()
    assert names(path) == ["checkpoints", "logs", "samples"]
    assert names(folder.samples) == []


def test_never_does_not_take_a_name_that_is_taken(tmp_path: Path) -> None:
    old_run(tmp_path / "x")
    (tmp_path / "x.1").write_text("somebody's file", encoding="utf-8")
    RunFolder(tmp_path / "x").open("never")
    assert names(tmp_path) == ["x", "x.1", "x.2"]
    assert (tmp_path / "x.1").read_text(encoding="utf-8") == "somebody's file"


def test_auto_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    path = tmp_path / "x"
    old_run(path)
    add_checkpoint(path, 2)
    last = add_checkpoint(path, 10)
    folder = RunFolder(path)
    assert folder.open("auto") == last
    assert folder.is_continued
    assert folder.metrics.read_text(encoding="utf-8") == "old metrics"
    assert names(tmp_path) == ["x"]
    assert names(folder.checkpoints) == ["step_000002", "step_000010"]


def test_auto_without_a_checkpoint_starts_again_in_the_same_folder(tmp_path: Path) -> None:
    old_run(tmp_path / "x")
    folder = RunFolder(tmp_path / "x")
    assert folder.open("auto") is None
    assert folder.is_continued
    assert names(tmp_path) == ["x"]


def test_a_checkpoint_of_its_own_continues_the_run_and_sets_later_ones_aside(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    old_run(path)
    steps = {step: add_checkpoint(path, step) for step in (2, 4, 6)}
    (path / "checkpoints" / "step_000006.1").mkdir()  # set aside before
    folder = RunFolder(path)
    # However it is written.
    assert folder.open(os.path.relpath(steps[4])) == Path(os.path.relpath(steps[4]))
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
    assert folder.open(str(aside)) == aside
    assert folder.is_continued
    assert read_state(aside) == {"step": 4}
    assert newest(folder.checkpoints) == path / "checkpoints" / "step_000002"


def test_a_checkpoint_of_another_run_starts_a_new_one(tmp_path: Path) -> None:
    source = add_checkpoint(tmp_path / "other", 7)
    old_run(tmp_path / "x")
    folder = RunFolder(tmp_path / "x")
    assert folder.open(str(source)) == source
    assert not folder.is_continued
    assert names(tmp_path) == ["other", "x", "x.1"]
    assert names(folder.checkpoints) == []
    assert source.exists()


def test_a_path_that_is_no_checkpoint_is_refused_before_anything_moves(tmp_path: Path) -> None:
    old_run(tmp_path / "x")
    with pytest.raises(CheckpointError, match="resume: nowhere is not a checkpoint"):
        RunFolder(tmp_path / "x").open("nowhere")
    assert names(tmp_path) == ["x"]


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.directory: .*file/x: Not a directory"):
        RunFolder(tmp_path / "file" / "x").open("never")


# ---------------------------------------------------------------------------- the lock

HOLDER = """
import sys, time
from pathlib import Path
from dapo_megatron.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.open("never")
print("open", flush=True)
time.sleep(1000)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            (path / "metrics.jsonl").write_text("of the first", encoding="utf-8")
            for resume in ("never", "auto"):
                with pytest.raises(ConfigError, match=r"run\.name: another process is running in"):
                    RunFolder(path).open(resume)
            assert names(tmp_path) == ["x"]
            assert (path / "metrics.jsonl").read_text(encoding="utf-8") == "of the first"
        finally:
            holder.send_signal(signal.SIGKILL)
    # However it ended, its lock went with it.
    folder = RunFolder(path)
    folder.open("auto")
    assert folder.is_continued


# ---------------------------------------------------------------------------- checkpoints


class FilePolicy:
    """Writes a file, as a policy does."""

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text("whole", encoding="utf-8")


class OneRank:
    rank = 0
    world_size = 1

    def barrier(self) -> None:
        """Alone."""


class AnotherRank(OneRank):
    rank = 1
    world_size = 2


def config(**checkpoint: Any) -> Config:
    texts = [f"checkpoint.{key}={value}" for key, value in checkpoint.items()]
    return load_config(TINY, ["train.rollout_steps=60", *texts])


def checkpoints(path: Path, exchange: type[OneRank] = OneRank, **settings: Any) -> Any:
    folder = RunFolder(path)
    folder.open("auto")
    return FolderCheckpoints(config(**settings), folder, exchange(), FilePolicy())  # type: ignore[arg-type]


def test_a_checkpoint_appears_when_it_is_published(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path / "x")
    state = {"coordinator": {"position": 3}, "seconds": 0.1}
    publish = saver.save(3, state)
    assert newest(saver.folder.checkpoints) is None
    publish()
    path = newest(saver.folder.checkpoints)
    assert path == saver.folder.checkpoints / "step_000003"
    assert names(path) == ["state.json", "weights"]
    assert read_state(path) == state
    assert names(saver.folder.checkpoints) == ["step_000003"]


def test_an_export_is_part_of_its_checkpoint(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path / "x")
    saver.export = lambda folder: (folder / "config.json").write_text("{}", encoding="utf-8")
    publish = saver.save(3, {})
    assert newest(saver.folder.checkpoints) is None
    publish()
    path = saver.folder.checkpoints / "step_000003"
    assert names(path) == ["hf", "state.json", "weights"]
    assert names(path / "hf") == ["config.json"]


def test_a_step_done_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path / "x")
    saver.save(3, {"try": 1})()
    saver.save(3, {"try": 2})()
    assert read_state(saver.folder.checkpoints / "step_000003") == {"try": 2}


def test_other_ranks_write_their_part_and_publish_nothing(tmp_path: Path) -> None:
    first = checkpoints(tmp_path / "x")
    publish = first.save(1, {})
    other = FolderCheckpoints(config(), first.folder, AnotherRank(), FilePolicy())  # type: ignore[arg-type]
    other.save(1, {})()
    assert newest(first.folder.checkpoints) is None
    publish()
    assert newest(first.folder.checkpoints) is not None


def test_what_a_killed_run_left_half_done_is_ignored_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    old_run(path)
    whole = add_checkpoint(path, 2)
    half = path / "checkpoints" / "step_000004.partial"
    half.mkdir()
    (half / "state.json").write_text("{}", encoding="utf-8")
    stateless = path / "checkpoints" / "step_000006"
    stateless.mkdir()
    assert newest(path / "checkpoints") == whole
    folder = RunFolder(path)
    assert folder.open("auto") == whole
    assert not half.exists()


def test_the_newest_is_so_by_number(tmp_path: Path) -> None:
    # By name, 999999 would come after 1000000; by time, 5 after both.
    million = add_checkpoint(tmp_path, 1_000_000)
    add_checkpoint(tmp_path, 999_999)
    add_checkpoint(tmp_path, 5)
    (tmp_path / "checkpoints" / "notes.txt").write_text("", encoding="utf-8")
    assert newest(tmp_path / "checkpoints") == million
    assert newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_k_are_kept(tmp_path: Path, keep: int) -> None:
    saver = checkpoints(tmp_path / "x", keep=keep)
    for step in (1, 2, 3, 10):
        saver.save(step, {})()
    assert names(saver.folder.checkpoints) == ["step_000003", "step_000010"][-keep:]


def test_a_run_taken_back_keeps_what_it_saves(tmp_path: Path) -> None:
    # The checkpoints it was taken back from must not count as its newest ones.
    old_run(tmp_path / "x")
    steps = {step: add_checkpoint(tmp_path / "x", step) for step in (20, 40, 60)}
    folder = RunFolder(tmp_path / "x")
    folder.open(str(steps[20]))
    saver = FolderCheckpoints(config(keep=2), folder, OneRank(), FilePolicy())  # type: ignore[arg-type]
    saver.save(25, {})()
    assert newest(folder.checkpoints) == folder.checkpoints / "step_000025"


@pytest.mark.parametrize(
    ("every", "due"), [(0, {60}), (20, {20, 40, 60}), (25, {25, 50, 60}), (100, {60})]
)
def test_checkpoints_are_due(tmp_path: Path, every: int, due: set[int]) -> None:
    saver = checkpoints(tmp_path / "x", every=every)
    assert {step for step in range(1, 61) if saver.due(step)} == due


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), (b"{", "cannot be read"), (b"\xff", "cannot"), (b"[]", "not a ch")],
)
def test_a_state_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_state(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'state.json'}: {said}")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    with pytest.raises(TypeError):
        write_json(path, {"steps": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"steps": 1}
