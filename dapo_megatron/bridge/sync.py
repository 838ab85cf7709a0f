"""One sync: move the policy's weights into the engines, and verify that they arrived.

A transfer plan is made when the set of engines changed, and reused until then. Every sync checks
that each wanted slice arrives exactly once. The first one with a set of engines, and every
`sync.fingerprint_every`-th after it, also compares fingerprints of all weights (verify.py). A
failure names tensor and ranks. If some engines pass, the run goes on with these; else the failure
ends it. What engines compute with their weights is compared on the tokens of every step
(algo/mismatch.py).

The sync also hands over the accelerator. Before it, the engines sleep. After it, the parts of the
policy that policy.offload names are in host memory. Both models are on the accelerator while
weights move. The KV cache is allocated last, after the policy has made room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch

from dapo_megatron.bridge.group import Meeting
from dapo_megatron.bridge.islands import RankSlices, Wanted
from dapo_megatron.bridge.plan import TransferPlan
from dapo_megatron.bridge.transfer import Transfer, gather_slices
from dapo_megatron.bridge.verify import check_fingerprints
from dapo_megatron.config import SyncConfig
from dapo_megatron.protocols import Engines, Exchange, Policy
from dapo_megatron.types import EnginesLost, SyncError, SyncReport, TensorSlice, TooFewEnginesError

logger = logging.getLogger(__name__)

MAX_TRIES = 10
"""Syncs of the same weights, each without engines that failed or were lost in the last one."""


@dataclass(frozen=True)
class Route:
    """Plan of syncs with one set of engines, and this rank's part."""

    engines: Mapping[int, int]
    """Replica -> number of its connection."""
    wanted: Wanted
    plan: TransferPlan
    transfer: Transfer
    bytes_received: list[int]
    """Bytes that each rank receives in one sync."""


class WeightSync:
    """Moves policy weights into the engines, once per call. Implements protocols.Sync."""

    def __init__(
        self,
        policy: Policy,
        engines: Engines,
        exchange: Exchange,
        config: SyncConfig,
        *,
        ranks_per_node: int,
        device: torch.device,
    ) -> None:
        self._policy, self._engines, self._exchange = policy, engines, exchange
        self._ranks_per_node, self._device = ranks_per_node, device
        self._shards = policy.shards()
        self._held = gather_slices(exchange, [shard.tensor_slice for shard in self._shards])
        self._shapes = {
            tensor_slice.name: (tensor_slice.global_shape, tensor_slice.dtype)
            for tensor_slices in self._held.lists
            for tensor_slice in tensor_slices
        }
        self.num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())
        """Bytes of the whole model."""
        self._fingerprint_every = config.fingerprint_every
        self._num_syncs = 0  # of this route
        self._num_unread = 0
        self.route: Route | None = None
        """Route of the last sync."""

    def __call__(self, version: int) -> SyncReport:
        """See protocols.Sync.

        Raises SyncError naming tensor and ranks if all engines fail, ConfigError if there is too
        little memory to wake them, and TooFewEnginesError and Stopped while it waits for engines.
        """
        why = ""
        for _ in range(MAX_TRIES):
            self._engines.await_ready()
            try:
                report = self._sync(version)
            except EnginesLost as error:
                why, self.route = str(error), None
            except SyncError as error:
                if not error.engines or error.engines >= set(self._engines.present):
                    raise
                why = str(error)
                self._engines.lose(sorted(error.engines), why)
            else:
                self._engines.note_sync()
                return report
            if self._exchange.rank == 0:
                logger.warning("another sync of weights %d, because of this: %s", version, why)
            self.switch_to_policy()
        raise TooFewEnginesError(
            f"{MAX_TRIES} syncs in a row failed, at last because of this: {why}"
        )

    def switch_to_policy(self) -> None:
        """See protocols.Sync."""
        if self._engines.present:
            with suppress(EnginesLost):  # an engine that is gone uses no memory
                self._engines.call("sleep", of=None)
        self._policy.onload()

    def _sync(self, version: int) -> SyncReport:
        started = time.perf_counter()
        self._policy.onload()
        self._engines.call("wake", "weights", of=None)
        route = self._route()
        awake = time.perf_counter()
        self._engines.load(iter(route.transfer), version)
        moved = time.perf_counter()
        is_compared = self._num_syncs % self._fingerprint_every == 0
        if is_compared:
            self._num_unread = check_fingerprints(
                version, self._shards, self._held, route.wanted, self._engines, self._exchange
            )
        compared = time.perf_counter()
        self._policy.offload()
        self._engines.call("wake", "kv_cache", of=None)
        self._num_syncs += 1
        return SyncReport(
            version=version,
            num_tensors=len(self._shapes),
            num_bytes=max(route.bytes_received),
            seconds=moved - awake,
            verify_seconds=compared - moved,
            turn_seconds=awake - started + time.perf_counter() - compared,
            fingerprinted=is_compared,
            unread_tensors=self._num_unread,
        )

    def _route(self) -> Route:
        """Return the route to the present engines, made again if others took part before."""
        if self.route is None or self.route.engines != self._engines.present:
            self.route = None  # closes the last group
            self._num_syncs = 0
            traced = self._engines.call("trace", self._shapes, of=list[list[TensorSlice]])
            places = self._engines.places()
            num_ranks = max(self._exchange.world_size, 1 + max(chain(*places.values())))
            by_rank: list[list[TensorSlice]] = [[] for _ in range(num_ranks)]
            replicas = [-1] * num_ranks
            for replica, by_worker in traced.items():
                for rank, slices in zip(places[replica], by_worker, strict=True):
                    by_rank[rank], replicas[rank] = slices, replica
            wanted = Wanted(RankSlices.of(by_rank), replicas)
            own = by_rank[self._exchange.rank]
            nothing = [len(self._held.lists)] * (num_ranks - self._exchange.world_size)
            held = RankSlices([*self._held.lists, []], [*self._held.list_of_rank, *nothing])
            meeting = Meeting(held, wanted.slices, self._ranks_per_node)
            plan = meeting.plan()
            group = self._engines.connect(meeting, own)
            transfer = Transfer(plan, self._shards, own, self._exchange.rank, self._device, group)
            received = self._exchange.all_gather(transfer.nbytes_received, int)
            received += plan.missing[self._exchange.world_size :]  # by engines on other GPUs
            self.route = Route(dict(self._engines.present), wanted, plan, transfer, received)
        return self.route
