"""Engines of a run, on every rank: rank 0 leads them, and each rank watches over its servers.

While rank 0 works with the engines, the other ranks wait. All meet once per second. So each rank
shows that it is alive, rank 0 learns of a signal to stop that any rank got, and the ranks that
started servers start those again that have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from dapo_megatron.bridge.buckets import BucketSender
from dapo_megatron.bridge.group import Meeting, join, new_store, open_store
from dapo_megatron.cluster.collectives import ErrorRecord, on_rank0
from dapo_megatron.cluster.instruments import TimelineRecorder
from dapo_megatron.cluster.processes import END_SECONDS
from dapo_megatron.cluster.servers import Server, process_name
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.protocols import Exchange, ReceivedTensor
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.types import (
    DapoError,
    EnginesLost,
    Stopped,
    TensorSlice,
    TooFewEnginesError,
)

T = TypeVar("T")


@dataclass
class Engines:
    """Engines of a run, as one rank sees them. Implements protocols.Engines.

    pool           on rank 0
    servers        that this rank started, by replica
    workers        of each replica: the ranks on whose GPUs they run; None: on other GPUs
    num_workers    of each replica
    sender         of weights to the engine worker on this rank's GPU; None without one
    host           address of rank 0
    secret         of the run
    folder         for sockets and files of this run
    at_least       number of engines with which a sync begins
    start_seconds  time that engines have to start
    call_seconds   time that a call may take
    silence_seconds  time that a collective with engines on other GPUs may take
    stop           signals to stop that this rank got; None: it handles them at once
    """

    exchange: Exchange
    pool: Pool | None
    servers: dict[int, Server]
    workers: Sequence[Sequence[int]] | None
    num_workers: int
    sender: BucketSender | None
    host: str
    secret: bytes
    folder: Path
    at_least: int
    start_seconds: float
    call_seconds: float
    silence_seconds: float
    device: torch.device
    stop: Stop | None = None
    present: dict[int, int] = field(default_factory=dict, init=False)
    """The replicas that take part in the sync, and the number of each one's connection."""

    def run(self, task: Callable[[Pool], T], of: object) -> T:
        """Run `task` on rank 0 while the other ranks wait. Return its result, of type `of`, on
        every rank. Collective. A DapoError of `task` is raised on every rank."""
        outcome: T | None = None
        error: DapoError | None = None
        if self.pool is None:
            while not self._meet(is_over=False):
                pass
        else:
            self.pool.on_second = partial(self._meet, is_over=False)
            try:
                outcome = task(self.pool)
            except DapoError as raised:
                error = raised
            self.pool.on_second = None
            self._meet(is_over=True)
        result = on_rank0(self.exchange, _outcome, outcome, error)
        return cast(T, self.exchange.broadcast(result, of))

    def _meet(self, *, is_over: bool) -> bool:
        """Meet the other ranks. Return whether the work of rank 0 is over. Collective."""
        given_up: list[str] = []
        if self.pool is not None:
            given_up, self.pool.given_up = self.pool.given_up, []
        is_over, given_up = self.exchange.broadcast((is_over, given_up), tuple[bool, list[str]])
        for server in self.servers.values():
            server.watch(is_given_up=process_name(server.process_id) in given_up)
        if not is_over:
            signals = self.exchange.all_gather(self._stop_signal, str)
            if self.pool is not None:
                self.pool.stop_signal = next(filter(None, signals), "")
        return is_over

    @property
    def _stop_signal(self) -> str:
        """Name of a signal to stop that this rank got, or empty."""
        return (self.stop and self.stop.signal) or ""

    def await_ready(self, at_least: int | None = None) -> None:
        """Wait until `at_least` engines can take part in a sync, and choose them: all that are
        ready. Collective. Raises TooFewEnginesError, and Stopped if a rank was asked to stop."""
        task = partial(self._await_ready, at_least or self.at_least)
        self.present = self.run(task, dict[int, int])

    def _await_ready(self, at_least: int, pool: Pool) -> dict[int, int]:
        end = time.monotonic() + self.start_seconds
        pool.wait(0.0)
        while len(pool.ready) < at_least:
            if pool.failure is not None:  # the next start would fail as well
                raise pool.failure.error()
            if pool.stop_signal:
                raise Stopped(f"stopped by {pool.stop_signal} while it waited for engines")
            if time.monotonic() > end:
                raise TooFewEnginesError(
                    f"{len(pool.ready)} of at least {at_least} engines (engine.min_replicas) "
                    f"are there after {self.start_seconds:g} s; see logs/engine_*.log"
                )
            pool.wait()
        return pool.ready

    def call(self, method: str, *arguments: Any, of: object) -> dict[int, Any]:
        """Call a method of the present replicas' engines. Return the results, of type `of`, by
        replica, on every rank. Collective. Raises as `_settle` does."""
        if self.pool is not None:
            self.pool.begin(method, dict.fromkeys(self.present, arguments))
        return self._settle(of)

    def load(self, weights: Iterator[ReceivedTensor], version: int) -> None:
        """Send each present engine its weights: this rank's part is `weights`, which is drained in
        any case. Collective. Raises as `_settle` does."""
        is_used = self.workers and any(
            self.exchange.rank in self.workers[replica] for replica in self.present
        )
        sender = self.sender if is_used else None
        address = "" if sender is None else sender.open()
        addresses = self.exchange.all_gather(address, str)
        if self.pool is not None:
            by_replica = {
                replica: [addresses[rank] for rank in self.workers[replica]] if self.workers else []
                for replica in self.present
            }
            self.pool.begin("load", {r: (version, values) for r, values in by_replica.items()})
        error = "" if sender is None else sender.send(weights)
        try:
            for _ in weights:
                pass
        except RuntimeError as raised:  # of the group
            if self.workers:
                raise
            error = f"the transfer failed: {raised}"
        self._settle_together(error)

    def _settle_together(self, error: str) -> None:
        """Settle a call in which this rank took part, with or without an error. Collective."""
        errors = [text for text in self.exchange.all_gather(error, str) if text]
        if not errors or self.workers:
            # A worker that failed has answered, unless it is gone or hangs.
            self._settle(None, END_SECONDS if errors else None)
            return
        # A lost engine breaks the group for all others.
        results, failures = self._finish(None, END_SECONDS)
        self.present = {replica: self.present[replica] for replica in (*results, *failures)}
        raise EnginesLost(errors[0])

    def _settle(self, of: object, seconds: float | None = None) -> dict[int, Any]:
        """Return the results of the last call. Engines that did not answer, or failed while others
        did not, are out. Raises the error if all that are left failed, else EnginesLost if none is
        left."""
        results, errors = self._finish(of, seconds or self.call_seconds)
        self.present = {replica: self.present[replica] for replica in results}
        if not results:
            for replica, error in errors.items():
                raise ErrorRecord(error.kind, f"engine {replica}: {error.text}").error()
            raise EnginesLost("no engine is left that could take part in the sync")
        for replica, error in errors.items():
            self.lose([replica], error.text)
        return results

    def _finish(self, of: object, seconds: float) -> tuple[dict[int, Any], dict[int, ErrorRecord]]:
        """Return what Pool.finish does, on every rank. Collective."""
        kind = tuple[dict[int, of], dict[int, ErrorRecord]]  # type: ignore[valid-type]
        return self.run(lambda pool: pool.finish(seconds), kind)

    def lose(self, replicas: Sequence[int], why: str) -> None:
        """Go on without engines at fault. Not collective."""
        for replica in replicas if self.pool is not None else ():
            assert self.pool is not None
            self.pool.lose(replica, why)

    def places(self) -> dict[int, list[int]]:
        """See protocols.Engines."""
        if self.workers is not None:
            return {replica: list(self.workers[replica]) for replica in self.present}
        starts = range(self.exchange.world_size, 2**31, self.num_workers)
        return {
            replica: list(range(start, start + self.num_workers))
            for replica, start in zip(self.present, starts, strict=False)
        }

    def connect(self, meeting: Meeting, slices: Sequence[TensorSlice]) -> Any:
        """See protocols.Engines."""
        if self.workers is not None:
            if self.sender is not None:
                self.sender.expect(slices)
            return None
        store, name = None, ""
        if self.pool is not None:
            store, name = new_store(self.host, self.folder)
        name = self.exchange.broadcast(name, str)
        meeting = replace(meeting, store=name, timeout=self.silence_seconds)
        if self.pool is not None:
            own = self.places()
            self.pool.begin("connect", {r: (replace(meeting, own=own[r]),) for r in self.present})
        group, error = None, ""
        try:
            store = store or open_store(name)
            group = join(meeting, self.exchange.rank, store, self.secret, self.device)
        except (DapoError, RuntimeError) as raised:
            error = str(raised)
        self._settle_together(error)
        return group

    def note_sync(self) -> None:
        """Note that the present engines have the new weights. Not collective."""
        if self.pool is not None:
            self.pool.note_sync(self.present)

    def close(self) -> None:
        """End the engines. Not collective."""
        if self.pool is not None:
            self.pool.close()
        for server in self.servers.values():
            server.close()


