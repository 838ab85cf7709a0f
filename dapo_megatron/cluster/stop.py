"""Stopping on a signal: SIGUSR1 (Slurm, some time before the time limit), SIGTERM (preemption) or
SIGHUP (the terminal is gone).

The handler only records the signal. The run checks for it at points where its state is consistent.
All ranks then raise `Stopped` together, and the loop saves. The handler itself never saves, because
it can interrupt any code, even an optimizer step.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from dapo_megatron.cluster.attempt import STOPPED, record_reason
from dapo_megatron.cluster.interrupt import SAME_SECONDS
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import Stopped

SIGNALS = tuple(
    number
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN  # nohup
)


def leave_when_asked() -> None:
    """Exit with code STOPPED on a signal, until `Stop.listen` replaces the handlers.

    There is nothing to save yet.
    """

    def leave(number: int, _: Any) -> None:
        record_reason(STOPPED, f"stopped by {signal.Signals(number).name} before the run started")
        os._exit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, leave)


class Stop:
    """Stop requests by signals to this process. A second signal ends the process immediately.

    `seconds` is the time from a signal to the deadline: the watchdog ends a rank that has not saved
    by then. Otherwise Slurm would kill it later, possibly in the middle of a write.
    """

    def __init__(self, seconds: float, watchdog: Watchdog) -> None:
        self.signal: str | None = None
        """Name of the first signal, or None."""
        self._seconds = seconds
        self._watchdog = watchdog
        self._at = 0.0
        self._exchange: Exchange | None = None
        """Set once there is a state to save."""

    def listen(self) -> None:
        """Install the signal handlers. Until `hold`, a signal raises Stopped immediately, because
        there is nothing to save yet."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def hold(self, exchange: Exchange) -> None:
        """Only record signals from now on; the run calls `check` at points where it can stop.
        `exchange` is between all ranks.

        Raises Stopped if there was a signal already.
        """
        self._exchange = exchange
        if self.signal is not None:
            raise Stopped(f"stopped by {self.signal} before the first step")

    def lift_deadline(self) -> None:
        """Cancel the deadline, once the run is done and saved.

        The report and MLflow, which follow, may take longer without counting as a hang.
        """
        self._seconds = float("inf")
        self._watchdog.lift_deadline()

    def check(self) -> None:
        """Raise Stopped on all ranks if any of them got a signal, after `hold`. Collective."""
        assert self._exchange is not None
        by_rank = self._exchange.all_gather(self.signal, str | None)
        if name := next(filter(None, by_rank), None):
            raise Stopped(f"stopped by {name}")

    def _on_signal(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self.signal is None:
            self.signal, self._at = name, time.monotonic()
            self._watchdog.set_deadline(
                self._seconds,
                f"no checkpoint was saved within run.stop_seconds ({self._seconds:g} s) after "
                f"{name}",
            )
            if self._exchange is None:
                raise Stopped(f"stopped by {name} before the first step")
        elif time.monotonic() - self._at > SAME_SECONDS:
            os._exit(128 + number)
