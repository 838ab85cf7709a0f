"""Joining torch.distributed, and collectives for plain values between the ranks of a run."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_megatron.cluster import collectives
from dapo_megatron.cluster.collectives import EnginesChanged, agreed
from dapo_megatron.cluster.entry import enter, find_peers, report_failure
from dapo_megatron.cluster.groups import (
    TIMEOUT,
    ClosableGroup,
    group_or_world,
    make_closable_group,
    make_device_group,
    make_group,
)
from dapo_megatron.cluster.members import Members
from dapo_megatron.cluster.secret import NUM_BYTES, prove, run_secret
from dapo_megatron.cluster.store import default_store, open_store
from dapo_megatron.types import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ENGINE = "DAPO_MEGATRON_ENGINE"
"""Environment variable with the name of this rank's engine, if engines run on dedicated ranks."""
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
    device_group: Any = None
    """Process group for tensors on the device; None for the default group."""
    store: Store | None = None
    """Rendezvous store of the run, for further groups; None for that of the default group."""
    members: tuple[int, ...] = ()
    """Numbers of these ranks in the run; empty if they are all ranks."""
    by_role: RanksByRole | None = None
    """Ranks of each role; None if every rank has a policy and an engine."""
    generation: int = 0
    """Number of times that ranks with engines were lost or joined."""
    timeout: timedelta = TIMEOUT
    """Timeout of collectives."""
    has_engines_apart: bool = False
    """Whether some of these ranks have only an engine, others only a policy."""
    is_agreed: bool = False
    """Whether the ranks with a policy agree on the success of each collective."""
    on_activity: Callable[[str], None] = lambda _: None
    """Called before and after every exchange, so that the watchdog knows where a rank hangs."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def names(self) -> Sequence[int]:
        """See Exchange."""
        return self.members or range(self.world_size)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, also while separate engines have not joined."""
        return self.world_size if self.by_role is None else self.by_role.members.num_ranks

    @property
    def is_alone(self) -> bool:
        """Whether this rank has only an engine, which has not joined the others yet."""
        return self.by_role is not None and not self.by_role.members.current

    @property
    def engines_apart(self) -> Members:
        """The ranks that take part in a run whose engines run on dedicated ranks."""
        assert self.by_role is not None
        return self.by_role.members

    @property
    def policy(self) -> Ranks | None:
        """The ranks that have a policy, as a separate world; None on other ranks."""
        return self if self.by_role is None else self.by_role.policy

    @property
    def engine(self) -> Ranks | None:
        """The ranks of this rank's engine, as a separate world; None on other ranks. If every
        rank has a policy, the ranks of all engines."""
        return self if self.by_role is None else self.by_role.engine

    def second(self) -> Ranks:
        """Return these ranks with a separate process group, for another thread. Collective. Raises
        RankError as `join` does."""
        return self._with_group("second", self.names, lambda _: None)

    def subgroup(self, ranks: Sequence[int]) -> Ranks:
        """Return these ranks, in ascending order, as a separate world with its own process
        group. Collective over them; others do not take part. Raises RankError as `join` does."""
        members = [self.names[rank] for rank in sorted(ranks)]
        # With another first word, because the watchdog compares the exchanges of all ranks.
        return self._with_group(
            "subgroup", members, lambda what: self.on_activity(f"subgroup {what}")
        )

    def _with_group(
        self, purpose: str, members: Sequence[int], on_activity: Callable[[str], None]
    ) -> Ranks:
        """Return the ranks with these numbers in the run, with a separate process group."""
        own = members.index(self.names[self.rank])
        group: Any = None
        has_engines_apart = self.has_engines_apart and len(members) == self.world_size
        if len(members) > 1:
            store, name = self.store or default_store(), f"{purpose} {self.generation}"
            if has_engines_apart:
                self.barrier()  # see CONNECT_SECONDS
                group = agreed(self.policy, lambda: self._closable(store, name, members, own))
            else:
                group = make_group(store, name, members, own)
        ranks = replace(
            self,
            rank=own,
            world_size=len(members),
            group=group,
            members=tuple(members),
            by_role=None,
            has_engines_apart=has_engines_apart,
            is_agreed=False,  # of another thread, or of some ranks
            on_activity=on_activity,
            _numbers=itertools.count(1),
        )
        agreed(self.policy if has_engines_apart else None, ranks.check_members)
        return ranks

    def all_gather(self, value: T, of: object) -> list[T]:
        """Return the value of each rank, in rank order. `of` is the type of the values."""
        if self.world_size == 1:
            self.on_activity("all_gather, one rank")
            return [value]
        return self._together(
            "all_gather", lambda: collectives.all_gather(value, of, self.group, self.names)
        )

    def broadcast(self, value: T, of: object, source: int = 0) -> T:
        """Return the value of rank `source`. `of` is its type."""
        if self.world_size == 1:
            self.on_activity("broadcast, one rank")
            return value
        return self._together(
            "broadcast",
            lambda: collectives.broadcast(value, of, self.group, self.names, source),
        )

    def all_to_all(
        self, parts: Sequence[bytes | bytearray | memoryview], sizes: Sequence[int]
    ) -> list[memoryview]:
        """Send `parts[r]` to rank r and return the part from each rank; `sizes[r]` is the number of
        bytes that rank r sends. Raises RankError naming a rank with another size."""
        if self.world_size == 1:
            self.on_activity("all_to_all, one rank")
            return [memoryview(parts[0])]
        return self._together(
            "all_to_all", lambda: collectives.all_to_all(parts, sizes, self.group, self.names)
        )

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            self._together("barrier", lambda: group_or_world(self.group).barrier().wait())

    def check_members(self) -> None:
        """Raise RankError if a member of the group does not know the run's secret. Collective."""
        secret = run_secret(self.world_size)
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
        self._together(
            "all_gather",
            lambda: group_or_world(self.group).allgather(received, message).wait(),
        )
        return [bytes(tensor.tolist()) for tensor in received]

    @contextmanager
    def _reporting_activity(self, kind: str) -> Iterator[None]:
        name = f"{kind} {next(self._numbers)}"
        self.on_activity(name)
        with self.noticing_losses():
            yield
        self.on_activity(f"{name} done")

    @contextmanager
    def noticing_losses(self) -> Iterator[None]:
        """Raise EnginesChanged if a collective in this block fails and some of these ranks may be
        lost, because they have only an engine. Then the groups are closed, so that no other rank
        waits for this one."""
        from torch.distributed import DistError

        try:
            yield
        except RuntimeError as error:
            # Not a subclass of another kind, such as torch's for a full GPU.
            is_of_group = type(error) is RuntimeError or isinstance(error, DistError)
            if not (self.has_engines_apart and is_of_group):
                raise
            text = f"a rank with an engine is gone or hangs: {_first_line(error)}"
            traceback.clear_frames(error.__traceback__)  # they refer to the group
        else:
            return
        self.close()
        raise EnginesChanged(text)

    def _closable(self, store: Store, name: str, members: Sequence[int], own: int) -> ClosableGroup:
        with self.noticing_losses():
            return make_closable_group(store, name, members, own, TIMEOUT)

    def close(self) -> None:
        """Close the groups of these ranks, if some have only an engine. Idempotent."""
        for group in (self.group, self.device_group):
            if isinstance(group, ClosableGroup):
                group.close()

    def _together(self, kind: str, action: Callable[[], T]) -> T:
        """Run a collective. If some of these ranks have only an engine, it fails on all ranks with
        a policy, or on none, so that they stay at the same place of the program."""

        def run() -> T:
            with self._reporting_activity(kind):
                return action()

        return agreed(self.policy, run) if self.is_agreed else run()


