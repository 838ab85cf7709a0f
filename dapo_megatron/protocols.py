"""Interfaces between the loop and coordinator and the heavy libraries behind them.

Every method is collective (all ranks call it in the same order) unless its docstring says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dapo_megatron.types import (
    LogProbs,
    LossOutput,
    MicroTokens,
    Region,
    Rollouts,
    SequenceDiagnostics,
    Shard,
    StepStats,
    SyncReport,
    TensorSlice,
    TokenBatch,
    TrainingSequence,
)

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")

LossFn = Callable[["Tensor", MicroTokens], LossOutput]
"""(log-probs of one micro-batch, its other inputs) -> token sums. Called with grad enabled."""

Shape = tuple[int, ...]
ReceivedTensor = tuple[str, "Sequence[tuple[Region, Tensor]]"]
"""(HF name, [(region, values)]): all the slices of one tensor that a rank receives."""

MicrobatchPlanner = Callable[[Sequence[int], int], list[list[list[int]]]]
"""(tokens of each sequence, data-parallel ranks) -> [rank][micro-batch] -> sequence indices.
Every rank gets the same number of micro-batches; some may be empty."""


class Exchange(Protocol):
    """Collectives for plain values. With one rank they return their argument.

    `of` is the type of the values, one that cluster/collectives.py can send. A message of another
    type raises RankError naming the sending rank.
    """

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def names(self) -> Sequence[int]:
        """Numbers of these ranks in the run, which errors name."""

    def all_gather(self, value: T, of: object) -> list[T]:
        """Return the values of all ranks, in rank order."""

    def broadcast(self, value: T, of: object, source: int = 0) -> T:
        """Return the value of rank `source` on every rank."""

    def scatter(self, parts: Sequence[bytearray] | None, size: int) -> memoryview:
        """Send `parts[r]` from rank 0 to rank r. Return this rank's part, which has `size` bytes;
        otherwise raise RankError."""

    def barrier(self) -> None:
        """Wait for every rank."""


class Snapshot(Protocol):
    """A rank's part of a checkpoint, in host memory. Any thread may write it at any time."""

    @property
    def num_bytes(self) -> int:
        """Size on disk in bytes."""

    @property
    def checksums(self) -> Mapping[str, str]:
        """SHA-256 checksums of the files written so far, by file name."""

    def write(self, folder: Path) -> None:
        """Write the snapshot to `folder` and fsync it. Raises OSError or CheckpointError."""

    def finish(self, folder: Path, exchange: Exchange) -> None:
        """Complete the files after all ranks have written theirs. Collective."""


class Policy(Protocol):
    """The model being trained, sharded over all ranks."""

    @property
    def data_parallel_index(self) -> int:
        """Data-parallel index of this rank."""

    def logprobs(self, batch: TokenBatch, temperature: float | None = None) -> LogProbs:
        """Return log-prob and entropy of each held token of `batch`, without grad. `temperature`
        None means rollout.temperature.

        Without `batch.owners`, the sequences are distributed over all ranks, and every rank gets
        the complete result. Otherwise each rank gets the result of the sequences it holds.
        """

    def keep_reference(self, write: Callable[[Sequence[Shard]], None] | None = None) -> None:
        """Keep weights in host memory for `reference_logprobs`: the current ones, or those that
        `write` writes into shards. The policy's own weights stay the same. Not collective."""

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probs of `logprobs` under the weights of `keep_reference`."""

    def keep_teacher(self, arch: Any, write: Callable[[Sequence[Shard]], None]) -> None:
        """Keep another model, of this Architecture, in host memory for `teacher_logprobs`. It has
        the policy's layout, and `write` writes its weights into shards. Not collective."""

    def teacher_logprobs(self, batch: TokenBatch) -> LogProbs:
        """Return what `logprobs` does, by the model of `keep_teacher`; with loss.distill.top_k also
        its most likely tokens."""

    def update(
        self,
        mini: TokenBatch,
        loss: LossFn,
        lr: float,
        *,
        check: Callable[[LogProbs], None] | None = None,
    ) -> StepStats:
        """Run forward, backward, gradient clipping and one optimizer step on one mini-batch. Each
        rank holds at least the sequences that it trains on.

        If `mini` has no old log-probs, they are those of this forward pass. `check` is called on
        every rank before the optimizer step, with what `logprobs` would return for `mini`; if it
        has old log-probs, 0 for tokens outside the loss. It may raise. Raises Diverged before the
        optimizer step if the loss or the gradient is not finite.
        """

    def shards(self) -> Sequence[Shard]:
        """Return the slices of HF tensors that this rank holds. They alias its parameters, so they
        always contain the current weights. Not collective."""

    def rewrite(self, change: Callable[[Sequence[Shard]], None]) -> None:
        """Call `change` with shards that it may read and overwrite, all of them or some.
        Afterwards update the other copies of the weights, such as FP8 parameters and the
        optimizer's main copies."""

    def snapshot(self) -> Snapshot:
        """Copy this rank's weights, optimizer and RNG state to host memory. Not collective."""

    def load(self, folder: Path) -> None:
        """Load a checkpoint that `snapshot` wrote in this or another layout. Raises
        CheckpointError naming file and key."""

    def offload(self) -> None:
        """Free accelerator memory for the engine: move what policy.offload lists to host memory,
        and discard gradients. Idempotent. Only `onload` may be called next. The views of shards
        are empty until then."""

    def onload(self) -> None:
        """Undo `offload`. Weights and optimizer state are restored bit for bit. Idempotent."""


