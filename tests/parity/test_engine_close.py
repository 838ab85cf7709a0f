"""Test that a closed engine leaves nothing behind, and that its process can make another one."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from dapo_megatron.types import SyncError
from tests.helpers.engines import GAP, gap, hf_model, requests, run, start
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

NUM_RANKS = 2


def left_behind() -> dict[str, Any]:
    """Return threads, children, process groups and shared memory of this process."""
    process = psutil.Process()
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "children": {child.pid for child in process.children(recursive=True)},
        "groups": len(dist.distributed_c10d._world.pg_map),
        # vLLM never frees the memory of its all-reduce on CPU, and has no function that would.
        "shared memory": {
            mapped.path
            for mapped in process.memory_maps()
            if "/dev/shm/dapo" in mapped.path and "cpushm" not in mapped.path
        },
    }


def rank_main(rank: int, folder: Path) -> dict[str, Any]:
    """Make an engine over both ranks and then one per rank. Close the first awake, the second
    asleep."""
    model = hf_model(folder)
    observed: dict[str, Any] = {"before": left_behind(), "gaps": [], "after": [], "is freed": []}
    for ranks in (2, 1):
        engine = start(folder, rank, NUM_RANKS, ranks)
        observed["gaps"].append(gap(model, requests(range(2)), run(engine, requests(range(2)))))
        (reference,) = engine._llm.apply_model(lambda module: weakref.ref(module))
        assert reference() is not None
        if ranks == 1:
            engine.sleep()
        engine.close()
        engine.close()
        with pytest.raises(SyncError, match="it is closed"):
            engine.submit(requests([0]))
        observed["is freed"].append(reference() is None)
        observed["after"].append(left_behind())
    dist.barrier()  # the world's process group still works
    return observed


def test_a_closed_engine_leaves_nothing_behind_and_another_can_be_made(tmp_path: Path) -> None:
    for observed in run_ranks(rank_main, NUM_RANKS, make_random_model("qwen3", tmp_path)):
        assert max(observed["gaps"]) < GAP
        assert observed["is freed"] == [True, True]
        assert observed["after"] == [observed["before"]] * 2
