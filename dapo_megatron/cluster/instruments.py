"""Everything that observes the phases of a rollout step on one rank, behind one `phase(name)`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_megatron.cluster.memory_meter import MemoryMeter
from dapo_megatron.cluster.timeline import Timeline
from dapo_megatron.cluster.watchdog import Watchdog


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
