"""The ranks of a run: joining torch.distributed, and telling each other plain Python values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

TIMEOUT_MINUTES = 120.0
"""Longer than anything a rank may have to wait for; the watchdog is sooner."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """protocols.Exchange over torch.distributed; made once per process by `join`."""

    rank: int
    world_size: int
    local_rank: int
    group: Any = None
    """Process group for plain values; None: the default one. Not NCCL's: it would copy them, padded
    to the longest, into the memory of every GPU."""
    beat: Callable[[str], None] = lambda _: None
    """Told of every exchange, before and after: a rank that hangs can say in which it is."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def second(self) -> Ranks:
        """The same ranks over a group of their own, for another thread. Collective."""
        import torch.distributed as dist

        timeout = timedelta(minutes=TIMEOUT_MINUTES)
        group = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None
        return replace(self, group=group, beat=lambda _: None, _numbers=itertools.count(1))

    def all_gather(self, value: Any) -> list[Any]:
        """The value of each rank, in rank order."""
        if self.world_size == 1:
            self.beat("all_gather, alone")
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        with self._told("all_gather"):
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            self.beat("broadcast, alone")
            return value
        import torch.distributed as dist

        box = [value]
        with self._told("broadcast"):
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            import torch.distributed as dist

            with self._told("barrier"):
                dist.barrier(group=self.group)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        name = f"{what} {next(self._numbers)}"
        self.beat(name)
        yield
        self.beat(f"{name} done")


def join(backend: str, beat: Callable[[str], None] = lambda _: None) -> Ranks:
    """Join the process group that the launcher's environment describes."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(minutes=TIMEOUT_MINUTES)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        group=None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout),
        beat=beat,
    )
