"""Start processes that have torch, Megatron-core, vLLM and transformers already imported.

They are forked from one server per test process, which imports these once (10 s of CPU) and starts
no thread. Every process is new, so that no state passes from one test to another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PRELOADED = "tests.helpers.preload"
SERVERS = "DAPO_TEST_SERVERS"
"""Environment variable with the folder to which engine servers write their process ids."""


def warm_context() -> ForkServerContext:
    """Return a context whose processes are forked from the server. The first process starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment, inherited from the server, by that of the test."""
    os.environ.clear()
    os.environ.update(environment)


def fork_servers() -> None:
    """Let this process, and those that it forks, start engine servers as warm processes, too."""
    from dapo_megatron.cluster import servers

    servers.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_WarmServer,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


class _WarmServer:
    """The part of `subprocess.Popen` that cluster/servers.py uses. Its parent is the server of this
    file, so it watches the rank by itself."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: Any,
        preexec_fn: Callable[[], None],
        **_: Any,
    ) -> None:
        # This process was forked from the server, and knows its address.
        known: Any = forkserver._forkserver  # type: ignore[attr-defined]
        known.ensure_running = lambda: None
        log = None if stdout in (None, subprocess.DEVNULL) else Path(stdout.name)
        self._process = warm_context().Process(
            target=_serve, args=(list(command[1:]), dict(env), log, os.getpid(), os.getcwd())
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        self.returncode = self._process.exitcode
        return self.returncode


def _serve(
    words: list[str], environment: dict[str, str], log: Path | None, parent: int, folder: str
) -> None:
    from tests.helpers.commands import run_and_exit

    take_environment(environment)
    os.setpgid(0, 0)
    os.chdir(folder)
    if log is not None:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(handle, stream.fileno())
    if SERVERS in environment:
        (Path(environment[SERVERS]) / f"{os.getpid()}").touch()

    def die_with_parent() -> None:
        while Path(f"/proc/{parent}").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_with_parent, daemon=True).start()
    run_and_exit(words)
