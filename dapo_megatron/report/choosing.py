"""Choice of the completions in a report: the strange ones of the whole run, and an even spread.

Whoever looks for the one strange completion among a million finds it here if it is strange in any
of the ways below. Groups are kept whole, for a completion is judged against its siblings.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain, islice, zip_longest
from math import inf
from typing import Any

from dapo_megatron.report.recorded import StepIndex

ASKED, RANDOM = "asked for", "random"
LONGEST, UNLIKELY, UNSURE = "longest", "lowest log-prob", "lowest mean log-prob"
OLDEST, GAP, TRUNCATED = "oldest weights", "largest gap", "truncated"
UNGRADED, UNPARSED = "no grade", "no answer found"
LONE_WRONG, LONE_RIGHT = "wrong among right", "right among wrong"

KEPT = 8
"""Groups remembered of each way to be strange; how many of them are shown is a matter of room."""
_MISSES = 8
"""Groups that may be too large for the room that is left, before no more are tried."""


@dataclass(frozen=True)
class Wanted:
    """Size of the choice, and the groups that are kept in any case."""

    completions: int
    """At most, but for those asked for; a first group is kept even if it is larger."""
    tokens: int
    """At most, in all: the page's size."""
    tickets: frozenset[int] = frozenset()
    """Groups asked for: kept in any case."""
    gaps: Mapping[int, int] = field(default_factory=dict)
    """Ticket -> sample of the largest gaps, largest first."""
    inspected: int = 0
    """Groups trained on, the first of each step, of which there are policy values by token."""
    seed: int = 0


@dataclass(frozen=True)
class Candidate:
    """A group, where it is, and how large it is."""

    step: int
    ticket: int
    offset: int
    num_completions: int
    num_tokens: int


@dataclass
class Pick:
    """A chosen group and why: reasons by sample, and of the group as a whole (None)."""

    group: Candidate
    reasons: dict[int | None, list[str]] = field(default_factory=dict)

    def why(self, sample: int) -> str:
        """The reasons for one of its completions, in words."""
        own = [*self.reasons.get(sample, []), *self.reasons.get(None, [])]
        extremes = sorted(place for place in self.reasons if place is not None)
        return ", ".join(own) or "beside sample " + " and ".join(map(str, extremes))


@dataclass
class _Best:
    """The groups of the largest values of one measure, each by its most extreme completion."""

    found: list[tuple[float, float, Candidate, int | None]] = field(default_factory=list)

    @property
    def bar(self) -> float:
        """Values must be above it."""
        return self.found[-1][0] if len(self.found) == KEPT else -inf

    def add(self, value: float, tie: float, group: Candidate, sample: int | None) -> None:
        self.found.append((value, tie, group, sample))
        self.found.sort(key=lambda one: one[:2], reverse=True)
        del self.found[KEPT:]


