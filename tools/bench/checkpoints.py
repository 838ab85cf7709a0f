"""Measure how long saving a checkpoint takes, in the step and in the background, by size.

    python tools/bench/checkpoints.py                      # 10 MB, 100 MB and 1 GB of state
    python tools/bench/checkpoints.py --sizes-mb 100 --folder /the/file/system --num-processes 4

The code of a run saves a checkpoint of the given size, shared equally by the processes, and reads
it back. It measures, in seconds:

    blocking     what a step waits for: the copy in memory and the JSON of the state
    background   from then until the checkpoint is published: write, checksums, fsync
    pause        the longest time that the background kept Python code of its process from running
    verify       checksums at a resume
    load         reading the own part of each process
    reshard      reading in another layout: each process reads a part of each process's part

Values are medians of the slowest process. Pause is the maximum.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from dapo_megatron.checkpoints.folder import fault_of
from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, read_boxes
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.config.file import load_config
from dapo_megatron.policy.boxes import HostCopies
from dapo_megatron.policy.checkpoint import PolicySnapshot
from dapo_megatron.tracking.provenance import facts

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TENSORS = 100
MB = 10**6
METRICS = ("blocking", "background", "pause", "verify", "load", "reshard")


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


@dataclass
class PauseMeter:
    """Measure the longest time, in seconds, that a Python thread was kept from running."""

    pause: float = 0.0

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PauseMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            self.pause = max(self.pause, time.perf_counter() - before)


def measure_once(
    checkpoints: CheckpointSaver, ranks: Ranks, step: int, layouts: Sequence[Sequence[Box]]
) -> dict[str, float]:
    """Return the seconds of one save, its verification, and reading it in these layouts, of the
    slowest process."""
    ranks.barrier()
    started = time.perf_counter()
    publish = checkpoints.commit(step, {"coordinator": {}})
    blocking = time.perf_counter() - started
    with PauseMeter() as meter:
        started = time.perf_counter()
        publish()
        checkpoints.wait()
        background = time.perf_counter() - started
    folder = checkpoints.folder / f"step_{step:06d}"
    started = time.perf_counter()
    fault = fault_of(folder, ranks)
    if fault:
        raise AssertionError(fault)
    seconds = [blocking, background, meter.pause, time.perf_counter() - started]
    for boxes in layouts:
        ranks.barrier()
        started = time.perf_counter()
        read_boxes(folder, boxes)
        seconds.append(time.perf_counter() - started)
    return dict(zip(METRICS, map(max, zip(*ranks.all_gather(seconds, list[float])))))


class Source:
    """A policy with the parameters `boxes`, and a recorder of nothing."""

    def __init__(self, boxes: list[Box], rank: int) -> None:
        self.boxes, self.rank, self.copies = boxes, rank, HostCopies()

    def snapshot(self) -> PolicySnapshot:
        """Copy the boxes."""
        return PolicySnapshot(self.rank, self.copies.copy(self.boxes), {}, [[{}]], 1.0, {})

    def note(self, text: str) -> None:
        """Print a line."""
        print(text)

    def flush(self) -> None:
        """Do nothing."""


def measure(num_bytes: int, ranks: Ranks, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure `repeats` saves, after one that is not counted."""
    boxes = make_boxes(num_bytes, ranks, by_row=True)
    layouts = [make_boxes(num_bytes, ranks, by_row=by_row) for by_row in (True, False)]
    config = load_config(REPOSITORY / "model_configs" / "tiny_cpu.yaml", ["checkpoint.keep=1"])
    source = Source(boxes, ranks.rank)
    checkpoints = CheckpointSaver(
        config,
        folder,
        ranks,
        background=ranks.second(),
        policy=source,
        recorder=source,
        companions=Companions.of(config),
    )
    runs = [measure_once(checkpoints, ranks, step, layouts) for step in range(repeats + 1)][1:]
    metrics = {f"{key}_seconds": statistics.median(run[key] for run in runs) for key in METRICS}
    metrics["pause_seconds"] = max(run["pause"] for run in runs)
    rate = num_bytes / metrics["background_seconds"]
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    about = {"bytes": num_bytes, "bytes_on_disk": on_disk}
    return {**about, **metrics, "background_bytes_per_second": rate}


def show(results: list[dict[str, Any]], num_processes: int) -> Table:
    """Return a table with a row per size."""
    table = Table("MB", *(f"{key}\nseconds" for key in METRICS), "background\nMB/s")
    table.title = f"Checkpoints of {num_processes} processes"
    for result in results:
        seconds = [f"{result[f'{key}_seconds']:.3f}" for key in METRICS]
        rate = f"{result['background_bytes_per_second'] / MB:,.0f}"
        table.add_row(f"{result['bytes'] / MB:,.0f}", *seconds, rate)
    return table


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
        results = [measure(size, ranks, work_folder / str(size), repeats) for size in sizes]
        ranks.barrier()
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
    dist.destroy_process_group()
    if ranks.rank == 0:
        Console(soft_wrap=True, width=120).print(show(results, ranks.world_size))
        about = {"num_processes": ranks.world_size, "repeats": repeats, "measured": results}
        print(json.dumps({**facts(), **about}))


if __name__ == "__main__":
    typer.run(main)
