"""Which ranks take part in a run whose engines run on dedicated ranks, and may die and return.

The ranks of one *generation* have process groups in common. The first is formed when all engines
have been built. When an engine is lost or wants to join, all ranks leave their generation
(EnginesChanged) and meet at the rendezvous store. Rank 0 decides who takes part in the next one.
The policy's ranks always do: without one of them the run ends.

A *start* of an engine rank is one process. An engine whose ranks do not all come is left out, and
so is a start that was left out once: its process ends, and the launcher starts it again.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from dapo_megatron.cluster.collectives import EnginesChanged, ErrorRecord
from dapo_megatron.cluster.processes import ask_to_kill, has_ended, kill_here, runs_here
from dapo_megatron.cluster.store import num_starts, process_of
from dapo_megatron.types import DapoError, RankError, TooFewEnginesError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ARRIVAL_SECONDS = 30.0
"""Time that an engine has to come to the meeting, unless it is known to be gone."""
READY_SECONDS = 10.0
"""Time that a rank which waits in the meeting has to answer the decision about the generation."""
POLL_SECONDS = 0.05
LATE_SECONDS = 120.0
"""The first generation waits for an engine that much longer than for the others, at least."""
LEAVING_SECONDS = 3
"""Time that the process of an engine that is left out has to end by itself."""
SIGN_SECONDS = 1.0
"""Interval of rank 0's signs of life in the store."""
MAX_FAULTS = 3
"""An engine that failed so many syncs since the run was started, or could so often not be reached
by others, does not join again."""
MAX_FAILURES = 5
"""The run ends if so many generations in a row of the same processes fail."""