class Engines(Protocol):
    """Engines of a run, as a sync sees them; see rollout/engines.py."""

    present: dict[int, int]
    """The replicas that take part in the sync, and the number of each one's connection."""

    def await_ready(self) -> None:
        """Wait until enough engines can take part in a sync, and set `present`. Raises
        TooFewEnginesError and Stopped."""

    def call(self, method: str, *arguments: Any, of: object) -> dict[int, Any]:
        """Call a method of the present engines, see engine/messages.py. Return the results, of type
        `of`, by replica. Engines that fail while others do not are out. Raises EnginesLost if none
        is left, and the error if all that are left fail."""

    def places(self) -> dict[int, list[int]]:
        """Return the number in the transfer plan of each worker of the present engines, by replica:
        the rank on whose GPU it runs. Workers of other GPUs come after all ranks. Not
        collective."""

    def connect(self, meeting: Any, slices: Sequence[TensorSlice]) -> Any:
        """Get ready to send weights to the present engines by the plan of `meeting`
        (bridge/group.py), `slices` to the worker on this rank's GPU. Return the process group in
        which engines on other GPUs take part; None without any. Raises as `call` does."""

    def load(self, weights: Iterator[ReceivedTensor], version: int) -> None:
        """Send each present engine its weights as `version`. The worker on this rank's GPU gets
        `weights`, which is drained in any case. Raises as `call` does."""

    def lose(self, replicas: Sequence[int], why: str) -> None:
        """Go on without engines at fault. Not collective."""

    def note_sync(self) -> None:
        """Note that the present engines have the new weights. Not collective."""


class Tracker(Protocol):
    """Destination of a run's metrics. Only rank 0 has a real one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""

    def finish(self, status: str) -> None:
        """Close the run with status FINISHED, FAILED or KILLED."""


class Recorder(Protocol):
    """Receives everything that the loop reports; see tracking/recorder.py."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def trained(self, lengths: Sequence[int], num_scored: int) -> None: ...
    def record(self, step: int, record: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def sequence_diagnostics(
        self,
        step: int,
        diagnostics: Iterable[SequenceDiagnostics],
        sequences: Sequence[TrainingSequence],
        data_parallel: Any,
    ) -> None: ...
    def groups(self, done: int) -> None: ...
    def phase(self, name: str, step: int) -> None: ...
    def timeline(self, step: int, record: Mapping[str, Any]) -> None: ...


class Collector(Protocol):
    """Source of a step's rollouts: the engines (rollout/collector.py), or a recorded run
    (rollout/replay.py)."""

    def collect(self, version: int) -> Rollouts:
        """Return the rollouts of a step that starts from weights `version`."""

    def state(self) -> dict[str, Any]:
        """Return JSON-compatible state for a checkpoint; rank 0's counts. Not collective."""

    def snapshot(self) -> Snapshot:
        """Return this rank's completions of open groups, for a checkpoint. Not collective."""

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Continue from `state` and the completions in the checkpoint `folder`."""


class Sync(Protocol):
    """Copies weights to the engines, and hands the accelerator from one model to the other. See
    bridge/sync.py. A replay has no engine."""

    def __call__(self, version: int) -> SyncReport:
        """Copy the policy's weights to the engines as `version`, and give the accelerator to the
        engines."""

    def switch_to_policy(self) -> None:
        """Give the accelerator to the policy, whichever model has it."""


class Evaluations(Protocol):
    """Evaluations between steps; see rollout/evaluate.py."""

    def due(self, step: int, last: int) -> bool: ...
    def run(self, version: int) -> dict[str, float]: ...
