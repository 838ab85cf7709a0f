"""Carrying out a plan: boxes of weights from the ranks that hold them to those that want them.

Each round packs what this rank sends into one flat buffer of bytes, exchanges it with all ranks by
one all_to_all_single (gloo or NCCL; any mix of dtypes), and hands on the tensors that are then
complete. The buffers of one round are all the memory it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.bridge.plan import Move, Plan, make_plan
from dapo_megatron.protocols import Arrival, Exchange
from dapo_megatron.types import Piece, Region, Shard, SyncError, whole

ALIGNMENT_BYTES = 16
"""Where a box may start in a buffer: a multiple of the size of any dtype."""

_Key = tuple[str, Region]
_Named = TypeVar("_Named", Piece, Shard)


class Transfer:
    """Collective: all ranks of the plan make one with their own shards and pieces, and iterate at
    the same time, to the end.

    Iterating yields every tensor wanted here, once, complete. Weights are read from the shards as
    each round begins, so one Transfer serves every sync. What the rank holds itself is a view of
    its own weights, not a copy; what comes in one box is a view of a buffer that is not used again.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Shard],
        wanted: Sequence[Piece],
        rank: int,
        device: torch.device,
    ) -> None:
        self._device = device
        held = _by_name(shards, lambda shard: shard.piece.name)
        pieces = _by_name(wanted, lambda piece: piece.name)
        self._rounds = []
        for routes in plan.rounds:
            one = _Round(plan.num_ranks)
            for route in routes:
                one.is_exchange |= bool(route.traffic()[0])
                moves = list(route.moves(rank))
                for move in moves:
                    one.add(move, rank, held.get(route.name, []))
                here = any(move.target == rank for move in moves)
                # Pieces without elements have no moves: they come with the others' part.
                if route.name in pieces and (here or not any(p.nbytes for p in pieces[route.name])):
                    one.wanted[route.name] = pieces.pop(route.name)
            self._rounds.append(one)
        if pieces:
            raise SyncError(f"the plan does not bring {sorted(pieces)[0]}, wanted on rank {rank}")

    @property
    def nbytes_received(self) -> int:
        """Bytes that one pass brings here from other ranks, alignment included."""
        return sum(sum(one.arriving.splits) for one in self._rounds)

    def __iter__(self) -> Iterator[Arrival]:
        for one in self._rounds:
            yield from self._carry_out(one)

    def _carry_out(self, one: _Round) -> Iterator[Arrival]:
        received = one.arriving.allocate(self._device)
        if one.is_exchange:
            sent = one.leaving.allocate(self._device)
            self._pack(one, sent)
            dist.all_to_all_single(received, sent, one.arriving.splits, one.leaving.splits)
            del sent
        for name, pieces in one.wanted.items():
            yield name, [(p.region, self._complete(p, one, received)) for p in pieces]

    def _pack(self, one: _Round, buffer: Tensor) -> None:
        last, value = None, buffer
        for shard, slot in one.sends:
            if shard is not last:  # a shard that several ranks want is read once
                last, value = shard, shard.read()
            box = value[slot.box.within(shard.piece.region).slices]
            one.leaving.window(buffer, slot, shard.piece.dtype).copy_(box)

    def _complete(self, piece: Piece, one: _Round, received: Tensor) -> Tensor:
        key = (piece.name, piece.region)
        parts = [
            (box, shard.read()[box.within(shard.piece.region).slices])
            for box, shard in one.local.get(key, [])
        ] + [
            (slot.box, one.arriving.window(received, slot, piece.dtype))
            for slot in one.remote.get(key, [])
        ]
        if len(parts) == 1:
            return parts[0][1]
        found = torch.empty(piece.region.shape, dtype=piece.dtype, device=self._device)
        for box, value in parts:
            found[box.within(piece.region).slices] = value
        return found


def gather_whole(
    shards: Sequence[Shard],
    exchange: Exchange,
    device: torch.device,
    *,
    on: Sequence[int] | None = None,
    deal: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor, whole, on the ranks `on` (None: all ranks), from the shards of all ranks.

    Collective: all ranks iterate to the end; those not in `on` get nothing. With `deal`, each
    tensor is whole on one rank of `on` alone, so that they share the bytes evenly: an export in
    parallel. Raises SyncError naming a tensor of which a part is missing.
    """
    held = exchange.all_gather([shard.piece for shard in shards], list[Piece])
    targets = range(len(held)) if on is None else on
    wanted: list[list[Piece]] = [[] for _ in held]
    nbytes = dict.fromkeys(targets, 0)
    for first in {piece.name: piece for pieces in held for piece in pieces}.values():
        piece = Piece(first.name, first.global_shape, first.dtype, whole(first.global_shape))
        for rank in [min(targets, key=nbytes.__getitem__)] if deal else targets:
            wanted[rank].append(piece)
            nbytes[rank] += piece.nbytes
    plan = make_plan(held, wanted)
    for name, regions in Transfer(plan, shards, wanted[exchange.rank], exchange.rank, device):
        for _, tensor in regions:
            yield name, tensor


@dataclass(frozen=True, slots=True)
class _Slot:
    """A box in a buffer: so many bytes into the stretch of a peer."""

    peer: int
    offset: int
    box: Region


class _Stretches:
    """A flat buffer of bytes with a stretch for each rank, laid out as boxes are added."""

    def __init__(self, num_ranks: int) -> None:
        self.splits = [0] * num_ranks

    def add(self, peer: int, move: Move) -> _Slot:
        slot = _Slot(peer, self.splits[peer], move.box)
        self.splits[peer] += -(-move.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return slot

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(sum(self.splits), dtype=torch.uint8, device=device)

    def window(self, buffer: Tensor, slot: _Slot, dtype: torch.dtype) -> Tensor:
        """The box in the buffer, as a tensor of its shape."""
        start = sum(self.splits[: slot.peer]) + slot.offset
        stop = start + slot.box.numel * dtype.itemsize
        return buffer[start:stop].view(dtype).view(slot.box.shape)


class _Round:
    """One rank's part in a round. Both ends of a stretch lay it out in the plan's order."""

    def __init__(self, num_ranks: int) -> None:
        self.leaving = _Stretches(num_ranks)
        self.arriving = _Stretches(num_ranks)
        self.is_exchange = False  # whether any rank moves anything
        self.sends: list[tuple[Shard, _Slot]] = []
        self.wanted: dict[str, list[Piece]] = {}
        self.local: dict[_Key, list[tuple[Region, Shard]]] = {}
        self.remote: dict[_Key, list[_Slot]] = {}

    def add(self, move: Move, rank: int, held: Sequence[Shard]) -> None:
        """Take in a move that `rank` is an end of."""
        key = (move.name, move.region)
        if move.target == move.source:
            self.local.setdefault(key, []).append((move.box, _holder(held, move)))
        elif move.target == rank:
            self.remote.setdefault(key, []).append(self.arriving.add(move.source, move))
        else:
            self.sends.append((_holder(held, move), self.leaving.add(move.target, move)))


def _holder(held: Sequence[Shard], move: Move) -> Shard:
    for shard in held:
        if shard.piece.region.intersect(move.box) == move.box:
            return shard
    raise SyncError(f"rank {move.source} has no {move.name} {move.box}, as the plan says")


def _by_name(pieces: Iterable[_Named], name: Callable[[_Named], str]) -> dict[str, list[_Named]]:
    found: dict[str, list[_Named]] = {}
    for piece in pieces:
        found.setdefault(name(piece), []).append(piece)
    return found
