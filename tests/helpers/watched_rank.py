"""A rank without torch, for tests of the watchdog: LOGS RANK WORLD_SIZE LIMIT FAULT.

Ranks go through phases and exchange with each other through files, forever. FAULT, done by the last
rank at the third step: none; sleep (the rank sits in its own computation); gil (it holds the
interpreter); end (it leaves).
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from dapo_megatron.cluster.watch import Watch


def main(logs: Path, rank: int, world_size: int, limit: float, fault: str) -> None:
    watch = Watch(logs, rank, world_size, {"start": 60.0, "generate": 30.0, "update": limit})
    watch.start()
    watch.tell("requests in flight", lambda: f"{rank + 7} of them")

    def exchange(number: int) -> None:
        watch.beat(f"all_gather {number}")
        (logs / f"exchange_{number}_{rank}").touch()
        while not all((logs / f"exchange_{number}_{one}").exists() for one in range(world_size)):
            time.sleep(0.02)
        watch.beat(f"all_gather {number} done")

    for step in range(1, 10_000):
        with watch.phase("update", step):
            if step == 3 and rank == world_size - 1:
                if fault == "sleep":
                    time.sleep(1000)
                if fault == "gil":
                    # PyDLL, unlike CDLL, keeps the interpreter while it calls.
                    ctypes.PyDLL(None).sleep(1000)
                if fault == "end":
                    watch.close()
                    return
            time.sleep(0.05)
            watch.beat(f"micro-batch {step}")
            exchange(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
