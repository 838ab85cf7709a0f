"""Engine servers as children of a rank: started again, killed with their workers, and not for
ever."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.cluster import servers
from dapo_megatron.cluster.processes import STARTED_ON
from dapo_megatron.cluster.servers import MAX_QUICK_ENDS, Server
from tests.helpers.processes import processes_with, wait_until

STUB = """#!{python}
import json, os, subprocess, sys, time
lines = dict(pid=os.getpid(), arguments=sys.argv[1:], environment=dict(os.environ))
lines["cpus"] = sorted(os.sched_getaffinity(0))
with open({record!r}, "a") as file:
    file.write(json.dumps(lines) + "\\n")
print("a line for the log", flush=True)
if not os.path.exists({quick!r}):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    while not os.path.exists({end!r}):
        time.sleep(0.01)
"""
SECRET = bytes(range(32))


class Stub:
    """A program in place of the server's: it has a worker process, and ends when the file `end`
    exists, or at once if the file `quick` does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end, self.quick, self.log = folder / "end", folder / "quick", folder / "log"
        self._record = folder / "record"
        program = folder / "program"
        program.write_text(
            STUB.format(
                python=sys.executable,
                record=str(self._record),
                quick=str(self.quick),
                end=str(self.end),
            )
        )
        program.chmod(0o755)
        self.mark = f"MARK_{os.getpid()}_{time.monotonic_ns()}"
        monkeypatch.setenv("DAPO_TEST_MARK", self.mark)
        monkeypatch.setattr(sys, "executable", str(program))

    def server(self, devices: str | None = None) -> Server:
        return Server(2, "tcp://10.0.0.1:7", SECRET, devices, self.log)

    @property
    def starts(self) -> list[dict[str, Any]]:
        if not self._record.exists():
            return []
        *lines, _ = self._record.read_text().split("\n")  # the last may be on its way
        return [json.loads(line) for line in lines]

    @property
    def processes(self) -> list[str]:
        return processes_with(self.mark)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(tmp_path, monkeypatch)


def test_a_server_gets_its_address_and_secret_but_not_the_rank(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    server = stub.server("2,3")
    wait_until(lambda: len(stub.processes) == 2)
    [start] = stub.starts
    assert " ".join(start["arguments"]) == (
        "-m dapo_megatron engine --connect tcp://10.0.0.1:7 --replica 2"
    )
    assert SECRET.hex() not in " ".join(start["arguments"])  # everybody can read these
    environment = start["environment"]
    assert SECRET.hex() in environment.values()
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not environment.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"}
    assert stub.log.read_text() == "a line for the log\n"
    stub.end.touch()
    server.close()
    wait_until(lambda: not stub.processes)  # its worker neither


def test_a_server_is_not_bound_to_the_cpus_of_its_rank(stub: Stub) -> None:
    try:
        os.sched_setaffinity(0, {min(STARTED_ON)})
        server = stub.server()
    finally:
        os.sched_setaffinity(0, STARTED_ON)
    wait_until(lambda: stub.starts)
    assert stub.starts[0]["cpus"] == sorted(STARTED_ON)
    stub.end.touch()
    server.close()


def test_a_server_that_ended_or_was_given_up_is_started_again(stub: Stub) -> None:
    server = stub.server()
    wait_until(lambda: len(stub.processes) == 2)
    server.watch()
    assert server.process_id == stub.starts[0]["pid"]  # it runs
    stub.end.touch()
    os.waitid(os.P_PID, server.process_id, os.WEXITED | os.WNOWAIT)
    stub.end.unlink()
    server.watch()
    wait_until(lambda: len(stub.starts) == 2 and len(stub.processes) == 2)
    assert server.process_id == stub.starts[1]["pid"]
    server.watch(is_given_up=True)
    wait_until(lambda: len(stub.starts) == 3 and len(stub.processes) == 2)
    assert server.process_id == stub.starts[2]["pid"]
    stub.end.touch()
    server.close()
    wait_until(lambda: not stub.processes)


def test_a_server_that_ends_again_and_again_is_not_started_for_ever(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(number: int) -> None:
        for _ in range(number):
            wait_until(lambda: server._process.poll() is not None)
            server.watch()

    stub.quick.touch()
    server = stub.server()
    watch(MAX_QUICK_ENDS + 3)
    assert len(stub.starts) == MAX_QUICK_ENDS + 1
    monkeypatch.setattr(servers, "QUICK_SECONDS", 0.0)  # the next end is not quick
    watch(1)
    wait_until(lambda: len(stub.starts) == MAX_QUICK_ENDS + 2)
    server.close()


def test_a_server_that_hangs_at_the_end_is_killed_with_its_workers(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "END_SECONDS", 0.5)
    server = stub.server()
    wait_until(lambda: len(stub.processes) == 2)
    server.close()
    wait_until(lambda: not stub.processes)
