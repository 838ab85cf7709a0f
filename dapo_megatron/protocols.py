"""The seams of the system: what the loop and the coordinator know of the giants behind them.

Every method is collective unless it says otherwise: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dapo_megatron.types import (
    Collected,
    Completion,
    Group,
    Inspected,
    LogProbs,
    LossOutput,
    MicroTokens,
    Piece,
    Region,
    SampleRequest,
    Shard,
    StepStats,
    SyncReport,
    TokenBatch,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


T = TypeVar("T")

LossFn = Callable[["Tensor", MicroTokens], LossOutput]
"""(log-probs of one micro-batch, its other inputs) -> sums. Called with grad enabled."""

Shape = tuple[int, ...]
Arrival = tuple[str, "Sequence[tuple[Region, Tensor]]"]
"""(HF name, the slices of it that are wanted here): all that a rank gets of one tensor."""

Planner = Callable[[Sequence[int], int], list[list[list[int]]]]
"""(tokens of each sequence, data-parallel ranks) -> [rank][micro-batch] -> sequence indices.
The same number of micro-batches on every rank; some may be empty."""


class Exchange(Protocol):
    """Exchange of plain values between ranks. One rank: returns its argument.

    `of` is the type of the values, all of which collectives.py can send: a message that does not
    have it is refused. Raises RankError naming the rank.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, value: T, of: object) -> list[T]:
        """The value of each rank, in rank order, on every rank."""
        ...

    def broadcast(self, value: T, of: object) -> T:
        """Rank 0's value on every rank."""
        ...

    def barrier(self) -> None:
        """Wait for every rank."""
        ...


class Snapshot(Protocol):
    """A rank's part of a checkpoint, in memory; may be written by any thread, at any time."""

    @property
    def num_bytes(self) -> int:
        """That it takes on disk."""
        ...

    @property
    def sums(self) -> Mapping[str, str]:
        """SHA-256 by file name, of what has been written."""
        ...

    def __call__(self, folder: Path) -> None:
        """Write it, to the disk itself. Raises OSError or CheckpointError."""
        ...


class Policy(Protocol):
    """The model being trained, sharded over all ranks."""

    def logprobs(self, batch: TokenBatch, temperature: float | None = None) -> LogProbs:
        """Log-prob and entropy of each token of `batch`, whole on every rank; no grad.
        Temperature None: that of rollouts."""
        ...

    def update(self, mini: TokenBatch, loss: LossFn, lr: float) -> StepStats:
        """Forward, backward, clip and one optimizer step over one mini-batch.

        Raises Diverged before the step if the loss or the gradient is not finite.
        """
        ...

    def shards(self) -> Sequence[Shard]:
        """The slices of HF tensors that this rank holds, aliasing its parameters: read at any
        time they are the current weights. Not collective."""
        ...

    def rewrite(self, change: Callable[[Sequence[Shard]], None]) -> None:
        """Let `change` write into shards: in place of the weights, from what they are, all of them
        or some. Whatever form they are kept in, and the optimizer's copies of them, follow."""
        ...

    def snapshot(self) -> Snapshot:
        """Copy this rank's weights, optimizer and RNG state to host memory. Not collective."""
        ...

    def load(self, folder: Path) -> None:
        """Read back what `snapshot` wrote, in this or another layout. Raises CheckpointError,
        naming file and key."""
        ...

    def offload(self) -> None:
        """Leave the accelerator's memory to the engine: what policy.offload names goes to host
        memory, gradients are given up. Idempotent; nothing but `onload` may follow. Shards keep
        their views, which are empty until then."""
        ...

    def onload(self) -> None:
        """Undo `offload`; weights and optimizer state are as they were, to the bit. Idempotent."""
        ...


class RolloutEngine(Protocol):
    """One vLLM replica as seen by one of its ranks; the driver feeds and polls it.

    The ranks of one replica make the same calls with the same arguments; replicas may differ.
    """

    replica: int
    num_replicas: int
    is_leader: bool
    """Whether this rank speaks for its replica: it alone hands completions on."""
    version: int
    """Of the weights it samples with: completions carry it."""
    max_sequences: int
    """Requests that can run at once; more are queued."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests."""
        ...

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """Advance by one engine step. Return the requests that finished in it, answered. A
        completion is whole: what the request brought as `so_far`, then what was sampled here."""
        ...

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        """Drop all requests. Return those with at least one token, with the completion, unfinished.

        What a request brought as `so_far` is not lost, even if nothing was added to it.
        """
        ...

    @property
    def requests(self) -> Collection[SampleRequest]:
        """Requests that are queued or running."""
        ...

    def wanted(self, offered: Mapping[str, tuple[Shape, torch.dtype]]) -> list[Piece]:
        """The slices that this rank needs of HF tensors, offered by name, shape and dtype.

        Raises SyncError naming a tensor that is missing, unknown or misshapen.
        """
        ...

    def receive(self, weights: Iterable[Arrival], version: int) -> None:
        """Replace all weights and drop cached prefixes; completions carry `version` from now.

        Memory of an arrival may be reused once the next one is asked for. Raises SyncError naming
        a wanted slice that is missing, repeated or misshapen; the engine then takes no requests.
        """
        ...

    def held(self) -> Iterable[tuple[Piece, Tensor | None]]:
        """Each wanted slice as the engine computes with it now; None where it cannot be read."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob, at temperature 1, of each token but the first of each sequence."""
        ...

    def sleep(self) -> None:
        """Leave the accelerator's memory to the policy, and lose all weights; no request may be in
        flight. Nothing happens with engine.sleep false. Idempotent, as is waking."""
        ...

    def wake_weights(self) -> None:
        """Have memory for weights again; `receive` must follow. Raises ConfigError if there is too
        little."""
        ...

    def wake_cache(self) -> None:
        """Have memory for the KV cache again, after `wake_weights`; with both, and weights
        received, it samples. Raises ConfigError if there is too little."""
        ...


class Instruments(Protocol):
    """What observes the phases of a step; see cluster/instruments.py."""

    def begin(self, step: int) -> None:
        """Start a rollout step. Not collective."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Observe what is done inside, a key of config.watchdog. Not collective."""
        ...

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return time/*, memory/* and throughput/* of the step, which trained on `num_tokens`."""
        ...


class Tracker(Protocol):
    """Where metrics of a run go. Only rank 0 has a real one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""
        ...

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        ...


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


class Sync(Protocol):
    """Which of the two models has the accelerator: a sync is the engine's turn. See
    bridge/sync.py; a replay has no engine."""

    def __call__(self, version: int) -> SyncReport:
        """Give the engines the policy's weights, which then carry this version, and the
        accelerator."""
        ...

    def switch_to_policy(self) -> None:
        """Give the accelerator to the policy, whichever model has it."""
        ...


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
    sync: Sync
    loss: LossFn
    learning_rate: Callable[[int], float]
    """Of every update of a rollout step, counted from 1."""
    coordinator: Collector
    evaluator: Evaluations
    recorder: Recorder
    checkpoints: Checkpoints
    instruments: Instruments
    check_stop: Callable[[], object] = lambda: None
    """Raises Stopped on all ranks if a signal asked any of them to stop. Collective."""
