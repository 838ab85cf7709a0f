"""Run a rank for tests of the watchdog. Arguments: FOLDER RANK WORLD_SIZE LIMIT FAULT.

Ranks go through phases and exchange with each other through files, forever. The last rank acts out
FAULT in its third step:

    none       nothing
    sleep      it hangs in its own computation
    gil        it hangs and holds the GIL
    end        it exits
    slow       it computes for longer than the limit, but records activity
    disk       it hangs, and opening a file hangs as well

With FAULT `torch`, ranks all-reduce without recording activity, and the last rank stops.
"""

from __future__ import annotations

import ctypes
import io
import sys
import time
from pathlib import Path

from dapo_megatron.cluster import heartbeat
from dapo_megatron.cluster.output import protect_streams
from dapo_megatron.cluster.watchdog import Watchdog

heartbeat.HEARTBEAT_SECONDS = 0.5  # because limits are short


def exchange(watch: Watchdog, folder: Path, number: int, rank: int, world_size: int) -> None:
    watch.record_activity(f"all_gather {number}", number)
    (folder / f"exchange_{number}_{rank}").touch()
    while not all((folder / f"exchange_{number}_{peer}").exists() for peer in range(world_size)):
        time.sleep(0.02)
    watch.record_activity(f"all_gather {number} done")


def main(folder: Path, rank: int, world_size: int, limit: float, fault: str) -> None:
    protect_streams()
    watch = Watchdog(folder, rank, world_size, {"start": 600.0, "update": limit})
    watch.start()
    exchange(watch, folder, 1, rank, world_size)  # ranks do not start at the same time
    if fault == "torch":
        reduce_for_ever(watch, folder, rank, world_size)
    for step in range(2, 10_000):
        with watch.phase("update", step):
            if step == 3 and rank == world_size - 1:
                if fault == "sleep":
                    time.sleep(1000)
                if fault == "disk":
                    io.open = lambda *_, **__: time.sleep(1000)  # type: ignore[assignment]
                    time.sleep(1000)
                if fault == "gil":
                    # PyDLL, unlike CDLL, keeps the GIL during the call.
                    ctypes.PyDLL(None).sleep(1000)
                if fault == "slow":
                    for part in range(30):
                        time.sleep(limit / 10)
                        watch.record_activity(f"part {part}")
                if fault == "end":
                    watch.close()
                    return
            time.sleep(0.05)
            exchange(watch, folder, step, rank, world_size)


def reduce_for_ever(watch: Watchdog, folder: Path, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    group = dist.new_group(range(world_size), group_desc="DATA_PARALLEL")
    for number in range(10_000):
        with watch.phase("update", 1):
            if number == 4 and rank == world_size - 1:
                time.sleep(1000)
            dist.all_reduce(torch.ones(3, 2), group=group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
