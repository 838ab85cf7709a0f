"""Execution of a transfer plan: boxes of weights move from holders to the ranks that want them.

Each round packs the boxes that this rank sends into one flat buffer of bytes, exchanges it with all
ranks in one all_to_all_single (gloo or NCCL, any mix of dtypes), and yields the tensors that are
then complete. Memory use is the buffers of one round and the tensor that is put together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.bridge.islands import RankSlices
from dapo_megatron.bridge.plan import BoxTransfer, TransferPlan, make_plan
from dapo_megatron.cluster.collectives import gather_distinct
from dapo_megatron.cluster.groups import group_or_world
from dapo_megatron.protocols import Exchange, ReceivedTensor
from dapo_megatron.types import Region, Shard, SyncError, TensorSlice, whole

ALIGNMENT_BYTES = 16
"""Alignment of boxes in a buffer: a multiple of the size of any dtype."""

_Key = tuple[str, Region]


class Transfer:
    """Iterable over the tensors that this rank wants; each iteration yields each of them once.

    Collective: all ranks of the plan construct one with their own shards and wanted slices, and
    iterate at the same time, to the end. Weights are read from the shards when each round starts,
    so one Transfer serves every sync. A region in a single box is yielded without a copy. If this
    rank holds the box, the tensor is a view of its weights. Otherwise it is a view of a receive
    buffer that is not reused.
    """

    def __init__(
        self,
        plan: TransferPlan,
        shards: Sequence[Shard],
        wanted: Sequence[TensorSlice],
        rank: int,
        device: torch.device,
        group: Any = None,
    ) -> None:
        """`group` is the process group for tensors on `device`; None for the default group."""
        self._device, self._group = device, group
        held: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            held[shard.tensor_slice.name].append(shard)
        tensor_slices: dict[str, list[TensorSlice]] = defaultdict(list)
        for tensor_slice in wanted:
            tensor_slices[tensor_slice.name].append(tensor_slice)
        self._rounds = []
        island = plan.island_of(rank)
        number = island.index(rank)
        for tensors in plan.rounds:
            round_ = _Round(plan.num_ranks, island, number)
            for tensor in tensors:
                name = tensor.name
                round_.is_exchange |= bool(tensor.routes.traffic[0])
                rank_boxes = tensor.routes.by_rank.get(number, ())
                for box, source in rank_boxes:
                    round_.add(name, box, source, held[name])
                is_here = any(box.target == number for box, _ in rank_boxes)
                # Slices without elements have no boxes. They are yielded when other ranks receive
                # the tensor.
                is_empty = not any(part.nbytes for part in tensor_slices.get(name, ()))
                if name in tensor_slices and (is_here or is_empty):
                    round_.wanted[name] = tensor_slices.pop(name)
            self._rounds.append(round_)
        if tensor_slices:
            raise SyncError(
                f"the plan does not bring {sorted(tensor_slices)[0]}, wanted on rank {rank}"
            )

    @property
    def nbytes_received(self) -> int:
        """Bytes that this rank receives in one pass, including alignment."""
        return sum(sum(round_.arriving.splits) for round_ in self._rounds)

    def __iter__(self) -> Iterator[ReceivedTensor]:
        for round_ in self._rounds:
            yield from self._run(round_)

    def _run(self, round_: _Round) -> Iterator[ReceivedTensor]:
        received = round_.arriving.allocate(self._device)
        if round_.is_exchange:
            sent = round_.leaving.allocate(self._device)
            self._pack(round_, sent)
            splits = round_.arriving.splits, round_.leaving.splits
            group_or_world(self._group).alltoall_base(received, sent, *splits).wait()
            del sent
        for name, tensor_slices in round_.wanted.items():
            complete = [self._complete(part, round_, received) for part in tensor_slices]
            yield name, [(part.region, value) for part, value in zip(tensor_slices, complete)]

    def _pack(self, round_: _Round, buffer: Tensor) -> None:
        """Copy the boxes that this rank sends into `buffer`."""
        last, value = None, buffer
        for shard, packed in round_.sends:
            if shard is not last:  # a shard that several ranks want is read once
                last, value = shard, shard.read()
            box = value[packed.box.within(shard.tensor_slice.region).slices]
            round_.leaving.window(buffer, packed, shard.tensor_slice.dtype).copy_(box)

    def _complete(self, tensor_slice: TensorSlice, round_: _Round, received: Tensor) -> Tensor:
        """Return the tensor of a wanted slice, shaped as its region."""
        key = (tensor_slice.name, tensor_slice.region)
        parts = [
            (box, shard.read()[box.within(shard.tensor_slice.region).slices])
            for box, shard in round_.local[key]
        ] + [
            (packed.box, round_.arriving.window(received, packed, tensor_slice.dtype))
            for packed in round_.remote[key]
        ]
        if len(parts) == 1:
            return parts[0][1]
        shape, dtype = tensor_slice.region.shape, tensor_slice.dtype
        complete = torch.empty(shape, dtype=dtype, device=self._device)
        for box, value in parts:
            complete[box.within(tensor_slice.region).slices] = value
        return complete


def gather_slices(exchange: Exchange, tensor_slices: Sequence[TensorSlice]) -> RankSlices:
    """Return the slices of all ranks. Collective."""
    return RankSlices(*gather_distinct(exchange, list(tensor_slices), list[TensorSlice]))


def gather_whole(
    shards: Sequence[Shard], exchange: Exchange, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor, complete, on all ranks, from all ranks' shards.

    Collective: all ranks iterate to the end. Raises SyncError naming a tensor if no rank
    holds some part.
    """
    held = gather_slices(exchange, [shard.tensor_slice for shard in shards])
    parts = {part.name: part for tensor_slices in held.lists for part in tensor_slices}
    wanted = [replace(part, region=whole(part.global_shape)) for part in parts.values()]
    plan = make_plan(held, RankSlices([wanted], [0] * len(held)))
    for name, regions in Transfer(plan, shards, wanted, exchange.rank, device):
        for _, tensor in regions:
            yield name, tensor


