"""What a run is made of, behind its seams: all that the loop knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dapo_megatron.protocols import Meter, Policy, Timeline, Watch
from dapo_megatron.rollout.coordinator import Collected
from dapo_megatron.types import Group, Inspected, SyncReport


class Recorder(Protocol):
    """What the loop tells the world; see tracking/recorder.py."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def trained(self, lengths: Sequence[int], num_scored: int) -> None: ...
    def samples(self, step: int, groups: Iterable[tuple[Group, str]]) -> None: ...
    def inspected(self, step: int, sequences: Iterable[Inspected]) -> None: ...
    def progress(self, num_groups: int) -> AbstractContextManager[Callable[[int], None]]: ...


class Collector(Protocol):
    """Where a step's groups come from: the coordinator, or a recorded run (rollout/replay.py)."""

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Engine(Protocol):
    """What the loop itself asks of the engines; a replay has none. A sync wakes them up."""

    def sleep(self) -> None: ...


class Evaluations(Protocol):
    """See rollout/evaluate.py."""

    def due(self, step: int, last: int) -> bool: ...
    def run(self) -> dict[str, float]: ...


class Checkpoints(Protocol):
    """Saving in the background; see checkpoints/."""

    def due(self, step: int) -> bool: ...
    def copy(self) -> None:
        """Copy what the policy has to host memory, for the `save` that follows."""
        ...

    def save(
        self, step: int, state: Mapping[str, Any], *, is_open: bool = False
    ) -> Callable[[], None]:
        """Calling what it returns has the copy written and published, with `state`.
        `is_open`: the step after `step` has begun; the checkpoint gets a name of its own."""
        ...

    def wait(self) -> None:
        """Until nothing is being written. Raises CheckpointError if the last save failed."""
        ...


@dataclass
class Parts:
    """Everything a run is made of, behind its seams."""

    policy: Policy
    engine: Engine
    sync: Callable[[int], SyncReport]
    """Policy weights into the engines, which then carry this version and have the accelerator."""
    coordinator: Collector
    evaluator: Evaluations
    recorder: Recorder
    checkpoints: Checkpoints
    watch: Watch
    memory: Meter
    timeline: Timeline
    stop: Callable[[], None] = lambda: None
    """Raises Stopped on all ranks if a signal asked any of them to stop. Collective."""
