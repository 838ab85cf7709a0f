"""Measure how long saving a checkpoint takes, in the step and in the background, by size.

    python tools/bench/checkpoints.py                      # 10 MB, 100 MB and 1 GB of state
    python tools/bench/checkpoints.py --sizes-mb 100 --folder /the/file/system --num-processes 4

The code of a run saves a checkpoint of the given size, shared equally by the processes, and reads
it back. It measures, in seconds:

    blocking     what a step waits for: the copy in memory and the JSON of the state
    background   from then until the checkpoint is published: write, checksums, fsync
    verify       checksums at a resume
    load         reading the own part of each process
    reshard      reading in another layout: each process reads a part of each process's part

Values are medians of the slowest process.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from bench import MB, Meter, finish, show

from dapo_megatron.checkpoints.folder import fault_of
from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, Reading
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.config.file import load_config
from dapo_megatron.policy.boxes import HostCopies
from dapo_megatron.policy.checkpoint import PolicySnapshot

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TENSORS = 100
METRICS = ("blocking", "background", "verify", "load", "reshard")


def make_boxes(num_bytes: int, ranks: Ranks, *, by_row: bool) -> list[Box]:
    """Return this process's boxes of a state of `num_bytes` bytes, rounded down: one row of each
    tensor, or a column of blocks."""
    size = ranks.world_size
    width = num_bytes // 4 // NUM_TENSORS // size**2
    shape = (size, size * width)
    offset, sizes = (ranks.rank, 0), (1, size * width)
    if not by_row:
        offset, sizes = (0, ranks.rank * width), (size, width)
    return [Box(f"{n}", offset, shape, torch.randn(sizes)) for n in range(NUM_TENSORS)]


class Saves:
    """Saves of `num_bytes` bytes by the code of a run. Stands for the run's policy and
    recorder, of which a save needs little."""

    def __init__(self, num_bytes: int, ranks: Ranks, folder: Path) -> None:
        self.num_bytes, self.ranks, self.folder = num_bytes, ranks, folder
        self._boxes = make_boxes(num_bytes, ranks, by_row=True)
        self._other_boxes = make_boxes(num_bytes, ranks, by_row=False)
        self._copies = HostCopies()
        config = load_config(REPOSITORY / "model_configs" / "tiny_cpu.yaml", ["checkpoint.keep=1"])
        this: Any = self
        self._saver = CheckpointSaver(
            config,
            folder,
            ranks,
            background=ranks.second(),
            policy=this,
            recorder=this,
            companions=Companions.of(config),
        )

    def flush(self) -> None:
        """Do nothing: nothing is recorded."""

    def note(self, text: str) -> None:
        """Show no lines."""

    def snapshot(self) -> PolicySnapshot:
        """Return a copy of this process's boxes."""
        return PolicySnapshot(self.ranks.rank, self._copies.copy(self._boxes), {}, [[{}]], 1.0, {})

    def once(self, step: int) -> dict[str, float]:
        """Return the seconds of one save, its verification, and reading it in two layouts, of the
        slowest process."""
        meters = {name: Meter() for name in METRICS}
        self.ranks.barrier()
        with meters["blocking"]:
            publish = self._saver.commit(step, {"coordinator": {}})
        with meters["background"]:
            publish()
            self._saver.wait()
        folder = self._saver.folder / f"step_{step:06d}"
        with meters["verify"]:
            fault = fault_of(folder, self.ranks)
        if fault:
            raise AssertionError(fault)
        for name, boxes in (("load", self._boxes), ("reshard", self._other_boxes)):
            self.ranks.barrier()
            with meters[name]:
                Reading(folder, boxes).run()
        seconds = [meter.seconds for meter in meters.values()]
        return dict(zip(METRICS, map(max, zip(*self.ranks.all_gather(seconds, list[float])))))

    def measure(self, repeats: int) -> dict[str, float]:
        """Return the medians of `repeats` saves, after one that is not counted."""
        runs = [self.once(step) for step in range(repeats + 1)][1:]
        medians = {name: statistics.median(run[name] for run in runs) for name in METRICS}
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {
            "MB": self.num_bytes / MB,
            "MB on disk": sum(path.stat().st_size for path in files) / MB,
            **medians,
            "background MB/s": self.num_bytes / medians["background"] / MB,
        }


def main(
    sizes_mb: Annotated[
        str, typer.Option(help="Sizes of the whole checkpoint, separated by commas.")
    ] = "10,100,1000",
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to measure.")] = None,
    num_processes: Annotated[int, typer.Option(help="Processes that save together.")] = 2,
    repeats: Annotated[int, typer.Option(help="Saves of each size.")] = 3,
) -> None:
    """Measure the seconds of a save. The last line is JSON."""
    if not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], num_processes))
    torch.set_num_threads(1)
    ranks = join("gloo")
    work_folder = Path(
        ranks.broadcast(tempfile.mkdtemp(prefix="bench_checkpoints_", dir=folder), str)
    )
    try:
        sizes = [int(float(size) * MB) for size in sizes_mb.split(",")]
        measured = [Saves(size, ranks, work_folder / str(size)).measure(repeats) for size in sizes]
        ranks.barrier()
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
    dist.destroy_process_group()
    if ranks.rank == 0:
        show(f"seconds of a checkpoint of {num_processes} processes", measured)
        finish("checkpoints", num_processes=num_processes, repeats=repeats, measured=measured)


if __name__ == "__main__":
    typer.run(main)