@dataclass(frozen=True, slots=True)
class _PackedBox:
    """Position of a box in a flat buffer: `offset` bytes into the part of rank `peer`."""

    peer: int
    offset: int
    box: Region


class _BufferLayout:
    """Layout of a flat buffer of bytes with a part for each rank, in the order boxes are added.

    `splits[rank]` is the number of bytes in the part of `rank`.
    """

    def __init__(self, num_ranks: int) -> None:
        self.splits = [0] * num_ranks

    def add(self, peer: int, transfer: BoxTransfer) -> _PackedBox:
        """Append a box to the part of rank `peer`."""
        packed = _PackedBox(peer, self.splits[peer], transfer.box)
        self.splits[peer] += -(-transfer.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return packed

    def allocate(self, device: torch.device) -> Tensor:
        """Return an uninitialized uint8 buffer of this layout."""
        return torch.empty(sum(self.splits), dtype=torch.uint8, device=device)

    def window(self, buffer: Tensor, packed: _PackedBox, dtype: torch.dtype) -> Tensor:
        """Return a view of the box in `buffer`, in its shape and dtype."""
        start = sum(self.splits[: packed.peer]) + packed.offset
        stop = start + packed.box.numel * dtype.itemsize
        return buffer[start:stop].view(dtype).view(packed.box.shape)


class _Round:
    """One rank's part in a round. Sender and receiver add boxes in the same order, the plan's.

    The plan numbers ranks by their position in `island`, and this rank is `number`.
    """

    def __init__(self, num_ranks: int, island: Sequence[int], number: int) -> None:
        self.leaving = _BufferLayout(num_ranks)
        self.arriving = _BufferLayout(num_ranks)
        self.is_exchange = False  # whether any rank moves anything
        self.sends: list[tuple[Shard, _PackedBox]] = []
        self.wanted: dict[str, list[TensorSlice]] = {}
        self.local: dict[_Key, list[tuple[Region, Shard]]] = defaultdict(list)
        self.remote: dict[_Key, list[_PackedBox]] = defaultdict(list)
        self._island, self._number = island, number

    def add(self, name: str, transfer: BoxTransfer, source: int, held: Sequence[Shard]) -> None:
        """Add a box of the tensor `name` that this rank sends, receives or keeps."""
        key = (name, transfer.region)
        if transfer.target == source:
            self.local[key].append((transfer.box, _holder(name, held, transfer.box)))
        elif transfer.target == self._number:
            self.remote[key].append(self.arriving.add(self._island[source], transfer))
        else:
            shard = _holder(name, held, transfer.box)
            self.sends.append((shard, self.leaving.add(self._island[transfer.target], transfer)))


def _holder(name: str, held: Sequence[Shard], box: Region) -> Shard:
    """Return the shard that contains `box`. Raises SyncError if none does."""
    for shard in held:
        if shard.tensor_slice.region.intersect(box) == box:
            return shard
    raise SyncError(f"{name}{box}: this rank does not hold it, although the plan says so")