@dataclass(frozen=True)
class SamplingAhead:
    """Sampling for the next step while the policy trains, if engines have separate GPUs.

    coordinator  on rank 0
    timeline     measures this on rank 0
    repeated     recorded steps that the run repeats, on rank 0. The engines wait meanwhile, because
                 nothing that they sampled would be kept
    """

    engines: Engines
    coordinator: Coordinator | None
    timeline: TimelineRecorder
    repeated: Mapping[int, Path]

    @contextmanager
    def sampling(self, version: int) -> Iterator[None]:
        """Sample with weights `version` during this block. Collective. An error of the coordinator
        is raised on all ranks at the end."""
        is_over, future = threading.Event(), None
        with ThreadPoolExecutor(1) as thread:
            if self.coordinator is not None and not self.repeated:
                future = thread.submit(self._sample, self.coordinator, version, is_over)
            try:
                yield
            finally:
                is_over.set()
        on_rank0(self.engines.exchange, _raise_error, future)

    def _sample(self, coordinator: Coordinator, version: int, is_over: threading.Event) -> None:
        with self.timeline.serving(), suppress(EnginesLost):  # the next sync waits for engines
            coordinator.sample_ahead(version, is_over.is_set)


def _raise_error(future: Future[None] | None) -> None:
    if future is not None:
        future.result()


def _outcome(value: T, error: Exception | None) -> T:
    """Return a value, or raise the error that there is instead."""
    if error is not None:
        raise error
    return value
