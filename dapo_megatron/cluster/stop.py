"""Stopping by a signal: SIGUSR1 (Slurm, some time before the limit) and SIGTERM (preemption).

A handler only takes note. The run looks at points where its state is whole, where all ranks agree
and raise `Stopped` together; the loop then saves. Nothing is saved inside a handler: it interrupts
anything, half an optimizer step as well.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from typing import Any

from dapo_megatron.cluster.attempt import HUNG
from dapo_megatron.cluster.verdict import record
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import Stopped

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAME_SECONDS = 1.0
"""Signals closer than this are one: a launcher passes on what its ranks get anyway."""


class Stop:
    """What signals have asked this process. A second signal ends it at once."""

    def __init__(self, seconds: float) -> None:
        self.signal: str | None = None
        """Name of the signal that asked for a stop."""
        self._seconds = seconds
        self._at = 0.0
        self._has_state = False

    def listen(self) -> None:
        """Take the signals. Until `hold` there is nothing to save: one raises Stopped at once."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def hold(self) -> None:
        """From now on the run looks by itself whether to stop."""
        self._has_state = True
        if self.signal is not None:
            raise Stopped(f"stopped by {self.signal} before the first step")

    def check(self, exchange: Exchange) -> None:
        """Raises Stopped on all ranks if any of them was asked to. Collective."""
        if told := next((name for name in exchange.all_gather(self.signal) if name), None):
            raise Stopped(f"stopped by {told}")

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
        time.sleep(self._seconds)
        reason = f"{self.signal} came {self._seconds:g} s ago, not saved since: run.stop_seconds"
        print(f"error: {reason}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        record(HUNG, reason)
        os._exit(HUNG)
