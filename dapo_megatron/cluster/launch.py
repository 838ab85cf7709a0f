"""Starts the ranks of a run on this machine if no launcher has started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path

from dapo_megatron.cluster.attempt import attempt_variable
from dapo_megatron.cluster.processes import die_with_parent
from dapo_megatron.cluster.scratch import private_folder
from dapo_megatron.cluster.secret import secret_variable
from dapo_megatron.cluster.stop import SIGNALS
from dapo_megatron.cluster.store import STORE
from dapo_megatron.types import ConfigError

_STARTED = "DAPO_MEGATRON_STARTED"
_IMPORTED = time.time()  # close to the start of the command, which imports this module first
KILL_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
GRACE_SECONDS = 15.0
"""Time that the other ranks have to exit by themselves after one has failed."""
RESTART_SECONDS = 2.0
"""Time before a rank is started again. If the whole run ends, other ranks have failed by then."""
STARTS, MAX_STARTS = "DAPO_ENGINE_STARTS", 5
"""A rank is not started again after so many starts in a row that were followed by a quick end. As
slurm/engine_rank.sh does, read from the environment variable, with this default."""
QUICK, QUICK_SECONDS = "DAPO_QUICK_SECONDS", 600
"""An end within so many seconds after the start is quick."""


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
    from the terminal. The ranks are killed if this process dies. A rank that has called
    `allow_restart` is started again if it fails. Raises ConfigError if STARTS or QUICK is not a
    number.
    """
    max_starts, quick_seconds = _number(STARTS, MAX_STARTS), _number(QUICK, QUICK_SECONDS)
    with private_folder() as folder:
        shared = {**os.environ, **attempt_variable(), **meeting_variables(folder)}
        port = free_port()

        def start(rank: int) -> subprocess.Popen[bytes]:
            environment = {**shared, **_environment(rank, num_processes, port)}
            return subprocess.Popen(command, env=environment, preexec_fn=_prepare_rank)

        ranks = [start(rank) for rank in range(num_processes)]
        now = time.monotonic()
        restarts = _Restarts(start, folder, max_starts, quick_seconds, [now] * num_processes)
        with _forward_signals(ranks):
            code = _wait(ranks, grace_seconds, restarts)
    return code if code >= 0 else 128 - code


def allow_restart(environ: Mapping[str, str] = os.environ) -> None:
    """Let the launcher start this rank again if it fails."""
    if STORE in environ:
        _restart_mark(Path(environ[STORE]).parent, int(environ["RANK"])).touch()


def forbid_restart(environ: Mapping[str, str] = os.environ) -> None:
    """Take back `allow_restart`: the run cannot go on without this rank."""
    if STORE in environ:
        _restart_mark(Path(environ[STORE]).parent, int(environ["RANK"])).unlink(missing_ok=True)


def _number(variable: str, default: int) -> int:
    given = os.environ.get(variable) or str(default)
    if not (given.isascii() and given.isdigit()):
        raise ConfigError(f"{variable}: {given!r} is not a number")
    return int(given)


def _restart_mark(folder: Path, rank: int) -> Path:
    return folder / f"restart_{rank}"


@dataclass
class _Restarts:
    """Starts failed ranks again that have allowed it.

    start          starts a rank
    folder         where ranks leave their marks
    max_starts     number of starts in a row, with a quick end, after which a rank is given up
    quick_seconds  an end within this time after the start is quick
    started_at     time of each rank's last start, as time.monotonic()
    """

    start: Callable[[int], subprocess.Popen[bytes]]
    folder: Path
    max_starts: int
    quick_seconds: int
    started_at: list[float]
    _failed_at: dict[int, float] = field(default_factory=dict)
    _quick_ends: Counter[int] = field(default_factory=Counter)

    def may_fail(self, rank: int) -> bool:
        """Return whether the run goes on without a rank."""
        return _restart_mark(self.folder, rank).exists()

    @property
    def are_expected(self) -> bool:
        """Whether ranks may fail without ending the run."""
        return any(
            _restart_mark(self.folder, rank).exists() for rank in range(len(self.started_at))
        )

    def run(self, ranks: MutableSequence[subprocess.Popen[bytes]]) -> None:
        """Replace failed ranks that may be started again."""
        now = time.monotonic()
        for rank, process in enumerate(ranks):
            if not process.poll() or not self.may_fail(rank):
                continue
            if rank not in self._failed_at:
                self._failed_at[rank] = now
                is_quick = now - self.started_at[rank] < self.quick_seconds
                self._quick_ends[rank] = self._quick_ends[rank] + 1 if is_quick else 0
            is_given_up = self._quick_ends[rank] >= self.max_starts
            if is_given_up or now < self._failed_at[rank] + RESTART_SECONDS:
                continue
            del self._failed_at[rank]
            print(f"rank {rank} ended with {ending(process.returncode)}; it is started again")
            ranks[rank], self.started_at[rank] = self.start(rank), now


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


def _wait(
    ranks: MutableSequence[subprocess.Popen[bytes]], grace_seconds: float, restarts: _Restarts
) -> int:
    first, code, deadline, is_terminated = 0, 0, None, False
    while any(rank.poll() is None for rank in ranks):
        failed = [
            number
            for number, rank in enumerate(ranks)
            if rank.poll() and not restarts.may_fail(number)
        ]
        if failed and deadline is None:
            first, deadline = failed[0], time.monotonic() + grace_seconds
            code = ranks[first].returncode
        elif deadline is None and ranks[0].poll() is None:
            restarts.run(ranks)
        elif deadline is None and restarts.are_expected:
            # The run is over, but a rank that was started again may hang, or wait to join.
            deadline = time.monotonic() + grace_seconds
        overdue_seconds = time.monotonic() - deadline if deadline is not None else -1.0
        if overdue_seconds > 0 and not is_terminated:
            is_terminated = True  # once: a second SIGTERM would end rank 0 while it closes the run
            for rank in ranks:
                rank.terminate()
        if overdue_seconds > KILL_SECONDS:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    if code < 0 or (code and ranks[0].returncode != code):
        # The terminal shows at most rank 0's error, and that of no rank which a signal has ended.
        print(f"rank {first} ended first, with {ending(code)}; see its log", file=sys.stderr)
    codes = (rank.returncode for n, rank in enumerate(ranks) if not restarts.may_fail(n))
    return code or next(filter(None, codes), 0)


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
