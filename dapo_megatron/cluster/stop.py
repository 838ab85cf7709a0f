"""Stopping on a signal: SIGUSR1 (Slurm, some time before the time limit), SIGTERM (preemption) or
SIGHUP (the terminal is gone).

The handler only records the signal. The run checks for it at points where its state is consistent.
All ranks then raise `Stopped` together, and the loop saves. The handler itself never saves, because
it can interrupt any code, even an optimizer step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from dapo_megatron.cluster.attempt import HUNG, STOPPED
from dapo_megatron.cluster.collectives import ErrorRecord
from dapo_megatron.cluster.emergency_io import run_with_timeout, stacks, write_unbuffered
from dapo_megatron.cluster.exit_reason import record
from dapo_megatron.cluster.interrupt import SAME_SECONDS
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import Fenced, Stopped

SIGNALS = tuple(
    number
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN  # nohup
)
LAST_SECONDS = 2.0
"""Timeout of writing the log, and then of writing the exit reason, after the deadline."""
OWNER_SECONDS = 10.0
"""Interval between checks of the run folder's owner."""


def leave_when_asked() -> None:
    """Exit with code STOPPED on a signal, until `Stop.listen` replaces the handlers.

    There is nothing to save yet.
    """

    def leave(number: int, _: Any) -> None:
        record(STOPPED, f"stopped by {signal.Signals(number).name} before the run started")
        os._exit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, leave)


class Stop:
    """Stop requests by signals to this process. A second signal ends the process immediately.

    `seconds` is the time from a signal to the deadline: a rank that has not saved by then exits
    with code HUNG. `check_owner` raises Fenced if another attempt owns the run's folder; rank 0
    calls it.
    """

    def __init__(self, seconds: float, check_owner: Callable[[], None] = lambda: None) -> None:
        self.signal: str | None = None
        """Name of the first signal, or None."""
        self._check_owner = check_owner
        self._owner_checked = time.monotonic()
        self._seconds = seconds
        self._at = 0.0
        self._has_state = False
        self._is_saved = threading.Event()

    def listen(self) -> None:
        """Install the signal handlers. Until `hold`, a signal raises Stopped immediately, because
        there is nothing to save yet."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def hold(self) -> None:
        """Only record signals from now on; the run calls `check` at points where it can stop.

        Raises Stopped if there was a signal already.
        """
        self._has_state = True
        if self.signal is not None:
            raise Stopped(f"stopped by {self.signal} before the first step")

    def lift_deadline(self) -> None:
        """Cancel the deadline, once the run is done and saved.

        The report and MLflow, which follow, may take longer without counting as a hang.
        """
        self._is_saved.set()

    def check(self, exchange: Exchange) -> None:
        """Raise Stopped on all ranks if any of them got a signal, or Fenced if another attempt owns
        the run's folder. Collective."""
        fence = ErrorRecord.of(self._fence_error()) if exchange.rank == 0 else None
        by_rank = exchange.all_gather((self.signal, fence), tuple[str | None, ErrorRecord | None])
        if record := by_rank[0][1]:
            raise record.error()
        if name := next((name for name, _ in by_rank if name), None):
            raise Stopped(f"stopped by {name}")

    def _fence_error(self) -> Fenced | None:
        if time.monotonic() - self._owner_checked > OWNER_SECONDS:
            self._owner_checked = time.monotonic()
            try:
                self._check_owner()
            except Fenced as error:
                return error
        return None

    def _on_signal(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self.signal is None:
            self.signal, self._at = name, time.monotonic()
            threading.Thread(target=self._exit_at_deadline, daemon=True).start()
            if not self._has_state:
                raise Stopped(f"stopped by {name} before the first step")
        elif time.monotonic() - self._at > SAME_SECONDS:
            os._exit(128 + number)

    def _exit_at_deadline(self) -> None:
        """End the process at the deadline, whatever it is doing. Otherwise Slurm would kill it
        later, possibly in the middle of a write."""
        if self._is_saved.wait(self._seconds):
            return
        reason = (
            f"no checkpoint was saved within run.stop_seconds ({self._seconds:g} s) after "
            f"{self.signal}"
        )
        try:
            run_with_timeout(
                LAST_SECONDS, lambda: write_unbuffered(2, f"error: {reason}\n{stacks()}")
            )
            run_with_timeout(LAST_SECONDS, lambda: record(HUNG, reason))
        finally:
            os._exit(HUNG)
