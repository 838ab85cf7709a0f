"""Who sends which box of which tensor to whom, from what every rank holds and wants.

A plan is made once from the lists of all ranks (the same on every rank, so every rank makes the
same plan) and used at every sync. Every wanted piece is tiled by boxes, each from one source: the
rank itself where it holds it, so that nothing moves; else a rank that does, on the same node if
there is one, of these the one with the least to send so far. Boxes travel in rounds of bounded
bytes that every rank takes part in, so no rank can wait in a circle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch

from dapo_megatron.types import Piece, Region, SyncError

BUCKET_BYTES = 256 * 2**20
SENT_BUCKETS = 2
"""A rank sends at most this many buckets in a round: replicas ask the same rank for more than each
of them receives."""


class Move(NamedTuple):
    """A box of a wanted region on its way from `source` to `target`; it stays if they are equal."""

    name: str
    dtype: torch.dtype
    region: Region
    box: Region
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a wanted region, and the ranks it may come from: the target alone if it holds it.
    Tensors alike in shape, holders and wishes share their tiles."""

    target: int
    region: Region
    box: Region
    nbytes: int
    holders: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether nothing has to move."""
        return self.holders == (self.target,)


@dataclass(frozen=True, slots=True)
class Route:
    """How one tensor gets to those who want it, all of them or some: the source of each tile."""

    name: str
    dtype: torch.dtype
    tiles: tuple[Tile, ...]
    sources: tuple[int, ...]

    def traffic(self) -> tuple[Counter[int], Counter[int]]:
        """Bytes that each rank receives from others, and sends to others."""
        received: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        for tile, source in zip(self.tiles, self.sources):
            if source != tile.target:
                received[tile.target] += tile.nbytes
                sent[source] += tile.nbytes
        return received, sent

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """Tiles and sources in the plan's order; with `rank`, only what it sends or receives."""
        for tile, source in zip(self.tiles, self.sources):
            if rank is None or rank in (source, tile.target):
                yield Move(self.name, self.dtype, tile.region, tile.box, source, tile.target)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of tensors, and what each rank receives, sends and cannot do without (bytes)."""

    num_ranks: int
    rounds: tuple[tuple[Route, ...], ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def num_rounds(self) -> int:
        """Exchanges of one sync, those without bytes included."""
        return len(self.rounds)

    @property
    def num_tensors(self) -> int:
        """Tensors that some rank wants."""
        return len({route.name for one in self.rounds for route in one})

    def bytes_received(self, rank: int) -> int:
        """Bytes that `rank` gets from others in one sync."""
        return self.received[rank]

    def bytes_sent(self, rank: int) -> int:
        """Bytes that `rank` sends to others in one sync."""
        return self.sent[rank]

    def lower_bound(self, rank: int) -> int:
        """Bytes that `rank` wants and does not hold: no plan moves fewer to it."""
        return self.missing[rank]


def make_plan(
    held: Sequence[Sequence[Piece]],
    wanted: Sequence[Sequence[Piece]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    ranks_per_node: int = 8,
) -> Plan:
    """The plan that brings every rank what it wants; `held[rank]`, `wanted[rank]`.

    In each round a rank receives at most `bucket_bytes` and sends at most SENT_BUCKETS times that,
    or what one rank wants of one tensor if it is larger: that arrives in one round, and on all
    ranks in the same one unless a rank would have to send too much. Each `ranks_per_node` ranks in
    a row are a node. Tensors that nobody wants are left out.

    Raises SyncError naming tensor and rank: an element that nobody holds, or that a rank wants
    twice; ranks that disagree on shape or dtype.
    """
    tensors = _index(held, wanted)
    alike: dict[object, tuple[Tile, ...]] = {}
    for tensor in tensors:
        key = (tensor.shape, tensor.dtype, tuple(tensor.held), tuple(tensor.wanted))
        if key not in alike:
            alike[key] = _tiles(tensor, ranks_per_node)
        tensor.tiles = alike[key]
    return _fill(_in_order(tensors), len(held), bucket_bytes)


@dataclass(slots=True)
class _Tensor:
    """A tensor, its shape and dtype as `first` has them, and the boxes that ranks hold and want."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    held: list[tuple[int, Region]] = field(default_factory=list)
    wanted: list[tuple[int, Region]] = field(default_factory=list)
    tiles: tuple[Tile, ...] = ()
    stage: int = 0

    @property
    def moved(self) -> int:
        return sum(tile.nbytes for tile in self.tiles if not tile.is_local)


