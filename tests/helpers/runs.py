"""Watch real runs: rows of their metrics, their engine servers, and the ledger's counts."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from tests.helpers.commands import Running, started
from tests.helpers.configs import REPOSITORY
from tests.helpers.processes import PATIENCE_SECONDS, wait_until
from tests.helpers.sockets import unused_port

SMALL = ("run.processes=1", "policy.tensor_parallel=1")
SEPARATE = (*SMALL, "engine.colocated=false")
FREE = (
    *("rollout.on_policy=false", "rollout.deterministic=false", "loss.tis_cap=2.0"),
    *("engine.max_sequences=8", "engine.silence_seconds=8"),
)
"""Overrides of runs whose engines take no common steps."""


def rank_environment() -> dict[str, str]:
    """Return the variables of a launcher with one rank, so that the program starts no ranks."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "OMP_NUM_THREADS": "1"}
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
    wait_until(lambda: not servers(ids), lambda: servers(ids))


def kill_with_an_instance(
    words: Sequence[object], ids: Path, rng: random.Random, folder: Path = REPOSITORY
) -> bool:
    """Start a run. Kill the process of an environment and soon afterwards everything, at random
    moments. Return whether the run had not ended before."""
    with started(*words, folder=folder, new_session=True) as running:
        end = time.monotonic() + PATIENCE_SECONDS
        while running.poll() is None and not kill_an_instance(ids, rng):
            assert time.monotonic() < end, running.stdout
            time.sleep(rng.uniform(0.02, 0.5))
        end = time.monotonic() + rng.uniform(0.0, 3.0)
        while running.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        is_killed = running.poll() is None
        if is_killed:
            os.killpg(running.pid, signal.SIGKILL)
    wait_for_the_end(ids)
    return is_killed


def kill_an_instance(ids: Path, rng: random.Random) -> bool:
    """Kill the process of some completion's environment. Return whether there was any."""
    for server in servers(ids):
        with suppress(psutil.Error):
            for process in server.children():
                if "dapo_megatron.environments.process" in process.cmdline():
                    instances = process.children()
                    if len(instances) > 1:  # else it may be the one that describes environments
                        rng.choice(instances).kill()
                        return True
    return False


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
