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

On CPU it is the resident memory of the process. Linux keeps its peak and can reset it; where that
is not allowed, every phase reports the peak of the process so far.

**Timeline** is the phases of each rank and the number of requests of each engine over a step.

For some steps all ranks' timelines are gathered and recorded. For every step, the load of the
engines, whose requests rank 0 counts, is a metric. Timestamps come from each rank's monotonic clock
and are aligned at a barrier, because clocks of two nodes may differ by more than the length of a
phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

import torch

from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.protocols import Exchange, Recorder
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
    """Resident memory of this process."""

    def __init__(self) -> None:
        self._highest = 0

    def begin(self) -> None:
        """Reset the peak."""
        self._highest = self.highest()
        with suppress(OSError):
            forget_peak()

    def peaks(self) -> dict[str, float]:
        """Return peaks since `begin`, in bytes, by part; "" is the total."""
        return {"": float(resident_bytes())}

    def highest(self) -> int:
        """Return the peak since the start of the process, in bytes."""
        return max(self._highest, resident_bytes())


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
RankTimeline = tuple[str, list[tuple[str, float, float]]]
"""Host, and spans as (phase, start, end)."""


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

    def begin(self, now: float, count: int = 0) -> None:
        """Start an interval at `now`, with `count` requests."""
        self._is_open, self._last = True, (now, count)
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
    """Return at most `limit` of the points, evenly chosen: the first, the last and every nth."""
    if len(points) <= limit:
        return list(points)
    return [*points[: -1 : ceil((len(points) - 1) / (limit - 1))], points[-1]]


class TimelineRecorder:
    """Timeline of one rank, and on rank 0 of all engines.

    Every `every`-th step is written to timeline/step_*.json, and always the first one; 0 writes
    none.
    """

    def __init__(self, exchange: Exchange, every: int, recorder: Recorder | None = None) -> None:
        self._exchange = exchange
        self._every = every
        self._recorder = recorder
        self._requests: list[int] = []
        """Current number of requests of each replica, on rank 0."""
        self._max_sequences = 1
        self._changing = threading.Lock()
        self._is_first = True
        self.begin(0)

    def follow(self, num_replicas: int, max_sequences: int) -> None:
        """Count the requests of `num_replicas` replicas, each of which can run `max_sequences` at
        the same time. Called on rank 0 before the first step."""
        self._requests, self._max_sequences = [0] * num_replicas, max_sequences
        self.begin(self._step)

    def change(self, replica: int, num_requests: int) -> None:
        """Record the current number of requests of a replica, whenever it may have changed. Any
        thread may call this."""
        with self._changing:
            self._requests[replica] = num_requests
            now = time.perf_counter()
            self._running[replica].change(now, num_requests)
            self._ahead[replica].change(now, num_requests)

    @property
    def requests(self) -> int:
        """Current number of requests of all replicas."""
        return sum(self._requests)

    def begin(self, step: int) -> None:
        """Start a rollout step."""
        self._step = step
        self._started, self._started_at = time.perf_counter(), time.time()
        self._spans: list[tuple[str, float, float]] = []
        self._running = [Running() for _ in self._requests]
        self._ahead = [Running() for _ in self._requests]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time of this block, also if it raises: the step may go on after EnginesLost.
        Requests count in the `generate` phase only."""
        started = time.perf_counter()
        try:
            with self._counting(self._running) if name == Phase.GENERATE else nullcontext():
                yield
        finally:
            self._spans.append((name, started, time.perf_counter()))

    def serving(self) -> AbstractContextManager[None]:
        """Count the requests during a block in which engines sample while the policy trains. It may
        run in another thread than `phase`."""
        return self._counting(self._ahead)

    @contextmanager
    def _counting(self, intervals: Sequence[Running]) -> Iterator[None]:
        with self._changing:
            started = time.perf_counter()
            for running, num_requests in zip(intervals, self._requests, strict=True):
                running.begin(started, num_requests)
        try:
            yield
        finally:
            with self._changing:
                ended = time.perf_counter()
                for running in intervals:
                    running.end(ended)

    def seconds(self) -> dict[str, float]:
        """Return time/<phase> of the phases of the step so far."""
        seconds: dict[str, float] = {}
        for name, started, ended in self._spans:
            seconds[f"time/{name}"] = seconds.get(f"time/{name}", 0.0) + ended - started
        return seconds

    def metrics(self) -> dict[str, float]:
        """Record the timeline of the step if it is due. Return on rank 0 time/engine_idle and
        throughput/running_mean, if the step generated, and throughput/overlap, if engines sampled
        while the policy trained. Collective."""
        if self._every and (self._is_first or self._step % self._every == 0):
            self._record_step()
        self._is_first = False
        metrics: dict[str, float] = {}
        if running := [replica for replica in self._running if replica.seconds]:
            mean = fmean(replica.request_seconds / replica.seconds for replica in running)
            metrics["time/engine_idle"] = fmean(replica.idle_seconds for replica in running)
            metrics["throughput/running_mean"] = mean / self._max_sequences
        if ahead := [replica for replica in self._ahead if replica.seconds]:
            idle = fmean(replica.idle_seconds / replica.seconds for replica in ahead)
            metrics["throughput/overlap"] = 1.0 - idle
        return metrics

    def _record_step(self) -> None:
        self._exchange.barrier()
        now = time.perf_counter()  # the same time on all ranks, up to the skew of the barrier
        spans_here = [(name, started - now, ended - now) for name, started, ended in self._spans]
        by_rank = self._exchange.all_gather((node_name(), spans_here), RankTimeline)
        if self._exchange.rank:
            return
        step_start = self._started - now

        def since(seconds: float) -> float:
            return round(seconds - step_start, DIGITS)

        with self._changing:
            points = [
                thinned(running.points + ahead.points)
                for running, ahead in zip(self._running, self._ahead, strict=True)
            ]
        record = {
            "step": self._step,
            "begin": self._started_at,
            "ranks": [
                {
                    "rank": self._exchange.names[rank],
                    "host": host,
                    "spans": [[name, since(start), since(end)] for name, start, end in spans],
                }
                for rank, (host, spans) in enumerate(by_rank)
            ],
            "replicas": [
                {"replica": replica, "running": [[since(at - now), count] for at, count in kept]}
                for replica, kept in enumerate(points)
            ],
        }
        if self._recorder is not None:
            self._recorder.timeline(self._step, record)


class StepInstruments:
    """Watchdog, memory, timeline and clock of one rank."""

    def __init__(self, watchdog: Watchdog, memory: MemoryMeter, timeline: TimelineRecorder) -> None:
        self.memory = memory
        self.timeline = timeline
        self._watchdog = watchdog
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start a rollout step. Earlier measurements do not count in its metrics."""
        self._step = step
        self.memory.begin()
        self.timeline.begin(step)
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure this block as phase `name`, which is a key of config.watchdog."""
        with (
            self.timeline.phase(name),
            self._watchdog.phase(name, self._step),
            self.memory.phase(name),
        ):
            yield

    def serving(self) -> AbstractContextManager[None]:
        """See TimelineRecorder."""
        return self.timeline.serving()

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return time/*, memory/* and throughput/* of the step, which trained on `num_tokens`
        prompt and response tokens. Collective."""
        seconds = time.perf_counter() - self._started
        return {
            **self.timeline.seconds(),
            **self.memory.metrics(),
            **self.timeline.metrics(),
            "time/step": seconds,
            "throughput/tokens_per_second": num_tokens / seconds,
        }
