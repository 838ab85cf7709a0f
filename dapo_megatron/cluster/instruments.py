"""What observes the phases of a rollout step on one rank: memory, timeline, clock and watchdog.

**Memory** is the most that each phase takes, of the rank that takes most.

On a GPU that is memory of the device in use by anybody. torch's own counts are not it: they go on
counting what an engine asleep has given up (vLLM's pools are torch's, and unmapped behind its
back), and do not see CUDA itself, NCCL and graphs. The device's figure has no maximum that could be
read. So a phase is given the largest of three: the device's use at its begin, at its end, and the
most that torch had reserved in it, plus what torch did not know of (or wrongly thought to have), at
the begin or the end, whichever is less. Where an engine wakes up in the middle this may be too low.

On CPU it is the resident memory of the process, whose maximum Linux keeps and resets.

**Timeline** is who did what when: the phases of each rank over a step, and the requests of each
engine.

Of some steps all of it is gathered and handed on; of every step, how busy the engines were. Times
are of each rank's own monotonic clock. Ranks leave a barrier at the same moment, and there their
clocks are laid side by side: those of two nodes may differ by more than a phase takes.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import Phase

GIB = 2**30


class MemoryMeter:
    """Memory of one rank."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._process = ProcessGauge()
        self._gauge = DeviceGauge() if torch.cuda.is_available() else self._process
        self._peaks: dict[str, float] = {}

    def begin(self) -> None:
        """Forget the phases so far."""
        self._peaks = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is inside; more of the same name is one phase."""
        self._gauge.begin()
        yield
        for part, num_bytes in self._gauge.peaks().items():
            metric = f"memory/{name}_{part}gib"
            self._peaks[metric] = max(self._peaks.get(metric, 0.0), num_bytes / GIB)

    def metrics(self) -> dict[str, float]:
        """memory/<phase>_gib, on a GPU also memory/<phase>_torch_gib, of the phases since the last
        call. Collective."""
        everyone = self._exchange.all_gather(self._peaks, dict[str, float])
        self._peaks = {}
        return {name: max(one.get(name, 0.0) for one in everyone) for name in everyone[0]}

    def highest_gib(self) -> float:
        """Largest resident memory of this process so far."""
        return self._process.highest() / GIB


class ProcessGauge:
    """Resident memory of this process. Where Linux's maximum cannot be reset, or read, all phases
    have that of the process so far."""

    def __init__(self) -> None:
        self._highest = 0

    def begin(self) -> None:
        """Forget the maximum."""
        self._highest = self.highest()
        with suppress(OSError):
            forget_peak()

    def peaks(self) -> dict[str, float]:
        """Return the peak since `begin`, in bytes; "" stands for all, other names for parts."""
        return {"": float(_peak_bytes())}

    def highest(self) -> int:
        """In bytes, whatever was forgotten. (getrusage forgets with it.)"""
        return max(self._highest, _peak_bytes())


def _peak_bytes() -> int:
    with suppress(OSError):
        return resident_bytes()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceGauge:
    """Memory of this rank's GPU. `torch_`: what tensors had allocated, as torch counts it."""

    def __init__(self) -> None:
        self._used = self._unknown = 0

    def begin(self) -> None:
        """Forget torch's maxima."""
        torch.cuda.reset_peak_memory_stats()
        self._used, self._unknown = _used()

    def peaks(self) -> dict[str, float]:
        """See ProcessGauge."""
        used, unknown = _used()
        reserved = torch.cuda.max_memory_reserved()
        return {
            "": float(highest_use((self._used, used), (self._unknown, unknown), reserved)),
            "torch_": float(torch.cuda.max_memory_allocated()),
        }


def _used() -> tuple[int, int]:
    """Bytes of the device in use; how many more that is than torch has reserved."""
    free, total = torch.cuda.mem_get_info()
    return total - free, total - free - torch.cuda.memory_reserved()


def highest_use(used: tuple[int, int], unknown: tuple[int, int], reserved: int) -> int:
    """The most of a device that is known to have been in use in a phase: `used` at its begin and
    its end, `unknown` of it to torch (negative: torch counts what is gone), and the most that was
    `reserved` by torch in between."""
    return max(*used, reserved + min(unknown))


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
        self._host = node_name()
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
        watches = name == Phase.GENERATE and self._replica is not None
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


class Instruments:
    """Watchdog, memory, timeline and clock of one rank."""

    def __init__(self, watchdog: Watchdog, memory: MemoryMeter, timeline: Timeline) -> None:
        self.memory = memory
        self.timeline = timeline
        self._watchdog = watchdog
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start a rollout step: what was measured before does not count in its metrics."""
        self._step = step
        self._seconds: dict[str, float] = {}
        self.memory.begin()
        self.timeline.begin(step)
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Observe what is done inside; `name` is a key of config.watchdog."""
        started = time.perf_counter()
        with (
            self.timeline.phase(name),
            self._watchdog.phase(name, self._step),
            self.memory.phase(name),
        ):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return time/*, memory/* and throughput/* of the step, which trained on `num_tokens`
        prompt and response tokens. Collective."""
        seconds = time.perf_counter() - self._started
        return {
            **{f"time/{name}": value for name, value in self._seconds.items()},
            **self.memory.metrics(),
            **self.timeline.metrics(),
            "time/step": seconds,
            "throughput/tokens_per_second": num_tokens / seconds,
        }
