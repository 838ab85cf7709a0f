"""Division of a cluster into islands: equal groups of nodes that exchange weights only among
themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from dapo_megatron.types import TensorSlice

ISLAND_RANKS = 32
"""Minimum number of ranks of an island, unless there are fewer. With more ranks, more can share the
sending. With fewer, planning takes less time."""


@dataclass(frozen=True)
class RankSlices:
    """The slices of each rank. Ranks at the same place of a layout share one of the `lists`."""

    lists: Sequence[Sequence[TensorSlice]]
    list_of_rank: Sequence[int]

    @classmethod
    def of(cls, by_rank: RankSlices | Sequence[Sequence[TensorSlice]]) -> RankSlices:
        """Return the lists `by_rank`, each distinct one once."""
        if isinstance(by_rank, RankSlices):
            return by_rank
        numbers: dict[tuple[TensorSlice, ...], int] = {}
        list_of_rank = [numbers.setdefault(tuple(parts), len(numbers)) for parts in by_rank]
        return cls(list(numbers), list_of_rank)

    def __len__(self) -> int:
        return len(self.list_of_rank)

    def __getitem__(self, rank: int) -> Sequence[TensorSlice]:
        return self.lists[self.list_of_rank[rank]]

    def select(self, ranks: Iterable[int]) -> RankSlices:
        """Return the slices of `ranks` only, renumbered in that order."""
        numbers: dict[int, int] = {}
        list_of_rank = [numbers.setdefault(self.list_of_rank[rank], len(numbers)) for rank in ranks]
        return RankSlices([self.lists[number] for number in numbers], list_of_rank)


@dataclass(frozen=True)
class Wanted:
    """Slices that the workers of the present engines take.

    slices      of each rank's worker: [rank] -> slices. With engines on other GPUs, their workers
                follow the trainer ranks
    replicas    [rank] -> replica of the rank's worker; -1 without one
    """

    slices: RankSlices
    replicas: Sequence[int]

    def of_replica(self, replica: int) -> list[int]:
        """Return the ranks of a replica's workers."""
        return [rank for rank, number in enumerate(self.replicas) if number == replica]


def make_islands(
    held: RankSlices, wanted: RankSlices, ranks_per_node: int
) -> tuple[tuple[int, ...], ...]:
    """Divide the nodes into as many equal islands of at least ISLAND_RANKS ranks as possible.

    Nodes are of one kind if their ranks hold and want the same, in the same order. Every island has
    the same number of nodes of each kind, so it holds whatever the whole cluster holds.
    """
    places = list(zip(held.list_of_rank, wanted.list_of_rank))
    nodes_of_kind: dict[tuple[tuple[int, int], ...], list[range]] = {}
    kinds = []
    for first in range(0, len(places), ranks_per_node):
        node = range(first, min(first + ranks_per_node, len(places)))
        kinds.append(tuple(places[rank] for rank in node))
        nodes_of_kind.setdefault(kinds[-1], []).append(node)
    most = gcd(*map(len, nodes_of_kind.values()))
    largest = max(len(places) // ISLAND_RANKS, 1)
    num = max(num for num in range(1, largest + 1) if most % num == 0)
    # The order of kinds in the first island. The other islands follow it, whatever order their own
    # nodes have, because they use the same plan.
    order: list[tuple[tuple[int, int], ...]] = []
    for kind in kinds:
        if order.count(kind) < len(nodes_of_kind[kind]) // num:
            order.append(kind)
    islands = []
    for number in range(num):
        nodes = {
            kind: iter(of_kind[number * len(of_kind) // num :])
            for kind, of_kind in nodes_of_kind.items()
        }
        islands.append(tuple(rank for kind in order for rank in next(nodes[kind])))
    return tuple(islands)
