"""Make a run folder and checkpoints like the package `run` does, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.policy.checkpoint import PolicySnapshot
from dapo_megatron.protocols import Exchange
from dapo_megatron.run.folder import RunFolder
from tests.helpers.configs import tiny_config

ALONE = Ranks(0, 1, 0)
RANK_FILE = "__0_0.distcp"
KIB, MIB = 2**10, 2**20


def part(num_bytes: int = 8 * KIB, rank: int = 0, num_ranks: int = 1) -> PolicySnapshot:
    """Return a rank's snapshot of a policy, of `num_bytes`."""
    numel = num_bytes // 16
    boxes = [
        Box(f"{number}", (rank, 0), (num_ranks, numel), torch.rand(1, numel)) for number in range(4)
    ]
    return PolicySnapshot(rank, boxes, {}, [[{"lr": 0.1}]], 3.0, {})


@dataclass
class OnTheWay:
    """A snapshot that runs `action` just before it is written."""

    action: Callable[[], object]
    inner: PolicySnapshot = field(default_factory=part)
    num_bytes: int = 0

    @property
    def checksums(self) -> Mapping[str, str]:
        return dict(self.inner.checksums)

    def write(self, folder: Path) -> None:
        self.action()
        self.inner.write(folder)

    def finish(self, folder: Path, exchange: Exchange) -> None:
        self.inner.finish(folder, exchange)


class TextExport:
    """An export that writes the size of each rank file as text."""

    FOLDER = "hf"
    num_bytes = 10

    def create(self, target: Path) -> None:
        target.mkdir()
        (target / "index.txt").write_text("begun", encoding="utf-8")

    def write(self, source: Path, target: Path, rank: int, num_ranks: int) -> None:
        size = (source / f"__{rank}_0.distcp").stat().st_size
        (target / f"{rank}.txt").write_text(str(size), encoding="utf-8")

    def finish(self, target: Path) -> list[str]:
        (target / "index.txt").write_text("done", encoding="utf-8")
        return [path.name for path in target.iterdir()]


class Source:
    """A policy with the snapshot `part`, and a recorder that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.part: Any = None

    def snapshot(self) -> Any:
        return self.part or part()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def flush(self) -> None:
        """Nothing is recorded."""


def companions(beside: Path) -> Companions:
    """Return the files of a model in a folder beside `beside`."""
    model = beside.with_name("model")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    return Companions(model, None)


class Run(Source):
    """A run folder and its checkpoints, made like the package `run` makes them."""

    def __init__(self, path: Path, *, resume: str = "auto", **settings: Any) -> None:
        super().__init__()
        self.folder = RunFolder(path)
        self.folder.acquire(lock_seconds=0.0)
        self.source = self.folder.find_checkpoint(resume, ALONE)
        self.folder.prepare(resume, self.source)
        keys = {f"checkpoint__{key}": value for key, value in settings.items()}
        self.checkpoints = CheckpointSaver(
            tiny_config(train__rollout_steps=60, **keys),
            self.folder.checkpoints,
            ALONE,
            background=ALONE,
            policy=self,
            recorder=self,
            companions=companions(path),
            attempt=self.folder.attempt,
        )

    def save(self, step: int, part: Any = None, **state: Any) -> Path:
        """Save a checkpoint, wait until it is published, and return its folder."""
        self.part = part
        self.checkpoints.commit(step, {"step": step, **state})()
        self.checkpoints.wait()
        return self.folder.checkpoints / f"step_{step:06d}"

    def unlock(self) -> None:
        assert self.folder._lock is not None
        self.folder._lock.close()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def half_written(run: Run) -> list[Path]:
    return [p for p in run.folder.checkpoints.glob(".partial/**/*") if p.name != run.folder.attempt]
