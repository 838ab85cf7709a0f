"""The transfer plan: which rank sends which box of which tensor to which rank.

A plan is made once, from the slices that all ranks hold and want, and used at every sync. These
lists are the same on every rank, so every rank makes the same plan. Each wanted region is cut into
boxes, and each box has one source. That is the target itself if it holds the box, else a holder on
the target's node, else any holder. If several qualify, the one with the fewest bytes to send so far
is nearest. Boxes travel in rounds of bounded bytes. Every rank takes part in every round, so there
is no deadlock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from dapo_megatron.types import Region, SyncError, TensorSlice, overlap

BUCKET_BYTES = 256 * 2**20
SENT_BUCKETS = 2
"""Maximum number of buckets that a rank sends in a round. It is above 1 because one rank may send
to several replicas, each of which receives up to a bucket."""


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """A box of a wanted region, and the ranks nearest to the target that hold it.

    One of `holders` is the source. If the target holds the box, it is the only one. Tensors with
    the same shape, dtype, holders and targets share their boxes.
    """

    target: int
    region: Region
    box: Region
    nbytes: int
    holders: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether the target holds the box itself."""
        return self.holders == (self.target,)


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """Boxes of one tensor, for all or some of the ranks that want it, and the source of each."""

    name: str
    boxes: tuple[BoxTransfer, ...]
    sources: tuple[int, ...]

    def traffic(self) -> tuple[Counter[int], Counter[int]]:
        """Return the bytes that each rank receives from others, and sends to others."""
        received: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        for box, source in self.with_sources():
            if source != box.target:
                received[box.target] += box.nbytes
                sent[source] += box.nbytes
        return received, sent

    def with_sources(self, rank: int | None = None) -> Iterator[tuple[BoxTransfer, int]]:
        """Yield (box, source) in the plan's order; with `rank`, only those it sends or receives."""
        for box, source in zip(self.boxes, self.sources):
            if rank is None or rank in (source, box.target):
                yield box, source


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The rounds of one sync."""

    rounds: tuple[tuple[TensorTransfer, ...], ...]
    missing: tuple[int, ...]
    """Bytes that each rank wants and does not hold. No plan can send it fewer."""
    sent: tuple[int, ...]
    """Bytes that each rank sends."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return len(self.missing)

    @property
    def num_rounds(self) -> int:
        """Number of rounds, including those in which no bytes move."""
        return len(self.rounds)

    @property
    def num_tensors(self) -> int:
        """Number of tensors that some rank wants."""
        return len({tensor.name for tensors in self.rounds for tensor in tensors})


