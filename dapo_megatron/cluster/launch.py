"""Starting the ranks of a run on this machine, when no launcher has."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dapo_megatron.cluster.attempt import attempt_variable
from dapo_megatron.cluster.processes import die_with_parent
from dapo_megatron.cluster.ranks import STORE
from dapo_megatron.cluster.scratch import private_folder
from dapo_megatron.cluster.secret import secret_variable

_STARTED = "DAPO_MEGATRON_STARTED"
_IMPORTED = time.time()  # of this module, which the command line imports first of all
KILL_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
GRACE_SECONDS = 15.0
"""How long the other ranks get to end by themselves after one has failed."""


def started_at() -> float:
    """When the user's command began, as time.time(): before the ranks were started, if `launch`
    did that."""
    return float(os.environ.get(_STARTED, _IMPORTED))


def is_launched() -> bool:
    """Whether torchrun, srun (see join.py) or `launch` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    command: Sequence[str], num_processes: int, *, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Run `command` on `num_processes` ranks; the exit code, as a shell gives it.

    The first rank to fail decides it; the others are given `grace_seconds` and are then killed.
    SIGTERM and SIGUSR1 are passed on; SIGINT reaches the ranks from the terminal. Ranks die with
    this process.
    """
    with private_folder() as folder:
        shared = {**os.environ, **attempt_variable(), **meeting_variables(folder)}
        port = free_port()
        ranks = [
            subprocess.Popen(
                command,
                env={**shared, **_environment(rank, num_processes, port)},
                preexec_fn=_prepare_rank,
            )
            for rank in range(num_processes)
        ]
        with _signals_passed_on(ranks):
            code = _wait(ranks, grace_seconds)
    return code if code >= 0 else 128 - code


def meeting_variables(folder: Path) -> dict[str, str]:
    """Return what ranks on one machine need to meet in a folder that only this user can open: the
    path of their store, and a new secret."""
    return {STORE: str(folder / "store"), **secret_variable()}


def _environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        _STARTED: str(_IMPORTED),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        # More threads than cores make every collective wait for a thread that is not running.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_processes))
    return environment


def _wait(ranks: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> int:
    first, code, deadline, asked = 0, 0, None, False
    while any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll()]
        if failed and deadline is None:
            first, deadline = failed[0], time.monotonic() + grace_seconds
            code = ranks[first].returncode
        late = time.monotonic() - deadline if deadline is not None else -1.0
        if late > 0 and not asked:
            asked = True  # once: rank 0 may be closing the run as what it was
            for rank in ranks:
                rank.terminate()
        if late > KILL_SECONDS:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    if ranks[0].returncode != code and deadline is not None:
        # Rank 0 has told its own story at best.
        print(f"rank {first} failed first (exit code {code}); see its log", file=sys.stderr)
    return code or next((rank.returncode for rank in ranks if rank.returncode), 0)


@contextlib.contextmanager
def _signals_passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    # A terminal sends SIGINT to the ranks as well; ours only must not end this process first.
    kept = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, pass_on),
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _prepare_rank() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
