"""Ranks with a policy and ranks with an engine: who does what, and what stands in for the other.

By default every rank has both. With separate roles (the config section `roles`), the ranks with an
engine serve the coordinator while those with a policy train.
"""

from __future__ import annotations

import threading
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dapo_megatron.cluster.collectives import EnginesChanged, on_rank0
from dapo_megatron.cluster.members import MAX_FAULTS, Members
from dapo_megatron.protocols import Exchange, ReceivedTensor, StepResult, Sync
from dapo_megatron.rollout.checkpoint_files import CARRIED, CompletionsSnapshot
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.engines import Engines, Running, lost_error
from dapo_megatron.types import (
    DapoError,
    LogProbs,
    RankError,
    SampleRequest,
    Shard,
    Stopped,
    SyncError,
    SyncReport,
    TensorSlice,
    TokenBatch,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SeparateTraining:
    """Training of a step on the ranks with a policy, while the others serve the coordinator.

    coordinator    on rank 0, if the engines sample on meanwhile. None: they wait
    policy         exchange between the ranks with a policy; None on ranks with an engine
    serving        measures what this rank's engine does meanwhile
    """

    engines: Engines
    coordinator: Coordinator | None
    policy: Exchange | None
    serving: Callable[[], AbstractContextManager[None]]

    def __call__(self, version: int | None, train: Callable[[], StepResult]) -> StepResult:
        """Return rank 0's result of `train` on all ranks. See protocols.Parts. If a replica is lost
        meanwhile, EnginesChanged is raised when the training is over."""
        result: StepResult = {}, 0
        error: DapoError | None = None
        is_over = threading.Event()
        running = self._lead_engines(version, is_over)
        try:
            if self.policy is not None:
                result = train()
            else:
                assert self.engines.worker is not None
                with self.serving():
                    self.engines.worker.serve()
        except RankError:  # the lost rank would not come to the exchange below
            raise
        except DapoError as raised:
            if self.policy is None:  # the others may go on without this engine
                raise
            error = raised
        is_over.set()
        is_broken = False
        if running is not None:
            running.thread.join()
            is_broken = isinstance(running.error, EnginesChanged)
            if not is_broken:
                running.join()
                error = error or running.failure
        # A request to stop is found again. Any other error of the policy ends the run.
        if self.policy is not None and self.policy.broadcast(is_broken, bool):
            _raise(None if isinstance(error, Stopped) else error)
            raise lost_error(running)
        on_rank0(self.engines.exchange, partial(_raise, error))
        _raise(error)
        return self.engines.exchange.broadcast(result, StepResult)

    def _lead_engines(self, version: int | None, is_over: threading.Event) -> Running[None] | None:
        """Start a thread on rank 0 that leads the engines during the training."""
        if self.engines.driver is None:
            return None

        def lead(driver: EngineDriver) -> None:
            with driver.short_waits():
                if self.coordinator is not None and version is not None:
                    self.coordinator.sample_ahead(version, is_over.is_set)
                driver.idle(is_over.is_set)

        return Running(lead, self.engines.driver)


@contextmanager
def taking_out_failed(members: Members, driver: EngineDriver | None) -> Iterator[None]:
    """Go on without the engines that fail a sync or its plan in this block. `driver` is that of
    rank 0, if it exists.

    If some engines are at fault, and others pass the check that finds it, EnginesChanged is raised
    on all ranks but those of the former, which raise SyncError. If all engines fail, or ranks of
    the policy do, then the policy or the model is at fault, and SyncError is raised on all ranks.
    """
    try:
        yield
    except SyncError as error:
        replicas = members.replicas
        failed = {
            replica for replica, ranks in enumerate(replicas) if error.ranks.intersection(ranks)
        }
        is_policy = any(rank < members.num_policy for rank in error.ranks)
        is_all = len(failed) == len(replicas)
        if not failed or is_policy or is_all or members.replica in failed:
            raise
        if driver is not None:
            driver.lost |= failed
        names = ", ".join(_take_out(members, replica) for replica in sorted(failed))
        raise EnginesChanged(
            f"{names}: failed the check of a sync, which other engines passed; the run goes on "
            f"without it: {error}"
        ) from error


def _take_out(members: Members, replica: int) -> str:
    """Count a fault of a replica. Return its name."""
    ranks = ", ".join(map(str, members.replicas[replica]))
    if members.add_fault(replica):
        return f"replica {replica} (rank {ranks})"
    return f"replica {replica} (rank {ranks}; {MAX_FAULTS} times, does not join again)"


@dataclass(frozen=True)
class SeparateSync:
    """Sync after which the run goes on without engines that fail its checks. Implements
    protocols.Sync.

    driver  on rank 0
    """

    sync: Sync
    members: Members
    driver: EngineDriver | None

    def __call__(self, version: int) -> SyncReport:
        """See protocols.Sync. Raises `members.ending`, if it is set, or as `taking_out_failed`
        does."""
        _raise(self.members.ending)
        with taking_out_failed(self.members, self.driver):
            return self.sync(version)

    def switch_to_policy(self) -> None:
        """See protocols.Sync."""
        self.sync.switch_to_policy()


def _raise(error: DapoError | None) -> None:
    if error is not None:
        raise error


class NoPolicy:
    """Policy of a rank without one. Implements protocols.Policy."""

    data_parallel_index = -1

    def logprobs(self, batch: TokenBatch, temperature: float | None = None) -> LogProbs:
        """Return no log-probs."""
        return LogProbs(torch.empty(0), torch.empty(0))

    def shards(self) -> Sequence[Shard]:
        """Return no shards."""
        return []

    def snapshot(self) -> CompletionsSnapshot:
        """Return a snapshot that writes nothing."""
        return CompletionsSnapshot(CARRIED, 0, [])

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def _never(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("this rank has no policy")

    keep_reference = rewrite = load = offload = onload = _nothing
    reference_logprobs = update = _never


@dataclass
class NoEngine:
    """Engine of a rank without one. Implements protocols.RolloutEngine."""

    num_replicas: int
    max_sequences: int
    replica: int = -1
    is_leader: bool = False
    version: int = 0
    requests: Collection[SampleRequest] = ()

    def needed_slices(self, offered: Mapping[str, Any]) -> list[TensorSlice]:
        """Return no slices."""
        return []

    def receive(self, weights: Iterable[ReceivedTensor], version: int) -> None:
        """Take part in the transfer, which brings nothing here."""
        for _ in weights:
            pass
        self.version = version

    def read_back(
        self, names: Container[str] | None = None
    ) -> Iterable[tuple[TensorSlice, Tensor | None]]:
        """Return no weights."""
        return []

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return no log-probs."""
        return []

    def decode(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return no tokens."""
        return []

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def _never(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("this rank has no engine")

    sleep = wake_weights = wake_cache = close = _nothing
    submit = step = interrupt = _never
