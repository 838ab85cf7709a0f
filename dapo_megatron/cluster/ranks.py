"""The ranks of a run: joining torch.distributed, and telling each other plain Python values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Ranks:
    """protocols.Exchange over torch.distributed; made once per process by `join`."""

    rank: int
    world_size: int
    local_rank: int
    group: Any = None
    """Process group for plain values; None: the default one. Not NCCL's: it would copy them, padded
    to the longest, into the memory of every GPU."""

    def all_gather(self, value: Any) -> list[Any]:
        """The value of each rank, in rank order."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.group)


def join(backend: str, timeout_minutes: float = 120.0) -> Ranks:
    """Join the process group that the launcher's environment describes."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        group=None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout),
    )