def _index(held: Sequence[Sequence[Piece]], wanted: Sequence[Sequence[Piece]]) -> list[_Tensor]:
    """The wanted tensors, in the order in which ranks list what they hold."""
    if len(held) != len(wanted):
        raise ValueError(f"{len(held)} ranks hold pieces, {len(wanted)} want some")
    tensors: dict[str, _Tensor] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            _entry(tensors, piece, rank).held.append((rank, piece.region))
    for rank, pieces in enumerate(wanted):
        for piece in pieces:
            tensor = _entry(tensors, piece, rank)
            if not tensor.held:
                raise SyncError(f"rank {rank} wants {piece.name}, which no rank holds")
            tensor.wanted.append((rank, piece.region))
    return [tensor for tensor in tensors.values() if tensor.wanted]


def _entry(tensors: dict[str, _Tensor], piece: Piece, rank: int) -> _Tensor:
    found = tensors.get(piece.name)
    if found is None:
        found = _Tensor(piece.name, piece.global_shape, piece.dtype, rank)
        tensors[piece.name] = found
    if piece.global_shape != found.shape or piece.dtype != found.dtype:
        raise SyncError(
            f"{piece.name} is {list(found.shape)} {found.dtype} on rank {found.first}, but "
            f"{list(piece.global_shape)} {piece.dtype} on rank {rank}"
        )
    return found


def _tiles(tensor: _Tensor, ranks_per_node: int) -> tuple[Tile, ...]:
    """Every wanted region cut into boxes that one rank can send."""
    holders: dict[Region, list[int]] = {}
    for rank, region in tensor.held:
        holders.setdefault(region, []).append(rank)
    _check_once(tensor)
    tiles = []
    for target, region in tensor.wanted:
        node = target // ranks_per_node

        def distance(source: int, target: int = target, node: int = node) -> int:
            return 0 if source == target else 1 if source // ranks_per_node == node else 2

        nearest_first = sorted(holders, key=lambda one: min(map(distance, holders[one])))
        rest = [region]
        for source in nearest_first:
            boxes = [box for part in rest if (box := part.intersect(source))]
            rest = [left for part in rest for left in _without(part, source)]
            for box in boxes:
                able = {
                    rank for one in holders if one.intersect(box) == box for rank in holders[one]
                }
                near = min(map(distance, able))
                chosen = tuple(sorted(rank for rank in able if distance(rank) == near))
                nbytes = box.numel * tensor.dtype.itemsize
                tiles.append(Tile(target, region, box, nbytes, chosen))
        if rest and region.numel:
            raise SyncError(
                f"rank {target} wants {_text(rest[0])} of {tensor.name}, which no rank holds"
            )
    return tuple(tiles)


def _check_once(tensor: _Tensor) -> None:
    """No rank may want an element twice: the second would be written over the first."""
    regions: dict[int, list[Region]] = {}
    for rank, region in tensor.wanted:
        for other in regions.setdefault(rank, []):
            if both := region.intersect(other):
                raise SyncError(f"rank {rank} wants {_text(both)} of {tensor.name} twice")
        regions[rank].append(region)


def _without(box: Region, hole: Region) -> list[Region]:
    """Boxes that tile what is left of `box` without `hole`."""
    inside = box.intersect(hole)
    if inside is None:
        return [box]
    left = []
    start, shape = list(box.start), list(box.shape)
    for dim, (first, size) in enumerate(zip(inside.start, inside.shape)):
        last, stop = first + size, start[dim] + shape[dim]
        for begin, end in ((start[dim], first), (last, stop)):
            if begin < end:
                left.append(
                    Region(
                        (*start[:dim], begin, *start[dim + 1 :]),
                        (*shape[:dim], end - begin, *shape[dim + 1 :]),
                    )
                )
        start[dim], shape[dim] = first, size
    return left


def _text(region: Region) -> str:
    return str([f"{s.start}:{s.stop}" for s in region.slices]).replace("'", "")


_LAYER = re.compile(r".*?\blayers\.\d+\.")


