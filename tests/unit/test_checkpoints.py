"""Checkpoints of a run: written in the background, published atomically, verified before use."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.checkpoints import folder
from dapo_megatron.checkpoints.folder import (
    MANIFEST,
    newest,
    read_manifest,
    read_state,
    restoring,
)
from dapo_megatron.checkpoints.formats.torch_dist.boxes import METADATA, Box
from dapo_megatron.files import publish_folder, write_json
from dapo_megatron.loop import Progress
from dapo_megatron.policy.boxes import HostCopies
from dapo_megatron.policy.checkpoint import PolicySnapshot
from dapo_megatron.run.resume import _progress
from dapo_megatron.types import CheckpointError
from tests.helpers.saving import (
    ALONE,
    KIB,
    RANK_FILE,
    OnTheWay,
    Run,
    TextExport,
    half_written,
    names,
)
from tests.helpers.training_state import stored_tensors

# ---------------------------------------------------------------------------- saving


def test_a_checkpoint_appears_only_when_it_is_completely_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    started_writing, go_on = threading.Event(), threading.Event()
    run.part = OnTheWay(lambda: started_writing.set() or go_on.wait())
    state = {"coordinator": {"position": 3}, "seconds": 0.1}
    start = run.checkpoints.commit(3, state)
    assert not half_written(run)
    start()
    assert started_writing.wait(60)
    assert newest(run.folder.checkpoints) is None
    assert half_written(run)
    go_on.set()
    run.checkpoints.wait()
    path = newest(run.folder.checkpoints)
    assert path == run.folder.checkpoints / "step_000003"
    others = ["common.pt", "config.json", "manifest.json", "metadata.json", "state.json"]
    assert names(path) == [RANK_FILE, *others]
    assert read_state(path) == state
    assert not half_written(run)


def test_a_snapshot_is_a_copy_and_the_file_contains_it(tmp_path: Path) -> None:
    tensors = {
        "a": torch.rand(3, 5),
        "turned": torch.rand(4, 2).T,
        "half": torch.rand(7).bfloat16(),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "scalar": torch.tensor(2.0),
        "wide": torch.rand(2, dtype=torch.float64),
    }
    original = {key: value.clone() for key, value in tensors.items()}
    boxes = [Box(key, (0,) * v.dim(), tuple(v.shape), v) for key, v in tensors.items()]
    copies = HostCopies().copy(boxes)
    snapshot = PolicySnapshot(0, copies, {"extra": b"x" * 5000}, [[{"lr": 0.1}]], 3.0, {})
    for value in tensors.values():
        value.zero_()
    snapshot.write(tmp_path)
    snapshot.finish(tmp_path, ALONE)
    loaded = stored_tensors(tmp_path)
    assert loaded.keys() == original.keys()
    assert all(torch.equal(loaded[key], original[key]) for key in original)
    content = (tmp_path / RANK_FILE).read_bytes()
    assert snapshot.num_bytes >= len(content)
    assert snapshot.checksums == {RANK_FILE: hashlib.sha256(content).hexdigest()}


def test_the_manifest_has_the_checksum_of_every_file(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    run.checkpoints.export = TextExport()
    path = run.save(3)
    assert (path / "hf" / "index.txt").read_text(encoding="utf-8") == "done"
    assert int((path / "hf" / "0.txt").read_text(encoding="utf-8")) > 8 * KIB
    files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert files == {
        str(file.relative_to(path)): [
            file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
        ]
        for file in path.rglob("*")
        if file.is_file() and file.name != MANIFEST
    }  # fmt: skip
    assert {".metadata", RANK_FILE, "common.pt", "config.json", "hf/0.txt"} <= files.keys()


def test_a_save_waits_for_the_previous_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "x", keep=3)
    go_on = threading.Event()
    run.part = OnTheWay(go_on.wait)
    run.checkpoints.commit(1, {})()
    join = threading.Thread.join

    def join_released(thread: threading.Thread, timeout: float | None = None) -> None:
        go_on.set()  # the first checkpoint is written only after a thread waits for it
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_released)
    run.part = None
    assert names(run.folder.checkpoints) == []
    start = run.checkpoints.commit(2, {})
    assert names(run.folder.checkpoints) == ["step_000001"]
    start()
    run.checkpoints.wait()
    assert names(run.folder.checkpoints) == ["step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("every", "due"), [(0, {60}), (20, {20, 40, 60}), (25, {25, 50, 60}), (100, {60})]
)
def test_checkpoints_are_due_every_n_steps_and_after_the_last(
    tmp_path: Path, every: int, due: set[int]
) -> None:
    checkpoints = Run(tmp_path / "x", every=every).checkpoints
    assert {step for step in range(1, 61) if checkpoints.due(step)} == due


def test_a_checkpoint_is_due_after_so_many_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run = Run(tmp_path / "x", every=0, max_minutes=5.0)
    now += 299.0
    assert not run.checkpoints.due(1)
    now += 2.0
    assert run.checkpoints.due(2)
    run.save(2)
    assert not run.checkpoints.due(3)


@given(
    steps=st.lists(st.integers(0, 1_000_001) | st.integers(0, 9), min_size=1, unique=True),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 7),
)
def test_pruning_keeps_the_newest_and_every_nth_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[int],
    keep: int,
    keep_every: int | None,
) -> None:
    path = tmp_path_factory.mktemp("prune")
    for step in steps:
        (path / folder.name_of(step)).mkdir()
    assert [step for step, _ in folder.published(path)] == sorted(steps, reverse=True)
    graveyard = path / ".partial"
    graveyard.mkdir()
    folder.prune(path, graveyard, keep=keep, keep_every=keep_every)
    kept = set(sorted(steps)[-keep:]) | {s for s in steps if keep_every and s % keep_every == 0}
    assert {folder.step_of(path.name) for _, path in folder.published(path)} == kept
    assert not list(graveyard.iterdir())


def test_old_checkpoints_are_deleted_after_a_new_one_is_published(tmp_path: Path) -> None:
    run = Run(tmp_path / "x", keep=2, keep_every=4)
    for step in (4, 5, 6, 10):
        run.save(step)
    kept = ["step_000004", "step_000006", "step_000010"]
    assert names(run.folder.checkpoints) == kept
    assert read_state(run.save(10, attempt=2))["attempt"] == 2  # a repeated step
    assert names(run.folder.checkpoints) == kept


def test_a_checkpoint_of_an_earlier_version_is_refused_with_the_commit_that_reads_it() -> None:
    source = Path("runs/x/checkpoints/step_000002")
    state = {"progress": {"step": 2, "not_logged": None}, "coordinator": {}}
    assert _progress(source, state, None).step == 2
    with pytest.raises(CheckpointError, match=r"step_000002 was .* with commit [0-9a-f]{7},"):
        _progress(source, {**state, "open_step": None}, None)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", range(3))
def test_replacing_a_checkpoint_always_leaves_one_to_recover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    old, partial = tmp_path / "step_000003", tmp_path / ".partial" / "a" / "step_000003"
    for path in (old, partial):
        path.mkdir(parents=True)
        write_json(path / "state.json", {"new": path == partial})
    calls = iter(range(99))

    def killed_at(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == after:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", killed_at(Path.rename))
        patch.setattr(shutil, "rmtree", killed_at(shutil.rmtree))
        publish_folder(partial, old)
    folder.recover_checkpoints(tmp_path)
    assert read_state(old) == {"new": after == 2}
    assert names(tmp_path) == ["step_000003"]
    assert not (tmp_path / ".partial").exists()


# ---------------------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at // 8 % len(data)] ^= 1 << at % 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, int], object]] = {
    "flipped bit": flip,
    "cut": lambda path, at: os.truncate(path, at % path.stat().st_size),
    "longer": lambda path, at: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path, at: path.unlink(),
    "folder": lambda path, at: path.rename(path.parent / "moved").with_name(path.name).mkdir(),
}
"""Kind of damage -> how to do it to a file, at a bit or byte of it."""
FILES = [RANK_FILE, METADATA, "common.pt", "state.json", MANIFEST, "config.json", "hf/0.txt"]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with checkpoints 10 and 20."""
    path = tmp_path_factory.mktemp("runs") / "x"
    run = Run(path)
    run.checkpoints.export = TextExport()
    run.save(10)
    run.save(20)
    run.unlock()
    return path


