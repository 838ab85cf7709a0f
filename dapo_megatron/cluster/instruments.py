"""Measurements of the phases of a rollout step on one rank: memory, timeline, clock, watchdog.

**Memory** is the peak of each phase, on the rank with the highest peak.

On a GPU it is the device memory in use by all processes. torch's own statistics do not give it:
they still count the memory that a sleeping engine has released (vLLM unmaps pools of torch's
allocator without telling torch), and they do not include CUDA itself, NCCL and CUDA graphs. The
driver reports current use only, not a peak. So the peak of a phase is estimated as the largest of
three values: the device's use at the start of the phase, its use at the end, and torch's peak of
reserved memory plus the use that torch does not count (negative if torch counts released memory),
at the start or the end, whichever is less. If an engine wakes up in the middle of a phase, this
estimate may be too low.

On CPU it is the resident memory of the process. Linux keeps its peak and can reset it.

**Timeline** is the phases of each rank and the number of requests of each engine over a step.

For some steps all ranks' timelines are gathered and recorded. For every step, the load of the
engines is a metric. Timestamps come from each rank's monotonic clock and are aligned at a barrier,
because clocks of two nodes may differ by more than the length of a phase.
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

from dapo_megatron.cluster.collectives import EnginesChanged
from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import Phase

GIB = 2**30


class MemoryMeter:
    """Peak memory of each phase on one rank."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._process = ProcessGauge()
        self._gauge = DeviceGauge() if torch.cuda.is_available() else self._process
        self._peaks: dict[str, float] = {}

    def begin(self) -> None:
        """Clear all peaks."""
        self._peaks = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak inside this block. Blocks with the same name count as one phase."""
        self._gauge.begin()
        yield
        for part, num_bytes in self._gauge.peaks().items():
            metric = f"memory/{name}_{part}gib"
            self._peaks[metric] = max(self._peaks.get(metric, 0.0), num_bytes / GIB)

    def metrics(self) -> dict[str, float]:
        """Return memory/<phase>_gib, and on a GPU memory/<phase>_torch_gib, of the phases since the
        last call: the maximum over ranks. Collective."""
        by_rank = self._exchange.all_gather(self._peaks, dict[str, float])
        self._peaks = {}
        return {name: max(peaks.get(name, 0.0) for peaks in by_rank) for name in by_rank[0]}

    def highest_gib(self) -> float:
        """Return the peak resident memory of this process so far."""
        return self._process.highest() / GIB


class ProcessGauge:
    """Resident memory of this process. If its peak cannot be reset or read from /proc, every phase
    reports the peak of the process so far."""

    def __init__(self) -> None:
        self._highest = 0

    def begin(self) -> None:
        """Reset the peak."""
        self._highest = self.highest()
        with suppress(OSError):
            forget_peak()

    def peaks(self) -> dict[str, float]:
        """Return peaks since `begin`, in bytes, by part; "" is the total."""
        return {"": float(_peak_bytes())}

    def highest(self) -> int:
        """Return the peak since the start of the process, in bytes.

        Tracked here because resetting the peak in /proc also resets that of getrusage.
        """
        return max(self._highest, _peak_bytes())


def _peak_bytes() -> int:
    with suppress(OSError):
        return resident_bytes()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceGauge:
    """Memory of this rank's GPU. The part `torch_` is torch's peak of allocated memory."""

    def __init__(self) -> None:
        self._used = self._uncounted = 0

    def begin(self) -> None:
        """Reset torch's peaks."""
        torch.cuda.reset_peak_memory_stats()
        self._used, self._uncounted = _device_use()

    def peaks(self) -> dict[str, float]:
        """Return peaks since `begin`, see `ProcessGauge.peaks`."""
        used, uncounted = _device_use()
        reserved = torch.cuda.max_memory_reserved()
        return {
            "": float(highest_use((self._used, used), (self._uncounted, uncounted), reserved)),
            "torch_": float(torch.cuda.max_memory_allocated()),
        }


def _device_use() -> tuple[int, int]:
    """Return the bytes in use on the device, and these minus the bytes that torch has reserved."""
    free, total = torch.cuda.mem_get_info()
    return total - free, total - free - torch.cuda.memory_reserved()


def highest_use(used: tuple[int, int], uncounted: tuple[int, int], reserved: int) -> int:
    """Return an estimate of a device's peak use in a phase, in bytes.

    used       use at the start and the end of the phase
    uncounted  part of `used` that torch does not count, at both times; negative if torch counts
               memory that was released
    reserved   torch's peak of reserved memory in the phase
    """
    return max(*used, reserved + min(uncounted))


