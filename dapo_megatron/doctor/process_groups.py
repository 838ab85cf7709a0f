"""Run one case after another in the same processes, each with its own process groups.

Megatron builds its groups over the whole world. For a case of n ranks, the first n ranks therefore
form a new world, and destroy it before the next case.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dapo_megatron.cluster.ranks import Ranks, form_world
from dapo_megatron.cluster.store import open_store
from dapo_megatron.policy.device import backend

PATIENCE = timedelta(hours=4)
"""Timeout of ranks that wait while others run a case."""
CASE_TIMEOUT = timedelta(minutes=5)
"""Timeout of collectives within a case."""


class Worlds:
    """Forms a world of ranks for each case, within a launched job."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = open_store(self.rank, self.num_ranks, PATIENCE)
        self._number = 0

    def tell(self, key: str, value: bytes) -> bytes:
        """Return rank 0's value on every rank."""
        if self.rank == 0:
            self.store.set(key, value)  # type: ignore[arg-type]  # torch's stub has no bytes
        sent: bytes = self.store.get(key)
        return sent

    @contextmanager
    def world(self, num_ranks: int) -> Iterator[Ranks | None]:
        """Form a world of the first `num_ranks` ranks. Yield None on other ranks at once."""
        self._number += 1
        if self.rank >= num_ranks:
            yield None
            return
        self.tell(f"start/{self._number}", b"go")
        excepthook = sys.excepthook
        store = PrefixStore(f"case/{self._number}", self.store)
        ranks = form_world(backend(), store, self.rank, num_ranks, timeout=CASE_TIMEOUT)
        sys.excepthook = excepthook  # each form_world adds one more "[rank0]" to every line
        yield ranks
        # Not after an error, because the other ranks may never come.
        dist.destroy_process_group()
        # Reference cycles keep process groups alive, and each group holds threads and sockets.
        gc.collect()
