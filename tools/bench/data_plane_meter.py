"""Meters of the data plane's benchmark, and the product's parts with their calls measured."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from dapo_megatron.cluster.collectives import encode
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.messages import StepPlan
from dapo_megatron.tracking.rollout_writer import RolloutWriter
from dapo_megatron.types import Group, Outcome, SequenceTokens, TrainingSequence

T = TypeVar("T")
BENCH, RECORDING, CHECKPOINT = "benchmark", "recording", "checkpoint"
"""Parts that do not block a step: what the benchmark itself does, and the two writing threads."""


@dataclass
class Meter:
    """CPU seconds of the parts of a step. An outer part excludes the parts inside it."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    received_bytes: int = 0
    plan_bytes: int = 0
    held_tokens: int = 0
    _inner: dict[int, list[float]] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a new step."""
        self.seconds.clear()
        self.received_bytes = self.plan_bytes = self.held_tokens = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part, in the current thread."""
        stack = self._inner.setdefault(threading.get_ident(), [])
        stack.append(0.0)
        started = time.thread_time()
        try:
            yield
        finally:
            elapsed = time.thread_time() - started
            self.seconds[name] += elapsed - stack.pop()
            if stack:
                stack[-1] += elapsed

    def wrap(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return `function`, measured as part `name`."""

        def measured(*args: object, **kwargs: object) -> T:
            with self.part(name):
                return function(*args, **kwargs)

        return measured

    def measure(self, owner: object, **names: str) -> None:
        """Measure methods of an object, given as method=part."""
        for method, name in names.items():
            setattr(owner, method, self.wrap(name, getattr(owner, method)))


@dataclass(frozen=True)
class MeteredExchange:
    """An exchange whose calls are measured. Implements protocols.Exchange."""

    ranks: Ranks
    meter: Meter

    @property
    def rank(self) -> int:
        """See Exchange."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """See Exchange."""
        return self.ranks.world_size

    def all_gather(self, value: T, of: object) -> list[T]:
        """See Exchange."""
        with self.meter.part("gather"):
            return self.ranks.all_gather(value, of)

    def broadcast(self, value: T, of: object, source: int = 0) -> T:
        """See Exchange."""
        if of is StepPlan and self.rank == source:
            with self.meter.part(BENCH):
                self.meter.plan_bytes = len(encode(value))
        with self.meter.part("plan"):
            return self.ranks.broadcast(value, of, source)

    def all_to_all(
        self, parts: Sequence[bytes | bytearray | memoryview], sizes: Sequence[int]
    ) -> list[memoryview]:
        """See Exchange."""
        with self.meter.part("exchange"):
            received = self.ranks.all_to_all(parts, sizes)
        self.meter.received_bytes += sum(map(len, received))
        return received

    def barrier(self) -> None:
        """See Exchange."""
        self.ranks.barrier()


@dataclass(frozen=True)
class MeteredDataParallel(DataParallelRanks):
    """Data-parallel ranks whose planning is measured."""

    meter: Meter = field(default_factory=Meter)

    def owners(self, sequences: Sequence[TrainingSequence]) -> list[int]:
        """See DataParallelRanks."""
        with self.meter.part("owners"):
            return DataParallelRanks.owners(self, sequences)


@dataclass(frozen=True)
class MeteredDelivery(Delivery):
    """Delivery of tokens whose packing is measured."""

    meter: Meter = field(default_factory=Meter)

    def __call__(
        self, sequences: Sequence[TrainingSequence], groups: Sequence[Group]
    ) -> dict[int, SequenceTokens]:
        """See Delivery."""
        with self.meter.part("pack"):
            return Delivery.__call__(self, sequences, groups)


class MeteredWriter(RolloutWriter):
    """Writer whose thread is measured."""

    meter: Meter

    def _put(self, files: str, write: Callable[[], None]) -> None:
        super()._put(files, self.meter.wrap(RECORDING, write))


@dataclass
class MeteredCollector(EngineCollector):
    """Collector whose parts are measured."""

    meter: Meter = field(default_factory=Meter)

    def _rows(self, ended: Sequence[tuple[Group, Outcome]]) -> list[CompletionRow]:
        with self.meter.part(BENCH):
            assert self.coordinator is not None
            held = [*self.coordinator.completions().values()]
            held += [completion for group, _ in ended for completion in group.completions]
            self.meter.held_tokens = sum(completion.num_tokens for completion in held)
        with self.meter.part("close"):
            return super()._rows(ended)