class Chooser:
    """Sees the indexes of a run's steps one by one, and remembers little of each.

    Example: `chooser = Chooser(wanted, num_steps=len(files))`, `chooser.see(index)` for each step
    in step order, then `chooser.choose()`.
    """

    def __init__(self, wanted: Wanted, num_steps: int) -> None:
        self._wanted = wanted
        self._each_step = max(1, -(-wanted.completions // max(num_steps, 1)))
        self._best: dict[str, _Best] = {}
        self._asked: dict[int, Candidate] = {}
        self._gaps: dict[int, Candidate] = {}
        self._spread: list[list[Candidate]] = []
        self.num_seen = 0
        """Completions."""
        self.is_full = False
        """There were more to choose, but no room for their tokens."""

    def see(self, index: StepIndex, has_policy: bool = False) -> None:
        """The next step. `has_policy`: there are policy values of its first trained groups."""
        step = _Step(index, random.Random(f"{self._wanted.seed}:{index.step}"))
        self.num_seen += len(index.completions["group"])
        self._asked |= step.candidates(self._wanted.tickets)
        self._gaps |= step.candidates(self._wanted.gaps.keys())
        self._see_extremes(step)
        self._see_kinds(step)
        self._see_lone(step)
        self._spread.append(step.draw(self._each_step, self._wanted.inspected if has_policy else 0))

    def see_asked(self, index: StepIndex) -> None:
        """A step of which nothing is to be chosen, but what was asked for."""
        asked = _Step(index, random.Random(0)).candidates(self._wanted.tickets)
        self._asked |= asked
        self.num_seen += sum(group.num_completions for group in asked.values())

    def choose(self) -> list[Pick]:
        """The chosen groups, the most wanted first: those asked for, then in turn the next strange
        one and the next of the spread, until the room is full."""
        picks = {
            ticket: Pick(group, {None: [ASKED]}) for ticket, group in sorted(self._asked.items())
        }
        room = _Room(self._wanted.completions, self._wanted.tokens)
        for pick in picks.values():
            room.take(pick.group)
        misses = 0
        evenly = ((RANDOM, group, None) for group in self._evenly())
        for turn in zip_longest(self._strange(), evenly):
            for reason, group, sample in filter(None, turn):
                if group.ticket in picks:
                    if reason != RANDOM:
                        picks[group.ticket].reasons.setdefault(sample, []).append(reason)
                elif room.has_for(group) and misses < _MISSES:
                    room.take(group)
                    picks[group.ticket] = Pick(group, {sample: [reason]})
                elif reason == RANDOM:
                    misses += 1
            if room.is_full or misses >= _MISSES:
                break
        self.is_full = room.has_refused
        return list(picks.values())

    @property
    def missing(self) -> list[int]:
        """Tickets that were asked for and are in no index."""
        return sorted(self._wanted.tickets - self._asked.keys())

    # ------------------------------------------------------------------------ seeing

    def _see_extremes(self, step: _Step) -> None:
        """Offer the largest values of the step by each measure, if they are among the run's."""
        columns = step.index.completions
        ages = [age or 0 for age in columns["age"]]
        measures: tuple[tuple[str, list[float]], ...] = (
            (LONGEST, columns["num_tokens"]),
            (UNLIKELY, [-inf if one is None else -one for one in columns["logprob_min"]]),
            (UNSURE, [-inf if one is None else -one for one in columns["logprob_mean"]]),
            (OLDEST, ages if any(ages) else []),
        )
        for reason, values in measures:
            best = self._best.setdefault(reason, _Best())
            if not values or max(values) <= best.bar:
                continue
            seen = set()
            for row in nlargest(4 * KEPT, range(len(values)), key=values.__getitem__):
                place = columns["group"][row]
                if values[row] > best.bar and place not in seen:
                    seen.add(place)
                    self._offer(reason, values[row], step, place, row)

    def _see_kinds(self, step: _Step) -> None:
        """Offer one of each kind of the step, by chance. By chance again, some steps stay."""
        columns = step.index.completions
        rows = range(len(columns["group"]))
        kinds = {
            TRUNCATED: [row for row in rows if columns["finish"][row] == "length"],
            UNGRADED: [row for row in rows if columns["score"][row] is None],
            UNPARSED: [row for row in rows if columns["parsed"][row] is False],
        }
        for reason, found in kinds.items():
            if found:
                row = step.chance.choice(found)
                place = columns["group"][row]
                self._offer(reason, step.chance.random(), step, place, row)
        for name, column in (("set", "source"), ("fate", "fate")):
            by_value: dict[Any, list[int]] = {}
            for place, value in enumerate(step.index.groups[column]):
                by_value.setdefault(value, []).append(place)
            for value, places in by_value.items():
                place = step.chance.choice(places)
                self._offer(f"{name} {value}", step.chance.random(), step, place, None)

    def _see_lone(self, step: _Step) -> None:
        """The groups most of whose completions agree, and the one that does not."""
        columns = step.index.completions
        graded = [(g, c) for g, c in zip(columns["group"], columns["correct"]) if c is not None]
        size = Counter(place for place, _ in graded)
        right = Counter(place for place, correct in graded if correct)
        for place, num in size.items():
            share = right[place] / num
            if 0.0 < share < 1.0 and share != 0.5:
                reason = LONE_WRONG if share > 0.5 else LONE_RIGHT
                value = max(share, 1.0 - share)
                if value > self._best.setdefault(reason, _Best()).bar:
                    row = step.row(place, correct=reason == LONE_RIGHT)
                    self._offer(reason, value, step, place, row)

    def _offer(self, reason: str, value: float, step: _Step, place: int, row: int | None) -> None:
        best = self._best.setdefault(reason, _Best())
        if value > best.bar:
            sample = None if row is None else step.index.completions["sample"][row]
            best.add(value, step.chance.random(), step.candidate(place), sample)

    # ------------------------------------------------------------------------ choosing

    def _strange(self) -> Iterable[tuple[str, Candidate, int | None]]:
        """The first of every measure, then the second of every one, and so on."""
        gaps = [
            (GAP, self._gaps[ticket], sample)
            for ticket, sample in self._wanted.gaps.items()
            if ticket in self._gaps
        ]
        one_set = sum(reason.startswith("set ") for reason in self._best) == 1
        measures = [gaps] + [
            [(reason, group, sample) for _, _, group, sample in best.found]
            for reason, best in self._best.items()
            if not (one_set and reason.startswith("set "))
        ]
        for turn in zip_longest(*measures):
            yield from filter(None, turn)

    def _evenly(self) -> Iterable[Candidate]:
        """The drawn groups: one of every step, then a second of every one, in an order of steps of
        which any beginning is an even spread."""
        order = spread(len(self._spread))
        for turn in range(max(map(len, self._spread), default=0)):
            for place in order:
                if turn < len(self._spread[place]):
                    yield self._spread[place][turn]


def spread(num: int) -> list[int]:
    """0..num-1 in an order of which every beginning lies evenly over the whole: by the numbers'
    bits read backwards (van der Corput's sequence)."""
    num_bits = max(num - 1, 0).bit_length()
    backwards = (int(f"{one:0{num_bits}b}"[::-1], 2) for one in range(2**num_bits))
    return [place for place in backwards if place < num]


@dataclass
class _Room:
    completions: int
    tokens: int
    taken: int = 0
    has_refused: bool = False
    """A group for its tokens."""

    def has_for(self, group: Candidate) -> bool:
        if self.taken == 0 and self.completions > 0:
            return True
        if group.num_completions > self.completions:
            return False
        self.has_refused |= group.num_tokens > self.tokens
        return group.num_tokens <= self.tokens

    def take(self, group: Candidate) -> None:
        self.taken += 1
        self.completions -= group.num_completions
        self.tokens -= group.num_tokens

    @property
    def is_full(self) -> bool:
        return self.completions <= 0 or self.tokens <= 0


class _Step:
    """One index, and what is asked of it more than once."""

    def __init__(self, index: StepIndex, chance: random.Random) -> None:
        self.index, self.chance = index, chance
        self._num_tokens: Counter[int] = Counter()
        columns = index.completions
        self._sizes = Counter(columns["group"])
        for place, num_tokens in zip(columns["group"], columns["num_tokens"]):
            self._num_tokens[place] += num_tokens

    def candidate(self, place: int) -> Candidate:
        ticket, offset = (self.index.groups[name][place] for name in ("ticket", "offset"))
        sizes = self._sizes[place], self._num_tokens[place]
        return Candidate(self.index.step, ticket, offset, *sizes)

    def candidates(self, tickets: Collection[int]) -> dict[int, Candidate]:
        """Return the groups of this step that have one of these tickets."""
        own = self.index.groups["ticket"]
        return {ticket: self.candidate(own.index(ticket)) for ticket in {*own} & {*tickets}}

    def row(self, place: int, correct: bool) -> int:
        """The first completion of a group that is right, or wrong."""
        columns = self.index.completions
        both = zip(columns["group"], columns["correct"])
        return next(row for row, found in enumerate(both) if found == (place, correct))

    def draw(self, num: int, inspected: int) -> list[Candidate]:
        """Groups drawn by chance, in turn one with policy values (as far as there are any) and one
        of all."""
        places = range(len(self.index.groups["ticket"]))
        trained = [place for place in places if self.index.groups["fate"][place] == "trained"]
        with_values = trained[:inspected]
        self.chance.shuffle(with_values)
        of_all = self.chance.sample(places, min(num, len(places)))
        in_turn = chain.from_iterable(zip_longest(with_values, of_all))
        order = dict.fromkeys(place for place in in_turn if place is not None)
        return [self.candidate(place) for place in islice(order, max(num, 2))]
