"""The queue of requests for unfinished completions, and the checks of what replicas report.

The dispatcher hands requests to replicas with free slots and records which replica has which. An
unfinished completion of an earlier step continues on the replica that holds its tokens. A report
that contradicts the record is refused as a whole, by name, before anything is changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dapo_megatron.rollout.driver import Driver
from dapo_megatron.rollout.messages import Graded, GroupRequest, Report, Sampled, Sampling
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.types import CompletionSummary, Finish, RankError, Segment


@dataclass(frozen=True, slots=True)
class Events:
    """News from all replicas."""

    sampled: list[Sampled]
    """Finished completions, not graded yet."""
    graded: list[Graded]
    unfinished: list[Sampled]
    """Unfinished completions, after an interrupt."""
    orphans: frozenset[int] = frozenset()
    """Tickets with requests that lost replicas had, after an interrupt."""
    stop: str = ""
    """Name of the stop signal, or empty. If there is one, `graded` is empty: the signal may also
    have killed graders, so these completions are graded again after a resume."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A request that a replica has."""

    replica: int
    segments: tuple[Segment, ...]
    """Those of the completion so far."""


class Dispatcher:
    """One queue of requests for all replicas, in ticket order, for one phase at a time.

    groups      open groups by ticket, kept up to date by the caller
    is_closed   whether a ticket was open once and is not any more
    """

    def __init__(
        self,
        driver: Driver,
        sampling: Sampling,
        groups: Mapping[int, OpenGroup],
        is_closed: Callable[[int], bool] = lambda ticket: False,
    ) -> None:
        self._driver = driver
        self._sampling = sampling
        self._groups = groups
        self._is_closed = is_closed
        self._version: int | None = None
        self._num_lost = 0
        self._queue: list[tuple[int, int]] = []
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._running = [0] * driver.num_replicas
        self._claims = [0] * driver.num_replicas
        """Number of queued requests that only this replica can continue."""

    @property
    def room(self) -> int:
        """Free engine capacity, in requests, minus the queue length; may be negative."""
        present = self._driver.num_replicas - len(self._driver.lost)
        capacity = self._driver.max_sequences * present
        return capacity - len(self._in_flight) - len(self._queue)

    def start(self, version: int | None = None, dropped: Sequence[int] = ()) -> None:
        """Start a phase. New tokens must be of the weights `version`; None: of any. Replicas drop
        their completions of the tickets `dropped`."""
        self._version = version
        self._num_lost = len(self._driver.lost)  # before it starts: a replica may be lost by that
        self._driver.start(self._sampling, dropped)

    def restart(self, dropped: Sequence[int]) -> None:
        """Start the interrupted phase again."""
        self.start(self._version, dropped)

    @property
    def is_broken(self) -> bool:
        """Whether a replica was lost since the start of the phase."""
        return len(self._driver.lost) > self._num_lost

    def submit(self, group: OpenGroup) -> bool:
        """Queue requests for the unfinished completions of a group; lower tickets go first. Return
        whether there were any."""
        unfinished = group.to_sample()
        for sample, so_far in unfinished:
            heapq.heappush(self._queue, (group.ticket, sample))
            if so_far is not None:
                self._claims[so_far.replica] += 1
        return bool(unfinished)

    def advance(self, regrade: Sequence[tuple[int, int]] = ()) -> Events:
        """Fill the engines from the queue, and wait for news from them.

        `regrade` are finished completions of a resumed run, as (ticket, sample). Raises RankError
        naming the replica whose report contradicts what it was asked for.
        """
        by_replica: list[list[tuple[int, int]]] = [[] for _ in self._running]
        for ticket, sample in regrade:
            by_replica[self._groups[ticket].completions[sample].replica].append((ticket, sample))
        reports = self._driver.advance(self._hand_out(), by_replica)
        return self._take(reports, is_interrupted=False)

    def interrupt(self) -> Events:
        """Clear the queue and stop the engines. Return the last events, with an unfinished
        completion for each request that has tokens. Raises RankError as `advance` does."""
        self._queue.clear()
        self._claims = [0] * self._driver.num_replicas
        events = self._take(self._driver.interrupt(), is_interrupted=True)
        lost = self._driver.lost
        orphans = [key[0] for key, request in self._in_flight.items() if request.replica in lost]
        events = replace(events, orphans=frozenset(orphans))
        self._in_flight.clear()
        self._running = [0] * self._driver.num_replicas
        return events

    # ------------------------------------------------------------------ handing out

    def _hand_out(self) -> list[list[GroupRequest]]:
        """Take requests from the queue for each replica. Return them by replica.

        A completion with tokens goes to the replica that holds them. The other completions of a
        group go to the replica with the most room, and stay together if they fit, to share the
        prompt in the prefix cache. Slots that queued completions with tokens will need are not
        free: else these would wait for one replica, while another idles.
        """
        by_replica: list[dict[int, list[tuple[int, int]]]] = [{} for _ in self._running]
        waiting: list[tuple[int, int]] = []
        last_ticket, preferred = -1, 0
        limit = self._driver.max_sequences
        load = [sum(pair) for pair in zip(self._running, self._claims, strict=True)]
        for replica in self._driver.lost:
            load[replica] = limit
        free = [replica for replica, number in enumerate(load) if number < limit]
        capacity = limit * len(self._running)
        while self._queue and len(self._in_flight) < capacity:
            ticket, sample = heapq.heappop(self._queue)
            so_far = self._groups[ticket].completions.get(sample)
            if so_far is not None:
                replica = so_far.replica
                is_full = self._running[replica] >= limit
                self._claims[replica] -= not is_full
            else:
                if ticket != last_ticket or load[preferred] >= limit:
                    free = [replica for replica in free if load[replica] < limit]
                    preferred = min(free, key=load.__getitem__, default=preferred)
                    last_ticket = ticket
                replica = preferred
                is_full = load[replica] >= limit
                load[replica] += not is_full
            if is_full:
                waiting.append((ticket, sample))
                continue
            num_tokens = 0 if so_far is None else so_far.num_tokens
            by_replica[replica].setdefault(ticket, []).append((sample, num_tokens))
            segments = () if so_far is None else so_far.segments
            self._in_flight[ticket, sample] = _InFlight(replica, segments)
            self._running[replica] += 1
        for item in waiting:
            heapq.heappush(self._queue, item)
        return [
            [
                GroupRequest(ticket, self._groups[ticket].prompt, tuple(samples))
                for ticket, samples in by_ticket.items()
            ]
            for by_ticket in by_replica
        ]

    # ------------------------------------------------------------------ checking reports

    def _take(self, reports: Sequence[tuple[int, Report]], *, is_interrupted: bool) -> Events:
        """Check reports, given as (replica, report), and return them as events."""
        finished: dict[tuple[int, int], int] = {}
        reported: set[tuple[int, int]] = set()
        graded: set[tuple[int, int]] = set()
        for replica, report in reports:
            for is_finished, ticket, completion in (
                *((True, *item) for item in report.sampled),
                *((False, *item) for item in report.unfinished or ()),
            ):
                key = ticket, completion.sample
                fault = self._fault(replica, ticket, completion, is_finished=is_finished)
                if not is_finished and not is_interrupted:
                    fault = "reported as unfinished without an interrupt"
                if fault or key in reported:
                    self._refuse(replica, ticket, completion.sample, fault or "reported twice")
                reported.add(key)
                if is_finished:
                    finished[key] = replica
            for ticket, sample, _, _ in report.graded:
                key = ticket, sample
                is_expected = finished.get(key) == replica or self._awaits_grade(replica, *key)
                if key in graded or not is_expected:
                    self._refuse(replica, ticket, sample, "a grade that was not asked for")
                graded.add(key)
        for ticket, sample in finished:
            self._running[self._in_flight.pop((ticket, sample)).replica] -= 1
        stop = next((report.stop for _, report in reports if report.stop), "")
        return Events(
            sampled=[item for _, report in reports for item in report.sampled],
            graded=[] if stop else [item for _, report in reports for item in report.graded],
            unfinished=[item for _, report in reports for item in report.unfinished or ()],
            stop=stop,
        )

    def _fault(
        self, replica: int, ticket: int, completion: CompletionSummary, *, is_finished: bool
    ) -> str:
        """Return what is wrong with a completion; an empty string if nothing is."""
        in_flight = self._in_flight.get((ticket, completion.sample))
        if in_flight is None or not in_flight.replica == replica == completion.replica:
            return "a completion that this replica was not asked for"
        if is_finished == (completion.finish is Finish.UNFINISHED):
            return f"reported as {'finished' if is_finished else 'unfinished'}, but it is not"
        if sum(segment.num_tokens for segment in completion.segments) != completion.num_tokens:
            return f"segments {completion.segments} for {completion.num_tokens} tokens"
        if not 0 < completion.num_tokens <= self._sampling.max_tokens:
            return f"{completion.num_tokens} tokens, with a limit of {self._sampling.max_tokens}"
        is_long = completion.num_tokens == self._sampling.max_tokens
        if is_long != (completion.finish is Finish.LENGTH) and completion.finish is not Finish.STOP:
            return f"{completion.finish.value} with {completion.num_tokens} tokens"
        if completion.grade is not None:
            return "graded before its grade was reported"
        if not is_finished and completion.segments == in_flight.segments:
            return ""  # interrupted before its first new token
        return _segment_fault(in_flight.segments, completion.segments, self._version)

    def _awaits_grade(self, replica: int, ticket: int, sample: int) -> bool:
        """Return whether a replica may report a grade. That of a closed ticket is late
        (on_policy)."""
        group = self._groups.get(ticket)
        if group is None:
            return self._is_closed(ticket)
        return group.awaits(sample) and group.completions[sample].replica == replica

    def _refuse(self, replica: int, ticket: int, sample: int, fault: str) -> None:
        raise RankError(
            f"{self._driver.name(replica)}: its report was refused and changed nothing: ticket "
            f"{ticket}, sample {sample}: {fault}"
        )


def _segment_fault(
    so_far: tuple[Segment, ...], segments: tuple[Segment, ...], version: int | None
) -> str:
    """Return why `segments` do not continue `so_far` under weights of `version` (None: any); an
    empty string if they do."""
    *before, last = segments
    if last.num_tokens < 1:
        return f"segments {segments}"
    if version is not None and last.version != version:
        return f"its last tokens are of weights {last.version}, not {version}"
    expected = so_far
    if so_far and so_far[-1].version == last.version:  # the run resumed: this segment grows
        expected = so_far[:-1]
        if last.num_tokens <= so_far[-1].num_tokens:
            return f"segments {segments} after {so_far}"
    return "" if tuple(before) == expected else f"segments {segments} after {so_far}"
