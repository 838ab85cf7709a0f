"""Process groups that are made directly on a rendezvous store, outside of torch's registry.

torch numbers the ranks of a registered group within the default group. A group whose members have
different default groups (ranks of the policy and workers of engines) cannot be registered.

Use the methods of such a group. With the functions of torch.distributed, an error of a collective
would become a ValueError, because they look up the group in the registry to log it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import ProcessGroup, Store

TIMEOUT = timedelta(hours=2)
"""Timeout of torch's collectives. Longer than any legitimate wait; the watchdog acts earlier."""


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group, or the default group for None."""
    import torch.distributed as dist

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

    Every call with the same purpose and members makes another group. All members must make the same
    calls on a store, in any order of purposes.
    """
    import torch
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    store, name = _place(store, purpose, members, own)
    backend = ProcessGroupGloo(store, own, len(members), connect_timeout or timeout)
    backend._set_default_timeout(timeout)
    return _wrapped(store, name, backend, torch.device("cpu"), ProcessGroup.BackendType.GLOO)


_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that torch reads when it makes a group. With 1 `wait` blocks this thread,
and raises after an error or the group's timeout. Otherwise copies queue up behind a collective
whose member is gone, and a watchdog thread ends this process, after it has told all ranks to."""


def make_device_group(
    host: ProcessGroup,
    store: Store,
    purpose: str,
    members: Sequence[int],
    own: int,
    device: torch.device,
    timeout: timedelta,
    connect_timeout: timedelta,
) -> ProcessGroup:
    """Return the group for tensors on `device` of the same members as `host`: `host` itself on a
    CPU, a new NCCL group on a GPU (see `make_group`). The death of a member is an error of a
    collective, and does not end this process."""
    if device.type == "cpu":
        return host
    from torch.distributed import ProcessGroup, ProcessGroupNCCL

    store, name = _place(store, purpose, members, own)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # The first collective makes the communicator. If a member is gone, this would never return.
    options.config.blocking = 0
    seconds = str(int(connect_timeout.total_seconds()))
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", seconds)
    before = os.environ.get(_BLOCKING_WAIT, "0")
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        backend = ProcessGroupNCCL(store, own, len(members), options)
    finally:
        os.environ[_BLOCKING_WAIT] = before
    return _wrapped(store, name, backend, device, ProcessGroup.BackendType.NCCL)


def _place(store: Store, purpose: str, members: Sequence[int], own: int) -> tuple[Store, str]:
    """Return the store and the name of a new group."""
    from torch._C._distributed_c10d import PrefixStore

    digest = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    key = f"{purpose} {digest}"  # short, because it precedes every key of the group in the store
    # Counted in the store: a process that is started again has no counts of its own.
    number = store.add(f"{key} of {own}", 1)
    name = f"{purpose} {members[0]}-{members[-1]}/{number}"
    return PrefixStore(f"{key}/{number}", store), name


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
