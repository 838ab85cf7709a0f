"""The process group in which trainer ranks send weights to engines on other GPUs.

It is made when the set of engines changed, on its own store, and given up after any error. A
collective with an engine that is gone fails on all members, at the latest after the group's
timeout. (NCCL: not run, only a group over gloo that behaves like it.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from dapo_megatron.bridge.islands import RankSlices
from dapo_megatron.bridge.plan import TransferPlan, make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.cluster.address import LOOPBACK
from dapo_megatron.cluster.groups import make_device_group, make_group
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import SyncError

CONNECT = timedelta(seconds=20)
"""Timeout of making the group."""
PURPOSE = "sync"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Description of a group, for its members. Trainer ranks come first.

    held, wanted    slices of each member
    store           path of a file, or HOST:PORT
    timeout         of a collective, in seconds
    own             number in the group of each worker of the engine that gets this
    """

    held: RankSlices
    wanted: RankSlices
    ranks_per_node: int
    store: str = ""
    timeout: float = 0.0
    own: Sequence[int] = ()

    def plan(self) -> TransferPlan:
        """Return the plan of the transfer, which all members make."""
        return make_plan(self.held, self.wanted, ranks_per_node=self.ranks_per_node)


def new_store(host: str, folder: Path) -> tuple[Store, str]:
    """Return a new store on rank 0, and its name for the others. `host` is rank 0's address."""
    if host == LOOPBACK:  # only this user can open the file, and everybody could open a port
        path = tempfile.mktemp(prefix="sync_", dir=folder)
        return FileStore(path, -1), path
    store = TCPStore(host, 0, is_master=True, timeout=CONNECT, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def open_store(name: str) -> Store:
    """Return the store that rank 0 has made."""
    if name.startswith("/"):
        return FileStore(name, -1)
    host, _, port = name.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=CONNECT, wait_for_workers=False)


def join(meeting: Meeting, own: int, store: Store, secret: bytes, device: torch.device) -> Any:
    """Return the process group of a meeting. Collective over its members. Raises SyncError if it
    cannot be made, and RankError if a member does not know the run's secret."""
    members, timeout = range(len(meeting.held)), timedelta(seconds=meeting.timeout)
    try:
        group = make_group(store, PURPOSE, members, own, timeout, CONNECT)
        ranks = Ranks(own, len(members), 0, group=group, members=tuple(members))
        ranks.check_members(secret)
        group = make_device_group(group, store, PURPOSE, members, own, device, timeout, CONNECT)
        # NCCL connects in the first collective. Here a member that is gone is noticed early.
        sent = torch.zeros(len(members), dtype=torch.uint8, device=device)
        group.alltoall_base(torch.empty_like(sent), sent, [], []).wait()
        return group
    except RuntimeError as error:  # of gloo, NCCL or the store
        raise SyncError(f"the group of trainers and engines was not made: {error}") from error


def worker_transfer(meeting: Meeting, worker: int, secret: bytes, device: torch.device) -> Transfer:
    """Join a meeting as a worker of an engine. Return the transfer of the slices that it wants.
    Raises as `join` does."""
    own = meeting.own[worker]
    group = join(meeting, own, open_store(meeting.store), secret, device)
    return Transfer(meeting.plan(), [], meeting.wanted[own], own, device, group)
