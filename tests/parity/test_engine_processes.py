"""Test what processes of a run import, and that a server that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

SECONDS = 10.0
"""Time in which the processes of a killed server must end. vLLM's workers look every 2 s."""
ONE_RANK = {"policy__tensor_parallel": 1, "engine__replicas": 1}


def killed(rank: int, folder: Path, num_workers: int) -> tuple[int, list[str], list[str]]:
    """Kill a server with weights. Return the number of its processes, those that are left, and what
    is left of their shared memory."""
    from dapo_megatron.run.models import build_models, start_engines

    settings = {**ONE_RANK, "engine__tensor_parallel": num_workers, "engine__colocated": False}
    config = tiny_config(model__path=folder, **settings)
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


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_server_leaves_no_process_and_no_shared_memory(
    num_workers: int, tmp_path: Path
) -> None:
    folder = make_random_model("qwen3", tmp_path)
    ((num_processes, left, memory),) = run_ranks(killed, 1, folder, num_workers)
    assert num_processes > num_workers  # the server, its grader and its other workers
    assert left == memory == []


RANK = """
import resource, sys, time
from pathlib import Path
from dapo_megatron.cluster import servers
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.run.libraries import import_libraries
from dapo_megatron.run.models import build_models, start_engines
from tests.helpers.configs import tiny_config

class Traced(servers.Server):
    def _start(self):
        self._command[1:1] = ["-X", "importtime"]
        super()._start()

import dapo_megatron.run.models as models
models.Server = Traced
config = tiny_config(policy__tensor_parallel=1, engine__replicas=1, engine__tensor_parallel=1)
ranks = Ranks(0, 1, 0)
started = time.perf_counter()
engines = start_engines(config, ranks, logs=Path(sys.argv[1]))
import_libraries()
imported = time.perf_counter() - started
join("gloo")
build_models(config, ranks, engines).sync(0)
status = Path(f"/proc/{engines.servers[0].process_id}/status").read_text()
engines.close()
lines = [line for line in status.splitlines() if line.startswith(("VmRSS", "VmHWM"))]
print("seconds to import", imported)
print("memory of the engine", lines)
print("memory of the trainer, KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print("modules", *sys.modules)
"""


def test_trainers_import_no_vllm_and_engines_no_megatron(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    trainer = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert trainer.returncode == 0, trainer.stderr
    *figures, modules = trainer.stdout.splitlines()
    print(*figures, sep="\n")
    of_trainer = {name.partition(".")[0] for name in modules.split()}
    log = (tmp_path / "engine_0.log").read_text()
    rows = [line.rsplit("|", 2) for line in log.splitlines() if line.startswith("import time:")]
    of_engine = {name.strip().partition(".")[0] for _, _, name in rows[1:]}
    own = sum(int(row[0].split()[-1]) for row in rows[1:])
    print("imports of the engine, seconds with tracing:", own / 1e6)
    assert {"megatron", "torch"} <= of_trainer and "vllm" not in of_trainer
    assert {"vllm", "torch"} <= of_engine and "megatron" not in of_engine
