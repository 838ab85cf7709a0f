"""Process groups that are made directly on a rendezvous store, outside of torch's registry.

torch numbers the ranks of a registered group within the default group. A group whose members have
different default groups (policy and engines on dedicated ranks) cannot be registered. A group
that is made directly has only its members, so one can also be made again without a dead member.

Use the methods of such a group. With the functions of torch.distributed, an error of a collective
would become a ValueError, because they look up the group in the registry to log it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store

TIMEOUT = timedelta(hours=2)
"""Timeout of torch's collectives. Longer than any legitimate wait; the watchdog acts earlier."""

LOST_NODE_SECONDS = 20
"""Time in which a node must acknowledge what was sent to it; see `notice_lost_nodes`."""
CONNECT_SECONDS, CONNECT_SECONDS_PER_RANK = 10.0, 0.1
"""Timeout of connecting ranks that have just met. If one is lost meanwhile, the others wait so long
for its address in the store, because it has no connection yet whose end they would notice."""
_generations: Counter[str] = Counter()
"""Number of groups that this process has made, by purpose and members."""


@dataclass
class ClosableGroup:
    """A process group that its owner can close: its connections end when nobody refers to it. Other
    ranks, which wait for this one in a collective with a lost rank, then fail, too."""

    group: ProcessGroup | None

    def close(self) -> None:
        """Close the group. No thread of this process may be in one of its collectives."""
        self.group = None


def notice_lost_nodes() -> None:
    """Let the kernel end the present TCP connections of this process with a node that is lost.

    A node without power does not close its connections. Without this, only the watchdog would end a
    collective with it. A process that is only frozen is not noticed, because its kernel answers.
    """
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of listdir itself, or closed by another thread
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in _INTERNET:
                    for level, option, value in _KEEPALIVE:
                        connection.setsockopt(level, option, value)


_INTERNET = (socket.AF_INET, socket.AF_INET6)
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_NODE_SECONDS // 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_NODE_SECONDS // 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_NODE_SECONDS),  # of unsent data
)


def group_or_world(group: ProcessGroup | ClosableGroup | None) -> ProcessGroup:
    """Return the group, or the default group for None. Raises RuntimeError if it is closed."""
    import torch.distributed as dist

    if isinstance(group, ClosableGroup):
        if group.group is None:
            raise RuntimeError("this process group was closed, because a rank was lost")
        return group.group
    world = group or dist.group.WORLD
    assert world is not None
    return world


def make_group(
    store: Store,
    purpose: str,
    members: Sequence[int],
    own: int,
    timeout: timedelta = TIMEOUT,
    connect_timeout: timedelta | None = None,
) -> ProcessGroup:
    """Return a new gloo group for tensors on the CPU. Collective over its members.

    members          their numbers in the run, in the order of the group
    own              index of this rank in `members`
    timeout          of each collective of the group
    connect_timeout  of making the group; None for `timeout`

    Every call with the same purpose and members makes the next generation of that group. All
    members must make the same calls, in any order of purposes.
    """
    import torch
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    store, name = _generation(store, purpose, members)
    backend = ProcessGroupGloo(store, own, len(members), connect_timeout or timeout)
    backend._set_default_timeout(timeout)
    return _wrapped(store, name, backend, torch.device("cpu"), ProcessGroup.BackendType.GLOO)


def make_device_group(
    store: Store, purpose: str, members: Sequence[int], own: int, device: int
) -> ProcessGroup:
    """Return a new NCCL group for tensors on the GPU with this index; see `make_group`."""
    import torch
    from torch.distributed import ProcessGroup, ProcessGroupNCCL

    store, name = _generation(store, purpose, members)
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    backend = ProcessGroupNCCL(store, own, len(members), options)
    place = torch.device("cuda", device)
    return _wrapped(store, name, backend, place, ProcessGroup.BackendType.NCCL)


def _generation(store: Store, purpose: str, members: Sequence[int]) -> tuple[Store, str]:
    """Return the store and the name of the next generation of a group."""
    from torch._C._distributed_c10d import PrefixStore

    digest = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    key = f"{purpose} {digest}"  # short, because it precedes every key of the group in the store
    generation = _generations[key]
    _generations[key] += 1
    name = f"{purpose} {members[0]}-{members[-1]}/{generation}"
    return PrefixStore(f"{key}/{generation}", store), name


def _wrapped(store: Store, name: str, backend: Any, place: Any, kind: Any) -> ProcessGroup:
    """Return the process group of a backend for tensors on the device `place`. The flight recorder
    shows its name, by which the watchdog compares ranks."""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import GroupName

    backend._set_sequence_number_for_group()
    group = ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(place, kind, backend)
    group._set_group_name(GroupName(name))
    group._set_group_desc(name)
    return group


def make_closable_group(
    store: Store,
    name: str,
    members: Sequence[int],
    own: int,
    timeout: timedelta,
    patience: float = 1.0,
) -> ClosableGroup:
    """Return a group of ranks that have just met, and of which some may be lost."""
    seconds = patience * (CONNECT_SECONDS + CONNECT_SECONDS_PER_RANK * len(members))
    connect_timeout = timedelta(seconds=seconds)
    return ClosableGroup(make_group(store, name, members, own, timeout, connect_timeout))
