"""Which rank trains on which sequence, and values of the data-parallel ranks.

Ranks of one data-parallel index (all its tensor-, pipeline- and context-parallel ranks) train on
the same sequences and hold their tokens. Every rank computes all owners from the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Self, TypeVar, cast

from dapo_megatron.data.packing import minibatch_ranges
from dapo_megatron.protocols import Exchange, MicrobatchPlanner
from dapo_megatron.types import TrainingSequence

T = TypeVar("T")


def owners(
    lengths: Sequence[int], num_updates: int, plan: MicrobatchPlanner, num_ranks: int
) -> list[int]:
    """Return the data-parallel index that trains on each sequence of a step.

    It is the one that `plan` gives to the sequence in its mini-batch, also if the mini-batch has no
    loss tokens. So updates use the same plans.
    """
    return list(_owners(tuple(lengths), num_updates, plan, num_ranks))


@lru_cache(maxsize=1)  # a step asks twice: for the exchange, and for the batch
def _owners(
    lengths: tuple[int, ...], num_updates: int, plan: MicrobatchPlanner, num_ranks: int
) -> list[int]:
    result = [0] * len(lengths)
    if num_ranks == 1:
        return result
    for minibatch in minibatch_ranges(len(lengths), num_updates):
        shares = plan(lengths[minibatch.start : minibatch.stop], num_ranks)
        for rank, micros in enumerate(shares):
            for index in chain.from_iterable(micros):
                result[minibatch.start + index] = rank
    return result


@dataclass(frozen=True, slots=True)
class DataParallelRanks:
    """The data-parallel indices of all ranks. `join` creates it.

    exchange     between all ranks
    indices      data-parallel index of each rank
    plan         splits a mini-batch over data-parallel indices
    num_updates  mini-batches of a step
    """

    exchange: Exchange
    indices: tuple[int, ...]
    plan: MicrobatchPlanner
    num_updates: int

    @classmethod
    def join(
        cls, exchange: Exchange, index: int, plan: MicrobatchPlanner, num_updates: int
    ) -> Self:
        """Return the data-parallel ranks of a run. `index` is this rank's. Collective."""
        return cls(exchange, tuple(exchange.all_gather(index, int)), plan, num_updates)

    @property
    def index(self) -> int:
        """Data-parallel index of this rank."""
        return self.indices[self.exchange.rank]

    @property
    def size(self) -> int:
        """Number of data-parallel indices."""
        return max(self.indices) + 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its index."""
        return self.indices.index(self.index) == self.exchange.rank

    @property
    def firsts(self) -> list[int]:
        """First rank of each data-parallel index."""
        return [self.indices.index(index) for index in range(self.size)]

    def owners(self, sequences: Sequence[TrainingSequence]) -> list[int]:
        """Return the data-parallel index that trains on each sequence of a step."""
        lengths = [sequence.num_tokens for sequence in sequences]
        return owners(lengths, self.num_updates, self.plan, self.size)

    def all_gather(self, value: T, of: object) -> list[T]:
        """Return the value of each data-parallel index, given by its first rank. Collective."""
        if self.size == 1:
            return [value]
        values = self.exchange.all_gather(value if self.is_first else None, cast(Any, of) | None)
        return [cast(T, values[rank]) for rank in self.firsts]
