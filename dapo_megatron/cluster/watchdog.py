"""Signs of life of one rank, and what happens when they stop.

Each rank has a `Watchdog` with two threads. One looks at the clock: when the phase has been silent
for longer than its limit, the rank hangs. It touches no file, and ends the process some seconds
later whatever hangs. The other writes the rank's pulse (heartbeat.py) and listens for the alarm of
another rank; a file system that stalls holds up this thread alone.

A hang ends all ranks: the first one that notices rings the alarm. Every rank that hears it dumps
its stacks into its own log and says so in its pulse. One of them, rank 0 if it can, then knows who
did not answer or is behind, and writes it into `.pulse/hang_ATTEMPT.json`, the verdict and the
terminal. Times are of each rank's own monotonic clock; a job that Slurm suspends for longer than a
limit counts as hung when it goes on.

A rank whose interpreter is held by a library (the GIL) runs none of these threads. A timer of
faulthandler, which needs no interpreter, then dumps its stacks and ends it, with code 1. Other
ranks name it; a process alone leaves no verdict, and only these stacks in its log say that it hung.
Where its log hangs as well, faulthandler never comes to ending it: whoever started it must (Slurm
and `launch` do, once another rank has ended). No process ends while the kernel lets one of its
threads wait uninterruptibly, as for some dead file systems.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from dapo_megatron.cluster import exit_reason, flight_recorder, heartbeat
from dapo_megatron.cluster.attempt import HUNG, attempt
from dapo_megatron.cluster.emergency_io import say, stacks, within
from dapo_megatron.cluster.heartbeat import Alarm, Pulse, State
from dapo_megatron.cluster.safe_output import above_panel
from dapo_megatron.files import write_json

ANSWER_SECONDS = 3.0
"""From the alarm to naming those who did not answer."""
ASK_SECONDS = 1.0
"""For each thing said or asked when a rank hangs: it may wait for what hangs."""
END_SECONDS = 7.0
"""From noticing a hang to the end of the process, said or not; less than the backstop's."""
BACKSTOP_SECONDS = 10.0
"""From a phase's limit to the end of a rank that cannot run a thread."""
EXCHANGES = frozenset({"all_gather", "broadcast", "barrier"})
"""First words of the beats of cluster/ranks.py: "all_gather 123", then "all_gather 123 done"."""


def hang_file(run: Path, start_attempt: str) -> Path:
    """What was found out when that attempt hung: why, text and all pulses, as JSON."""
    return heartbeat.pulse_folder(run) / f"hang_{start_attempt}.json"


