"""The transfer plan: which rank sends which box of which tensor to which rank.

A plan is made once, from the slices that all ranks hold and want, and used at every sync. These
lists are the same on every rank, so every rank makes the same plan. Each wanted region is cut into
boxes, and each box has one source. That is the target itself if it holds the box, else a holder on
the target's node, else any holder. If several qualify, the one with the fewest bytes to send so far
is nearest. Boxes travel in rounds of bounded bytes. Every rank takes part in every round, so there
is no deadlock.

The cost of planning does not grow with the cluster. Ranks at the same place of the layout share
their lists of slices. Nodes form equal islands that hold the whole model (islands.py), and one
island's plan serves all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, groupby
from operator import itemgetter

import torch

from dapo_megatron.bridge.islands import RankSlices, make_islands
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


@dataclass(frozen=True)
class Routes:
    """Boxes for all or some of the ranks that want a tensor, and the source of each. Many tensors
    share one object."""

    boxes: tuple[BoxTransfer, ...]
    sources: tuple[int, ...]

    def with_sources(self) -> Iterator[tuple[BoxTransfer, int]]:
        """Yield (box, source) in the plan's order."""
        return zip(self.boxes, self.sources)

    @cached_property
    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Bytes that each rank receives from others, and sends to others."""
        received: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        for box, source in self.with_sources():
            if source != box.target:
                received[box.target] += box.nbytes
                sent[source] += box.nbytes
        return received, sent

    @cached_property
    def by_rank(self) -> Mapping[int, Sequence[tuple[BoxTransfer, int]]]:
        """The (box, source) that each rank sends, receives or keeps, in the plan's order."""
        by_rank: dict[int, list[tuple[BoxTransfer, int]]] = {}
        for box, source in self.with_sources():
            for rank in {source, box.target}:
                by_rank.setdefault(rank, []).append((box, source))
        return by_rank


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """The routes of one tensor in one round."""

    name: str
    routes: Routes


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The rounds of one sync. They are the same in every island, with ranks numbered within it."""

    rounds: tuple[tuple[TensorTransfer, ...], ...]
    islands: tuple[tuple[int, ...], ...]
    """The ranks of each island. Weights move only within an island."""
    missing: tuple[int, ...]
    """Bytes that each rank wants and does not hold. No plan can send it fewer."""
    sent: tuple[int, ...]
    """Bytes that each rank sends."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return len(self.missing)

    def island_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the island of `rank`."""
        return next(island for island in self.islands if rank in island)


def make_plan(
    held: RankSlices | Sequence[Sequence[TensorSlice]],
    wanted: RankSlices | Sequence[Sequence[TensorSlice]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    ranks_per_node: int = 8,
) -> TransferPlan:
    """Return the plan that sends each rank the slices in `wanted[rank]`, from those in `held`.

    In each round a rank receives at most `bucket_bytes` and sends at most SENT_BUCKETS times that.
    The slices of one tensor that one rank wants arrive in one round, even if they are larger. They
    arrive on all ranks in the same round, unless a rank would have to send too much. A node is
    `ranks_per_node` consecutive ranks. Tensors that no rank wants are left out.

    Raises SyncError naming tensor and rank for an element that no rank holds or that a rank wants
    twice, and for ranks that disagree on shape or dtype.
    """
    if len(held) != len(wanted):
        raise ValueError(f"{len(held)} ranks hold slices, {len(wanted)} want some")
    held, wanted = RankSlices.of(held), RankSlices.of(wanted)
    islands = make_islands(held, wanted, ranks_per_node)
    island = _Island(islands[0], held.select(islands[0]), wanted.select(islands[0]), ranks_per_node)
    tensors = _index(island)
    shared_boxes: dict[object, tuple[tuple[BoxTransfer, ...], int]] = {}
    for tensor in tensors:
        key = (tensor.shape, tensor.dtype, tuple(tensor.held), tuple(tensor.wanted))
        if key not in shared_boxes:
            boxes = _boxes(tensor, island)
            moved = (box.nbytes for box in boxes if box.holders != (box.target,))
            shared_boxes[key] = boxes, sum(moved)
        tensor.boxes, tensor.moved = shared_boxes[key]
    rounds, missing, sent = _fill(_in_order(tensors), len(island.ranks), bucket_bytes)
    return TransferPlan(
        rounds, islands, _of_all_ranks(missing, islands), _of_all_ranks(sent, islands)
    )


def _of_all_ranks(values: Sequence[int], islands: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return one value per rank, from one per rank of an island."""
    by_rank = {rank: value for island in islands for rank, value in zip(island, values)}
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


@dataclass(frozen=True, slots=True)
class _Island:
    """The ranks of an island, and what each of them holds and wants. Within an island, ranks are
    numbered by their position in `ranks`."""

    ranks: tuple[int, ...]
    held: RankSlices
    wanted: RankSlices
    ranks_per_node: int

    def distance(self, target: int, source: int) -> int:
        """Return 0 for the target itself, 1 for a rank of its node, 2 for one of another node."""
        is_near = source // self.ranks_per_node == target // self.ranks_per_node
        return 0 if source == target else 1 if is_near else 2


