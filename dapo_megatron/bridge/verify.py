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
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from math import prod
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
_Part = tuple[int, TensorSlice, int]
"""(rank, slice, fingerprint)"""


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
    wants. Return the number of tensors that were not compared, because the first engine has a part
    that cannot be read back. Raises SyncError naming tensors, ranks and the engines at fault; none
    if copies within the policy differ.
    """
    # Ranks at the same place of both layouts send equal lists. Each distinct list travels once.
    own_prints = fingerprints((shard.read(), shard.tensor_slice.region) for shard in shards)
    values, value_of_rank = gather_distinct(exchange, own_prints, list[int])
    # (index into a worker's slices, fingerprint) of each slice that can be read
    by_replica = engines.call("fingerprints", of=list[list[tuple[int, int]]])
    # Each rank compares some of the tensors.
    names = sorted({part.name for parts in held.lists for part in parts})
    compared = set(names[exchange.rank :: exchange.world_size])

    @cache  # ranks that share a list and its fingerprints are handled once
    def policy_prints(list_number: int, value_number: int) -> list[tuple[TensorSlice, int]]:
        pairs = zip(held.lists[list_number], values[value_number], strict=True)
        return [(part, number) for part, number in pairs if part.name in compared]

    of_engines: list[list[tuple[TensorSlice, int]]] = [[] for _ in wanted.replicas]
    for replica, by_worker in by_replica.items():
        for rank, prints in zip(wanted.of_replica(replica), by_worker, strict=True):
            pairs = ((wanted.slices[rank][index], number) for index, number in prints)
            of_engines[rank] = [(part, number) for part, number in pairs if part.name in compared]
    policy = list(map(policy_prints, held.list_of_rank, value_of_rank))
    own = describe_mismatches(policy, of_engines, wanted.replicas)
    if mismatches := list(chain(*exchange.all_gather(own, list[Mismatch]))):
        lines = [f"weights {version}: fingerprints differ after the sync"]
        lines += [mismatch.text for mismatch in mismatches[:NAMED]]
        if len(mismatches) > NAMED:
            lines.append(f"... and {len(mismatches) - NAMED} more")
        at_fault = chain(*(mismatch.replicas for mismatch in mismatches))
        raise SyncError("\n".join(lines), at_fault)
    replica, by_worker = next(iter(by_replica.items()))
    unread = {part.name: prod(part.global_shape) for parts in held.lists for part in parts}
    workers = zip(wanted.of_replica(replica), by_worker, strict=True)
    for part in {wanted.slices[rank][index] for rank, prints in workers for index, _ in prints}:
        unread[part.name] -= part.region.numel
    return sum(numel != 0 for numel in unread.values())


# ------------------------------------------------------------------ fingerprints


def fingerprints(values: Iterable[tuple[Tensor, Region]]) -> list[int]:
    """Return the contribution of each region to its tensor's fingerprint.

    A value has its region's shape, and elements of 1, 2 or 4 bytes. Subnormal numbers (below 1e-38
    in bfloat16 and float32) and -0.0 count as 0, because kernels through which weights are read
    back flush them to 0. All values are on one device, and it is waited for only once.
    """
    sums = [_summand(value, region) for value, region in values]
    return [total & _MASK for total in torch.stack(sums).tolist()] if sums else []


@torch.no_grad()
def _summand(value: Tensor, region: Region) -> Tensor:
    """Return a region's contribution as a signed 64-bit number on the value's device."""
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

    Copies of one region must be equal, among policy ranks and among the ranks of an engine. Then
    each tensor is compared as a whole, whose fingerprint is the sum of its parts'.
    """
    mismatches: list[Mismatch] = []
    parts_of_engines = _by_tensor(engines)
    for name, parts in sorted(_by_tensor(policy).items()):
        expected, unequal = _total("policy", parts)
        mismatches += [Mismatch(text, []) for text in unequal]
        if unequal:
            continue  # it is unknown which copy the engine should hold
        replicas: dict[int, list[_Part]] = defaultdict(list)
        for part in parts_of_engines.get(name, ()):
            replicas[replica_of_rank[part[0]]].append(part)
        for replica, sampled in sorted(replicas.items()):
            actual, texts = _total("engine", sampled)
            if not texts and actual not in (expected, None):
                ranks = _list({rank for rank, _, _ in sampled})
                texts = [f"{name}: engine ranks {ranks} hold other values than the policy"]
            mismatches += [Mismatch(text, [replica]) for text in texts]
    return mismatches


def _by_tensor(prints: Fingerprints) -> dict[str, list[_Part]]:
    """Return (rank, slice, fingerprint) of all slices, by tensor name."""
    tensors: dict[str, list[_Part]] = defaultdict(list)
    for rank, tensor_slices in enumerate(prints):
        for tensor_slice, value in tensor_slices:
            tensors[tensor_slice.name].append((rank, tensor_slice, value))
    return tensors


def _total(side: str, parts: Sequence[_Part]) -> tuple[int | None, list[str]]:
    """Return the fingerprint of a tensor, and a line per region with unequal copies, naming the
    smallest group of ranks first. The fingerprint is None if some of the tensor cannot be read."""
    first = parts[0][1]
    copies: dict[Region, dict[int, list[int]]] = {}
    for rank, part, value in parts:
        copies.setdefault(part.region, {}).setdefault(value, []).append(rank)
    unequal = []
    for region, values in copies.items():
        if len(values) > 1:
            fewest, *rest = sorted(values.values(), key=len)
            unequal.append(
                f"{first.name}{region}: {side} ranks {_list(fewest)} hold other values than "
                f"ranks {_list(chain(*rest))}"
            )
    is_whole = sum(region.numel for region in copies) == prod(first.global_shape)
    total = sum(next(iter(values)) for values in copies.values()) & _MASK
    return (total if is_whole else None), unequal


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