class Watchdog:
    """Signs of life of one rank. `folder`: the run's.

    `limits`: seconds without a sign of life, by phase. Outside of phases that of `start` holds, or
    else the longest.
    `start_attempt`: the same on all ranks; by default attempt.py's.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        limits: Mapping[str, float],
        start_attempt: str | None = None,
    ) -> None:
        self.terminal_fd = 2
        """Where the user looks; a session that sends its output to a log sets it."""
        self.at_hang: Callable[[], None] = lambda: None
        """Called when the run hangs, by the one rank that reports it; it gets ASK_SECONDS."""
        self.on_phase: Callable[[str, int], None] = lambda phase, step: None
        """Told of every turn to another phase, and its step."""
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._limits = {**limits, "": limits.get("start", max(limits.values()))}
        self._attempt = start_attempt or attempt()
        self._host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._alarm = Alarm.of(folder, self._attempt)
        self._hang_file = hang_file(folder, self._attempt)
        self._phase, self._step = "", 0
        self._last = (time.monotonic(), "started")
        self._exchange = ""
        self._num_collectives: Mapping[str, int] = {}
        self._asks: dict[str, Callable[[], str]] = {}
        self._state = State.RUNNING
        self._heard: str | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch. Raises OSError where `folder` cannot be written."""
        self._alarm.prepare(fresh=self._rank == 0)
        if self._rank == 0:
            self._hang_file.unlink(missing_ok=True)
        heartbeat.write(self._folder, self.pulse())
        faulthandler.enable(file=2)
        self._arm(0.0)
        for work in (self._watch, self._write_pulses):
            thread = threading.Thread(target=work, name=f"watch{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """This rank ends, well or not; it can no longer hang."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(1.0)  # it may be at a stalled disk
        faulthandler.cancel_dump_traceback_later()
        if self._threads and self._state is State.RUNNING:
            self._state = State.ENDED
            within(ASK_SECONDS, self._write_pulse)

    @contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[None]:
        """What is done inside, a key of the limits; an inner phase counts while it lasts. Without
        `step` it belongs to the step of the one before."""
        if name not in self._limits:
            raise ValueError(f"watchdog: no limit for a phase {name!r}")
        outer = self._phase
        self._step = step or self._step
        self._turn_to(name, f"begin of {name}")
        try:
            yield
        finally:
            self._turn_to(outer, f"end of {name}")

    def beat(self, what: str = "") -> None:
        """A sign of life, and what it was; from any thread, in a microsecond."""
        self._last = (time.monotonic(), what or self._last[1])
        if what.partition(" ")[0] in EXCHANGES:
            self._exchange = what

    def tell(self, what: str, ask: Callable[[], str]) -> None:
        """Something to ask for, from another thread, when the rank hangs."""
        self._asks[what] = ask

    def _turn_to(self, phase: str, sign: str) -> None:
        self._phase = phase
        self.beat(sign)
        self.on_phase(phase, self._step)
        if self._threads and not self._closed.is_set():
            self._arm(self._limits[phase])  # not left to a thread: it may not run any more

    # The thread that looks at the clock.

    def _watch(self) -> None:
        while not self._closed.is_set():
            limit, silent = self._silence()
            if self._heard is not None:
                self._hang(self._heard)
            if silent > limit:
                why = f"rank {self._rank}: no sign of life for {limit:g} s, {self.pulse().place}"
                self._hang(why, first=True)
            self._arm(limit - silent)
            self._wake.wait(min(1.0, max(limit - silent, 0.01), limit / 10))

    def _silence(self) -> tuple[float, float]:
        """Seconds: the limit, and how long the rank has been silent."""
        return self._limits[self._phase], time.monotonic() - self._last[0]

    def _arm(self, seconds: float) -> None:
        """End this process that much, and a little, later, whatever holds its interpreter."""
        faulthandler.dump_traceback_later(max(seconds, 0.0) + BACKSTOP_SECONDS, exit=True, file=2)

    def _hang(self, why: str, *, first: bool = False) -> None:
        """Ends the process; all that may block is done by others."""
        try:
            self._arm(0.0)
            if not within(END_SECONDS, lambda: self._tell_all(why, first)):
                text = f"hung: {why}\nnot all could be said: the disk or a log hangs as well"
                within(ASK_SECONDS, lambda: self._tell_user(text))
        finally:
            os._exit(HUNG)

    def _tell_all(self, why: str, first: bool) -> bool:
        began = time.monotonic()
        if first:
            within(ASK_SECONDS, lambda: self._alarm.ring(why))
        here = self.pulse()
        self._log(
            f"watchdog: {why}\n"
            f"rank {self._rank} ({here.host}, pid {here.pid}): {here.place}; "
            f"silent for {here.silent_seconds:.1f} s; last sign of life: {here.sign}\n"
            f"exchanges: {here.num_exchanges}, last: {here.exchange or 'none'}; stacks:\n"
            f"{stacks()}"
        )
        flown = within(ASK_SECONDS, flight_recorder.last_collectives) or flight_recorder.Flight()
        self._num_collectives = flown.counts
        self._state = State.HUNG
        within(ASK_SECONDS, self._write_pulse)
        self._log(flown.text)
        within(ASK_SECONDS, self._ask)
        self._report(why, began)
        return True

    def _report(self, why: str, began: float) -> None:
        """One rank, rank 0 if it is alive, names those that are missing; the others wait for it."""
        path = self._hang_file
        if self._rank:
            time.sleep(min(0.3 + 0.01 * self._rank, 1.5))
        try:
            path.open("x").close()
        except OSError:  # another rank does it, or the disk is full
            time.sleep(max(0.0, began + ANSWER_SECONDS + 1.0 - time.monotonic()))
            return
        pulses = heartbeat.read_all(self._folder, self._world_size)
        while time.monotonic() < began + ANSWER_SECONDS and heartbeat.missing(
            pulses, self._attempt
        ):
            time.sleep(0.2)
            pulses = heartbeat.read_all(self._folder, self._world_size)
        text = heartbeat.accusation(pulses, self._attempt)
        # The accused comes first: scripts show the log of the first rank that is named.
        reason = f"hung: {text.splitlines()[0]}; noticed by {why}"
        within(ASK_SECONDS, lambda: exit_reason.record(HUNG, reason, text))
        full = f"hung: {text}\nnoticed by {why}"
        self._log(full)
        if self.terminal_fd != 2:
            within(ASK_SECONDS, lambda: self._tell_user(full))
        report = {"why": why, "text": full, "pulses": [one and asdict(one) for one in pulses]}
        with contextlib.suppress(OSError):
            write_json(path, report, durable=False)
        within(ASK_SECONDS, self.at_hang)

    def _tell_user(self, text: str) -> None:
        is_terminal = os.isatty(self.terminal_fd)
        say(self.terminal_fd, above_panel(text) if is_terminal else text)

    def _log(self, text: str) -> None:
        within(ASK_SECONDS, lambda: say(2, text))

    def _ask(self) -> None:
        for what, ask in list(self._asks.items()):
            say(2, f"{what}: {ask()}")

    # The thread that talks with the other ranks.

    def _write_pulses(self) -> None:
        written, told = 0.0, ("", 0)
        while not self._closed.wait(1.0) and self._state is State.RUNNING:
            now = (self._phase, self._step)
            if now != told or time.monotonic() - written > heartbeat.PULSE_SECONDS - 1.0:
                self._write_pulse()
                written, told = time.monotonic(), now
            if (why := self._alarm.heard()) is not None:
                self._heard = self._heard or why
                self._wake.set()

    def _write_pulse(self) -> None:
        # A thread that waits for a stalled disk must not keep the rank from ending.
        if self._writing.acquire(timeout=1.0):
            try:
                heartbeat.write(self._folder, self.pulse())
            except OSError as error:
                say(2, f"watchdog: {error}")
            finally:
                self._writing.release()

    def pulse(self) -> Pulse:
        """What this rank says of itself now."""
        limit, silent = self._silence()
        words = self._exchange.split()
        return Pulse(
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
        )
