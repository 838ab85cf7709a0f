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

    def all_gather(self, value: Any) -> list[Any]:
        """The value of each rank, in rank order."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()


def join(backend: str, timeout_minutes: float = 120.0) -> Ranks:
    """Join the process group that the launcher's environment describes."""
    import torch.distributed as dist

    ranks = Ranks(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
    )
    dist.init_process_group(
        backend,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(minutes=timeout_minutes),
    )
    return ranks
