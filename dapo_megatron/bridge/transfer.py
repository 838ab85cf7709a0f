"""Execution of a transfer plan: boxes of weights from the ranks that hold them to those that want
them.

Each round packs what this rank sends into one flat buffer of bytes, exchanges it with all ranks in
one all_to_all_single (gloo or NCCL, any mix of dtypes), and yields the tensors that are then
complete. The buffers of one round are all the memory it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.bridge.plan import BoxTransfer, TransferPlan, make_plan
from dapo_megatron.protocols import Arrival, Exchange
from dapo_megatron.types import Piece, Region, Shard, SyncError, whole

ALIGNMENT_BYTES = 16
"""Alignment of boxes in a buffer: a multiple of the size of any dtype."""

_Key = tuple[str, Region]
_Named = TypeVar("_Named", Piece, Shard)


class Transfer:
    """Yields every tensor wanted here, once and complete, each time it is iterated over.

    Collective: all ranks of the plan make one with their own shards and pieces, and iterate at the
    same time, to the end. Weights are read from the shards as each round begins, so one Transfer
    serves every sync. What the rank holds itself is a view of its own weights, not a copy. What
    arrives in one box is a view of a buffer that is not used again.
    """

    def __init__(
        self,
        plan: TransferPlan,
        shards: Sequence[Shard],
        wanted: Sequence[Piece],
        rank: int,
        device: torch.device,
    ) -> None:
        self._device = device
        held = _by_name(shards, lambda shard: shard.piece.name)
        pieces = _by_name(wanted, lambda piece: piece.name)
        self._rounds = []
        for tensors in plan.rounds:
            step = _Round(plan.num_ranks, rank)
            for tensor in tensors:
                name = tensor.name
                step.is_exchange |= bool(tensor.traffic()[0])
                mine = list(tensor.with_sources(rank))
                for box, source in mine:
                    step.add(name, box, source, held.get(name, []))
                is_here = any(box.target == rank for box, _ in mine)
                # Pieces without elements have no boxes: they come with the others' part.
                if name in pieces and (is_here or not any(p.nbytes for p in pieces[name])):
                    step.wanted[name] = pieces.pop(name)
            self._rounds.append(step)
        if pieces:
            raise SyncError(f"the plan does not bring {sorted(pieces)[0]}, wanted on rank {rank}")

    @property
    def nbytes_received(self) -> int:
        """Bytes that this rank receives in one pass, including alignment."""
        return sum(sum(step.arriving.splits) for step in self._rounds)

    def __iter__(self) -> Iterator[Arrival]:
        for step in self._rounds:
            yield from self._run(step)

    def _run(self, step: _Round) -> Iterator[Arrival]:
        received = step.arriving.allocate(self._device)
        if step.is_exchange:
            sent = step.leaving.allocate(self._device)
            self._pack(step, sent)
            dist.all_to_all_single(received, sent, step.arriving.splits, step.leaving.splits)
            del sent
        for name, pieces in step.wanted.items():
            yield name, [(p.region, self._complete(p, step, received)) for p in pieces]

    def _pack(self, step: _Round, buffer: Tensor) -> None:
        last, value = None, buffer
        for shard, packed in step.sends:
            if shard is not last:  # a shard that several ranks want is read once
                last, value = shard, shard.read()
            box = value[packed.box.within(shard.piece.region).slices]
            step.leaving.window(buffer, packed, shard.piece.dtype).copy_(box)

    def _complete(self, piece: Piece, step: _Round, received: Tensor) -> Tensor:
        key = (piece.name, piece.region)
        parts = [
            (box, shard.read()[box.within(shard.piece.region).slices])
            for box, shard in step.local.get(key, [])
        ] + [
            (packed.box, step.arriving.window(received, packed, piece.dtype))
            for packed in step.remote.get(key, [])
        ]
        if len(parts) == 1:
            return parts[0][1]
        complete = torch.empty(piece.region.shape, dtype=piece.dtype, device=self._device)
        for box, value in parts:
            complete[box.within(piece.region).slices] = value
        return complete


def gather_whole(
    shards: Sequence[Shard],
    exchange: Exchange,
    device: torch.device,
    *,
    on: Sequence[int] | None = None,
    deal: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor, complete, on the ranks `on` (None: all ranks), from all ranks' shards.

    Collective: all ranks iterate to the end, and ranks not in `on` get nothing. With `deal`, each
    tensor goes to only one rank of `on`, so that they share the bytes evenly (a parallel export).
    Raises SyncError naming a tensor of which a part is missing.
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
class _PackedBox:
    """A box in a buffer, `offset` bytes into the part of a peer."""

    peer: int
    offset: int
    box: Region


class _BufferLayout:
    """A flat buffer of bytes with a part for each rank, laid out as boxes are added."""

    def __init__(self, num_ranks: int) -> None:
        self.splits = [0] * num_ranks

    def add(self, peer: int, transfer: BoxTransfer) -> _PackedBox:
        packed = _PackedBox(peer, self.splits[peer], transfer.box)
        self.splits[peer] += -(-transfer.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return packed

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(sum(self.splits), dtype=torch.uint8, device=device)

    def window(self, buffer: Tensor, packed: _PackedBox, dtype: torch.dtype) -> Tensor:
        """Return the box in the buffer, as a tensor of its shape."""
        start = sum(self.splits[: packed.peer]) + packed.offset
        stop = start + packed.box.numel * dtype.itemsize
        return buffer[start:stop].view(dtype).view(packed.box.shape)


class _Round:
    """One rank's part in a round. Sender and receiver lay out buffers in the plan's order."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.leaving = _BufferLayout(num_ranks)
        self.arriving = _BufferLayout(num_ranks)
        self.is_exchange = False  # whether any rank moves anything
        self.sends: list[tuple[Shard, _PackedBox]] = []
        self.wanted: dict[str, list[Piece]] = {}
        self.local: dict[_Key, list[tuple[Region, Shard]]] = {}
        self.remote: dict[_Key, list[_PackedBox]] = {}
        self._rank = rank

    def add(self, name: str, transfer: BoxTransfer, source: int, held: Sequence[Shard]) -> None:
        """Add a box of the tensor `name` that this rank sends, receives or has."""
        key = (name, transfer.region)
        if transfer.target == source:
            self.local.setdefault(key, []).append((transfer.box, _holder(name, held, transfer.box)))
        elif transfer.target == self._rank:
            self.remote.setdefault(key, []).append(self.arriving.add(source, transfer))
        else:
            shard = _holder(name, held, transfer.box)
            self.sends.append((shard, self.leaving.add(transfer.target, transfer)))


def _holder(name: str, held: Sequence[Shard], box: Region) -> Shard:
    for shard in held:
        if shard.piece.region.intersect(box) == box:
            return shard
    raise SyncError(f"{name}{box}: this rank does not hold it, although the plan says so")


def _by_name(pieces: Iterable[_Named], name: Callable[[_Named], str]) -> dict[str, list[_Named]]:
    by_name: dict[str, list[_Named]] = {}
    for piece in pieces:
        by_name.setdefault(name(piece), []).append(piece)
    return by_name
