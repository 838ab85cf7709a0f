"""One sync: the policy's weights into the engines, and the proof that they arrived.

The plan is made once and reused. Every call checks that each engine tensor is written completely
and once, and that policy and engines give the same log-probs for canary sequences. At a period it
also compares fingerprints of all weights (verify.py). A failure ends the run and names tensor and
ranks.

The sync also hands over the accelerator: before it the engine sleeps, after it what policy.offload
names has left. Both models are on the accelerator while weights move. The KV cache comes back last,
when the policy has made room.
"""

from __future__ import annotations

import time
from math import prod

from dapo_megatron.bridge.plan import TransferPlan, make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.bridge.verify import SyncVerifier
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.config import SyncConfig
from dapo_megatron.protocols import Exchange, Policy, RolloutEngine
from dapo_megatron.types import Piece, SyncError, SyncReport

SMALL_MODEL = 200_000_000
"""Largest number of elements of which every sync is fingerprinted: 10 ms per million on one CPU
core."""
BIG_MODEL_PERIOD = 10


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
        vocab: int,
        max_tokens: int,
        ranks_per_node: int,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._exchange = exchange
        shards = policy.shards()
        held = exchange.all_gather([shard.piece for shard in shards], list[Piece])
        shapes = {p.name: (p.global_shape, p.dtype) for pieces in held for p in pieces}
        wanted = on_all_ranks(exchange, lambda: engine.wanted(shapes))
        self.wanted = exchange.all_gather(wanted, list[Piece])
        """The slices of each rank's engine."""
        self.plan: TransferPlan = make_plan(held, self.wanted, ranks_per_node=ranks_per_node)
        self._transfer = Transfer(self.plan, shards, wanted, exchange.rank, shards[0].view.device)
        self.bytes_received = exchange.all_gather(self._transfer.nbytes_received, int)
        """Bytes that each rank receives in one sync."""
        size = sum(prod(shape) for shape, _ in shapes.values())
        self.num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        """Bytes of the whole model."""
        self._period = config.fingerprint_every or (1 if size <= SMALL_MODEL else BIG_MODEL_PERIOD)
        self._num_done = 0
        self._verifier = SyncVerifier(
            policy,
            engine,
            exchange,
            shards,
            held,
            max_gap=config.max_gap,
            vocab=vocab,
            num_tokens=max(2, min(config.canary_tokens, max_tokens)),
        )

    def __call__(self, version: int) -> SyncReport:
        """Sync once. Raises SyncError naming tensor and ranks, and ConfigError if the engine finds
        too little memory to wake up in. The engines must not be used after an error."""
        started = time.perf_counter()
        self._policy.onload()
        on_all_ranks(self._exchange, self._engine.wake_weights)
        woken = time.perf_counter()
        self._move(version)
        moved = time.perf_counter()
        is_due = self._num_done % self._period == 0  # the first after a start or resume always is
        if is_due:
            self._verifier.check_fingerprints(version)
        ours = self._verifier.canary_logprobs()
        compared = time.perf_counter()
        self._policy.offload()
        on_all_ranks(self._exchange, self._engine.wake_cache)
        turned = time.perf_counter()
        gap = self._verifier.check_canary(version, ours, fingerprinted=is_due)
        self._num_done += 1
        return SyncReport(
            version=version,
            num_tensors=len({piece.name for piece in self.wanted[self._exchange.rank]}),
            num_bytes=max(self.bytes_received),
            seconds=moved - woken,
            verify_seconds=compared - moved + time.perf_counter() - turned,
            turn_seconds=woken - started + turned - compared,
            fingerprinted=is_due,
            unread_tensors=self._verifier.num_unread,
            canary_gap=gap,
        )

    def switch_to_policy(self) -> None:
        """Give the accelerator to the policy, whichever model has it."""
        self._engine.sleep()
        self._policy.onload()

    def _move(self, version: int) -> None:
        """Move the weights, and check that all ranks moved the same version."""
        stream = iter(self._transfer)
        on_all_ranks(self._exchange, lambda: self._engine.receive(stream, version), drain=stream)
        versions = self._exchange.all_gather((version, self._engine.version), tuple[int, int])
        newest = max(asked for asked, _ in versions)
        for rank, (asked, running) in enumerate(versions):
            if (asked, running) != (newest, newest):
                raise SyncError(
                    f"weights {newest}: rank {rank} syncs weights {asked}, and its engine has "
                    f"weights {running}; the ranks are not at the same step"
                )
