"""Who did what when: the phases of each rank over a step, and the requests of each engine.

Of some steps all of it is gathered and handed on; of every step, how busy the engines were. Times
are of each rank's own monotonic clock. Ranks leave a barrier at the same moment, and there their
clocks are laid side by side: those of two nodes may differ by more than a phase takes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dapo_megatron.protocols import Exchange

MAX_POINTS = 200
"""Of a replica's requests over a step that are kept."""
DIGITS = 4
"""Of a second."""
Point = tuple[float, int]
"""(seconds, requests from then on)."""
RankTimeline = tuple[str, list[tuple[str, float, float]], int | None, list[Point]]
"""Host, spans as (phase, start, end), replica if the rank leads one, and its requests."""


@dataclass
class Running:
    """Requests of one engine over the time in which it is watched; changes at other times, as by
    an evaluation, do not count."""

    seconds: float = 0.0
    """Watched, up to the last point."""
    idle_seconds: float = 0.0
    """Of them, with no request."""
    request_seconds: float = 0.0
    """Integral of the requests."""
    points: list[Point] = field(default_factory=list)
    """Where it begins, every change, where it ends."""
    _is_open: bool = False
    _last: Point = (0.0, 0)

    def begin(self, now: float) -> None:
        """Watch from `now` on, an engine without requests."""
        self._is_open, self._last = True, (now, 0)
        self.points.append(self._last)

    def change(self, now: float, count: int) -> None:
        """There are `count` requests from now on."""
        if self._is_open and count != self._last[1]:
            self._pass(now, count)

    def end(self, now: float) -> None:
        """Watch no longer."""
        self._pass(now, self._last[1])
        self._is_open = False

    def _pass(self, now: float, count: int) -> None:
        before, running = self._last
        self.seconds += now - before
        self.idle_seconds += (now - before) * (running == 0)
        self.request_seconds += (now - before) * running
        self._last = now, count
        self.points.append(self._last)


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` of the points: the first, the last, a highest one, and the last in each of
    equal parts of the time. At the end of each part the count is the true one."""
    if len(points) <= limit:
        return list(points)
    begin, end = points[0][0], points[-1][0]
    num_parts = limit - 3
    length = (end - begin) / num_parts or 1.0
    highest = max(range(len(points)), key=lambda index: points[index][1])
    last_of_part = {
        min(int((seconds - begin) / length), num_parts - 1): index
        for index, (seconds, _) in enumerate(points)
    }
    kept = {0, len(points) - 1, highest, *last_of_part.values()}
    return [points[index] for index in sorted(kept)]


class Timeline:
    """Phases and requests of one rank. `every`: steps from one that is handed on to the next, the
    first always; 0: none. `keep` is called with (step, record) on rank 0; the record is what
    timeline/step_*.json holds."""

    def __init__(
        self,
        exchange: Exchange,
        every: int,
        keep: Callable[[int, Any], None] = lambda step, record: None,
    ) -> None:
        self._exchange = exchange
        self._every = every
        self._keep = keep
        self._host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._replica: int | None = None
        self._max_sequences = 1
        self.requests = 0
        """That this rank's replica has now."""
        self._is_first = True
        self.begin(0)

    def follow(self, replica: int, max_sequences: int) -> Callable[[int], None]:
        """This rank speaks for a replica; what is returned is to be told the number of its requests
        whenever it may have changed."""
        self._replica, self._max_sequences = replica, max_sequences
        return self._change

    def begin(self, step: int) -> None:
        """A rollout step begins."""
        self._step = step
        self._begun, self._begun_at = time.perf_counter(), time.time()
        self._spans: list[tuple[str, float, float]] = []
        self._running = Running()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside; the engines' requests count in `generate` alone."""
        watches = name == "generate" and self._replica is not None
        begun = time.perf_counter()
        if watches:
            self._running.begin(begun)
        yield
        ended = time.perf_counter()
        if watches:
            self._running.end(ended)
        self._spans.append((name, begun, ended))

    def metrics(self) -> dict[str, float]:
        """time/engine_idle and throughput/running_mean of a step that generated; the record of the
        step is handed on if it is one that is kept. Collective."""
        is_kept = bool(self._every) and (self._is_first or self._step % self._every == 0)
        self._is_first = False
        told = self._exchange.all_gather(self._load(), tuple[float, float] | None)
        if is_kept:
            self._hand_on()
        loads = [load for load in told if load is not None]
        if not loads:
            return {}
        return {
            "time/engine_idle": fmean(idle for idle, _ in loads),
            "throughput/running_mean": fmean(share for _, share in loads),
        }

    def _change(self, num_requests: int) -> None:
        self.requests = num_requests
        self._running.change(time.perf_counter(), num_requests)

    def _load(self) -> tuple[float, float] | None:
        """Seconds idle, and the share of the requests there is room for, of this rank's replica."""
        running = self._running
        if not running.seconds:
            return None
        mean = running.request_seconds / running.seconds
        return running.idle_seconds, mean / self._max_sequences

    def _hand_on(self) -> None:
        self._exchange.barrier()
        now = time.perf_counter()  # the same moment on all ranks
        mine = (
            self._host,
            [(name, begun - now, ended - now) for name, begun, ended in self._spans],
            self._replica,
            [(seconds - now, count) for seconds, count in thinned(self._running.points)],
        )
        everyone = self._exchange.all_gather(mine, RankTimeline)
        if self._exchange.rank:
            return
        begun = self._begun - now

        def since(seconds: float) -> float:
            return round(seconds - begun, DIGITS)

        record = {
            "step": self._step,
            "begin": self._begun_at,
            "ranks": [
                {
                    "rank": rank,
                    "host": host,
                    "spans": [[name, since(start), since(end)] for name, start, end in spans],
                }
                for rank, (host, spans, _, _) in enumerate(everyone)
            ],
            "replicas": [
                {"replica": replica, "running": [[since(at), count] for at, count in points]}
                for _, _, replica, points in everyone
                if replica is not None
            ],
        }
        self._keep(self._step, record)