@dataclass
class Members:
    """One rank's part in the meetings.

    num_policy    number of ranks with a policy; they are the first ones
    num_ranks     number of all ranks of the job, present or not
    replica_size  ranks of each engine, consecutive
    start         number of this rank's start, from 1 (entry.py)
    on_activity   called with a sign of life
    """

    store: Store
    rank: int
    num_policy: int
    num_ranks: int
    replica_size: int
    start: int = 0
    on_activity: Callable[[str], None] = lambda what: None
    generation: int = 0
    current: tuple[int, ...] = ()
    """Ranks of the generation, ascending. Before the first one, those of the policy; empty for an
    engine that has not joined yet."""
    _starts: dict[int, int] = field(default_factory=dict)
    """Start of each rank of an engine that has taken part, on rank 0."""
    began: float = field(default_factory=time.monotonic)
    """Time of this rank's start, as time.monotonic()."""
    ending: DapoError | None = None
    """Why the run ends, if the generation is only there to save; None if it trains."""
    num_failures: int = 0
    """Number of generations in a row that failed although no process was lost."""
    _unready: set[int] = field(default_factory=set)
    """Ranks that did not answer the last decision, on rank 0."""
    _newest: set[tuple[int, ...]] = field(default_factory=set)
    """Engines that joined last, and did not work with the others yet, on rank 0."""
    _faults: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Number of times that each engine failed a sync or could not be reached."""
    _last_sign: float = -math.inf
    """Time of the last sign of life in the store, of rank 0, as time.monotonic()."""

    @property
    def replicas(self) -> list[tuple[int, ...]]:
        """Ranks of each engine of the generation, in the order of replica numbers."""
        return [engine for engine in self._engines() if set(engine) <= set(self.current)]

    @property
    def replica(self) -> int:
        """Number of this rank's replica in the generation; -1 for a rank with a policy."""
        return next((i for i, ranks in enumerate(self.replicas) if self.rank in ranks), -1)

    def wants_in(self) -> bool:
        """Return whether an engine waits to join. Asked on rank 0."""
        return bool(self._joining())

    def add_fault(self, replica: int) -> bool:
        """Count a sync that an engine of the generation failed. Return whether it may join again.
        Its new starts might take long to fail, so that the launcher would never give up."""
        engine = self.replicas[replica]
        self._faults[engine] += 1
        return self._faults[engine] < MAX_FAULTS

    def note_progress(self) -> None:
        """Note that the generation works."""
        self.num_failures, self._newest = 0, set()

    def check_present(self) -> None:
        """Raise EnginesChanged if a rank of the generation is known to be gone. On rank 0."""
        if gone := [rank for rank in self.current if self._is_gone(rank)]:
            raise EnginesChanged(f"rank {gone[0]} ended while it joined the others")

    @property
    def replaceable(self) -> list[int]:
        """Ranks that the run can go on without: those of the generation's engines, and without any
        those of all engines, unless the run only saves."""
        current = [rank for rank in self.current if rank >= self.num_policy]
        waits_for_first = not current and self.ending is None
        return list(range(self.num_policy, self.num_ranks)) if waits_for_first else current

    @property
    def absent(self) -> set[int]:
        """Ranks of engines that join, or do not return."""
        return set(range(self.num_policy, self.num_ranks)) - set(self.replaceable)

    def engine_of(self, rank: int) -> range:
        """Return the ranks of the engine to which a rank belongs."""
        first = rank - (rank - self.num_policy) % self.replica_size
        return range(first, first + self.replica_size)

    def set_error(self, key: str, error: DapoError) -> None:
        """Set a key of the store to an error."""
        record = ErrorRecord.of(error)
        self.store.set(key, json.dumps(record and asdict(record)))

    def _raise_error(self, key: str) -> None:
        """Raise the error that was set, if one was."""
        if self.is_set(key):
            raise ErrorRecord(**json.loads(self.store.get(key))).error()

    def after_rank0(self, what: str) -> None:
        """Wait until rank 0 calls this, too."""
        if self.rank == 0:
            self.store.set(what, "")
        self._wait_for(what)

    def knock(self) -> None:
        """Ask to join, and wait until rank 0 has decided on a generation with this rank. Raises
        RankError as `meet` does."""
        self.store.set(f"knock {self.rank} {self.start}", "")
        invitation = f"invitation {self.rank} {self.start}"
        while not self.is_set(invitation):
            self.pause("waits to join")
        self.generation = int(self.store.get(invitation))
        self._follow_decision()
        if not self._is_complete():
            self.meet(at_least=1, wait_seconds=math.inf)

    def meet_all(self, at_least: int | None = None) -> None:
        """Form the first generation, of all engines. If at least `at_least` are built, it waits
        as long again for the others, and LATE_SECONDS at least, since the last start or end, but
        not three times as long; before, only the watchdog limits the time. Collective over the
        policy's ranks, while the engines knock. Raises the error of an engine that fails."""
        self.meet(at_least=at_least or len(list(self._engines())), wait_seconds=math.inf)

    def meet(
        self,
        *,
        at_least: int,
        wait_seconds: float,
        lost: Mapping[int, float] = MappingProxyType({}),
        cause: str = "",
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Form the next generation. Collective over the ranks that are left.

        at_least      number of engines with which the run goes on; with fewer, it waits for others
        wait_seconds  time limit of this wait
        lost          ranks that rank 0 waits for no longer than until this time.monotonic()
        cause         why the last generation ended
        check_stop    raises Stopped, on rank 0, if the run was asked to stop while it waits

        If the wait fails or the run is asked to stop, the generation has the engines that are left,
        if any, and `ending` is set: the run can save, and ends. Raises RankError if generations of
        the same processes fail again and again, or if this rank was left out.
        """
        is_complete = False
        while not is_complete:
            self.generation += 1
            self.store.set(f"arrival {self.generation} {self.rank}", "")
            if self.rank == 0:
                self._decide(at_least, wait_seconds, lost, cause, check_stop)
            self._wait_for(f"members {self.generation}")
            self._follow_decision()
            if not self.current:
                self._raise_error("end")
            if self.rank not in self.current:
                raise RankError(
                    f"rank {self.rank}: the run goes on without this engine, because it or another "
                    "of its ranks did not answer in time. Its next start joins again"
                )
            is_complete = self._is_complete()
            # Not those before: new starts of them may have been invited.
            lost = dict.fromkeys(self._unready, -math.inf)

    def _is_complete(self) -> bool:
        """Return whether all ranks of the generation know that they belong to it. A group with a
        rank that is gone would not be made."""
        self.store.set(f"ready {self.generation} {self.rank}", "")
        if self.rank == 0:
            self._unready = self._missing("ready", {}, READY_SECONDS)
            self.store.set(f"complete {self.generation}", "" if self._unready else "yes")
            if not self._unready:
                self.store.set("formed", "")
        self._wait_for(f"complete {self.generation}")
        return bool(self.store.get(f"complete {self.generation}"))

    # ------------------------------------------------------------------ rank 0 decides

    def _decide(
        self,
        at_least: int,
        wait_seconds: float,
        lost: Mapping[int, float],
        cause: str,
        check_stop: Callable[[], None],
    ) -> None:
        here = set(self.current) - self._missing("arrival", lost, ARRIVAL_SECONDS)
        staying = [engine for engine in self.replicas if set(engine) <= here]
        staying = self._without_newest(staying, at_least)
        # Before the wait: a new start of the last engine may be waited for.
        self._end_leftovers(set(self.current) - {rank for engine in staying for rank in engine})
        joining: list[tuple[int, ...]] = []
        is_first = wait_seconds == math.inf
        if self.ending is None:
            try:
                if is_first:
                    joining = self._wait_for_first(len(staying), at_least, check_stop)
                else:
                    joining = self._wait_for_others(
                        len(staying), at_least, wait_seconds, check_stop
                    )
            except DapoError as error:
                if is_first:  # there is nothing to save yet
                    self._end(error)
                self.ending = error
        for rank in (rank for engine in joining for rank in engine):
            self._starts[rank] = num_starts(self.store, rank)
            self.store.set(f"invitation {rank} {self._starts[rank]}", str(self.generation))
        engines = sorted({*staying, *joining})
        members = [*range(self.num_policy), *(rank for engine in engines for rank in engine)]
        is_same = not joining and members == list(self.current)
        self.num_failures = self.num_failures + 1 if is_same else 0
        self._newest = set(joining) or self._newest
        if self.num_failures == MAX_FAILURES:
            self._end(
                RankError(
                    f"{MAX_FAILURES} times in a row, the ranks could not work together, although "
                    f"all were there: {cause}. See the network between the nodes, and "
                    "GLOO_SOCKET_IFNAME"
                )
            )
        self._publish(members)

    def _wait_for_first(
        self, num_staying: int, at_least: int, check_stop: Callable[[], None]
    ) -> list[tuple[int, ...]]:
        """Return the engines that join in the first generation (`meet_all`)."""
        changed, enough_at = time.monotonic(), math.inf
        counts = (0, 0, 0)
        while True:
            joining = self._joining()
            num_engines, now = num_staying + len(joining), time.monotonic()
            # An end counts, because the watchdog itself may have killed the engine.
            counts, before = (*self._num_starts_and_ends(), num_engines), counts
            changed = now if counts != before else changed
            if num_engines >= at_least:
                enough_at = min(enough_at, now)
                patience = max(LATE_SECONDS, enough_at - self.began)
                is_late = now > min(changed + patience, enough_at + 2 * patience)
                if is_late or num_engines == len(list(self._engines())):
                    return joining
            check_stop()
            self._raise_error("failure")
            # Without enough, the watchdog limits the time from the last start or end.
            self.pause("waits for engines" if enough_at <= now or changed == now else "")

    def _wait_for_others(
        self,
        num_staying: int,
        at_least: int,
        wait_seconds: float,
        check_stop: Callable[[], None],
    ) -> list[tuple[int, ...]]:
        """Return the engines that join, when there are enough with those that stay. Raises
        TooFewEnginesError if the time is over."""
        deadline = time.monotonic() + wait_seconds
        while num_staying + len(joining := self._joining()) < at_least:
            check_stop()
            if time.monotonic() > deadline:
                raise TooFewEnginesError(
                    f"{num_staying + len(joining)} engines are left, fewer than "
                    f"engine.min_replicas = {at_least}, and none returned within "
                    f"{wait_seconds:.0f} s. See their logs"
                )
            self.pause("waits for engines")
        return joining

    def _without_newest(
        self, engines: list[tuple[int, ...]], at_least: int
    ) -> list[tuple[int, ...]]:
        """Return `engines`, without those that joined last if generations fail since then: others
        may not reach them."""
        older = [engine for engine in engines if engine not in self._newest]
        if self.num_failures == 0 or len(older) < max(at_least, 1):
            return engines
        self._faults.update(self._newest)
        return older

    def _end(self, error: DapoError) -> NoReturn:
        """Raise an error on all ranks."""
        self.set_error("end", error)
        self._publish([])  # so that no rank waits
        raise error

    def _missing(self, word: str, until: Mapping[int, float], seconds: float) -> set[int]:
        """Wait until the ranks of `current` have set their keys `word`. Return those that do not:
        they are gone, or take longer than `seconds`. Those of the policy always come.

        until  ranks that get less time, until this time.monotonic()
        """
        deadline = time.monotonic() + seconds
        lost: set[int] = set()
        while True:
            missing = {
                rank for rank in self.current if not self.is_set(f"{word} {self.generation} {rank}")
            }
            now = time.monotonic()
            is_late = now > deadline
            lost |= {
                rank
                for rank in missing
                if rank >= self.num_policy and (is_late or now > until.get(rank, math.inf))
            }
            lost |= {rank for rank in missing if self._is_gone(rank)}
            if missing <= lost:
                return missing
            # If only ranks of the policy are missing, they hang, and the watchdog's limit applies.
            self.pause("" if is_late else "waits for the other ranks")

    def _end_leftovers(self, ranks: Collection[int]) -> None:
        """Kill the engines among `ranks`: they hang and keep memory, or are about to end."""
        left = [
            process_of(self.store, rank)
            for rank in ranks
            if rank >= self.num_policy and not self._is_restarted(rank)
        ]
        for process in left:
            ask_to_kill(*process, after_seconds=LEAVING_SECONDS)
        deadline = time.monotonic() + LEAVING_SECONDS
        while any(runs_here(*process) for process in left) and time.monotonic() < deadline:
            self.pause("waits for ranks that leave")
        for process in left:
            kill_here(*process)

    def _num_starts_and_ends(self) -> tuple[int, int]:
        """Return how many processes of engines have started, and how many of the newest ended."""
        starts = {
            rank: num_starts(self.store, rank) for rank in range(self.num_policy, self.num_ranks)
        }
        num_ended = sum(self._has_ended(rank) for rank, number in starts.items() if number)
        return sum(starts.values()), num_ended

    def _publish(self, members: list[int]) -> None:
        record = ErrorRecord.of(self.ending)
        decision = [members, self.num_failures, record and asdict(record)]
        self.store.set(f"members {self.generation}", json.dumps(decision))

    def _has_ended(self, rank: int) -> bool:
        return has_ended(*process_of(self.store, rank))

    def _is_gone(self, rank: int) -> bool:
        """Return whether the process of an engine's rank that took part is known to be gone."""
        return rank >= self.num_policy and (self._has_ended(rank) or self._is_restarted(rank))

    def _is_restarted(self, rank: int) -> bool:
        """Return whether a newer start of a rank exists than that which took part."""
        return num_starts(self.store, rank) > self._starts.get(rank, 0)

    def _waits(self, engine: tuple[int, ...]) -> bool:
        """Return whether the newest starts of all ranks of an engine wait to join, and may."""
        return self._faults[engine] < MAX_FAULTS and all(
            self._is_restarted(rank)
            and self.is_set(f"knock {rank} {num_starts(self.store, rank)}")
            and not self._has_ended(rank)
            for rank in engine
        )

    def _joining(self) -> list[tuple[int, ...]]:
        """Return the engines that wait to join."""
        return [engine for engine in self._engines() if self._waits(engine)]

    def _engines(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks of each engine of the job, present or not."""
        for first in range(self.num_policy, self.num_ranks, self.replica_size):
            yield tuple(self.engine_of(first))

    def _follow_decision(self) -> None:
        decision = json.loads(self.store.get(f"members {self.generation}"))
        members, self.num_failures, record = decision
        self.current = tuple(members)
        self.ending = record and ErrorRecord(**record).error()

    def _wait_for(self, key: str) -> None:
        """Wait until rank 0 has set a key. Its signs of life count as those of this rank, so that
        the watchdog ends the run if rank 0 hangs meanwhile."""
        last = None
        while not self.is_set(key):
            sign = self.store.get("sign of life") if self.is_set("sign of life") else b""
            self.pause("waits for rank 0" if sign != last else "")
            last = sign

    def pause(self, activity: str) -> None:
        """Wait a moment, with a sign of life unless `activity` is empty."""
        if activity:
            self.on_activity(activity)
            if self.rank == 0 and time.monotonic() > self._last_sign + SIGN_SECONDS:
                self._last_sign = time.monotonic()
                self.store.set("sign of life", str(self._last_sign))
        time.sleep(POLL_SECONDS)

    def is_set(self, key: str) -> bool:
        """Return whether a key of the store is set."""
        return bool(self.store.check([key]))
