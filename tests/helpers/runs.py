"""Watch real runs: rows of their metrics, their engine servers, and the ledger's counts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from tests.helpers.commands import Running

PATIENCE_SECONDS = 300.0
"""Time after which a test gives up. Only a failing test waits so long."""
SMALL = ("run.processes=1", "policy.tensor_parallel=1")
SEPARATE = (*SMALL, "engine.colocated=false")
FREE = (
    *("rollout.on_policy=false", "rollout.deterministic=false", "loss.tis_cap=2.0"),
    *("engine.max_sequences=8", "engine.silence_seconds=8"),
)
"""Overrides of runs whose engines take no common steps."""


def rank_environment() -> dict[str, str]:
    """Return the variables of a launcher with one rank, so that the program starts no ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ranks, **where}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without clocks, memory, what the layout of engines or a new start changes
    in a sync, and what kills of environments count."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("time/", "memory/", "throughput/", "sync/bytes", "sync/fingerprinted")
    left_out += ("turns/failed/",)
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


def wait_for_row(folder: Path, number: int, process: Running) -> None:
    """Wait until the metrics have more than `number` rows."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + PATIENCE_SECONDS
    while not path.exists() or path.read_text().count("\n") <= number:
        assert time.monotonic() < deadline and process.poll() is None, process.stdout
        time.sleep(0.05)


def servers(ids: Path) -> list[psutil.Process]:
    """Return the engine servers of a run that write their process ids to the folder `ids`."""
    running = []
    for path in ids.iterdir():
        with suppress(psutil.Error):
            process = psutil.Process(int(path.name))
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                running.append(process)
    return running


def wait_for_the_end(ids: Path) -> None:
    """Wait for the end of all engine servers."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := servers(ids):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def check_ledger(folder: Path, num_steps: int, samples_per_prompt: int = 4) -> dict[str, float]:
    """Check that every ticket is counted once, and none was trained on twice. Return counts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    steps = [row for row in rows if "groups/issued" in row]
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    ended = ("trained", "all_correct", "all_wrong", "overlong", "abstained", "expired")
    closed = sum(row[f"groups/{outcome}"] for row in steps for outcome in ended)
    issued = sum(row["groups/issued"] for row in steps)
    assert issued == closed + steps[-1]["groups/carried"]
    trained: Counter[tuple[int, int]] = Counter()
    for path in (folder / "policy").glob("step_*.parquet"):
        table = pq.read_table(path, columns=["ticket", "sample"])
        trained.update(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert set(trained.values()) == {1}
    assert len(trained) == samples_per_prompt * sum(row["groups/trained"] for row in steps)
    resampled = sum(row.get("groups/resampled", 0) for row in steps)
    return {"issued": issued, "resampled": resampled, "sequences": len(trained)}
