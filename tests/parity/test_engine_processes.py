"""Test that a server that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.processes import is_alive, wait_until
from tests.helpers.ranks import run_ranks


def killed(rank: int, folder: Path) -> tuple[int, list[str]]:
    """Kill a server with weights and two workers, and wait until they have ended. Return the number
    of its processes, and what is left of their shared memory."""
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
    shared: set[Path] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            paths = (mapped.path for mapped in process.memory_maps())
            shared |= {Path(path) for path in paths if path.startswith("/dev/shm/")}
    own = f"dapo-{os.geteuid()}-{server.pid}"
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(process.pid) for process in processes))
    memory = [path for path in shared if path.exists()] + list(Path("/dev/shm").glob(f"{own}*"))
    engines.close()
    return len(processes), list(map(str, memory))


def test_a_killed_server_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    folder = make_random_model("qwen3", tmp_path)
    ((num_processes, memory),) = run_ranks(killed, 1, folder)
    assert num_processes > 2  # the server, its grader and its other worker
    assert memory == []
