"""Joining torch.distributed, and collectives for plain values between the ranks of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_megatron.cluster import collectives
from dapo_megatron.cluster.groups import TIMEOUT, group_or_world, make_group
from dapo_megatron.cluster.secret import NUM_BYTES, prove, run_secret
from dapo_megatron.cluster.store import default_store, open_store
from dapo_megatron.types import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dapo_megatron.cluster.watchdog import Watchdog

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Implementation of protocols.Exchange with torch.distributed. `join` creates it."""

    rank: int
    world_size: int
    local_rank: int
    group: Any = None
    """Process group for plain values; None for the default group. It is a gloo group, because NCCL
    would copy all values, padded to the longest, into the memory of every GPU."""
    store: Store | None = None
    """Rendezvous store of the run, for further groups; None for the default group's."""
    members: tuple[int, ...] = ()
    """Numbers of these ranks in the run; empty if they are all ranks."""
    watchdog: Watchdog | None = None
    """Records the beginning and end of every exchange as signs of life."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def names(self) -> Sequence[int]:
        """See Exchange."""
        return self.members or range(self.world_size)

    def second(self) -> Ranks:
        """Return these ranks with a separate process group, for the thread that writes checkpoints;
        the stacks of a hang name it. Collective. Raises RankError as `join` does."""
        return self._with_group("checkpoint", self.names, None)

    def subgroup(self, ranks: Sequence[int]) -> Ranks:
        """Return these ranks, in ascending order, as a separate world with its own process
        group. Collective over them; others do not take part. Raises RankError as `join` does."""
        members = [self.names[rank] for rank in sorted(ranks)]
        return self._with_group("subgroup", members, self.watchdog)

    def _with_group(self, purpose: str, members: Sequence[int], watchdog: Watchdog | None) -> Ranks:
        """Return the ranks with these numbers in the run, with a separate process group."""
        own = members.index(self.names[self.rank])
        group: Any = None
        if len(members) > 1:
            group = make_group(self.store or default_store(), purpose, members, own)
        ranks = replace(
            self,
            rank=own,
            world_size=len(members),
            group=group,
            members=tuple(members),
            watchdog=watchdog,
            _numbers=itertools.count(1),
        )
        ranks.check_members()
        return ranks

    def all_gather(self, value: T, of: object) -> list[T]:
        """See Exchange."""
        with self._exchanging("all_gather"):
            if self.world_size == 1:
                return [value]
            return collectives.all_gather(value, of, self.group, self.names)

    def broadcast(self, value: T, of: object, source: int = 0) -> T:
        """See Exchange."""
        with self._exchanging("broadcast"):
            if self.world_size == 1:
                return value
            return collectives.broadcast(value, of, self.group, self.names, source)

    def scatter(self, parts: Sequence[bytearray] | None, size: int) -> memoryview:
        """See Exchange."""
        with self._exchanging("scatter"):
            if self.world_size == 1 and parts is not None:
                return memoryview(parts[0])
            return collectives.scatter(parts, size, self.group, self.names)

    def barrier(self) -> None:
        """See Exchange."""
        if self.world_size > 1:
            with self._exchanging("barrier"):
                group_or_world(self.group).barrier().wait()

    def check_members(self, secret: bytes | None = None) -> None:
        """Raise RankError if a member of the group does not know the run's secret, or another one
        if it is given. Collective."""
        secret = secret or run_secret(self.world_size)
        if self.world_size == 1 or secret is None:
            return
        try:
            prove(self._gather_bytes, self.rank, self.world_size, secret)
        except RuntimeError as error:  # from gloo, also if a message has another size
            other = f"rank {1 - self.rank}" if self.world_size == 2 else "another rank"
            raise RankError(
                f"rank {self.rank}: {other} disconnected while ranks proved that they know this "
                f"run's secret; see the log of that rank: {str(error).splitlines()[0]}"
            ) from error

    def _gather_bytes(self, value: bytes) -> list[bytes]:
        """All-gather NUM_BYTES raw bytes. No rank decodes a message before the secret is proved."""
        import torch

        received = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(self.world_size)]
        message = torch.tensor(list(value), dtype=torch.uint8)
        with self._exchanging("all_gather"):
            group_or_world(self.group).allgather(received, message).wait()
        return [bytes(tensor.tolist()) for tensor in received]

    @contextmanager
    def _exchanging(self, kind: str) -> Iterator[None]:
        number = next(self._numbers)
        if self.watchdog is not None:
            # Only exchanges of all ranks have numbers by which the ranks can be compared.
            exchange = 0 if self.members else number
            self.watchdog.record_activity(f"{kind} {number}", exchange)
        yield
        if self.watchdog is not None:
            self.watchdog.record_activity(f"{kind} {number} done")


def join(backend: str, watchdog: Watchdog | None = None) -> Ranks:
    """Join the ranks that the launcher's environment variables describe. Collective.

    Raises ConfigError, before contacting any other rank, if this rank has no secret (secret.py).
    Raises RankError if another rank does not know the secret.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(rank, world_size, TIMEOUT)
    return form_world(backend, store, rank, world_size, timeout=TIMEOUT, watchdog=watchdog)


def form_world(
    backend: str,
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    watchdog: Watchdog | None = None,
) -> Ranks:
    """Create the default process group of the ranks of a store. Collective.

    Raises RankError if a rank does not know the run's secret.
    """
    import torch.distributed as dist

    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        group=None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout),
        store=store,
        watchdog=watchdog,
    )
    ranks.check_members()
    return ranks
