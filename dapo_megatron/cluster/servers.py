"""Engine servers that a rank starts: one process tree each, started again when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.processes import END_SECONDS, STARTED_ON, die_with_parent, has_ended
from dapo_megatron.cluster.secret import SECRET

MAX_QUICK_ENDS = 5
"""A server is not started again after so many starts in a row that were followed by a quick end."""
QUICK_SECONDS = 600.0
"""An end within so many seconds after the start is quick."""
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank's launcher, by which vLLM would join a world."""


def _prepare_server() -> None:
    os.sched_setaffinity(0, STARTED_ON)  # it binds itself near its own GPUs
    die_with_parent()


def process_name(process_id: int) -> str:
    """Return the name of a process of this node, for messages and to find it again."""
    return f"node {node_name()}, process {process_id}"


class Server:
    """A server of a replica, as the child of this rank. It dies with this process.

    address  of rank 0's pool
    devices  visible GPUs of the server; None without GPUs
    log      gets its output; None: this process's own
    threads  of each of its workers without GPUs: more than there are cores wait for one another
    """

    def __init__(
        self,
        replica: int,
        address: str,
        secret: bytes,
        devices: str | None,
        log: Path | None,
        threads: int = 1,
    ) -> None:
        self._command = [sys.executable, "-m", "dapo_megatron", "engine", "--connect", address]
        self._command += ["--replica", str(replica)]
        inherited = {k: v for k, v in os.environ.items() if k not in OF_A_RANK}
        self._environment = inherited | {SECRET: secret.hex()}
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        else:
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self._log = log
        self._num_quick = 0
        self._start()

    def _start(self) -> None:
        output = subprocess.DEVNULL if self._log is None else self._log.open("ab")
        try:
            # Its own process group, because it is killed with its workers, and not by Ctrl-C.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                preexec_fn=_prepare_server,
            )
        finally:
            if not isinstance(output, int):
                output.close()
        self._started_at = time.monotonic()

    @property
    def process_id(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def watch(self, *, is_given_up: bool = False) -> None:
        """Start the server again if it has ended, or hangs (`is_given_up`)."""
        if not is_given_up and not has_ended(self._process):
            return
        self._kill()
        if time.monotonic() - self._started_at > QUICK_SECONDS:
            self._num_quick = 0
        if self._num_quick < MAX_QUICK_ENDS:
            self._num_quick += 1
            self._start()

    def close(self) -> None:
        """Wait for the end of the server, which rank 0 has told to end, but not for long."""
        end = time.monotonic() + END_SECONDS
        while not has_ended(self._process) and time.monotonic() < end:
            time.sleep(0.02)
        self._kill()

    def _kill(self) -> None:
        """End the process and its workers. Once it is waited for, its number may be another's."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
