"""Replace the pool of engines by scripted replicas, whose every response is known in advance."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine.messages import GroupRequest, Report, Returned, Sampling
from dapo_megatron.rollout.coordinator import Coordinator, SavePoint
from dapo_megatron.segments import Segment
from dapo_megatron.types import Collected, Completion, EnginesLost, Finish, Grade, Outcome, Prompt

Correct = Callable[[int, int], bool | None]
"""(ticket, sample) -> whether it is correct, or None if the grader times out."""
Length = Callable[[int, int], int]
"""(ticket, sample) -> number of tokens of the full response."""

MAX_TOKENS = 8


class RefusedByReplica(AssertionError):
    """A replica was asked to continue a response that is not the one reported last."""


class Killed(Exception):
    """The process died in the middle of a step."""


def completion_of(
    sample: int, segments: tuple[Segment, ...], finish: Finish, grade: Grade | None = None
) -> Completion:
    """Return a completion with as many tokens as the segments."""
    num_tokens = max(sum(segment.num_tokens for segment in segments), 0)
    tokens, logprobs = array("i", bytes(4 * num_tokens)), array("f", bytes(4 * num_tokens))
    return Completion(sample, tokens, logprobs, "", finish, segments, grade)


def with_random_tokens(completion: Completion, rng: random.Random) -> Completion:
    """Return a completion with other tokens and log-probs, as many as it has."""
    number = completion.num_tokens
    return replace(
        completion,
        tokens=array("i", [rng.randrange(2**31) for _ in range(number)]),
        logprobs=array("f", [-rng.random() for _ in range(number)]),
    )


def longer(
    segments: tuple[Segment, ...], num_tokens: int, version: int, engine: int = 0
) -> tuple[Segment, ...]:
    """Return the segments with more tokens, sampled by weights of `version` in `engine`."""
    *older, last = segments or (Segment(version, 0),)
    if last.version == version:
        return (*older, Segment(version, last.num_tokens + num_tokens, engine))
    return (*older, last, Segment(version, num_tokens, engine))


Key = tuple[int, int]
"""(ticket, sample)."""


@dataclass
class ScriptedDriver:
    """Driver of replicas that advance at random (`rng`). Responses depend only on ticket and
    sample.

    Requests are checked: no completion is requested twice, no replica exceeds `max_sequences`, and
    a completion continues with exactly the tokens that were reported last.
    """

    correct: Correct
    length: Length = lambda ticket, sample: 1
    num_replicas: int = 2
    max_sequences: int = 8
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    grade_at_once: bool = True
    version: int = 0
    grade_seconds: float = 0.0
    last_errors: dict[str, str] = field(default_factory=dict)
    on_start: Callable[[], None] = lambda: None
    on_advance: Callable[[], None] = lambda: None
    on_interrupt: Callable[[], None] = lambda: None
    stop: str = ""
    """Name of a signal to report at the next turn."""
    lost: set[int] = field(default_factory=set)
    orphaned: dict[int, int] = field(default_factory=dict)
    """Number of `requests` when a replica was lost that had some of a group, by ticket."""
    requests: list[GroupRequest] = field(default_factory=list)
    """Every request so far."""
    reported: dict[Key, tuple[Segment, ...]] = field(default_factory=dict)
    """Segments of the completions that were reported, finished or not."""

    def __post_init__(self) -> None:
        self._running: list[dict[Key, tuple[Segment, ...]]] = [{} for _ in range(self.num_replicas)]
        self._to_grade: list[dict[Key, Completion]] = [{} for _ in range(self.num_replicas)]
        self._num_sampled = [0] * self.num_replicas

    @property
    def stop_signal(self) -> str:
        return self.stop

    def name(self, replica: int) -> str:
        return f"replica {replica}"

    def start(self, sampling: Sampling) -> None:
        assert not self.is_running
        self.on_start()
        if len(self.lost) == self.num_replicas:
            raise EnginesLost("no replica is left")

    def lose(self, replica: int) -> None:
        """Lose a replica, with all that it has."""
        self.lost.add(replica)
        keys = self._running[replica].keys() | self._to_grade[replica].keys()
        self.orphaned |= {ticket: len(self.requests) for ticket, _ in keys}
        self._running[replica].clear()
        self._to_grade[replica].clear()

    def advance(self, requests: Sequence[Sequence[GroupRequest]]) -> list[tuple[int, Report]]:
        assert len(requests) == self.num_replicas
        for replica, groups in enumerate(requests):
            for group in groups:
                self._start(replica, group)
        self.on_advance()
        for replica in range(self.num_replicas):
            self._move_on_and_count(replica)
        self.grade_seconds += 0.5
        reports = [
            (replica, Report(returned=self._graded(replica), num_sampled=number))
            for replica, number in enumerate(self._num_sampled)
            if replica not in self.lost
        ]
        self.rng.shuffle(reports)
        return reports

    def interrupt(self) -> list[tuple[int, Report]]:
        self.on_interrupt()
        reports = []
        for replica, running in enumerate(self._running):
            returned = self._graded(replica)
            returned += [(key[0], each, "") for key, each in self._to_grade[replica].items()]
            returned += [
                (ticket, completion_of(sample, segments, Finish.UNFINISHED), "")
                for (ticket, sample), segments in running.items()
                if segments
            ]
            number, self._num_sampled[replica] = self._num_sampled[replica], 0
            if replica not in self.lost:
                report = Report(returned=returned, num_sampled=number, is_interrupted=True)
                reports.append((replica, report))
            self.reported |= running
            running.clear()
            self._to_grade[replica].clear()
        return reports

    @property
    def is_running(self) -> bool:
        """Whether a replica has something to sample or to grade."""
        return any(self._running) or any(self._to_grade)

    def accept(self, groups: Sequence[GroupRequest]) -> None:
        """Submit requests to the only replica."""
        for group in groups:
            self._start(0, group)

    def _start(self, replica: int, group: GroupRequest) -> None:
        assert replica not in self.lost
        for sample, so_far in group.samples:
            key = group.ticket, sample
            for held in (*self._running, *self._to_grade):
                assert key not in held, f"{key} requested twice"
            segments = () if so_far is None else so_far.segments
            is_new = not segments and group.ticket in self.orphaned  # sampled again
            if not is_new and segments != self.reported.get(key, ()):
                raise RefusedByReplica(f"{key}: {segments}, not {self.reported.get(key, ())}")
            if so_far is not None and so_far.finish is not Finish.UNFINISHED:
                assert so_far.grade is None
                self._to_grade[replica][key] = so_far
            else:
                assert so_far is None or so_far.num_tokens < self.length(*key)
                self._running[replica][key] = segments
        assert len(self._running[replica]) <= self.max_sequences
        self.requests.append(group)

    def _move_on_and_count(self, replica: int) -> None:
        finished = self._move_on(replica)
        self._num_sampled[replica] += len(finished)
        self._to_grade[replica] |= {(ticket, each.sample): each for ticket, each in finished}

    def _move_on(self, replica: int) -> list[tuple[int, Completion]]:
        finished, running = [], self._running[replica]
        for key, segments in list(running.items()):
            num_tokens = sum(segment.num_tokens for segment in segments)
            more = min(self.rng.randint(0, 2), self.length(*key) - num_tokens)
            if more:
                segments = running[key] = longer(segments, more, self.version, replica)
            if num_tokens + more == self.length(*key):
                self.reported[key] = running.pop(key)
                finish = Finish.LENGTH if num_tokens + more >= MAX_TOKENS else Finish.STOP
                finished.append((key[0], completion_of(key[1], segments, finish)))
        return finished

    def _graded(self, replica: int) -> list[Returned]:
        """Take the completions that have been graded."""
        to_grade = self._to_grade[replica]
        keys = [key for key in to_grade if self.grade_at_once or self.rng.random() < 0.5]
        returned = []
        for key in keys:
            grade, why = self._grade(*key)
            returned.append((key[0], replace(to_grade.pop(key), grade=grade), why))
        return returned

    def _grade(self, ticket: int, sample: int) -> tuple[Grade | None, str]:
        right = self.correct(ticket, sample)
        if self.stop:  # the signal has killed the grader
            return None, "crash"
        if right is None:
            return None, "timeout"
        return Grade(1.0 if right else -1.0, right, "7"), "graded"


def make_coordinator(
    driver: ScriptedDriver,
    *,
    overlong: dict[str, Any] | None = None,
    **rollout: Any,
) -> Coordinator:
    """Make a coordinator for ten prompts, 4 groups of 2 per step unless `rollout` overrides it."""
    settings = {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "temperature": 0.9,
        "top_p": 1.0,
        "max_prompt_tokens": 8,
        "max_response_tokens": MAX_TOKENS,
        "on_policy": False,
        "dynamic_sampling": True,
    }
    shaping = {
        "max_tokens": MAX_TOKENS,
        "buffer_tokens": 4,
        "penalty": True,
        "filter": False,
        "filtered_in_mean": False,
    }
    return Coordinator(
        config=RolloutConfig(**{**settings, **rollout}),
        overlong=OverlongConfig(**{**shaping, **(overlong or {})}),
        stream=PromptStream(
            [Prompt("sums", index, (index,), str(index), "7") for index in range(10)],
            seed=0,
            shuffle=True,
        ),
        driver=driver,
        seed=3,
    )


def collect(coordinator: Coordinator, driver: ScriptedDriver, version: int) -> Collected:
    """Collect one step with weights of `version`."""
    driver.version = version
    return coordinator.collect(version, lambda done: None)


def resume(coordinator: Coordinator, driver: ScriptedDriver, saved: SavePoint) -> None:
    """Restore what `Coordinator.save_point` returned, written and read again."""
    state, completions = saved
    coordinator.restore(json.loads(json.dumps(state)), completions)
    driver.reported = {
        (group.ticket, sample): completion.segments
        for group in coordinator.groups.values()
        for sample, completion in group.completions.items()
    }


def moved(driver: ScriptedDriver, num_replicas: int) -> ScriptedDriver:
    """Return a driver with the same script, as after a restart with `num_replicas` replicas."""
    return replace(
        driver,
        num_replicas=num_replicas,
        requests=[],
        reported={},
        lost=set(),
        orphaned={},
        on_advance=lambda: None,
    )


def sample_ahead(coordinator: Coordinator, version: int, num_turns: int) -> None:
    """Sample for some turns, as while the policy trains."""
    turns = iter([False] * num_turns)
    coordinator.sample_ahead(version, lambda: next(turns, True))


def random_script(seed: int, keep: float) -> tuple[Correct, Length]:
    """Return correctness and length functions: uneven lengths, and some gradings fail."""

    def draw(ticket: int, sample: int, quantity: str) -> random.Random:
        return random.Random(f"{seed}/{ticket}/{sample}/{quantity}")

    def correct(ticket: int, sample: int) -> bool | None:
        if draw(ticket, sample, "dead").random() < 0.02:
            return None
        mixed = draw(ticket, 0, "mixed").random() < keep
        return sample == 0 if mixed else ticket % 2 == 0

    def length(ticket: int, sample: int) -> int:
        return min(MAX_TOKENS, 1 + int(draw(ticket, sample, "length").expovariate(0.4)))

    return correct, length


@dataclass
class History:
    """Independent record of a run's steps, which checks the promises of the coordinator.

    rollout  settings of the run
    ready    groups that were ready before the last interrupt, with which more grades may come
    """

    rollout: dict[str, Any]
    correct: Correct
    length: Length
    steps: list[Collected] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)

    @property
    def ended(self) -> dict[int, Outcome]:
        """Outcome of each ticket that has ended. No ticket ends twice."""
        ended = [(group.ticket, outcome) for step in self.steps for group, outcome in step.ended]
        assert len(dict(ended)) == len(ended)
        return dict(ended)

    def check_books(self, coordinator: Coordinator) -> None:
        """Check that every ticket is open or has ended, once, and that all counts agree."""
        ledger, ended = coordinator.ledger, self.ended
        known = [group.ticket for group in coordinator.known_groups()]
        assert sorted([*ended, *known]) == list(range(ledger.next_ticket))
        ready = {ticket: group.is_ready for ticket, group in coordinator.groups.items()}
        ledger.audit(ready)
        for group in coordinator.groups.values():
            assert group.ungradable <= group.completions.keys()
        if len(known) == len(ready):  # all that ended belongs to a step
            assert ledger.totals == Counter(outcome.value for outcome in ended.values())

    def add(self, coordinator: Coordinator, collected: Collected) -> None:
        """Check what a step collected, with the weights of as many steps as there were before."""
        version = len(self.steps)
        self.steps.append(collected)
        self.check_books(coordinator)
        tickets = [group.ticket for group in collected.train]
        ended = {group.ticket: outcome for group, outcome in collected.ended}
        assert tickets == [ticket for ticket in ended if ended[ticket] is Outcome.TRAINED]
        assert tickets == sorted(tickets) and len(tickets) == self.rollout["prompts_per_step"]
        for group, outcome in collected.ended:
            if outcome is Outcome.EXPIRED and self.rollout["on_policy"]:
                assert group.ticket > tickets[-1]
                continue
            assert outcome is self._outcome(group.ticket)
            assert len(group.completions) == self.rollout["samples_per_prompt"]
            for completion in group.completions:
                self._check_completion(group.ticket, completion, version)
        for group in coordinator.groups.values():
            assert not (group.ticket in self.ready and group.ticket < tickets[-1])
            assert group.overtaken <= self.rollout["max_overtake"]
            is_later = group.ticket > tickets[-1]
            assert is_later or (not self.rollout["on_policy"] and self.rollout["max_overtake"])
        counts = collected.counts
        assert counts["carried"] == len(coordinator.groups)
        assert sum(counts[outcome] for outcome in Outcome) == len(ended)
        issued = sum(step.counts["issued"] for step in self.steps)
        assert issued == coordinator.ledger.next_ticket

    def _outcome(self, ticket: int) -> Outcome:
        """Return the outcome that follows from the script."""
        grades = {self.correct(ticket, each) for each in range(self.rollout["samples_per_prompt"])}
        if None in grades:
            return Outcome.ABSTAINED
        if len(grades) > 1 or not self.rollout.get("dynamic_sampling", True):
            return Outcome.TRAINED
        return Outcome.ALL_CORRECT if grades == {True} else Outcome.ALL_WRONG

    def _check_completion(self, ticket: int, completion: Completion, version: int) -> None:
        assert completion.num_tokens == self.length(ticket, completion.sample)
        versions = [segment.version for segment in completion.segments]
        assert versions == sorted(set(versions))
        assert completion.num_tokens == sum(s.num_tokens for s in completion.segments)
        assert completion.grade is not None or self._outcome(ticket) is Outcome.ABSTAINED
        if self.rollout["on_policy"]:
            assert versions == [version]
        elif self.rollout["max_staleness"] is not None and self._outcome(ticket) is Outcome.TRAINED:
            assert version - versions[0] <= self.rollout["max_staleness"]