@settings(max_examples=40)
@given(name=st.sampled_from(FILES), damage=st.sampled_from(list(DAMAGES)), at=st.integers(0, 10**6))
def test_any_damage_is_reported_and_the_previous_checkpoint_used(
    saved_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    damage: str,
    at: int,
) -> None:
    path = shutil.copytree(saved_run, tmp_path_factory.mktemp("damaged") / "x")
    damaged = path / "checkpoints" / "step_000020"
    assert folder.fault_of(damaged, ALONE) is None
    DAMAGES[damage](damaged / name, at)
    with pytest.raises(CheckpointError, match=f"^resume: {damaged} is (damaged: {damaged}/|not)"):
        Run(path, resume=str(damaged))
    gc.collect()  # releases the lock of the failed Run
    run = Run(path)
    assert run.source == path / "checkpoints" / "step_000010"
    [note] = run.folder.notes
    assert note.startswith(f"CHECKPOINT DAMAGED: {damaged / name}: ")
    assert names(path / "checkpoints") == ["step_000010", "step_000020.damaged"]
    assert newest(run.folder.checkpoints) == run.source
    run.unlock()
    shutil.rmtree(path)


def test_a_run_does_not_start_over_if_all_checkpoints_are_damaged(
    saved_run: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(saved_run, tmp_path / "x")
    for step in (10, 20):
        DAMAGES["cut"](path / "checkpoints" / f"step_{step:06d}" / RANK_FILE, 9)
    for _ in range(2):  # the second attempt fails, too
        with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged") as raised:
            Run(path)
        assert "step_000010.damaged, step_000020.damaged" in str(raised.value)
        del raised
        gc.collect()  # releases the lock of the failed Run
    assert Run(path, resume="never").source is None


OUTSIDE = ("../key", "/etc/passwd", "hf/../../key", "a\0b", "")
ENTRIES = (3, [1], ["1", "2"], {"0": 1, "1": "x"}, [True, "x"])


@pytest.mark.parametrize(
    ("files", "problem"),
    [({name: (3, "00")}, "lists .* outside of the") for name in OUTSIDE]
    + [({"a": entry}, r"the entry of a is not \[bytes, SHA") for entry in ENTRIES],
    ids=str,
)
def test_a_malformed_manifest_is_rejected_even_if_its_checksum_is_right(
    tmp_path: Path, files: dict[str, Any], problem: str
) -> None:
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    total = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps({"files": files, "sha256": total}))
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: {problem}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("state", ["{}", '{"progress": 3}', '{"progress": {"stepp": 3}}'])
def test_a_malformed_state_is_rejected_with_its_path(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(CheckpointError) as raised, restoring(tmp_path):
        Progress(**read_state(tmp_path)["progress"])
    assert str(raised.value).startswith(f"{tmp_path}/state.json: not a state that this version")
