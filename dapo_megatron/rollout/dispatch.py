"""The queue of requests for unfinished completions, and the checks of what replicas report.

The dispatcher hands requests to replicas with free slots and records which replica has which. Any
replica can continue an unfinished completion. A report that contradicts the record is refused as a
whole, by name, before anything is changed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dapo_megatron.engine.messages import GroupRequest, Report, Returned, Sampling
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, Finish, Grade, RankError


class Driver(Protocol):
    """All engines of a run, as the coordinator sees them."""

    num_replicas: int
    max_sequences: int
    """Maximum number of requests that one replica runs at once."""

    @property
    def lost(self) -> set[int]:
        """Replicas that cannot sample now. Nothing is sent to them."""

    @property
    def grade_seconds(self) -> float:
        """Total seconds that a replica waited for graders while its engine was idle, mean over
        replicas."""

    @property
    def last_errors(self) -> Mapping[str, str]:
        """Last error of a grader, by data set."""

    @property
    def stop_signal(self) -> str:
        """Name of a signal that asked the run to stop, or empty."""

    def name(self, replica: int) -> str:
        """Return a replica's name for errors, such as "engine 3 (node n4, process 1234)"."""

    def start(self, sampling: Sampling) -> None:
        """Start a phase in which all requests have these sampling parameters. Raises EnginesLost if
        no engine is left."""

    def advance(self, requests: Sequence[Sequence[GroupRequest]]) -> list[tuple[int, Report]]:
        """Send each replica its requests. Return the reports that have arrived, as (replica,
        report); none if there is no news for a while."""

    def interrupt(self) -> list[tuple[int, Report]]:
        """Stop all engines. Return the last reports, with all completions that they have."""