def _in_order(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """Layer by layer within a pipeline stage (layers held by the same ranks), and the stages side
    by side, so that all of them send at all times; within a layer the same for expert ranks."""
    stages: dict[frozenset[int], list[_Tensor]] = {}
    for layer in _grouped(tensors, lambda tensor: _layer(tensor.name)):
        ranks = frozenset(rank for tensor in layer for rank, _ in tensor.held)
        streams = _grouped(layer, lambda tensor: tuple(rank for rank, _ in tensor.held))
        stages.setdefault(ranks, []).extend(_side_by_side(streams))
    for number, stage in enumerate(stages.values()):
        for tensor in stage:
            tensor.stage = number
    return _side_by_side(list(stages.values()))


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else name


def _grouped(tensors: Iterable[_Tensor], key: Callable[[_Tensor], Hashable]) -> list[list[_Tensor]]:
    groups: dict[Hashable, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


def _side_by_side(streams: Sequence[Sequence[_Tensor]]) -> list[_Tensor]:
    """One order of all tensors, in which each stream is always as far through its bytes as the
    others."""
    progress = []
    for stream in streams:
        total, before = sum(tensor.moved for tensor in stream), 0
        for tensor in stream:
            progress.append((before / max(total, 1), tensor))
            before += tensor.moved
    return [tensor for _, tensor in sorted(progress, key=lambda one: one[0])]


def _fill(tensors: list[_Tensor], num_ranks: int, bucket_bytes: int) -> Plan:
    """Choose sources and cut the order of tensors into rounds."""
    rounds: list[list[tuple[int, Route]]] = [[]]
    received, sent = [0] * num_ranks, [0] * num_ranks  # in all rounds
    arriving: Counter[int] = Counter()  # in this round
    leaving: Counter[int] = Counter()
    for tensor in tensors:
        sources = []
        for tile in tensor.tiles:
            source = min(tile.holders, key=sent.__getitem__)
            sources.append(source)
            if source != tile.target:
                received[tile.target] += tile.nbytes
                sent[source] += tile.nbytes
        whole_route = Route(tensor.name, tensor.dtype, tensor.tiles, tuple(sources))
        for route in _split(whole_route, SENT_BUCKETS * bucket_bytes):
            more_in, more_out = route.traffic()
            if _over(arriving, more_in, bucket_bytes) or _over(
                leaving, more_out, SENT_BUCKETS * bucket_bytes
            ):
                rounds.append([])
                arriving, leaving = Counter(), Counter()
            arriving.update(more_in)
            leaving.update(more_out)
            rounds[-1].append((tensor.stage, route))
    missing = [0] * num_ranks
    for tensor in tensors:
        for rank, region in tensor.wanted:
            missing[rank] += region.numel * tensor.dtype.itemsize
        for tile in tensor.tiles:
            missing[tile.target] -= tile.nbytes if tile.is_local else 0
    return Plan(
        num_ranks,
        # A layer's tensors follow each other where the round lets them.
        tuple(
            tuple(route for _, route in sorted(one, key=lambda r: r[0])) for one in rounds if one
        ),
        tuple(received),
        tuple(sent),
        tuple(missing),
    )


def _split(route: Route, limit: int) -> list[Route]:
    """The route cut between targets, so that no rank sends more than `limit` bytes in a part."""
    if max(route.traffic()[1].values(), default=0) <= limit:
        return [route]
    parts: list[tuple[list[Tile], list[int]]] = []
    leaving: Counter[int] = Counter()
    targets = groupby(zip(route.tiles, route.sources), key=lambda pair: pair[0].target)
    for _, pairs in targets:
        tiles, sources = map(list, zip(*pairs))
        more = Route(route.name, route.dtype, tuple(tiles), tuple(sources)).traffic()[1]
        if not parts or _over(leaving, more, limit):
            parts.append(([], []))
            leaving = Counter()
        parts[-1][0].extend(tiles)
        parts[-1][1].extend(sources)
        leaving.update(more)
    return [Route(route.name, route.dtype, tuple(tiles), tuple(who)) for tiles, who in parts]


def _over(totals: Counter[int], more: Counter[int], limit: int) -> bool:
    """Whether a rank that has something already would have more than `limit`."""
    return any(totals[rank] and totals[rank] + nbytes > limit for rank, nbytes in more.items())
