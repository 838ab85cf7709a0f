"""One sync: move the policy's weights into the engines, and verify that they arrived.

The transfer plan is made once and reused. Every sync checks that each wanted slice arrives exactly
once, that policy and engines give the same log-probs for canary sequences, and that decoding gives
the same log-probs as scoring (decoding.py). It also compares fingerprints (verify.py) of all
weights or of a tenth of them (schedule.py). A failure names tensor and ranks. It ends the run,
unless the run can go on without the engines at fault (rollout/roles.py).

The sync also hands over the accelerator. Before it, the engine sleeps. After it, the parts of the
policy that policy.offload names are in host memory. Both models are on the accelerator while
weights move. The KV cache is allocated last, after the policy has made room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch

from dapo_megatron.bridge.bounds import CanaryBounds
from dapo_megatron.bridge.decoding import check_decoding
from dapo_megatron.bridge.plan import TransferPlan, make_plan
from dapo_megatron.bridge.schedule import FingerprintSchedule
from dapo_megatron.bridge.transfer import Transfer, gather_slices
from dapo_megatron.bridge.verify import SyncVerifier, canary_sequences
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.config import SyncConfig
from dapo_megatron.protocols import Exchange, Policy, ReceivedTensor, RolloutEngine
from dapo_megatron.types import SyncError, SyncReport


class WeightSync:
    """Moves policy weights into this rank's engine, once per call. Collective.

    Raises SyncError if the engines do not want exactly what the policy has.
    """

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        exchange: Exchange,
        config: SyncConfig,
        *,
        bounds: CanaryBounds,
        vocab: int,
        max_tokens: int,
        ranks_per_node: int,
        device: torch.device,
        group: Any = None,
        noticing_losses: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`group` is the process group for tensors on `device`; None for the default group. A
        collective in it runs inside of `noticing_losses()`."""
        self._noticing_losses = noticing_losses
        self._policy = policy
        self._engine = engine
        self._exchange = exchange
        shards = policy.shards()
        held = gather_slices(exchange, [shard.tensor_slice for shard in shards])
        shapes = {
            tensor_slice.name: (tensor_slice.global_shape, tensor_slice.dtype)
            for tensor_slices in held.lists
            for tensor_slice in tensor_slices
        }
        wanted = on_all_ranks(exchange, lambda: engine.needed_slices(shapes))
        self.wanted = gather_slices(exchange, wanted)
        """[rank] -> the slices that the rank's engine takes."""
        self.plan: TransferPlan = make_plan(held, self.wanted, ranks_per_node=ranks_per_node)
        self._transfer = Transfer(self.plan, shards, wanted, exchange.rank, device, group)
        of_first_engine = next(filter(None, self.wanted.lists), [])
        self._num_tensors = len({tensor_slice.name for tensor_slice in of_first_engine})
        self.bytes_received = exchange.all_gather(self._transfer.nbytes_received, int)
        """Bytes that each rank receives in one sync."""
        self.num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        """Bytes of the whole model."""
        num_elements = sum(prod(shape) for shape, _ in shapes.values())
        self._schedule = FingerprintSchedule(
            shapes, num_elements, config.fingerprint_every, exchange
        )
        num_tokens = max(2, min(config.canary_tokens, max_tokens))
        self._canary = canary_sequences(vocab, num_tokens)
        self._bounds = bounds
        self._verifier = SyncVerifier(
            policy,
            engine,
            exchange,
            shards,
            held,
            self.wanted,
            bounds=bounds,
            sequences=self._canary,
        )

    def __call__(self, version: int) -> SyncReport:
        """Sync once.

        Raises SyncError naming tensor and ranks, with the ranks at fault as far as known, and
        ConfigError if there is too little memory to wake the engine. Engines at fault must not be
        used after an error, and others need another sync.
        """
        started = time.perf_counter()
        self._policy.onload()
        on_all_ranks(self._exchange, self._engine.wake_weights)
        awake = time.perf_counter()
        self._move(version)
        moved = time.perf_counter()
        names = self._schedule.next()
        if names:
            self._verifier.check_fingerprints(version, names)
        fingerprinted = time.perf_counter()
        policy_logprobs = self._verifier.canary_logprobs()
        compared = time.perf_counter()
        self._policy.offload()
        on_all_ranks(self._exchange, self._engine.wake_cache)
        switched = time.perf_counter()
        share = self._schedule.share(names)
        gap = self._verifier.check_canary(version, policy_logprobs, fingerprinted=share == 1.0)
        self._schedule.record(names, moved - awake, fingerprinted - moved)
        decode_gap = check_decoding(
            self._engine, self._exchange, self._canary, version, bounds=self._bounds
        )
        return SyncReport(
            version=version,
            num_tensors=self._num_tensors,
            num_bytes=max(self.bytes_received),
            seconds=moved - awake,
            verify_seconds=compared - moved + time.perf_counter() - switched,
            turn_seconds=awake - started + switched - compared,
            fingerprinted=share,
            unread_tensors=self._verifier.num_unread,
            canary_gap=gap,
            decode_gap=decode_gap,
        )

    def _tensors(self) -> Iterator[ReceivedTensor]:
        """Yield the tensors that arrive here."""
        with self._noticing_losses():
            yield from self._transfer

    def switch_to_policy(self) -> None:
        """Give the accelerator to the policy, whichever model has it."""
        self._engine.sleep()
        self._policy.onload()

    def _move(self, version: int) -> None:
        """Move the weights. Raises SyncError if ranks have different versions."""
        stream = self._tensors()
        on_all_ranks(self._exchange, lambda: self._engine.receive(stream, version), drain=stream)
        versions = self._exchange.all_gather((version, self._engine.version), tuple[int, int])
        newest = max(synced for synced, _ in versions)
        behind = {
            rank: pair
            for rank, pair in zip(self._exchange.names, versions, strict=True)
            if pair != (newest, newest)
        }
        if behind:
            rank, (synced, running) = next(iter(behind.items()))
            raise SyncError(
                f"weights {newest}: rank {rank} syncs weights {synced}, and its engine has "
                f"weights {running}. The ranks are not at the same step",
                behind,
            )
