"""Watchdog: detects a hanging rank, reports which ranks are missing or behind, and ends all ranks.

Each rank has a `Watchdog` with two threads. The clock thread detects a hang: no sign of life for
longer than the limit of the phase. It does no file I/O itself, so it can always end the process
some seconds later. The heartbeat thread writes the rank's heartbeat (heartbeat.py) and checks for
an alarm of another rank. A stalled file system blocks only this thread.

A hang ends all ranks. The first rank to detect it raises an alarm. Every rank that sees the alarm
dumps its stacks into its log and reports the state HUNG in its heartbeat. One rank, rank 0 if it
can, then determines which ranks did not answer or are behind. It writes them to
`.pulse/hang_ATTEMPT.json`, the exit reason and the terminal. Times are of each rank's monotonic
clock. A job that Slurm suspends for longer than a limit counts as hung when it resumes.

If a library holds the GIL of a rank, none of these threads runs. A timer of faulthandler, which
does not need the GIL, then dumps the stacks and ends the rank with exit code 1. Other ranks report
it as missing. If there are no other ranks, no exit reason is written, and the stacks in the log are
the only sign of the hang. If writing the log hangs too, faulthandler cannot end the process. Slurm
or `launch` must end it, and they do so after another rank has exited. A process with a thread in
uninterruptible sleep, as on some dead file systems, cannot be ended at all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from dapo_megatron.cluster import exit_reason
from dapo_megatron.cluster.attempt import HUNG, attempt
from dapo_megatron.cluster.emergency_io import (
    FlightRecord,
    last_collectives,
    run_with_timeout,
    stacks,
    write_unbuffered,
)
from dapo_megatron.cluster.heartbeat import (
    HEARTBEAT_SECONDS,
    Alarm,
    Heartbeat,
    RankState,
    describe_suspects,
    heartbeat_folder,
    missing_ranks,
    read_heartbeats,
    write_heartbeat,
)
from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.safe_output import above_panel
from dapo_megatron.files import write_json
from dapo_megatron.types import Phase

ANSWER_SECONDS = 3.0
"""Time that other ranks have to answer an alarm."""
ASK_SECONDS = 1.0
"""Timeout of each diagnostic step of a hanging rank, because it may block on the cause of the
hang."""
END_SECONDS = 7.0
"""Maximum time from detecting a hang to the end of the process; less than BACKSTOP_SECONDS."""
BACKSTOP_SECONDS = 10.0
"""Time from a phase's limit until faulthandler ends a rank whose threads do not run."""
EXCHANGES = frozenset({"all_gather", "all_to_all", "broadcast", "barrier"})
"""First words of the activity reports of cluster/ranks.py: "all_gather 123", then
"all_gather 123 done"."""


def hang_file(run: Path, attempt_name: str) -> Path:
    """Return the path of the hang report of an attempt: reason, text and all heartbeats, as
    JSON."""
    return heartbeat_folder(run) / f"hang_{attempt_name}.json"