@dataclass(frozen=True, slots=True)
class RanksByRole:
    """Ranks of the policy, and ranks of this rank's engine, each a separate world. One of them is
    None: that of the role that this rank does not have."""

    policy: Ranks | None
    engine: Ranks | None
    members: Members
    """The ranks that take part, which may change."""


def join(
    backend: str,
    on_activity: Callable[[str], None] = lambda _: None,
    *,
    num_policy: int = 0,
    replica_size: int = 1,
    timeout: timedelta = TIMEOUT,
    job: Mapping[str, Any] = MappingProxyType({}),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> Ranks:
    """Join the ranks that the launcher's environment variables describe. Collective.

    If engines run on dedicated ranks, only those of the policy and those of each engine join.
    `next_generation` joins them all, when the engines have been built.

    num_policy    the first ranks have only a policy, the others only an engine; 0: all have both
    replica_size  ranks of an engine on dedicated ranks
    timeout       of collectives of the policy's ranks with those of engines
    job, facts    see entry.enter

    Raises ConfigError, before contacting any other rank, if this rank has no secret (secret.py),
    and as entry.enter does. Raises RankError if another rank does not know the secret.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(rank, world_size, TIMEOUT)
    if num_policy:
        members = Members(
            store,
            rank,
            num_policy,
            world_size,
            replica_size,
            on_activity=on_activity,
            current=tuple(range(num_policy)) if rank < num_policy else (),
        )
        try:
            members.start = enter(store, rank, num_policy, job, facts)
            return _join_role(backend, members, timeout)
        except Exception as error:
            with suppress(RuntimeError):  # of a store that is gone
                report_failure(members, error)
            raise
    return form_world(backend, store, rank, world_size, timeout=TIMEOUT, on_activity=on_activity)


def _join_role(backend: str, members: Members, timeout: timedelta) -> Ranks:
    """Create the default process group of this rank's role. Collective over the ranks of the
    policy, and over those of each engine.

    Megatron and vLLM make their groups over the default process group, so the policy and each
    engine get separate worlds. Ranks of the policy come first: rank 0 has the coordinator and
    writes the run's files, and a run may lose an engine but not its policy.
    """
    from torch._C._distributed_c10d import PrefixStore

    rank, num_policy, store = members.rank, members.num_policy, members.store
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    has_policy = rank < num_policy
    if has_policy:
        role, peers = "policy", range(num_policy)
    else:
        peers = members.engine_of(rank)
        number = find_peers(members)
        role = f"engine {peers[0]} {number}"
        os.environ[ENGINE] = f"{peers[0]}.{number}"
    world = form_world(
        backend,
        PrefixStore(role, store),
        peers.index(rank),
        len(peers),
        timeout=TIMEOUT,
        # With another first word, as in `Ranks.subgroup`.
        on_activity=lambda what: members.on_activity(f"{role} {what}"),
    )
    world = replace(
        world, local_rank=local_rank, store=store, timeout=timeout, members=tuple(peers)
    )
    if has_policy:
        return replace(world, by_role=RanksByRole(world, None, members))
    alone = Ranks(rank, members.num_ranks, local_rank, store=store, timeout=timeout)
    return replace(alone, by_role=RanksByRole(None, world, members))


def first_generation(ranks: Ranks, backend: str) -> Ranks:
    """Return all ranks of the job, when engines on dedicated ranks have been built. Collective
    over all of them. Raises EnginesChanged if one is lost meanwhile."""
    if ranks.by_role is None:
        return ranks
    if ranks.policy is None:
        ranks.engines_apart.knock()
    else:
        ranks.engines_apart.meet_all()
    return next_generation(ranks, backend)


def next_generation(ranks: Ranks, backend: str) -> Ranks:
    """Return the ranks that now take part, with new process groups. Collective over them, after
    they have met (members.py). Raises EnginesChanged if one is lost meanwhile."""
    assert ranks.by_role is not None
    members = ranks.by_role.members
    current, number = members.current, members.generation
    own = current.index(members.rank)
    patience = 2 ** min(members.num_failures, 2)
    store = ranks.store or default_store()

    def make() -> tuple[ClosableGroup, ClosableGroup]:
        try:
            name = f"run {number}"
            group = make_closable_group(store, name, current, own, ranks.timeout, patience)
            if backend == "gloo":
                return group, group
            name, local_rank = f"bridge {number}", ranks.local_rank
            return group, ClosableGroup(make_device_group(store, name, current, own, local_rank))
        except RuntimeError as error:  # of gloo, NCCL or the store
            text = f"a rank was lost while it joined: {_first_line(error)}"
            raise EnginesChanged(text) from None

    group, device_group = agreed(ranks.policy, make)
    formed = replace(
        ranks,
        rank=own,
        world_size=len(current),
        group=group,
        device_group=device_group,
        members=current,
        generation=number,
        has_engines_apart=True,
        is_agreed=True,
        on_activity=members.on_activity,
        _numbers=itertools.count(1),
    )
    try:
        formed.check_members()
    except RankError as error:  # the next generations go on without an engine that joined last
        raise EnginesChanged(str(error)) from error
    return formed


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def form_world(
    backend: str,
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    on_activity: Callable[[str], None] = lambda _: None,
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
        on_activity=on_activity,
    )
    ranks.check_members()
    return ranks