@dataclass(slots=True)
class _Tensor:
    """A tensor: its shape and dtype on rank `first`, and the (list, region) held and wanted. A list
    is an index into `RankSlices.lists`.

    `stage` numbers the set of ranks that hold the tensor's layer: a pipeline stage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    held: list[tuple[int, Region]] = field(default_factory=list)
    wanted: list[tuple[int, Region]] = field(default_factory=list)
    boxes: tuple[BoxTransfer, ...] = ()
    moved: int = 0
    """Bytes that move between ranks."""
    stage: int = 0


def _index(island: _Island) -> list[_Tensor]:
    """Return the wanted tensors, in the order in which ranks list the slices they hold."""
    tensors: dict[str, _Tensor] = {}
    for number, tensor_slices in enumerate(island.held.lists):
        rank = island.ranks[island.held.list_of_rank.index(number)]
        for tensor_slice in tensor_slices:
            _entry(tensors, tensor_slice, rank).held.append((number, tensor_slice.region))
    for number, tensor_slices in enumerate(island.wanted.lists):
        rank = island.ranks[island.wanted.list_of_rank.index(number)]
        for tensor_slice in tensor_slices:
            tensor = _entry(tensors, tensor_slice, rank)
            if not tensor.held:
                raise SyncError(f"rank {rank} wants {tensor_slice.name}, which no rank holds")
            tensor.wanted.append((number, tensor_slice.region))
    return [tensor for tensor in tensors.values() if tensor.wanted]


def _entry(tensors: dict[str, _Tensor], tensor_slice: TensorSlice, rank: int) -> _Tensor:
    """Return the entry of a tensor slice's tensor. Raises SyncError for another shape or dtype."""
    name, shape, dtype = tensor_slice.name, tensor_slice.global_shape, tensor_slice.dtype
    if name not in tensors:
        tensors[name] = _Tensor(name, shape, dtype, rank)
    tensor = tensors[name]
    if shape != tensor.shape or dtype != tensor.dtype:
        raise SyncError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on rank {tensor.first}, but "
            f"{list(shape)} {dtype} on rank {rank}"
        )
    return tensor


def _by_list(entries: Sequence[tuple[int, Region]]) -> dict[int, list[Region]]:
    """Return the regions of each list, from (list, region)."""
    regions: dict[int, list[Region]] = {}
    for number, region in entries:
        regions.setdefault(number, []).append(region)
    return regions


def _by_rank(
    entries: Sequence[tuple[int, Region]], tensor_slices: RankSlices
) -> Iterator[tuple[int, Region]]:
    """Yield (rank, region) for all ranks that have the (list, region) of `entries`."""
    regions = _by_list(entries)
    for rank, number in enumerate(tensor_slices.list_of_rank):
        for region in regions.get(number, ()):
            yield rank, region


def _boxes(tensor: _Tensor, island: _Island) -> tuple[BoxTransfer, ...]:
    """Cut every wanted region into boxes, each of which one rank can send."""
    holders: dict[Region, list[int]] = {}
    for rank, region in _by_rank(tensor.held, island.held):
        holders.setdefault(region, []).append(rank)
    _check_once(tensor, island)
    transfers = []
    for target, region in _by_rank(tensor.wanted, island.wanted):
        distance = partial(island.distance, target)
        nearest_first = sorted(holders, key=lambda held: min(map(distance, holders[held])))
        rest = [region]
        for source in nearest_first:
            boxes = [box for part in rest if (box := part.intersect(source))]
            rest = [outside for part in rest for outside in _without(part, source)]
            for box in boxes:
                whole = (ranks for held, ranks in holders.items() if held.intersect(box) == box)
                candidates = set(chain.from_iterable(whole))
                shortest = min(map(distance, candidates))
                nearest = tuple(sorted(rank for rank in candidates if distance(rank) == shortest))
                nbytes = box.numel * tensor.dtype.itemsize
                transfers.append(BoxTransfer(target, region, box, nbytes, nearest))
        if rest and region.numel:
            raise SyncError(
                f"rank {island.ranks[target]} wants {rest[0]} of {tensor.name}, which no rank holds"
            )
    return tuple(transfers)


def _check_once(tensor: _Tensor, island: _Island) -> None:
    """Raise SyncError if a rank wants an element twice: one copy would overwrite the other."""
    for number, regions in _by_list(tensor.wanted).items():
        if pair := overlap(regions):
            both = regions[pair[0]].intersect(regions[pair[1]])
            rank = island.ranks[island.wanted.list_of_rank.index(number)]
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
    names = [(_LAYER.match(tensor.name) or [tensor.name])[0] for tensor in tensors]
    for layer in _groups(tensors, names):
        lists = [tuple(number for number, _ in tensor.held) for tensor in layer]
        stages.setdefault(frozenset(chain(*lists)), []).extend(_interleave(_groups(layer, lists)))
    for number, stage in enumerate(stages.values()):
        for tensor in stage:
            tensor.stage = number
    return _interleave(list(stages.values()))


