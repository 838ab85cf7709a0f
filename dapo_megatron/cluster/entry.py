"""Entry of a rank into a run whose engines run on dedicated ranks, before it meets the others.

The ranks of a job find each other in a store at MASTER_ADDR and MASTER_PORT. Another job with the
same port, or an engine that was started again after an upgrade, finds it, too, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dapo_megatron.cluster.processes import kill_here
from dapo_megatron.cluster.store import num_starts, process_of, register
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dapo_megatron.cluster.members import Members

FACTS = "facts"
"""Key of the store with the facts of rank 0, as JSON."""


def enter(store: Store, rank: int, num_policy: int, facts: Mapping[str, Any]) -> int:
    """Register this start of a rank, and return its number, from 1. Nothing is registered for an
    engine that belongs to another run.

    num_policy  number of ranks with a policy; they are the first ones
    facts       JSON values by name that must be the same on all ranks, such as those of config keys

    Raises ConfigError naming the facts that differ from rank 0's, or if another job uses the store.
    """
    has_policy = rank < num_policy
    start = register(store, rank) if has_policy else 0
    if start > 1:  # only engines start more than once
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: rank {rank} has been started before in this store. Another "
            "job uses it; give each job its own port"
        )
    text = json.dumps(dict(facts))
    if rank == 0:
        store.set(FACTS, text)
    own, first = json.loads(text), json.loads(store.get(FACTS))
    lines = [
        f"{name}: {own.get(name)!r} on rank {rank}, but {first.get(name)!r} on rank 0; start all "
        "ranks with the same version, config, overrides and model, and each job with its own port"
        for name in sorted(own.keys() | first.keys())
        if own.get(name) != first.get(name)
    ]
    if lines:
        raise ConfigError("\n".join(lines))
    return start or register(store, rank)


def find_peers(members: Members) -> int:
    """Wait until every rank of this rank's engine has a start that was in no engine before. Return
    a number of this engine, which is the same on its ranks and new. Collective over them, although
    some may have been started more often than others. What is left on this node of an earlier
    engine with this rank is killed: it may wait for this rank's last start."""
    store, rank = members.store, members.rank
    engine = members.engine_of(rank)
    key = f"engine {engine[0]}"
    earlier = _used(store, key)
    if earlier.get(rank, members.start) < members.start:
        for other, start in earlier.items():
            if num_starts(store, other) == start:
                kill_here(*process_of(store, other))
    if rank == engine[0]:
        while any(num_starts(store, other) <= earlier.get(other, 0) for other in engine):
            members.pause("waits for the other ranks of its engine")
        starts = {other: num_starts(store, other) for other in engine}
        store.set(key, json.dumps([members.start, list(starts.items())]))
        return members.start
    while _used(store, key).get(rank) != members.start:
        members.pause("waits for the other ranks of its engine")
    return int(json.loads(store.get(key))[0])


def _used(store: Store, key: str) -> dict[int, int]:
    """Return the newest start of each rank that was in the engine with this key."""
    return dict(json.loads(store.get(key))[1]) if store.check([key]) else {}