@dataclass(frozen=True, slots=True)
class Events:
    """News from all replicas."""

    sampled: list[tuple[int, Completion]]
    """(ticket, completion) of newly finished completions, without grades."""
    graded: list[tuple[int, int, Grade | None, str]]
    """(ticket, sample, grade or None, "graded" or why there is no grade)."""
    unfinished: list[tuple[int, Completion]]
    """(ticket, completion) of unfinished completions, after an interrupt."""
    turn_counts: Mapping[str, float] = field(default_factory=dict)
    """See Report."""
    orphans: frozenset[int] = frozenset()
    """Tickets with requests that lost replicas had, after an interrupt."""
    stop: str = ""
    """Name of the stop signal, or empty. If there is one, `graded` has no failures: the signal may
    also have killed graders, so these completions are graded again after a resume."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A request that a replica has, and the completion so far, without its tokens."""

    replica: int
    segments: tuple[Segment, ...]
    is_finished: bool
    """Whether the completion is only graded."""


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
        self._to_grade: list[tuple[int, int]] = []
        self._to_talk: list[tuple[int, int]] = []
        """Completions with an environment to continue. They were in engines before, and go there
        again at once, because a replica keeps their instances only for the next phase."""
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._sent = [0] * driver.num_replicas
        """Number of requests that each replica was asked to sample in this phase."""
        self._running = [0] * driver.num_replicas
        """Number of those that it still samples, without those that wait for an environment."""
        self._waiting = list(self._running)

    @property
    def room(self) -> int:
        """Free engine capacity, in requests, minus the queue length; may be negative."""
        capacity = self._driver.max_sequences * len(self._present)
        return capacity - sum(self._running[r] for r in self._present) - len(self._queue)

    def start(self, version: int | None = None) -> None:
        """Start a phase. New tokens must be of the weights `version`; None: of any. Raises
        EnginesLost if no engine is left."""
        self._version = version
        self._num_lost = len(self._driver.lost)
        self._driver.start(self._sampling)

    def restart(self) -> None:
        """Start the interrupted phase again."""
        self.start(self._version)

    @property
    def is_broken(self) -> bool:
        """Whether a replica was lost since the start of the phase."""
        return len(self._driver.lost) > self._num_lost

    def submit(self, group: OpenGroup) -> bool:
        """Queue requests for what a group lacks: the rest of its completions, and grades. Lower
        tickets go first. Return whether there is something to sample."""
        unfinished = group.to_sample()
        for sample, so_far in unfinished:
            if so_far is not None and group.prompt.environment:
                self._to_talk.append((group.ticket, sample))
            else:
                heapq.heappush(self._queue, (group.ticket, sample))
        self._to_grade += [(group.ticket, completion.sample) for completion in group.to_grade()]
        return bool(unfinished)

    def advance(self) -> Events:
        """Fill the engines from the queue, and wait for news from them.

        Raises RankError naming the replica whose report contradicts what it was asked for.
        """
        return self._take(self._driver.advance(self._hand_out()), is_interrupted=False)

    def interrupt(self) -> Events:
        """Clear the queue and stop the engines. Return the last events, with an unfinished
        completion for each request that has tokens. Raises RankError as `advance` does."""
        self._queue.clear()
        self._to_grade.clear()
        self._to_talk.clear()
        events = self._take(self._driver.interrupt(), is_interrupted=True)
        lost = self._driver.lost
        orphans = {ticket for (ticket, _), item in self._in_flight.items() if item.replica in lost}
        self._in_flight.clear()
        self._sent = [0] * self._driver.num_replicas
        self._running, self._waiting = list(self._sent), list(self._sent)
        return replace(events, orphans=frozenset(orphans))

    # ------------------------------------------------------------------ handing out

    def _hand_out(self) -> list[list[GroupRequest]]:
        """Take requests from the queue for each replica. Return them by replica.

        The completions of a group go to the replica with the most room, and stay together if they
        fit, to share the prompt in the prefix cache.
        """
        by_replica: list[dict[int, list[int]]] = [{} for _ in self._running]
        present = self._present

        def give(replica: int, ticket: int, sample: int, so_far: Completion | None) -> None:
            is_finished = so_far is not None and so_far.finish is not Finish.UNFINISHED
            by_replica[replica].setdefault(ticket, []).append(sample)
            segments = () if so_far is None else so_far.segments
            self._in_flight[ticket, sample] = _InFlight(replica, segments, is_finished)
            if not is_finished:
                self._sent[replica] += 1
                self._running[replica] += 1

        for ticket, sample in self._to_grade if present else ():
            if ticket in self._groups:  # else it expired before the first turn (on_policy)
                completion = self._groups[ticket].completions[sample]
                give(present[ticket % len(present)], ticket, sample, completion)
        self._to_grade.clear()
        for ticket, sample in self._to_talk if present else ():
            so_far = self._groups[ticket].completions[sample]
            home = [segment.engine for segment in so_far.segments if not segment.is_observed][-1]
            if home not in present:
                home = min(present, key=self._load)
            give(home, ticket, sample, so_far)
        self._to_talk.clear()
        last_ticket, replica = -1, present[0] if present else 0
        while self._queue and present:
            ticket, sample = self._queue[0]
            if ticket != last_ticket or self._is_full(replica):
                replica = min(present, key=self._load)
                last_ticket = ticket
            if self._is_full(replica):
                break
            heapq.heappop(self._queue)
            give(replica, ticket, sample, self._groups[ticket].completions.get(sample))
        return [
            [self._request(ticket, samples) for ticket, samples in by_ticket.items()]
            for by_ticket in by_replica
        ]

    def _load(self, replica: int) -> int:
        """Return the number of completions that a replica has, sampled or waiting."""
        return self._running[replica] + self._waiting[replica]

    def _is_full(self, replica: int) -> bool:
        """Return whether a replica has no free slot, or as many completions wait on it as it has
        slots. Each has a process."""
        limit = self._driver.max_sequences
        return self._running[replica] >= limit or self._load(replica) >= 2 * limit

    def _request(self, ticket: int, samples: Sequence[int]) -> GroupRequest:
        group = self._groups[ticket]
        so_far = tuple((sample, group.completions.get(sample)) for sample in samples)
        return GroupRequest(ticket, group.prompt, so_far)

    @property
    def _present(self) -> list[int]:
        """Replicas that are not lost."""
        lost = self._driver.lost
        return [replica for replica in range(len(self._running)) if replica not in lost]

    # ------------------------------------------------------------------ checking reports

    def _take(self, reports: Sequence[tuple[int, Report]], *, is_interrupted: bool) -> Events:
        """Check reports, given as (replica, report), and return them as events."""
        returned: set[tuple[int, int]] = set()
        for replica, report in reports:
            for item in report.returned:
                ticket, completion, _ = item
                key = ticket, completion.sample
                fault = self._fault(replica, item, is_interrupted=is_interrupted)
                if fault or key in returned:
                    self._refuse(replica, ticket, completion.sample, fault or "returned twice")
                returned.add(key)
            if report.num_sampled + report.num_waiting > self._sent[replica]:
                fault = f"{report.num_sampled} requests sampled, but {self._sent[replica]} sent"
                if report.num_waiting:
                    fault = f"{report.num_waiting} waiting, {fault}"
                raise RankError(f"{self._driver.name(replica)}: {fault}")
        for replica, report in reports:
            num_sampling = self._sent[replica] - report.num_sampled - report.num_waiting
            self._running[replica], self._waiting[replica] = num_sampling, report.num_waiting
        stop = self._driver.stop_signal
        items = [(replica, item) for replica, report in reports for item in report.returned]
        sampled, unfinished = [], []
        for replica, (ticket, completion, why) in items:
            in_flight = self._in_flight[ticket, completion.sample]
            segments = _stamped(in_flight.segments, completion.segments, replica)
            completion = replace(completion, segments=segments)
            has_failed = why and completion.grade is None
            if completion.finish is Finish.UNFINISHED:
                unfinished.append((ticket, completion))
            elif stop and has_failed and self._groups[ticket].prompt.environment:
                pass  # its environment failed; it is sampled again after a resume
            elif not in_flight.is_finished:
                sampled.append((ticket, replace(completion, grade=None)))
        graded = [
            (ticket, completion.sample, completion.grade, why)
            for _, report in reports
            for ticket, completion, why in sorted(report.returned, key=_key)
            if why and not (stop and completion.grade is None)
        ]
        for key in returned:
            del self._in_flight[key]
        counts: Counter[str] = Counter()
        for _, report in reports:
            counts.update(report.turn_counts)
        return Events(sampled, graded, unfinished, counts, stop=stop)

    def _fault(self, replica: int, item: Returned, *, is_interrupted: bool) -> str:
        """Return what is wrong with a returned completion; an empty string if nothing is."""
        ticket, completion, why = item
        in_flight = self._in_flight.get((ticket, completion.sample))
        if in_flight is None or in_flight.replica != replica:
            return "a completion that this replica was not asked for"
        if not is_interrupted and not why:
            return "returned without a grade, but it was not interrupted"
        if why and completion.finish is Finish.UNFINISHED:
            return "graded, but not finished"
        num_tokens, limit = completion.num_tokens, self._sampling.max_tokens
        if len(completion.logprobs) != num_tokens:
            return f"{len(completion.logprobs)} log-probs for {num_tokens} tokens"
        if sum(segment.num_tokens for segment in completion.segments) != num_tokens:
            return f"segments {completion.segments} for {num_tokens} tokens"
        if not completion.num_sampled:
            return "none of its tokens was sampled"
        if completion.longest_branch > limit:
            return f"{completion.longest_branch} tokens, with a limit of {limit}"
        num_kept = _num_kept(in_flight.segments, completion.segments)
        if num_kept is None and not self._groups[ticket].prompt.environment:
            return f"segments {completion.segments} after {in_flight.segments}"
        for segment in completion.segments[num_kept or 0 :]:
            if not segment.is_observed and self._version not in (None, segment.version):
                return f"its last tokens are of weights {segment.version}, not {self._version}"
        return ""

    def _refuse(self, replica: int, ticket: int, sample: int, fault: str) -> None:
        raise RankError(
            f"{self._driver.name(replica)}: its report was refused and changed nothing: ticket "
            f"{ticket}, sample {sample}: {fault}"
        )


def _key(item: Returned) -> tuple[int, int]:
    """Return what grades are sorted by, because their order of arrival depends on timing."""
    ticket, completion, _ = item
    return ticket, completion.sample


def _num_kept(so_far: tuple[Segment, ...], segments: tuple[Segment, ...]) -> int | None:
    """Return how many segments of a completion so far are among its `segments` now. The last one
    may have grown, because the run resumed. None if these are of a completion that was sampled
    again, which only one with an environment may be."""
    num_kept = len(so_far)
    if segments[:num_kept] != so_far:
        num_kept -= 1
    is_shorter = sum(s.num_tokens for s in segments) < sum(s.num_tokens for s in so_far)
    return None if segments[:num_kept] != so_far[:num_kept] or is_shorter else num_kept


def _stamped(
    so_far: tuple[Segment, ...], segments: tuple[Segment, ...], replica: int
) -> tuple[Segment, ...]:
    """Return segments with the replica that sampled those that were not kept."""
    num_kept = _num_kept(so_far, segments) or 0
    return segments[:num_kept] + tuple(
        segment if segment.is_observed else replace(segment, engine=replica)
        for segment in segments[num_kept:]
    )
