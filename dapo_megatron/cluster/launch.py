"""Starts the ranks of a run on this machine if no launcher has started them."""

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

from dapo_megatron.cluster.attempt import REASON_FILE, attempt_variables, read_reason
from dapo_megatron.cluster.processes import END_SECONDS, die_with_parent
from dapo_megatron.cluster.scratch import private_folder
from dapo_megatron.cluster.secret import secret_variable
from dapo_megatron.cluster.stop import SIGNALS
from dapo_megatron.cluster.store import STORE

_STARTED = "DAPO_MEGATRON_STARTED"
_IMPORTED = time.time()  # close to the start of the command, which imports this module first
GRACE_SECONDS = 15.0
"""Time that the other ranks have to exit by themselves after one has failed."""


def started_at() -> float:
    """Return the start time of the user's command, as time.time(). In a rank that `launch` started
    this is the start of the launching process."""
    return float(os.environ.get(_STARTED, _IMPORTED))


def is_launched() -> bool:
    """Return whether torchrun, srun (see join.py) or `launch` started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    command: Sequence[str], num_processes: int, *, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Run `command` on `num_processes` ranks and return the exit code, as a shell reports it.

    It is the code of the first rank to fail. The other ranks then have `grace_seconds` to exit
    before they are terminated. SIGTERM, SIGUSR1 and SIGHUP are forwarded; SIGINT reaches the ranks
    from the terminal. The ranks are killed if this process dies.
    """
    folder = private_folder()
    shared = {**os.environ, **attempt_variables(folder), **meeting_variables(folder)}
    port = free_port()
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, **_environment(rank, num_processes, port)},
            preexec_fn=_prepare_rank,
        )
        for rank in range(num_processes)
    ]
    with _forward_signals(ranks):
        code = _wait(ranks, grace_seconds)
    reason = read_reason(Path(shared[REASON_FILE])) if code else None
    if reason is not None and reason.reason.startswith("hung: "):
        print(f"error: {reason.reason}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def meeting_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables with which ranks on one machine find each other: the path of
    their store in `folder`, which only this user can open, and a new secret."""
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
        # With more threads than cores, every collective waits for a descheduled thread.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_processes))
    return environment


def _wait(ranks: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> int:
    first, code, deadline, is_terminated = 0, 0, None, False
    while any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll()]
        if failed and deadline is None:
            first, deadline = failed[0], time.monotonic() + grace_seconds
            code = ranks[first].returncode
        overdue_seconds = time.monotonic() - deadline if deadline is not None else -1.0
        if overdue_seconds > 0 and not is_terminated:
            is_terminated = True  # once: a second SIGTERM would end rank 0 while it closes the run
            for rank in ranks:
                rank.terminate()
        if overdue_seconds > END_SECONDS:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    if code < 0 or (code and ranks[0].returncode != code):
        # The terminal shows at most rank 0's error, and none of a rank which a signal has ended.
        print(f"rank {first} ended first, with {ending(code)}; see its log", file=sys.stderr)
    return code or next((rank.returncode for rank in ranks if rank.returncode), 0)


def ending(code: int) -> str:
    """Return an exit code as text. A negative one is the number of the signal that ended the
    process."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}{_CAUSES.get(-code, '')} (exit code {code})"


_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", often because memory was full",
    signal.SIGBUS: ", often because /dev/shm was full",
}


@contextlib.contextmanager
def _forward_signals(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    # The terminal sends SIGINT to the ranks too. This process must not exit before them.
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        **{number: signal.signal(number, forward) for number in SIGNALS},
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _prepare_rank() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()


def free_port() -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
