"""One sync: the policy's weights into the engines, and the proof that they arrived.

Planned once, reused at every call, verified at every call: each engine tensor is written in full
and once; at a period, fingerprints of both sides agree over all ranks; and policy and engine give
the same log-probs for fixed sequences. Whatever fails ends the run and names tensor and ranks.

It is also where policy and engine hand over the accelerator: before it the engine sleeps, after it
what policy.offload names has left. Both have their weights there while these move; the KV cache
comes back last, when the policy has made room.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod

from torch import Tensor

from dapo_megatron.bridge import canary
from dapo_megatron.bridge.fingerprint import fingerprint
from dapo_megatron.bridge.plan import Plan, make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.bridge.verify import disagreements
from dapo_megatron.cluster.collectives import NAMED, on_all_ranks
from dapo_megatron.config import SyncConfig
from dapo_megatron.protocols import Exchange, Policy, RolloutEngine
from dapo_megatron.types import Piece, Shard, SyncError, SyncReport

SMALL_MODEL = 200_000_000
"""Up to so many elements, every sync is fingerprinted: 10 ms per million on one CPU core."""
BIG_MODEL_PERIOD = 10


class WeightSync:
    """Policy weights into this rank's engine; calling it is one sync. Collective.

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
        self._max_gap = config.max_gap
        self._ranks_per_engine = exchange.world_size // engine.num_replicas
        self._shards: Sequence[Shard] = policy.shards()
        self._held = exchange.all_gather([shard.piece for shard in self._shards], list[Piece])
        shapes = {p.name: (p.global_shape, p.dtype) for pieces in self._held for p in pieces}
        wanted = on_all_ranks(exchange, lambda: engine.wanted(shapes))
        self.wanted = exchange.all_gather(wanted, list[Piece])
        """The slices of each rank's engine."""
        self.plan: Plan = make_plan(self._held, self.wanted, ranks_per_node=ranks_per_node)
        self._transfer = Transfer(
            self.plan, self._shards, wanted, exchange.rank, self._shards[0].view.device
        )
        self.bytes_received = exchange.all_gather(self._transfer.nbytes_received, int)
        """By each rank in one sync."""
        size = sum(prod(shape) for shape, _ in shapes.values())
        self.num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        """Of the whole model."""
        self._period = config.fingerprint_every or (1 if size <= SMALL_MODEL else BIG_MODEL_PERIOD)
        self._num_done = 0
        self._num_unread = 0
        self._canary = canary.sequences(vocab, max(2, min(config.canary_tokens, max_tokens)))

    def __call__(self, version: int) -> SyncReport:
        """Raises SyncError naming tensor and ranks, and ConfigError if the engine finds too little
        memory to wake up in; the engines must then not be used."""
        started = time.perf_counter()
        self._policy.onload()
        on_all_ranks(self._exchange, self._engine.wake_weights)
        woken = time.perf_counter()
        self._move(version)
        moved = time.perf_counter()
        is_due = self._num_done % self._period == 0  # the first after a start or resume always is
        if is_due:
            self._check_fingerprints(version)
        ours = self._policy.logprobs(canary.as_batch(self._canary), temperature=1.0).logprobs
        compared = time.perf_counter()
        self._policy.offload()
        on_all_ranks(self._exchange, self._engine.wake_cache)
        turned = time.perf_counter()
        gap = self._check_canary(version, ours, fingerprinted=is_due)
        self._num_done += 1
        return SyncReport(
            version=version,
            num_tensors=len({piece.name for piece in self.wanted[self._exchange.rank]}),
            num_bytes=max(self.bytes_received),
            seconds=moved - woken,
            verify_seconds=compared - moved + time.perf_counter() - turned,
            turn_seconds=woken - started + turned - compared,
            fingerprinted=is_due,
            unread_tensors=self._num_unread,
            canary_gap=gap,
        )

    def switch_to_policy(self) -> None:
        """Give the accelerator to the policy, whichever model has it."""
        self._engine.sleep()
        self._policy.onload()

    def _move(self, version: int) -> None:
        """The weights, and agreement on which they are."""
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

    def _check_fingerprints(self, version: int) -> None:
        """Compare both sides, and count what this rank's engine does not let be read."""
        ours = [fingerprint(shard.read(), shard.piece.region) for shard in self._shards]
        pieces, theirs, unread = [], [], []
        for piece, value in self._engine.held():
            if value is None:
                unread.append(piece.name)
            else:
                pieces.append(piece)
                theirs.append(fingerprint(value, piece.region))
        everyone = self._exchange.all_gather(
            (ours, pieces, theirs), tuple[list[int], list[Piece], list[int]]
        )
        policy = [
            list(zip(held, prints, strict=True))
            for held, (prints, _, _) in zip(self._held, everyone, strict=True)
        ]
        engines = [list(zip(pieces, prints, strict=True)) for _, pieces, prints in everyone]
        if found := disagreements(policy, engines, self._ranks_per_engine):
            more = f"\n... and {len(found) - NAMED} more" if len(found) > NAMED else ""
            raise SyncError(
                f"weights {version}: fingerprints differ after the sync\n"
                + "\n".join(found[:NAMED])
                + more
            )
        self._num_unread = len(unread)

    def _check_canary(self, version: int, ours: Tensor, *, fingerprinted: bool) -> float:
        """The largest gap on the fixed sequences, of any engine; `ours`: the policy's log-probs."""
        mine = canary.worst(ours, self._engine.score(self._canary))
        gaps = self._exchange.all_gather(mine, tuple[float, int, int])
        gap, sequence, token = max(gaps)
        if gap <= self._max_gap:
            return gap
        if not fingerprinted:
            self._policy.onload()
            self._check_fingerprints(version)  # names the tensor, if it is one
        unread = f" ({self._num_unread} tensors cannot be read back)" if self._num_unread else ""
        ranks = ", ".join(str(rank) for rank, one in enumerate(gaps) if one[0] > self._max_gap)
        raise SyncError(
            f"weights {version}: on fixed sequences policy and engine disagree by {gap:.3g} "
            f"(sequence {sequence}, token {token}), engine ranks {ranks}; sync.max_gap is "
            f"{self._max_gap:g}. The weights' fingerprints agree{unread}: what the engine makes of "
            "them (packing, quantising, kernels) or how the two compute differs"
        )
