"""Watchdog of a rank: ends it if it hangs, with the stacks of all threads in its log.

A hang is no sign of life for longer than the limit of the phase, or no end by the deadline after a
stop signal. A timer of faulthandler ends the rank, also while a library holds the GIL. Signs of
life restart it.

A thread writes the rank's heartbeat (heartbeat.py). When the rank has hung, and shortly before the
timer ends it, this thread reads the heartbeats of all ranks and records as exit reason which of
them are missing or behind. If a stalled disk blocks the thread, the timer still ends the rank. The
end of one rank ends the others: they lose their connection to it, or Slurm or `launch` ends them.

The exit code is 1. The timer cannot end a rank whose log accepts no more output, or which has a
thread in uninterruptible sleep. Times are of the rank's monotonic clock. A job that Slurm suspends
for longer than a limit counts as hung when it resumes.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from dapo_megatron.cluster import heartbeat as beats
from dapo_megatron.cluster.attempt import (
    ATTEMPTS,
    attempt,
    end_attempt,
    has_reason,
    record_reason,
)
from dapo_megatron.cluster.heartbeat import Heartbeat, RankState
from dapo_megatron.cluster.join import node_name
from dapo_megatron.protocols import Recorder
from dapo_megatron.types import Phase

REPORT_SECONDS = 5.0
"""Time from a phase's limit until faulthandler ends the rank. In it the missing ranks are named."""


class Engines(Protocol):
    """The engines of a run, on rank 0."""

    def describe(self) -> tuple[str, ...]:
        """Return a line about each engine."""


class Watchdog:
    """Watchdog of one rank.

    folder   the run's folder
    limits   timeout without a sign of life in seconds, by phase; outside of phases the limit of
             `start` applies, or the longest limit if there is none
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, limits: Mapping[str, float]
    ) -> None:
        self.engines: Engines | None = None
        self.view: Recorder | None = None
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._limits = {**limits, "": limits.get(Phase.START, max(limits.values()))}
        self._phase, self._step = "", 0
        self._last = (time.monotonic(), "started")
        self._num_exchanges = 0
        self._deadline = (math.inf, "")
        self._armed = -math.inf
        self._state = RankState.RUNNING
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Start to watch. Raises OSError if `folder` is not writable."""
        beats.write_heartbeat(self._folder, self.heartbeat())
        faulthandler.enable(file=2)
        self._thread = threading.Thread(
            target=self._write_heartbeats, name="heartbeat", daemon=True
        )
        self._arm()
        self._thread.start()

    def close(self) -> None:
        """Stop watching, because this rank is about to exit, and write a last heartbeat."""
        if self._thread is None or self._closed.is_set():
            return
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join(REPORT_SECONDS)  # with a timeout, because a stalled disk may block it

    @contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[None]:
        """Apply the limit of phase `name` inside this block. An inner phase replaces the outer one
        while it lasts. `step` 0 keeps the step of the previous phase."""
        if name not in self._limits:
            raise ValueError(f"watchdog: no limit for phase {name!r}")
        outer = self._phase
        self._step = step or self._step
        self._enter(name, f"start of {name}")
        try:
            yield
        finally:
            self._enter(outer, f"end of {name}")

    def record_activity(self, sign: str, exchange: int = 0) -> None:
        """Record a sign of life and its description, and the number of an exchange between all
        ranks if it is one. Can be called from any thread and takes about a microsecond."""
        now = time.monotonic()
        self._last = (now, sign)
        self._num_exchanges = exchange or self._num_exchanges
        if now - self._armed > 1.0:
            self._arm()

    def set_deadline(self, seconds: float, why: str) -> None:
        """End this rank in `seconds`, whatever it is doing, for the reason `why`."""
        self._deadline = (time.monotonic() + seconds, why)
        self._arm()

    def lift_deadline(self) -> None:
        """Let this rank take any time again."""
        self._deadline = (math.inf, "")
        self._arm()

    def heartbeat(self) -> Heartbeat:
        """Return this rank's current heartbeat."""
        last, sign = self._last
        return Heartbeat(
            rank=self._rank,
            world_size=self._world_size,
            attempt=attempt(),
            host=node_name(),
            pid=os.getpid(),
            state=self._state,
            time=time.time(),
            phase=self._phase,
            step=self._step,
            limit_seconds=self._limits[self._phase],
            silent_seconds=time.monotonic() - last,
            sign=sign,
            collectives={"exchanges": self._num_exchanges, **_collectives()},
            engines=self.engines.describe() if self.engines is not None else (),
        )

    def _enter(self, phase: str, sign: str) -> None:
        self._phase = phase
        self._armed = -math.inf  # the limit is another one
        self.record_activity(sign)
        if self.view is not None:
            self.view.phase(phase, self._step)

    def _arm(self) -> None:
        """Restart the timer."""
        if self._thread is not None and not self._closed.is_set():
            self._armed = time.monotonic()
            self._set_timer(max(self._seconds_left(), 0.0) + REPORT_SECONDS)

    def _set_timer(self, seconds: float) -> None:
        if self._state is RankState.RUNNING:
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def _seconds_left(self) -> float:
        now = time.monotonic()
        return min(self._last[0] + self._limits[self._phase], self._deadline[0]) - now

    # The thread.

    def _write_heartbeats(self) -> None:
        written_at, written = -math.inf, ("", 0)
        while not self._closed.wait(min(1.0, beats.HEARTBEAT_SECONDS)):
            if self._seconds_left() <= 0.0:
                return self._report_hang()
            now, place = time.monotonic(), (self._phase, self._step)
            if place != written or now - written_at >= beats.HEARTBEAT_SECONDS:
                self._write_heartbeat()
                written_at, written = now, place
        self._state = RankState.ENDED
        self._write_heartbeat()
        return None

    def _write_heartbeat(self) -> None:
        try:
            beats.write_heartbeat(self._folder, self.heartbeat())
        except OSError as error:
            print(f"watchdog: {error}", file=sys.stderr, flush=True)

    def _report_hang(self) -> None:
        """Record which ranks are missing or behind, and end this rank."""
        here = self.heartbeat()
        why = f"rank {self._rank}: no sign of life for {here.limit_seconds:g} s, {here.place}"
        if time.monotonic() >= self._deadline[0]:
            why = f"rank {self._rank}: {self._deadline[1]}"
        lines = [f"watchdog: {why}; last sign of life: {here.sign}", *here.engines]
        self._state = RankState.HUNG
        self._write_heartbeat()
        time.sleep(min(0.01 * self._rank, REPORT_SECONDS / 2))  # one rank is enough
        if not has_reason():
            text = beats.describe_suspects(beats.read_heartbeats(self._folder))
            # The suspect comes first, because scripts show the log of the first rank in the reason.
            record_reason(1, f"hung: {text.splitlines()[0]}; noticed by {why}", text)
            end_attempt(self._folder / ATTEMPTS, end="hung")
            lines.append(f"hung: {text}")
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(0.01, exit=True, file=2)


def _collectives() -> dict[str, int]:
    """Return the number of collectives in each process group of torch, which has the same name on
    all of its ranks.

    Without those in which gloo also counts messages between two ranks: the default group and that
    of the pipeline. This module does not import torch, because a rank may hang before it has.
    """
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    counts: dict[str, int] = {}
    with suppress(AttributeError, RuntimeError):  # a group that is being made or destroyed
        for group in list(module._world.pg_map):
            if group is not module.GroupMember.WORLD and "PIPELINE" not in group.group_desc:
                name = f"group {group.group_name} ({group.group_desc})"
                counts[name] = group._get_sequence_number_for_group()
    return counts
