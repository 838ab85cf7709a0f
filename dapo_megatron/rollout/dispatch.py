"""The queue of requests for unfinished completions, and the checks of what replicas report.

The dispatcher hands requests to replicas with free slots and records which replica has which. Any
replica can continue an unfinished completion. A report that contradicts the record is refused as a
whole, by name, before anything is changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dapo_megatron.rollout.driver import Driver
from dapo_megatron.rollout.messages import (
    Graded,
    GroupRequest,
    Report,
    Sampled,
    Sampling,
    Ungraded,
)
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.types import Completion, Finish, RankError, Segment


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

    groups   open groups by ticket, kept up to date by the caller
    """

    def __init__(
        self,
        driver: Driver,
        sampling: Sampling,
        groups: Mapping[int, OpenGroup],
    ) -> None:
        self._driver = driver
        self._sampling = sampling
        self._groups = groups
        self._version: int | None = None
        self._num_lost = 0
        self._queue: list[tuple[int, int]] = []
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._grading: dict[tuple[int, int], int] = {}
        """Replica that grades each finished completion, as (ticket, sample). Grades of closed
        tickets may come late (on_policy)."""
        self._running = [0] * driver.num_replicas

    @property
    def room(self) -> int:
        """Free engine capacity, in requests, minus the queue length; may be negative."""
        present = self._driver.num_replicas - len(self._driver.lost)
        capacity = self._driver.max_sequences * present
        return capacity - len(self._in_flight) - len(self._queue)

    def start(self, version: int | None = None, dropped: Sequence[int] = ()) -> None:
        """Start a phase. New tokens must be of the weights `version`; None: of any. Replicas drop
        their grades of the tickets `dropped`."""
        self._grading = {
            key: replica for key, replica in self._grading.items() if key[0] not in dropped
        }
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

    def ungraded_by_lost(self) -> list[tuple[int, int]]:
        """Forget the completions that lost replicas would have graded, and return them as (ticket,
        sample)."""
        lost = [key for key, replica in self._grading.items() if replica in self._driver.lost]
        for key in lost:
            del self._grading[key]
        return lost

    def tickets_of_lost(self) -> list[int]:
        """Return the tickets with requests that lost replicas have."""
        lost = self._driver.lost
        return sorted({ticket for (ticket, _), r in self._in_flight.items() if r.replica in lost})

    def submit(self, group: OpenGroup) -> bool:
        """Queue requests for the unfinished completions of a group; lower tickets go first. Return
        whether there were any."""
        unfinished = group.to_sample()
        for sample, _ in unfinished:
            heapq.heappush(self._queue, (group.ticket, sample))
        return bool(unfinished)

    def advance(self, regrade: Sequence[tuple[int, int]] = ()) -> Events:
        """Fill the engines from the queue, and wait for news from them.

        `regrade` are finished completions of a resumed run, as (ticket, sample). Raises RankError
        naming the replica whose report contradicts what it was asked for.
        """
        reports = self._driver.advance(self._hand_out(), self._hand_out_grading(regrade))
        return self._take(reports, is_interrupted=False)

    def interrupt(self) -> Events:
        """Clear the queue and stop the engines. Return the last events, with an unfinished
        completion for each request that has tokens. Raises RankError as `advance` does."""
        self._queue.clear()
        events = self._take(self._driver.interrupt(), is_interrupted=True)
        events = replace(events, orphans=frozenset(self.tickets_of_lost()))
        self._in_flight.clear()
        self._running = [0] * self._driver.num_replicas
        return events

    # ------------------------------------------------------------------ handing out

    def _hand_out(self) -> list[list[GroupRequest]]:
        """Take requests from the queue for each replica. Return them by replica.

        The completions of a group go to the replica with the most room, and stay together if they
        fit, to share the prompt in the prefix cache.
        """
        by_replica: list[dict[int, list[int]]] = [{} for _ in self._running]
        limit, present = self._driver.max_sequences, self._present
        last_ticket, replica = -1, present[0]
        while self._queue:
            ticket, sample = self._queue[0]
            if ticket != last_ticket or self._running[replica] >= limit:
                replica = min(present, key=self._running.__getitem__)
                last_ticket = ticket
            if self._running[replica] >= limit:
                break
            heapq.heappop(self._queue)
            so_far = self._groups[ticket].completions.get(sample)
            by_replica[replica].setdefault(ticket, []).append(sample)
            segments = () if so_far is None else so_far.segments
            self._in_flight[ticket, sample] = _InFlight(replica, segments)
            self._running[replica] += 1
        return [
            [self._request(ticket, samples) for ticket, samples in by_ticket.items()]
            for by_ticket in by_replica
        ]

    def _request(self, ticket: int, samples: Sequence[int]) -> GroupRequest:
        group = self._groups[ticket]
        so_far = tuple((sample, group.completions.get(sample)) for sample in samples)
        return GroupRequest(ticket, group.prompt, so_far)

    def _hand_out_grading(self, finished: Sequence[tuple[int, int]]) -> list[list[Ungraded]]:
        """Distribute finished completions, given as (ticket, sample), over the replicas that grade
        them again. Return them by replica."""
        by_replica: list[list[Ungraded]] = [[] for _ in self._running]
        for ticket, sample in finished:
            group = self._groups[ticket]
            replica = self._present[ticket % len(self._present)]
            text = group.completions[sample].text
            by_replica[replica].append((ticket, sample, group.prompt, text))
            self._grading[ticket, sample] = replica
        return by_replica

    @property
    def _present(self) -> list[int]:
        """Replicas that are not lost."""
        return [
            replica for replica in range(len(self._running)) if replica not in self._driver.lost
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
                is_expected = replica in (finished.get(key), self._grading.get(key))
                if key in graded or not is_expected:
                    self._refuse(replica, ticket, sample, "a grade that was not asked for")
                graded.add(key)
        for key, replica in finished.items():
            self._running[self._in_flight.pop(key).replica] -= 1
            self._grading[key] = replica
        stop = next((report.stop for _, report in reports if report.stop), "")
        if not stop:  # else they are graded again
            for key in graded:
                del self._grading[key]
        return Events(
            sampled=[item for _, report in reports for item in report.sampled],
            graded=[] if stop else [item for _, report in reports for item in report.graded],
            unfinished=[item for _, report in reports for item in report.unfinished or ()],
            stop=stop,
        )

    def _fault(
        self, replica: int, ticket: int, completion: Completion, *, is_finished: bool
    ) -> str:
        """Return what is wrong with a completion; an empty string if nothing is."""
        in_flight = self._in_flight.get((ticket, completion.sample))
        if in_flight is None or in_flight.replica != replica:
            return "a completion that this replica was not asked for"
        if is_finished == (completion.finish is Finish.UNFINISHED):
            return f"reported as {'finished' if is_finished else 'unfinished'}, but it is not"
        if len(completion.logprobs) != completion.num_tokens:
            return f"{len(completion.logprobs)} log-probs for {completion.num_tokens} tokens"
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