def make_plan(
    held: Sequence[Sequence[TensorSlice]],
    wanted: Sequence[Sequence[TensorSlice]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    ranks_per_node: int = 8,
) -> TransferPlan:
    """Return the plan that sends each rank the slices in `wanted[rank]`, from those in `held`.

    In each round a rank receives at most `bucket_bytes` and sends at most SENT_BUCKETS times that.
    The slices of one tensor that one rank wants arrive in one round, even if they are larger. They
    arrive on all ranks in the same round, unless a rank would have to send too much. A node is
    `ranks_per_node` consecutive ranks. Tensors that no rank wants are outside out.

    Raises SyncError naming tensor and rank for an element that no rank holds or that a rank wants
    twice, and for ranks that disagree on shape or dtype.
    """
    tensors = _index(held, wanted)
    shared_boxes: dict[object, tuple[BoxTransfer, ...]] = {}
    for tensor in tensors:
        key = (tensor.shape, tensor.dtype, tuple(tensor.held), tuple(tensor.wanted))
        if key not in shared_boxes:
            shared_boxes[key] = _boxes(tensor, ranks_per_node)
        tensor.boxes = shared_boxes[key]
    return _fill(_in_order(tensors), len(held), bucket_bytes)


@dataclass(slots=True)
class _Tensor:
    """A tensor: its shape and dtype on rank `first`, and the (rank, region) held and wanted.

    `stage` numbers the set of ranks that hold the tensor's layer: a pipeline stage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    held: list[tuple[int, Region]] = field(default_factory=list)
    wanted: list[tuple[int, Region]] = field(default_factory=list)
    boxes: tuple[BoxTransfer, ...] = ()
    stage: int = 0

    @property
    def moved(self) -> int:
        """Bytes that move between ranks."""
        return sum(box.nbytes for box in self.boxes if not box.is_local)


def _index(
    held: Sequence[Sequence[TensorSlice]], wanted: Sequence[Sequence[TensorSlice]]
) -> list[_Tensor]:
    """Return the wanted tensors, in the order in which ranks list the slices they hold."""
    if len(held) != len(wanted):
        raise ValueError(f"{len(held)} ranks hold slices, {len(wanted)} want some")
    tensors: dict[str, _Tensor] = {}
    for rank, tensor_slices in enumerate(held):
        for tensor_slice in tensor_slices:
            _entry(tensors, tensor_slice, rank).held.append((rank, tensor_slice.region))
    for rank, tensor_slices in enumerate(wanted):
        for tensor_slice in tensor_slices:
            tensor = _entry(tensors, tensor_slice, rank)
            if not tensor.held:
                raise SyncError(f"rank {rank} wants {tensor_slice.name}, which no rank holds")
            tensor.wanted.append((rank, tensor_slice.region))
    return [tensor for tensor in tensors.values() if tensor.wanted]


def _entry(tensors: dict[str, _Tensor], tensor_slice: TensorSlice, rank: int) -> _Tensor:
    """Return the entry of a tensor slice's tensor. Raises SyncError for another shape or dtype."""
    new = _Tensor(tensor_slice.name, tensor_slice.global_shape, tensor_slice.dtype, rank)
    tensor = tensors.setdefault(tensor_slice.name, new)
    if tensor_slice.global_shape != tensor.shape or tensor_slice.dtype != tensor.dtype:
        raise SyncError(
            f"{tensor_slice.name} is {list(tensor.shape)} {tensor.dtype} on rank {tensor.first}, "
            f"but {list(tensor_slice.global_shape)} {tensor_slice.dtype} on rank {rank}"
        )
    return tensor


def _boxes(tensor: _Tensor, ranks_per_node: int) -> tuple[BoxTransfer, ...]:
    """Cut every wanted region into boxes, each of which one rank can send."""
    holders: dict[Region, list[int]] = {}
    for rank, region in tensor.held:
        holders.setdefault(region, []).append(rank)
    _check_once(tensor)
    transfers = []
    for target, region in tensor.wanted:
        node = target // ranks_per_node

        def distance(source: int, target: int = target, node: int = node) -> int:
            # The target itself, a rank of its node, a rank of another node.
            return 0 if source == target else 1 if source // ranks_per_node == node else 2

        nearest_first = sorted(holders, key=lambda held: min(map(distance, holders[held])))
        rest = [region]
        for source in nearest_first:
            boxes = [box for part in rest if (box := part.intersect(source))]
            rest = [outside for part in rest for outside in _without(part, source)]
            for box in boxes:
                candidates = {
                    rank
                    for held, ranks in holders.items()
                    if held.intersect(box) == box
                    for rank in ranks
                }
                shortest = min(map(distance, candidates))
                nearest = tuple(sorted(rank for rank in candidates if distance(rank) == shortest))
                nbytes = box.numel * tensor.dtype.itemsize
                transfers.append(BoxTransfer(target, region, box, nbytes, nearest))
        if rest and region.numel:
            raise SyncError(f"rank {target} wants {rest[0]} of {tensor.name}, which no rank holds")
    return tuple(transfers)


def _check_once(tensor: _Tensor) -> None:
    """Raise SyncError if a rank wants an element twice: one copy would overwrite the other."""
    wanted: dict[int, list[Region]] = {}
    for rank, region in tensor.wanted:
        wanted.setdefault(rank, []).append(region)
    for rank, regions in wanted.items():
        if pair := overlap(regions):
            both = regions[pair[0]].intersect(regions[pair[1]])
            raise SyncError(f"rank {rank} wants {both} of {tensor.name} twice")


def _without(box: Region, hole: Region) -> list[Region]:
    """Return boxes that tile the part of `box` outside `hole`."""
    inside = box.intersect(hole)
    if inside is None:
        return [box]
    outside = []
    start, shape = list(box.start), list(box.shape)
    for dim, (first, size) in enumerate(zip(inside.start, inside.shape)):
        last, stop = first + size, start[dim] + shape[dim]
        for low, high in ((start[dim], first), (last, stop)):
            if low < high:
                outside.append(
                    Region(
                        (*start[:dim], low, *start[dim + 1 :]),
                        (*shape[:dim], high - low, *shape[dim + 1 :]),
                    )
                )
        start[dim], shape[dim] = first, size
    return outside


_LAYER = re.compile(r".*?\blayers\.\d+\.")


def _in_order(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """Order tensors layer by layer within a pipeline stage (layers held by the same ranks).

    Stages are interleaved, so that all of them send at all times. Within a layer, the tensors of
    different expert ranks are interleaved for the same reason.
    """
    stages: dict[frozenset[int], list[_Tensor]] = {}
    for layer in _groups(tensors, lambda tensor: _layer(tensor.name)):
        ranks = frozenset(rank for tensor in layer for rank, _ in tensor.held)
        streams = _groups(layer, lambda tensor: tuple(rank for rank, _ in tensor.held))
        stages.setdefault(ranks, []).extend(_interleave(streams))
    for number, stage in enumerate(stages.values()):
        for tensor in stage:
            tensor.stage = number
    return _interleave(list(stages.values()))


def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name


def _groups(tensors: Iterable[_Tensor], key: Callable[[_Tensor], Hashable]) -> list[list[_Tensor]]:
    groups: dict[Hashable, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


def _interleave(streams: Sequence[Sequence[_Tensor]]) -> list[_Tensor]:
    """Interleave streams so that all have sent about the same share of their bytes."""
    progress = []
    for stream in streams:
        total, before = sum(tensor.moved for tensor in stream), 0
        for tensor in stream:
            progress.append((before / max(total, 1), tensor))
            before += tensor.moved
    return [tensor for _, tensor in sorted(progress, key=lambda entry: entry[0])]


def _fill(tensors: list[_Tensor], num_ranks: int, bucket_bytes: int) -> TransferPlan:
    """Choose the source of each box and cut the ordered tensors into rounds."""
    rounds: list[list[tuple[int, TensorTransfer]]] = [[]]
    missing, sent = [0] * num_ranks, [0] * num_ranks  # bytes in all rounds
    arriving: Counter[int] = Counter()  # bytes in this round
    leaving: Counter[int] = Counter()
    for tensor in tensors:
        sources = []
        for box in tensor.boxes:
            source = min(box.holders, key=sent.__getitem__)
            sources.append(source)
            if source != box.target:
                missing[box.target] += box.nbytes
                sent[source] += box.nbytes
        complete = TensorTransfer(tensor.name, tensor.boxes, tuple(sources))
        for transfer in _split(complete, SENT_BUCKETS * bucket_bytes):
            more_in, more_out = transfer.traffic()
            if _over(arriving, more_in, bucket_bytes) or _over(
                leaving, more_out, SENT_BUCKETS * bucket_bytes
            ):
                rounds.append([])
                arriving, leaving = Counter(), Counter()
            arriving.update(more_in)
            leaving.update(more_out)
            rounds[-1].append((tensor.stage, transfer))
    return TransferPlan(
        # Within a round, tensors of one stage, and so of one layer, follow each other.
        tuple(
            tuple(transfer for _, transfer in sorted(entries, key=lambda entry: entry[0]))
            for entries in rounds
            if entries
        ),
        tuple(missing),
        tuple(sent),
    )


def _split(tensor: TensorTransfer, limit: int) -> list[TensorTransfer]:
    """Cut a transfer between targets, so that no rank sends more than `limit` bytes per part.

    A part with only one target may be larger.
    """
    if max(tensor.traffic()[1].values(), default=0) <= limit:
        return [tensor]
    parts: list[tuple[list[BoxTransfer], list[int]]] = []
    leaving: Counter[int] = Counter()
    targets = groupby(tensor.with_sources(), key=lambda pair: pair[0].target)
    for _, pairs in targets:
        boxes, sources = map(list, zip(*pairs))
        more = TensorTransfer(tensor.name, tuple(boxes), tuple(sources)).traffic()[1]
        if not parts or _over(leaving, more, limit):
            parts.append(([], []))
            leaving = Counter()
        parts[-1][0].extend(boxes)
        parts[-1][1].extend(sources)
        leaving.update(more)
    return [TensorTransfer(tensor.name, tuple(boxes), tuple(sources)) for boxes, sources in parts]


def _over(totals: Counter[int], more: Counter[int], limit: int) -> bool:
    """Return whether `more` takes a rank above `limit`. A rank at 0 may take any amount."""
    return any(totals[rank] and totals[rank] + nbytes > limit for rank, nbytes in more.items())
