"""Test that a server that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

SECONDS = 60.0
"""Time in which the processes of a killed server must end. vLLM's workers look every 2 s."""


def killed(rank: int, folder: Path) -> tuple[int, list[str], list[str]]:
    """Kill a server with weights and two workers. Return the number of its processes, those that
    are left, and what is left of their shared memory."""
    from dapo_megatron.run.models import build_models, start_engines

    config = tiny_config(
        model__path=folder, policy__tensor_parallel=1, engine__replicas=1,
        engine__tensor_parallel=2, engine__colocated=False,
    )  # fmt: skip
    ranks = Ranks(rank, 1, rank)
    engines = start_engines(config, ranks)
    build_models(config, ranks, engines).sync(0)
    server = psutil.Process(engines.servers[0].process_id)
    processes = [server, *server.children(recursive=True)]
    shared = {
        Path(mapped.path)
        for process in processes
        for mapped in process.memory_maps()
        if mapped.path.startswith("/dev/shm/")
    }
    own = f"dapo-{os.geteuid()}-{server.pid}"
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while (left := [p for p in processes if is_running(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    memory = [path for path in shared if path.exists()] + list(Path("/dev/shm").glob(f"{own}*"))
    names = [" ".join(process.cmdline()) for process in left]
    engines.close()
    return len(processes), names, list(map(str, memory))


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_killed_server_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    folder = make_random_model("qwen3", tmp_path)
    ((num_processes, left, memory),) = run_ranks(killed, 1, folder)
    assert num_processes > 2  # the server, its grader and its other worker
    assert left == memory == []
