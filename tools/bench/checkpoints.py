"""Saving a checkpoint as bytes grow: what a step waits for, and what happens behind its back.

    python tools/bench/checkpoints.py                      # 10 MB, 100 MB and 1 GB of state
    python tools/bench/checkpoints.py --sizes-mb 100 --folder /the/file/system --num-processes 4

A checkpoint of so many bytes in all, dealt out to the processes as model, float32 copy and moments
are, is saved by the code of a run. *Blocking* is what a step waits for: the copy in memory, and the
JSON of the state. *Background* is from there until it is published: written, summed, brought to the
disk. *Pause* is the longest that the background has kept Python code of the same process waiting.
*Verify* is the reading and summing of a resume. Medians of the slowest process; pause is the worst.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from dapo_megatron.checkpoints import CheckpointSaver, fault_of
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.config.file import load_config
from dapo_megatron.policy.checkpoint import PolicySnapshot
from dapo_megatron.tracking.provenance import facts

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TENSORS = 100
MB = 10**6
FIGURES = ("blocking", "background", "pause", "verify")


def make_state(num_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors that take so many bytes."""
    numel = num_bytes // 4 // NUM_TENSORS
    return {f"optimizer/{number}": torch.randn(numel) for number in range(NUM_TENSORS)}


@dataclass
class PauseMeter:
    """Longest time that a thread of Python code was kept from running."""

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


def measure_once(checkpoints: CheckpointSaver, ranks: Ranks, step: int) -> dict[str, float]:
    """Seconds of one save and its verification, of the slowest process."""
    ranks.barrier()
    started = time.perf_counter()
    publish = checkpoints.commit(step, {"coordinator": {}})
    blocking = time.perf_counter() - started
    with PauseMeter() as meter:
        started = time.perf_counter()
        publish()
        checkpoints.wait()
        background = time.perf_counter() - started
    started = time.perf_counter()
    fault = fault_of(checkpoints.folder / f"step_{step:06d}", ranks)
    if fault:
        raise AssertionError(fault)
    found = (blocking, background, meter.pause, time.perf_counter() - started)
    return dict(zip(FIGURES, map(max, zip(*ranks.all_gather(found, tuple[float, ...])))))


def measure(num_bytes: int, ranks: Ranks, folder: Path, repeats: int) -> dict[str, Any]:
    """`repeats` saves after one that is not counted."""
    state = make_state(num_bytes // ranks.world_size)
    name = f"rank_{ranks.rank:05d}.safetensors"
    config = load_config(REPOSITORY / "model_configs" / "tiny_cpu.yaml", ["checkpoint.keep=1"])
    checkpoints = CheckpointSaver(
        config,
        folder,
        ranks,
        background=ranks.second(),
        snapshot=lambda: PolicySnapshot(name, state, {}),
    )
    runs = [measure_once(checkpoints, ranks, step) for step in range(repeats + 1)][1:]
    found = {f"{key}_seconds": statistics.median(run[key] for run in runs) for key in FIGURES}
    found["pause_seconds"] = max(run["pause"] for run in runs)
    rate = num_bytes / found["background_seconds"]
    return {"bytes": num_bytes, **found, "background_bytes_per_second": rate}


def show(found: list[dict[str, Any]], num_processes: int) -> Table:
    """A row per size."""
    table = Table("MB", *(f"{key}\nseconds" for key in FIGURES), "background\nMB/s")
    table.title = f"Checkpoints of {num_processes} processes"
    for one in found:
        seconds = [f"{one[f'{key}_seconds']:.3f}" for key in FIGURES]
        rate = f"{one['background_bytes_per_second'] / MB:,.0f}"
        table.add_row(f"{one['bytes'] / MB:,.0f}", *seconds, rate)
    return table


def main(
    sizes_mb: Annotated[str, typer.Option(help="Of the whole checkpoint; with commas.")] = (
        "10,100,1000"
    ),
    folder: Annotated[Path | None, typer.Option(help="On the disk to measure.")] = None,
    num_processes: Annotated[int, typer.Option(help="That save together.")] = 2,
    repeats: Annotated[int, typer.Option(help="Saves of each size.")] = 3,
) -> None:
    """Seconds of a save; the last line is JSON."""
    if not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], num_processes))
    torch.set_num_threads(1)
    ranks = join("gloo")
    place = Path(ranks.broadcast(tempfile.mkdtemp(prefix="bench_checkpoints_", dir=folder), str))
    try:
        sizes = [int(float(size) * MB) for size in sizes_mb.split(",")]
        found = [measure(size, ranks, place / str(size), repeats) for size in sizes]
        ranks.barrier()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    dist.destroy_process_group()
    if ranks.rank == 0:
        Console(soft_wrap=True, width=120).print(show(found, ranks.world_size))
        about = {"num_processes": ranks.world_size, "repeats": repeats, "measured": found}
        print(json.dumps({**facts(), **about}))


if __name__ == "__main__":
    typer.run(main)
