"""Fingerprints of weights: whether engines hold the policy's, independently of the plan that moved
them. (An engine that computes something else with the right weights is found by algo/mismatch.py.)

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
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_megatron.bridge.islands import RankSlices, Wanted
from dapo_megatron.cluster.collectives import NAMED, gather_distinct
from dapo_megatron.protocols import Engines, Exchange
from dapo_megatron.types import Region, Shard, SyncError, TensorSlice

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


def check_fingerprints(
    version: int,
    shards: Sequence[Shard],
    held: RankSlices,
    wanted: Wanted,
    engines: Engines,
    exchange: Exchange,
) -> int:
    """Compare the policy, sharded over all ranks, with every present engine. Collective.

    Take this rank's policy `shards`, and the slices that each rank's policy holds and each worker
    wants. Return the number of tensors of the first engine that cannot be read back. Raises
    SyncError naming tensors, ranks and the engines at fault; none if copies within the policy
    differ.
    """
    # Ranks at the same place of both layouts send equal lists. Each distinct list travels once.
    own_prints = fingerprints((shard.read(), shard.tensor_slice.region) for shard in shards)
    values, value_of_rank = gather_distinct(exchange, own_prints, list[int])
    by_replica = engines.call("fingerprints", of=list[list[_Print]])
    # Each rank compares some of the tensors.
    names = sorted({part.name for parts in held.lists for part in parts})
    compared = set(names[exchange.rank :: exchange.world_size])

    @cache  # ranks that share a list and its fingerprints are handled once
    def policy_prints(list_number: int, value_number: int) -> list[tuple[TensorSlice, int]]:
        pairs = zip(held.lists[list_number], values[value_number], strict=True)
        return [(part, number) for part, number in pairs if part.name in compared]

    of_engines: list[list[tuple[TensorSlice, int]]] = [[] for _ in wanted.replicas]
    for replica, by_worker in by_replica.items():
        for worker_rank, prints in zip(wanted.of_replica(replica), by_worker, strict=True):
            slices = wanted.slices[worker_rank]
            of_engines[worker_rank] = [
                (slices[index], number)
                for index, number in prints
                if slices[index].name in compared
            ]
    policy = list(map(policy_prints, held.list_of_rank, value_of_rank))
    own = describe_mismatches(policy, of_engines, wanted.replicas)
    if mismatches := list(chain(*exchange.all_gather(own, list[Mismatch]))):
        lines = [mismatch.text for mismatch in mismatches]
        more = f"\n... and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        raise SyncError(
            f"weights {version}: fingerprints differ after the sync\n"
            + "\n".join(lines[:NAMED])
            + more,
            chain(*(mismatch.replicas for mismatch in mismatches)),
        )
    replica, (prints, *_) = next(iter(by_replica.items()))
    slices = wanted.slices[wanted.of_replica(replica)[0]]
    return len({part.name for part in slices} - {slices[index].name for index, _ in prints})


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


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