class Watchdog:
    """Watchdog of one rank.

    folder         the run's folder
    limits         timeout without a sign of life in seconds, by phase; outside of phases the limit
                   of `start` applies, or the longest limit if there is none
    attempt_name   attempt name, the same on all ranks; the default is that of attempt.py
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        limits: Mapping[str, float],
        attempt_name: str | None = None,
    ) -> None:
        self.terminal_fd = 2
        """File descriptor of the user's terminal. Set it if the output goes to a log."""
        self.at_hang: Callable[[], None] = lambda: None
        """Called after a hang on the rank that reports it, with a timeout of ASK_SECONDS."""
        self.on_phase: Callable[[str, int], None] = lambda phase, step: None
        """Called with phase and step at every change of phase."""
        self.engines: Callable[[], tuple[str, ...]] = tuple
        """Return lines about the engines, on rank 0."""
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._limits = {**limits, "": limits.get(Phase.START, max(limits.values()))}
        self._attempt = attempt_name or attempt()
        self._host = node_name()
        self._alarm = Alarm.of(folder, self._attempt)
        self._hang_file = hang_file(folder, self._attempt)
        self._phase, self._step = "", 0
        self._last = (time.monotonic(), "started")
        self._exchange = ""
        self._num_collectives: Mapping[str, int] = {}
        self._state = RankState.RUNNING
        self._alarm_reason: str | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start both threads. Raises OSError if `folder` is not writable."""
        self._alarm.prepare(fresh=self._rank == 0)
        if self._rank == 0:
            self._hang_file.unlink(missing_ok=True)
        write_heartbeat(self._folder, self.heartbeat())
        faulthandler.enable(file=2)
        self._arm(0.0)
        for work in (self._watch, self._write_heartbeats):
            thread = threading.Thread(target=work, name=f"watch{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Stop watching, because this rank is about to exit, and write a last heartbeat."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(1.0)  # with a timeout, because it may block on a stalled disk
        faulthandler.cancel_dump_traceback_later()
        if self._threads and self._state is RankState.RUNNING:
            self._state = RankState.ENDED
            run_with_timeout(ASK_SECONDS, self._write_heartbeat)

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

    def record_activity(self, what: str = "") -> None:
        """Record a sign of life and its description. Can be called from any thread and takes about
        a microsecond."""
        self._last = (time.monotonic(), what or self._last[1])
        if what.partition(" ")[0] in EXCHANGES:
            self._exchange = what

    def _enter(self, phase: str, sign: str) -> None:
        self._phase = phase
        self.record_activity(sign)
        self.on_phase(phase, self._step)
        if self._threads and not self._closed.is_set():
            self._arm(self._limits[phase])  # here, because the clock thread may not get the GIL

    # The clock thread.

    def _watch(self) -> None:
        while not self._closed.is_set():
            limit, silent = self._silence()
            if self._alarm_reason is not None:
                self._end_process(self._alarm_reason)
            if silent > limit:
                why = (
                    f"rank {self._rank}: no sign of life for {limit:g} s, {self.heartbeat().place}"
                )
                self._end_process(why, raise_alarm=True)
            self._arm(limit - silent)
            self._wake.wait(min(1.0, max(limit - silent, 0.01), limit / 10))

    def _silence(self) -> tuple[float, float]:
        """Return the limit, and the time since the last sign of life, in seconds."""
        return self._limits[self._phase], time.monotonic() - self._last[0]

    def _arm(self, seconds: float) -> None:
        """Restart the backstop timer. It ends this process BACKSTOP_SECONDS after `seconds`, even
        if a library holds the GIL."""
        faulthandler.dump_traceback_later(max(seconds, 0.0) + BACKSTOP_SECONDS, exit=True, file=2)

    def _end_process(self, why: str, *, raise_alarm: bool = False) -> None:
        """Report the hang and end this process. Everything that may block runs in other threads."""
        try:
            self._arm(0.0)
            if not run_with_timeout(END_SECONDS, lambda: self._report_hang(why, raise_alarm)):
                text = f"hung: {why}\nthe report is incomplete because the disk or a log hangs too"
                run_with_timeout(ASK_SECONDS, lambda: self._write_to_terminal(text))
        finally:
            os._exit(HUNG)

    def _report_hang(self, why: str, raise_alarm: bool) -> bool:
        started = time.monotonic()
        if raise_alarm:
            run_with_timeout(ASK_SECONDS, lambda: self._alarm.trigger(why))
        here = self.heartbeat()
        self._log(
            f"watchdog: {why}\n"
            f"rank {self._rank} ({here.host}, pid {here.pid}): {here.place}; "
            f"silent for {here.silent_seconds:.1f} s; last sign of life: {here.sign}\n"
            f"exchanges: {here.num_exchanges}, last: {here.exchange or 'none'}; stacks:\n"
            f"{stacks()}"
        )
        record = run_with_timeout(ASK_SECONDS, last_collectives) or FlightRecord()
        self._num_collectives = record.counts
        self._state = RankState.HUNG
        run_with_timeout(ASK_SECONDS, self._write_heartbeat)
        self._log(record.text)
        self._log("\n".join(self.engines()))
        self._report_suspects(why, started)
        return True

    def _report_suspects(self, why: str, started: float) -> None:
        """Report the missing ranks, or those behind, on one rank: rank 0 if it is alive. The other
        ranks wait for it."""
        path = self._hang_file
        if self._rank:
            time.sleep(min(0.3 + 0.01 * self._rank, 1.5))
        try:
            path.open("x").close()
        except OSError:  # another rank reports, or the disk is full
            time.sleep(max(0.0, started + ANSWER_SECONDS + 1.0 - time.monotonic()))
            return
        heartbeats = read_heartbeats(self._folder, self._world_size)
        while time.monotonic() < started + ANSWER_SECONDS and missing_ranks(
            heartbeats, self._attempt
        ):
            time.sleep(0.2)
            heartbeats = read_heartbeats(self._folder, self._world_size)
        text = describe_suspects(heartbeats, self._attempt)
        # The suspect comes first, because scripts show the log of the first rank in the reason.
        reason = f"hung: {text.splitlines()[0]}; noticed by {why}"
        run_with_timeout(ASK_SECONDS, lambda: exit_reason.record(HUNG, reason, text))
        full = f"hung: {text}\nnoticed by {why}"
        self._log(full)
        if self.terminal_fd != 2:
            run_with_timeout(ASK_SECONDS, lambda: self._write_to_terminal(full))
        report = {
            "why": why,
            "text": full,
            "pulses": [heartbeat and asdict(heartbeat) for heartbeat in heartbeats],
        }
        with contextlib.suppress(OSError):
            write_json(path, report, durable=False)
        run_with_timeout(ASK_SECONDS, self.at_hang)

    def _write_to_terminal(self, text: str) -> None:
        is_terminal = os.isatty(self.terminal_fd)
        write_unbuffered(self.terminal_fd, above_panel(text) if is_terminal else text)

    def _log(self, text: str) -> None:
        run_with_timeout(ASK_SECONDS, lambda: write_unbuffered(2, text))

    # The heartbeat thread.

    def _write_heartbeats(self) -> None:
        written_at, written = 0.0, ("", 0)
        while not self._closed.wait(1.0) and self._state is RankState.RUNNING:
            now = (self._phase, self._step)
            if now != written or time.monotonic() - written_at > HEARTBEAT_SECONDS - 1.0:
                self._write_heartbeat()
                written_at, written = time.monotonic(), now
            if (why := self._alarm.triggered()) is not None:
                self._alarm_reason = self._alarm_reason or why
                self._wake.set()

    def _write_heartbeat(self) -> None:
        # With a timeout: a thread that is blocked by a stalled disk must not keep the rank alive.
        if self._writing.acquire(timeout=1.0):
            try:
                write_heartbeat(self._folder, self.heartbeat())
            except OSError as error:
                write_unbuffered(2, f"watchdog: {error}")
            finally:
                self._writing.release()

    def heartbeat(self) -> Heartbeat:
        """Return this rank's current heartbeat."""
        limit, silent = self._silence()
        words = self._exchange.split()
        return Heartbeat(
            rank=self._rank,
            world_size=self._world_size,
            attempt=self._attempt,
            host=self._host,
            pid=os.getpid(),
            state=self._state,
            time=time.time(),
            phase=self._phase,
            step=self._step,
            limit_seconds=limit,
            silent_seconds=silent,
            sign=self._last[1],
            num_exchanges=int(words[1]) if words else 0,
            in_exchange=len(words) == 2,
            exchange=" ".join(words[:2]),
            num_collectives=self._num_collectives,
            engines=self.engines(),
        )
