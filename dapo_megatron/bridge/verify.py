"""Verification of a sync: engines hold the policy's weights and compute the same log-probs.

Fingerprints compare the weights of both sides in place, independently of the plan that moved them.
Canary sequences compare log-probs. This also catches an engine that holds the right weights and
computes something else with them, in one pass or token by token.

A fingerprint has 64 bits and does not depend on the layout of the tensor over ranks. The bits of
each element, as an integer, are multiplied by a coefficient that depends on the element's position
in the whole tensor, and the products are summed modulo 2^64. So the fingerprints of disjoint parts
add up to the fingerprint of the whole, in any order. Coefficients are odd, so one flipped bit
always changes the sum: 2^k times an odd number is never 0 modulo 2^64. Coefficients are
pseudo-random and differ between rows and columns, so swapped, shifted or repeated elements change
the sum, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_megatron.bridge.bounds import CanaryBounds, canary_gap
from dapo_megatron.bridge.islands import RankSlices, Wanted
from dapo_megatron.cluster.collectives import NAMED, gather_distinct, on_all_ranks
from dapo_megatron.protocols import Engines, Exchange, Policy
from dapo_megatron.types import Region, Shard, SyncError, TensorSlice, TokenBatch

NUM_SEQUENCES = 4
SEED = 20250318  # any fixed number, so that every run has the same sequences

_CHUNK = 2**22
"""Elements converted to int64 at a time (32 MiB)."""
_MASK = 2**64 - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_INCREMENT, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

Fingerprints = Sequence[Sequence[tuple[TensorSlice, int]]]
"""[rank] -> (slice, fingerprint) of each slice that the rank has."""
_Print = tuple[int, int]
"""(index into a worker's slices, fingerprint) of a slice that can be read."""
_Boxes = dict[Region, dict[int, list[int]]]
"""Region -> fingerprint -> the ranks whose copy has it."""


class Mismatch(NamedTuple):
    """Copies of a tensor, or a part of it, that differ."""

    text: str
    """A line that names tensor and ranks."""
    replicas: list[int]
    """Engines at fault; none if copies within the policy differ."""


class SyncVerifier:
    """Compares the policy, sharded over all ranks, with every engine. Methods are collective."""

    def __init__(
        self,
        policy: Policy,
        engines: Engines,
        exchange: Exchange,
        shards: Sequence[Shard],
        held: RankSlices,
        *,
        bounds: CanaryBounds,
        sequences: list[list[int]],
    ) -> None:
        """Take this rank's policy `shards`, the slices that each rank's policy holds, and the
        canary sequences."""
        self._policy = policy
        self._engines = engines
        self._exchange = exchange
        self._shards = shards
        self._held = held
        self._bounds = bounds
        self._names = frozenset(
            tensor_slice.name for tensor_slices in held.lists for tensor_slice in tensor_slices
        )
        self._sequences = sequences
        self.num_unread = 0
        """Tensors of the first engine that could not be read back at the last full check."""

    def check_fingerprints(
        self, version: int, wanted: Wanted, names: Collection[str] | None = None
    ) -> None:
        """Raise SyncError naming tensors and ranks if policy and engines hold different weights.

        It names the engines at fault, unless copies within the policy differ. Compares the tensors
        in `names`, which are the same on all ranks. None: all tensors.
        """
        names = self._names if names is None else names
        is_full = len(names) == len(self._names)
        # Ranks at the same place of both layouts send equal lists. Each distinct list travels once.
        values, value_of_rank = gather_distinct(
            self._exchange, self._policy_prints(names), list[int]
        )
        by_replica = self._engines.call("fingerprints", sorted(names), of=list[list[_Print]])
        # Each rank compares some of the tensors.
        rank, num_ranks = self._exchange.rank, self._exchange.world_size
        start, end = (len(names) * number // num_ranks for number in (rank, rank + 1))
        compared = set(sorted(names)[start:end])

        @cache  # ranks that share a list and its fingerprints are handled once
        def policy_prints(list_number: int, value_number: int) -> list[tuple[TensorSlice, int]]:
            tensor_slices = _only(self._held.lists[list_number], names)
            return [
                (tensor_slice, number)
                for tensor_slice, number in zip(tensor_slices, values[value_number], strict=True)
                if tensor_slice.name in compared
            ]

        engines: list[list[tuple[TensorSlice, int]]] = [[] for _ in wanted.replicas]
        for replica, by_worker in by_replica.items():
            for worker_rank, prints in zip(wanted.of_replica(replica), by_worker, strict=True):
                slices = wanted.slices[worker_rank]
                engines[worker_rank] = [
                    (slices[index], number)
                    for index, number in prints
                    if slices[index].name in compared
                ]
        policy = list(map(policy_prints, self._held.list_of_rank, value_of_rank))
        own = describe_mismatches(policy, engines, wanted.replicas)
        if mismatches := list(chain(*self._exchange.all_gather(own, list[Mismatch]))):
            lines = [mismatch.text for mismatch in mismatches]
            more = f"\n... and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
            raise SyncError(
                f"weights {version}: fingerprints differ after the sync\n"
                + "\n".join(lines[:NAMED])
                + more,
                chain(*(mismatch.replicas for mismatch in mismatches)),
            )
        if is_full:
            replica, by_worker = next(iter(by_replica.items()))
            slices = wanted.slices[wanted.of_replica(replica)[0]]
            readable = {slices[index].name for index, _ in by_worker[0]}
            self.num_unread = len({tensor_slice.name for tensor_slice in slices} - readable)

    def _policy_prints(self, names: Collection[str]) -> list[int]:
        """Return the fingerprints of this rank's shards of the tensors in `names`."""
        return fingerprints(
            (shard.read(), shard.tensor_slice.region)
            for shard in self._shards
            if shard.tensor_slice.name in names
        )

    def canary_logprobs(self) -> Tensor:
        """Return the policy's log-probs of the canary sequences at temperature 1, end to end."""
        scored = self._policy.logprobs(canary_batch(self._sequences), temperature=1.0)
        logprobs = self._exchange.broadcast(scored.logprobs.tolist(), list[float])
        return torch.tensor(logprobs, dtype=torch.float64)

    def check_canary(
        self, version: int, wanted: Wanted, policy_logprobs: Tensor, *, fingerprinted: bool
    ) -> float:
        """Return the largest gap, in nats, between any engine and the policy.

        Raises SyncError naming the engines whose gap exceeds a bound. Unless this sync was
        `fingerprinted` in full, all fingerprints are checked first, because their error names the
        tensor.
        """
        scores = self._engines.call("score", self._sequences, of=list[list[float]])
        gaps = {replica: canary_gap(policy_logprobs, score) for replica, score in scores.items()}
        excess = self._bounds.excess(gaps)
        if excess is None:
            return max(gap.max for gap in gaps.values())
        at_fault = [replica for replica, gap in gaps.items() if not self._bounds.allow(gap)]
        disagreement = (
            f"weights {version}: on canary sequences policy and engine disagree by {excess}"
        )
        if not fingerprinted:
            try:
                on_all_ranks(self._exchange, self._reload_policy)
            except SyncError as error:
                raise SyncError(f"{disagreement}. {error}", at_fault) from error
            self.check_fingerprints(version, wanted)
        unread = f" ({self.num_unread} tensors cannot be read back)" if self.num_unread else ""
        raise SyncError(
            f"{disagreement}. The weights' fingerprints agree{unread}, so the engine packs or "
            "quantizes the weights wrongly, or its kernels compute something else. If this gap is "
            "normal for the model and its precisions, raise that key",
            at_fault,
        )

    def check_decoding(self, version: int) -> float:
        """Return the largest gap, in nats, between the log-probs of tokens that engines decode and
        of the same tokens scored in one pass. Raises SyncError naming the engines on which the
        largest gap or the mean exceeds the canary's bound.

        Canary sequences are scored in one pass over each sequence. Rollouts are decoded token by
        token, on a GPU in CUDA graphs. A graph keeps the addresses that it was captured with. If it
        read a stale one after a sync, it would pass all other checks, and only the gap of the next
        step's rollouts would show it.
        """
        gaps = self._engines.call("decode_gap", self._sequences, of=tuple[float, float])
        for key, bound, index in (
            ("sync.max_gap", self._bounds.max, 0),
            ("sync.canary_mean_gap", self._bounds.mean, 1),
        ):
            highest = max(gap[index] for gap in gaps.values())
            if highest > bound:
                at_fault = [replica for replica, gap in gaps.items() if gap[index] > bound]
                raise SyncError(
                    f"weights {version}: decoded tokens have other log-probs than the same tokens "
                    f"scored in one pass, by {highest:.3g}, engine {_list(at_fault)}; {key} is "
                    f"{bound:g}. Scoring agrees with the policy, so CUDA graphs read stale memory, "
                    "or the kernels of decoding compute something else. Try "
                    "engine.enforce_eager=true",
                    at_fault,
                )
        return float(max(largest for largest, _ in gaps.values()))

    def _reload_policy(self) -> None:
        """Bring the policy back next to the KV cache. Raises SyncError if both do not fit."""
        try:
            self._policy.onload()
        except torch.OutOfMemoryError as error:
            raise SyncError(
                "The fingerprints were not compared, because policy and KV cache do not fit on the "
                "GPU together. sync.fingerprint_every=1 compares them before the cache is there"
            ) from error


# ------------------------------------------------------------------ canary sequences


def canary_sequences(vocab: int, num_tokens: int) -> list[list[int]]:
    """Return NUM_SEQUENCES fixed sequences of `num_tokens` random tokens below `vocab`."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(vocab, (NUM_SEQUENCES, num_tokens), generator=generator)
    return [list(map(int, row)) for row in tokens]


def canary_batch(sequences: list[list[int]]) -> TokenBatch:
    """Return the sequences as a batch for Policy.logprobs, without loss tokens."""
    num_tokens = sum(map(len, sequences))
    zeros = torch.zeros(num_tokens)
    return TokenBatch(
        lengths=torch.tensor([len(sequence) for sequence in sequences]),
        loss_tokens=torch.zeros(len(sequences), dtype=torch.int64),
        group_ids=torch.arange(len(sequences)),
        tokens=torch.tensor(
            [token for sequence in sequences for token in sequence], dtype=torch.int32
        ),
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        advantages=zeros,
        weights=zeros,
        engine_logprobs=zeros,
    )


# ------------------------------------------------------------------ fingerprints


def fingerprint(value: Tensor, region: Region) -> int:
    """Return the contribution of one region to its tensor's fingerprint.

    `value` has the region's shape, and elements of 1, 2 or 4 bytes. Subnormal numbers (below 1e-38
    in bfloat16 and float32) and -0.0 count as 0, because kernels through which weights are read
    back flush them to 0.
    """
    [summand] = fingerprints([(value, region)])
    return summand


def fingerprints(values: Iterable[tuple[Tensor, Region]]) -> list[int]:
    """Return `fingerprint` of each value. All are on one device, and it is waited for only once."""
    sums = [_summand(value, region) for value, region in values]
    return [total & _MASK for total in torch.stack(sums).tolist()] if sums else []


@torch.no_grad()
def _summand(value: Tensor, region: Region) -> Tensor:
    """Return `fingerprint` as a signed 64-bit number on the value's device."""
    dims = len(region.shape)
    coefficients = [
        _coefficients(dim, region.start[dim], region.shape[dim], value.device)
        for dim in range(dims)
    ]
    rows = value.reshape(region.shape[0], -1) if dims else value.reshape(1, 1)
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        if part.element_size() > 1:
            part = torch.where(part.abs() < torch.finfo(part.dtype).tiny, 0.0, part)
        sums = part.contiguous().view(_BITS[value.element_size()]).to(torch.int64)
        sums = sums.view(-1, *region.shape[1:])
        for dim in reversed(range(1, dims)):
            sums = (sums * coefficients[dim]).sum(-1)
        if dims:
            sums = sums * coefficients[0][first : first + step]
        total += sums.sum()
    return total


def combine_fingerprints(*parts: int) -> int:
    """Return the fingerprint of the union of disjoint parts."""
    return sum(parts) & _MASK


@lru_cache(maxsize=256)
def _coefficients(dim: int, first: int, size: int, device: torch.device) -> Tensor:
    """Return odd 64-bit coefficients of indices first ... first + size - 1 in dimension `dim`.

    Cached, because the tensors of a model have few shapes.
    """
    mixed = torch.arange(first + 1, first + 1 + size, dtype=torch.int64, device=device)
    mixed = (mixed + (dim << 40)) * _INCREMENT
    mixed = (mixed ^ (mixed >> 30)) * _MIX_1
    mixed = (mixed ^ (mixed >> 27)) * _MIX_2
    return (mixed ^ (mixed >> 31)) | 1


# ------------------------------------------------------------------ both sides


def describe_mismatches(
    policy: Fingerprints,
    engines: Fingerprints,
    replica_of_rank: Sequence[int],
) -> list[Mismatch]:
    """Return the mismatches. `replica_of_rank` is the replica that each engine rank belongs to.

    Copies of one region must be equal, among policy ranks and among engine ranks. Shards of policy
    and engine are compared over the smallest unions of boxes that both sides cover.
    """
    held, wanted = _by_tensor(policy), _by_tensor(engines)
    mismatches: list[Mismatch] = []
    for name in sorted(held.keys() | wanted.keys()):
        trained = _boxes(held.get(name, ()))
        unequal = list(_unequal_copies(name, "policy", trained))
        mismatches += [Mismatch(text, []) for text in unequal]
        if unequal:
            continue  # it is unknown which copy the engine should hold
        replicas: dict[int, list[tuple[int, Region, int]]] = defaultdict(list)
        for entry in wanted.get(name, ()):
            replicas[replica_of_rank[entry[0]]].append(entry)
        for replica, entries in sorted(replicas.items()):
            for text in _differences(name, trained, _boxes(entries)):
                mismatches.append(Mismatch(text, [replica]))
    return mismatches


def _by_tensor(prints: Fingerprints) -> dict[str, list[tuple[int, Region, int]]]:
    """Return (rank, region, fingerprint) of all slices, by tensor name."""
    tensors: dict[str, list[tuple[int, Region, int]]] = defaultdict(list)
    for rank, tensor_slices in enumerate(prints):
        for tensor_slice, value in tensor_slices:
            tensors[tensor_slice.name].append((rank, tensor_slice.region, value))
    return tensors


def _boxes(entries: Iterable[tuple[int, Region, int]]) -> _Boxes:
    boxes: _Boxes = {}
    for rank, region, value in entries:
        ranks = boxes.setdefault(region, {}).setdefault(value, [])
        if rank not in ranks:
            ranks.append(rank)
    return boxes


def _unequal_copies(name: str, side: str, boxes: _Boxes) -> Iterator[str]:
    """Yield a line per region with unequal copies, naming the smallest group of ranks first."""
    for region, values in boxes.items():
        if len(values) > 1:
            fewest, *rest = sorted(values.values(), key=len)
            yield (
                f"{name}{region}: {side} ranks {_list(fewest)} hold other values than "
                f"ranks {_list(chain(*rest))}"
            )


def _differences(name: str, trained: _Boxes, sampled: _Boxes) -> Iterator[str]:
    """Yield a line per union of boxes on which one engine's weights are not the policy's."""
    for policy_boxes, engine_boxes in _components(trained, sampled):
        expected = combine_fingerprints(*(next(iter(trained[region])) for region in policy_boxes))
        if len(engine_boxes) == 1:  # compare each rank's copy by itself
            [region] = engine_boxes
            wrong = [
                rank
                for value, ranks in sampled[region].items()
                if value != expected
                for rank in ranks
            ]
        elif any(len(sampled[region]) > 1 for region in engine_boxes):
            yield from _unequal_copies(
                name, "engine", {region: sampled[region] for region in engine_boxes}
            )
            continue
        else:
            actual = combine_fingerprints(*(next(iter(sampled[region])) for region in engine_boxes))
            holders = {
                rank
                for region in engine_boxes
                for ranks in sampled[region].values()
                for rank in ranks
            }
            wrong = sorted(holders) if actual != expected else []
        if wrong:
            box = engine_boxes[0] if len(engine_boxes) == 1 else ""
            yield f"{name}{box}: engine ranks {_list(wrong)} hold other values than the policy"


def _components(trained: _Boxes, sampled: _Boxes) -> Iterator[tuple[list[Region], list[Region]]]:
    """Yield connected groups of policy boxes and engine boxes: they overlap, directly or through
    others."""
    remaining = list(trained)
    while remaining:
        policy_boxes, engine_boxes = [remaining.pop()], []
        unreached = set(sampled)
        grew = True
        while grew:
            more_engine = [box for box in unreached if any(map(box.intersect, policy_boxes))]
            unreached -= set(more_engine)
            engine_boxes += more_engine
            more_policy = [box for box in remaining if any(map(box.intersect, engine_boxes))]
            remaining = [box for box in remaining if box not in more_policy]
            policy_boxes += more_policy
            grew = bool(more_engine or more_policy)
        if engine_boxes:  # an engine with expert parallelism has only some of the boxes
            yield policy_boxes, sorted(engine_boxes, key=lambda region: region.start)


def _only(tensor_slices: Iterable[TensorSlice], names: Collection[str]) -> Iterator[TensorSlice]:
    return (tensor_slice for tensor_slice in tensor_slices if tensor_slice.name in names)


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