MAX_POINTS = 200
"""Maximum number of points that a timeline keeps of a replica's request counts over a step."""
DIGITS = 4
"""Decimal places of seconds."""
Point = tuple[float, int]
"""(seconds, number of requests from then on)."""
RankTimeline = tuple[str, list[tuple[str, float, float]], int | None, list[Point]]
"""Host, spans as (phase, start, end), replica if the rank is its leader, and its points."""


@dataclass
class Running:
    """Number of requests of one engine over the recorded intervals. Changes at other times, such as
    in an evaluation, do not count."""

    seconds: float = 0.0
    """Length of the intervals, up to the last point."""
    idle_seconds: float = 0.0
    """Part of `seconds` without requests."""
    request_seconds: float = 0.0
    """Integral of the number of requests over time."""
    points: list[Point] = field(default_factory=list)
    """Start of each interval, every change, and end."""
    _is_open: bool = False
    _last: Point = (0.0, 0)

    def begin(self, now: float) -> None:
        """Start an interval at `now`, with no requests."""
        self._is_open, self._last = True, (now, 0)
        self.points.append(self._last)

    def change(self, now: float, count: int) -> None:
        """Record that there are `count` requests from `now` on."""
        if self._is_open and count != self._last[1]:
            self._add_point(now, count)

    def end(self, now: float) -> None:
        """End the interval at `now`."""
        self._add_point(now, self._last[1])
        self._is_open = False

    def _add_point(self, now: float, count: int) -> None:
        before, running = self._last
        self.seconds += now - before
        self.idle_seconds += (now - before) * (running == 0)
        self.request_seconds += (now - before) * running
        self._last = now, count
        self.points.append(self._last)


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` of the points: the first, the last, one with the highest count, and
    the last point of each of `limit` - 3 equal time intervals.

    The count at the end of each interval is therefore exact.
    """
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


class TimelineRecorder:
    """Timeline of one rank.

    Every `every`-th step is recorded, and always the first one; 0 records none. On rank 0,
    `keep(step, record)` is called with the content of timeline/step_*.json.
    """

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
        """Current number of requests of this rank's replica."""
        self._is_first = True
        self.begin(0)

    def follow(self, replica: int, max_sequences: int) -> Callable[[int], None]:
        """Make this rank, the leader of a replica, record the replica's requests.

        Call the returned function with the number of requests whenever it may have changed.
        """
        self._replica, self._max_sequences = replica, max_sequences
        return self._change

    def begin(self, step: int) -> None:
        """Start a rollout step."""
        self._step = step
        self._started, self._started_at = time.perf_counter(), time.time()
        self._spans: list[tuple[str, float, float]] = []
        self._running, self._ahead = Running(), Running()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Record the engine's requests during this block, in which other ranks train."""
        started = time.perf_counter()
        self._ahead.begin(started)
        yield
        ended = time.perf_counter()
        self._ahead.end(ended)
        self._spans.append((Phase.GENERATE, started, ended))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time of this block. The engine's requests count in the `generate` phase
        only."""
        counts_requests = name == Phase.GENERATE and self._replica is not None
        started = time.perf_counter()
        if counts_requests:
            self._running.begin(started)
        yield
        ended = time.perf_counter()
        if counts_requests:
            self._running.end(ended)
        self._spans.append((name, started, ended))

    def metrics(self) -> dict[str, float]:
        """Return time/engine_idle and throughput/running_mean, if the step generated, and
        throughput/overlap if engines served while other ranks trained. Record the timeline of the
        step if it is due. Collective."""
        is_due = bool(self._every) and (self._is_first or self._step % self._every == 0)
        self._is_first = False
        by_rank = self._exchange.all_gather(
            (self._load(), self._overlap()), tuple[tuple[float, float] | None, float | None]
        )
        if is_due:
            self._record_step()
        loads = [load for load, _ in by_rank if load is not None]
        busy = [share for _, share in by_rank if share is not None]
        overlap = {"throughput/overlap": fmean(busy)} if busy else {}
        if not loads:
            return overlap
        return {
            **overlap,
            "time/engine_idle": fmean(idle for idle, _ in loads),
            "throughput/running_mean": fmean(share for _, share in loads),
        }

    def _change(self, num_requests: int) -> None:
        self.requests = num_requests
        now = time.perf_counter()
        self._running.change(now, num_requests)
        self._ahead.change(now, num_requests)

    def _overlap(self) -> float | None:
        """Return the share of `serving` in which this rank's replica had requests. Return None
        if it did not serve or this is not its leader."""
        ahead = self._ahead
        if self._replica is None or not ahead.seconds:
            return None
        return 1.0 - ahead.idle_seconds / ahead.seconds

    def _load(self) -> tuple[float, float] | None:
        """Return the idle seconds of this rank's replica, and its mean number of requests as a
        share of its capacity. Return None if it did not generate or another rank is its leader."""
        running = self._running
        if not running.seconds:
            return None
        mean = running.request_seconds / running.seconds
        return running.idle_seconds, mean / self._max_sequences

    def _record_step(self) -> None:
        self._exchange.barrier()
        now = time.perf_counter()  # the same time on all ranks, up to the skew of the barrier
        points = self._running.points + self._ahead.points
        timeline_here = (
            self._host,
            [(name, started - now, ended - now) for name, started, ended in self._spans],
            self._replica,
            [(seconds - now, count) for seconds, count in thinned(points)],
        )
        by_rank = self._exchange.all_gather(timeline_here, RankTimeline)
        if self._exchange.rank:
            return
        step_start = self._started - now

        def since(seconds: float) -> float:
            return round(seconds - step_start, DIGITS)

        record = {
            "step": self._step,
            "begin": self._started_at,
            "ranks": [
                {
                    "rank": self._exchange.names[rank],
                    "host": host,
                    "spans": [[name, since(start), since(end)] for name, start, end in spans],
                }
                for rank, (host, spans, _, _) in enumerate(by_rank)
            ],
            "replicas": [
                {"replica": replica, "running": [[since(at), count] for at, count in points]}
                for _, _, replica, points in by_rank
                if replica is not None
            ],
        }
        self._keep(self._step, record)


class StepInstruments:
    """Watchdog, memory, timeline and clock of one rank."""

    def __init__(self, watchdog: Watchdog, memory: MemoryMeter, timeline: TimelineRecorder) -> None:
        self.memory = memory
        self.timeline = timeline
        self._watchdog = watchdog
        self._earlier: StepInstruments | None = None
        self.begin(0)

    def continue_from(self, earlier: StepInstruments) -> None:
        """Count what `earlier`, those of the last generation of ranks, measured of the step that it
        did not finish."""
        before = earlier._earlier  # `earlier` may have been lost in the sync before the step
        self._earlier = earlier if before is None or before._step <= earlier._step else before
        self._earlier._earlier = None

    def begin(self, step: int) -> None:
        """Start a rollout step. Earlier measurements do not count in its metrics."""
        self._step = step
        self._seconds: dict[str, float] = {}
        self.memory.begin()
        self.timeline.begin(step)
        self._started = time.perf_counter()
        if (earlier := self._continued) is not None:
            self._seconds, self._started = dict(earlier._seconds), earlier._started

    @property
    def _continued(self) -> StepInstruments | None:
        """Instruments of an earlier generation that measured the beginning of this step."""
        earlier = self._earlier
        return earlier if earlier is not None and earlier._step == self._step else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure this block as phase `name`, which is a key of config.watchdog."""
        started = time.perf_counter()
        try:
            with (
                self.timeline.phase(name),
                self._watchdog.phase(name, self._step),
                self.memory.phase(name),
            ):
                yield
        finally:  # the step may go on after an error, in the next generation of ranks
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Measure this block, in which the engine serves while other ranks train."""
        with self.timeline.serving(), self._watchdog.phase(Phase.GENERATE, self._step):
            yield

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return time/*, memory/* and throughput/* of the step, which trained on `num_tokens`
        prompt and response tokens. Collective."""
        seconds = time.perf_counter() - self._started
        return {
            **{f"time/{name}": value for name, value in self._seconds.items()},
            **self._of_all_ranks(),
            "time/step": seconds,
            "throughput/tokens_per_second": num_tokens / seconds,
        }

    def _of_all_ranks(self) -> dict[str, float]:
        """Return what is measured on several ranks; nothing if one of them was lost, which the next
        exchange finds again."""
        try:
            metrics = {**self.memory.metrics(), **self.timeline.metrics()}
        except EnginesChanged:
            return {}
        if self._continued is not None:  # most of the training was in an earlier generation
            metrics.pop("throughput/overlap", None)
        return metrics
