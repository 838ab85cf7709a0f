"""Entry of a rank into a run whose engines run on dedicated ranks, before it meets the others.

The ranks of a job find each other in a store at MASTER_ADDR and MASTER_PORT. Another job with the
same port, or an engine that was started again after an upgrade, finds it, too, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dapo_megatron.cluster.exit_reason import is_secondary
from dapo_megatron.cluster.launch import forbid_restart
from dapo_megatron.cluster.processes import kill_here
from dapo_megatron.cluster.store import num_starts, process_of, register
from dapo_megatron.types import ConfigError, DapoError, RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dapo_megatron.cluster.members import Members

FACTS = "facts"
"""Key of the store with the facts of rank 0, as JSON."""


class OtherJob(ConfigError):
    """This rank belongs to another job than the store."""


def enter(
    store: Store, rank: int, num_policy: int, job: Mapping[str, Any], facts: Mapping[str, Any]
) -> int:
    """Register this start of a rank, and return its number, from 1. A rank that is refused leaves
    no trace in the store.

    num_policy  number of ranks with a policy; they are the first ones
    job         JSON values by name that differ between two jobs
    facts       JSON values by name that must be the same on all ranks, such as those of config keys

    Raises OtherJob if another job uses the store, and ConfigError naming the facts that differ from
    rank 0's.
    """
    start = 0
    if rank == 0:
        start = register(store, rank)
        if start == 1:
            store.set(FACTS, json.dumps([dict(job), dict(facts)]))
    of_rank0 = json.loads(store.get(FACTS))
    for kind, own, first in zip((OtherJob, ConfigError), (job, facts), of_rank0, strict=True):
        lines = [
            f"{name}: {own.get(name)!r} on rank {rank}, but {first.get(name)!r} on rank 0; start "
            "all ranks with the same version, config, overrides and model, and give each job its "
            "own MASTER_PORT"
            for name in sorted(own.keys() | first.keys())
            if own.get(name) != first.get(name)
        ]
        if lines:
            raise kind("\n".join(lines))
    start = start or register(store, rank)
    if start > 1 and rank < num_policy:  # only engines start more than once
        raise OtherJob(
            f"MASTER_ADDR, MASTER_PORT: rank {rank} has been started before in this store. Another "
            "job uses it; give each job its own port"
        )
    return start


def report_failure(members: Members, error: BaseException) -> bool:
    """Tell rank 0 about an error of a rank with an engine, if the run waits for its first
    generation. The error then ends the run, because it would occur at every start. Return whether
    it does."""
    is_alone = members.rank >= members.num_policy and not members.generation
    if not is_alone or not isinstance(error, Exception) or members.is_set("formed"):
        return False
    # The other job must not end this one. Secondary: another rank of the engine is gone.
    if isinstance(error, OtherJob) or is_secondary(str(error)):
        return False
    text = str(error) if isinstance(error, DapoError) else f"{type(error).__name__}: {error}"
    kind = type(error) if isinstance(error, DapoError) else RankError
    members.set_error("failure", kind(f"rank {members.rank}: {text}"))
    forbid_restart()
    return True


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
