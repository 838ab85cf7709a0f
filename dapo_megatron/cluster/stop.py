"""Stopping by a signal: SIGUSR1 (Slurm, some time before the limit) and SIGTERM (preemption).

A handler only takes note. The run looks at points where its state is whole, where all ranks agree
and raise `Stopped` together; the loop then saves. Nothing is saved inside a handler: it interrupts
anything, half an optimizer step as well.
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
from dapo_megatron.cluster.emergency_io import say, stacks, within
from dapo_megatron.cluster.exit_reason import record
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import Fenced, Stopped

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAME_SECONDS = 1.0
"""Signals closer than this are one: a launcher passes on what its ranks get anyway."""
LAST_SECONDS = 2.0
"""For the log, and then for the verdict, once the deadline has passed."""
OWNER_SECONDS = 10.0
"""Between two looks at who owns the folder."""


def leave_when_asked() -> None:
    """Until a run listens for itself: a signal ends the rank, as a stop with nothing to save."""

    def leave(number: int, _: Any) -> None:
        record(STOPPED, f"stopped by {signal.Signals(number).name} before it began")
        os._exit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, leave)


class Stop:
    """What signals have asked this process. A second signal ends it at once.

    `check_owner` raises Fenced where another attempt has taken the run's folder (rank 0 looks).
    """

    def __init__(self, seconds: float, check_owner: Callable[[], None] = lambda: None) -> None:
        self.signal: str | None = None
        """Name of the signal that asked for a stop."""
        self._check_owner = check_owner
        self._owner_checked = self._checked = time.monotonic()
        self._seconds = seconds
        self._at = 0.0
        self._has_state = False
        self._is_saved = threading.Event()

    def listen(self) -> None:
        """Take the signals. Until `hold` there is nothing to save: one raises Stopped at once."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def hold(self) -> None:
        """From now on the run looks by itself whether to stop."""
        self._has_state = True
        if self.signal is not None:
            raise Stopped(f"stopped by {self.signal} before the first step")

    def lift_deadline(self) -> None:
        """The run is done and all of it on disk: what is left, its report and MLflow, may take
        longer than a signal allows, and does not make it a run that hung."""
        self._is_saved.set()

    def check(self, exchange: Exchange) -> float:
        """Return the seconds since the previous check, the same on all ranks. Collective.

        Raises Stopped on all ranks if any rank got a signal, Fenced if another attempt has taken
        the run.
        """
        fenced = ErrorRecord.of(self._fenced()) if exchange.rank == 0 else None
        seconds = time.monotonic() - self._checked
        answers = exchange.all_gather(
            (self.signal, fenced, seconds), tuple[str | None, ErrorRecord | None, float]
        )
        self._checked = time.monotonic()
        if record := answers[0][1]:
            raise record.error()
        if name := next((name for name, _, _ in answers if name), None):
            raise Stopped(f"stopped by {name}")
        return max(seconds for _, _, seconds in answers)

    def _fenced(self) -> Fenced | None:
        if time.monotonic() - self._owner_checked > OWNER_SECONDS:
            self._owner_checked = time.monotonic()
            try:
                self._check_owner()
            except Fenced as error:
                return error
        return None

    def _take(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self.signal is None:
            self.signal, self._at = name, time.monotonic()
            threading.Thread(target=self._exit_late, daemon=True).start()
            if not self._has_state:
                raise Stopped(f"stopped by {name} before the first step")
        elif time.monotonic() - self._at > SAME_SECONDS:
            os._exit(128 + number)

    def _exit_late(self) -> None:
        """Whatever this rank waits for then: Slurm would kill it in the middle of a write."""
        if self._is_saved.wait(self._seconds):
            return
        reason = f"{self.signal} came {self._seconds:g} s ago, not saved since: run.stop_seconds"
        try:
            within(LAST_SECONDS, lambda: say(2, f"error: {reason}\n{stacks()}"))
            within(LAST_SECONDS, lambda: record(HUNG, reason))
        finally:
            os._exit(HUNG)