def _groups(tensors: Iterable[_Tensor], keys: Iterable[Hashable]) -> list[list[_Tensor]]:
    groups: dict[Hashable, list[_Tensor]] = {}
    for tensor, key in zip(tensors, keys, strict=True):
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _interleave(streams: Sequence[Sequence[_Tensor]]) -> list[_Tensor]:
    """Interleave streams so that all have sent about the same share of their bytes."""
    progress = []
    for stream in streams:
        total, before = sum(tensor.moved for tensor in stream), 0
        for tensor in stream:
            progress.append((before / max(total, 1), tensor))
            before += tensor.moved
    return [tensor for _, tensor in sorted(progress, key=itemgetter(0))]


def _fill(
    tensors: list[_Tensor], num_ranks: int, bucket_bytes: int
) -> tuple[tuple[tuple[TensorTransfer, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """Choose the source of each box and cut the ordered tensors into rounds. Returns the rounds,
    and the bytes that each rank is missing and sends."""
    rounds: list[list[tuple[int, TensorTransfer]]] = [[]]
    missing, sent = [0] * num_ranks, [0] * num_ranks  # bytes in all rounds
    arriving: Counter[int] = Counter()  # bytes in this round
    leaving: Counter[int] = Counter()
    routing = _Routing(sent, SENT_BUCKETS * bucket_bytes)
    for tensor in tensors:
        for routes in routing.choose(tensor.boxes):
            more_in, more_out = routes.traffic
            for rank, nbytes in more_in.items():
                missing[rank] += nbytes
            if _over(arriving, more_in, bucket_bytes) or _over(
                leaving, more_out, SENT_BUCKETS * bucket_bytes
            ):
                rounds.append([])
                arriving, leaving = Counter(), Counter()
            arriving.update(more_in)
            leaving.update(more_out)
            rounds[-1].append((tensor.stage, TensorTransfer(tensor.name, routes)))
    # Within a round, tensors of one stage, and so of one layer, follow each other.
    by_stage = (sorted(entries, key=itemgetter(0)) for entries in rounds if entries)
    transfers = tuple(tuple(transfer for _, transfer in entries) for entries in by_stage)
    return transfers, tuple(missing), tuple(sent)


class _Routing:
    """Chooses the source of each box: the nearest holder with the fewest bytes to send so far.

    Thousands of tensors (the experts) have the same boxes, and the bytes that their holders send
    differ in the same few ways. Each choice is made once. `sent` is updated.
    """

    def __init__(self, sent: list[int], limit: int) -> None:
        self._sent, self._limit = sent, limit
        self._holders: dict[int, list[int]] = {}
        self._choices: dict[tuple[int, ...], tuple[Routes, list[Routes]]] = {}

    def choose(self, boxes: tuple[BoxTransfer, ...]) -> list[Routes]:
        """Return the routes of a tensor, in parts of which no rank sends more than the limit."""
        sent = self._sent
        if id(boxes) not in self._holders:
            self._holders[id(boxes)] = sorted({rank for box in boxes for rank in box.holders})
        holders = self._holders[id(boxes)]
        least = min([sent[rank] for rank in holders], default=0)
        state = (id(boxes), *[sent[rank] - least for rank in holders])
        if state not in self._choices:
            added = dict.fromkeys(holders, 0)
            sources = []
            for box in boxes:
                source = min(box.holders, key=lambda rank: sent[rank] + added[rank])
                sources.append(source)
                if source != box.target:
                    added[source] += box.nbytes
            routes = Routes(boxes, tuple(sources))
            self._choices[state] = routes, _split(routes, self._limit)
        routes, parts = self._choices[state]
        for rank, nbytes in routes.traffic[1].items():
            sent[rank] += nbytes
        return parts


def _split(routes: Routes, limit: int) -> list[Routes]:
    """Cut routes between targets, so that no rank sends more than `limit` bytes per part.

    A part with only one target may be larger.
    """
    if max(routes.traffic[1].values(), default=0) <= limit:
        return [routes]
    parts: list[tuple[list[BoxTransfer], list[int]]] = []
    leaving: Counter[int] = Counter()
    targets = groupby(routes.with_sources(), key=lambda pair: pair[0].target)
    for _, pairs in targets:
        boxes, sources = map(list, zip(*pairs))
        more = Routes(tuple(boxes), tuple(sources)).traffic[1]
        if not parts or _over(leaving, more, limit):
            parts.append(([], []))
            leaving = Counter()
        parts[-1][0].extend(boxes)
        parts[-1][1].extend(sources)
        leaving.update(more)
    return [Routes(tuple(boxes), tuple(sources)) for boxes, sources in parts]


def _over(totals: Mapping[int, int], more: Mapping[int, int], limit: int) -> bool:
    """Return whether `more` takes a rank above `limit`. A rank at 0 may take any amount."""
    return any(
        (before := totals.get(rank, 0)) and before + nbytes > limit for rank, nbytes in more.items()
    )
