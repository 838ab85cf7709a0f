"""Reports of replicas that contradict what they were asked for: refused by name, without effect."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.engine.messages import Report
from dapo_megatron.rollout.coordinator import Coordinator, SavePoint
from dapo_megatron.types import Completion, Finish, Grade, RankError, Segment
from tests.helpers.rollouts import (
    MAX_TOKENS,
    RefusedByReplica,
    ScriptedDriver,
    collect,
    completion_of,
    make_coordinator,
    resume,
)

Reports = list[tuple[int, Report]]


@dataclass
class LyingDriver(ScriptedDriver):
    """Driver whose reports `lie` changes. The lie happens once, at the first chance after
    `honest_turns` reports; `lie` returns None if there is no chance in these."""

    lie: Callable[[Reports], Reports | None] = lambda reports: None
    honest_turns: int = 0
    is_interrupt_wrong: bool = False
    """Lie about unfinished completions instead of finished ones."""
    coordinator: Coordinator | None = None
    before: str = ""
    """The coordinator's state before the last reports."""
    turns_since_lie: int = -1
    """-1: it has not lied yet."""

    def name(self, replica: int) -> str:
        return f"replica {replica} (rank {2 * replica}, host n{replica})"

    def advance(self, requests: Any, regrade: Any) -> Reports:
        reports = super().advance(requests, regrade)
        return reports if self.is_interrupt_wrong else self._changed(reports)

    def interrupt(self) -> Reports:
        reports = super().interrupt()
        return self._changed(reports) if self.is_interrupt_wrong else reports

    def _changed(self, reports: Reports) -> Reports:
        assert self.coordinator is not None
        self.before = state_of(self.coordinator)
        self.honest_turns -= 1
        if self.turns_since_lie >= 0:
            self.turns_since_lie += 1
        elif self.honest_turns < 0:
            lie = self.lie(sorted(reports, key=lambda item: item[0]))
            if lie is not None:
                self.turns_since_lie = 0
                return lie
        return reports


def state_of(coordinator: Coordinator) -> str:
    return json.dumps(coordinator.state(), sort_keys=True)


def lengths(ticket: int, sample: int) -> int:
    return 1 + (3 * ticket + 2 * sample) % MAX_TOKENS


def correct(ticket: int, sample: int) -> bool:
    return sample == 0


def run_until_refused(driver: LyingDriver, **settings: Any) -> str:
    """Run steps until a report is refused, and check that this changed nothing. Return the error,
    or an empty string if nothing was refused."""
    coordinator = make_coordinator(driver, **settings)
    driver.coordinator = coordinator
    version = 0
    while version < 6:
        try:
            collect(coordinator, driver, version)
        except RankError as error:
            assert state_of(coordinator) == driver.before
            coordinator.ledger.audit(coordinator._open_groups())
            continues(driver, coordinator.save_point(), version, settings)
            return str(error)
        version += 1
    return ""


def continues(
    driver: ScriptedDriver, saved: SavePoint, version: int, settings: dict[str, Any]
) -> None:
    """Check that a checkpoint resumes, and that no ticket is lost."""
    honest = ScriptedDriver(driver.correct, driver.length, rng=random.Random(1))
    resumed = make_coordinator(honest, **settings)
    resume(resumed, honest, saved)
    ended = sum(resumed.ledger.totals.values())
    for step in range(version, version + 3):
        ended += len([*collect(resumed, honest, step).ended])
    assert ended >= sum(resumed.ledger.totals.values())
    assert resumed.ledger.next_ticket == sum(resumed.ledger.totals.values()) + len(resumed.groups)


# ------------------------------------------------------------------ one lie at a time

Item = tuple[int, Completion]


def with_segments(item: Item, segments: tuple[Segment, ...]) -> Item:
    """Return the completion with as many tokens as the segments."""
    ticket, completion = item
    return ticket, completion_of(completion.sample, segments, completion.finish, completion.grade)


def change_sampled(change: Callable[[Item], Item | None]) -> Callable[[Reports], Reports | None]:
    """Return a lie about the first finished completion that `change` can change."""
    return _change("sampled", change)


def change_unfinished(change: Callable[[Item], Item | None]) -> Callable[[Reports], Reports | None]:
    return _change("unfinished", change)


def _change(
    name: str, change: Callable[[Item], Item | None]
) -> Callable[[Reports], Reports | None]:
    def lie(reports: Reports) -> Reports | None:
        for place, (replica, report) in enumerate(reports):
            for number, item in enumerate(getattr(report, name) or ()):
                if (changed := change(item)) is not None:
                    items = [*getattr(report, name)]
                    items[number] = changed
                    return [
                        *reports[:place],
                        (replica, replace(report, **{name: items})),
                        *reports[place + 1 :],
                    ]
        return None

    return lie


def of_another_replica(reports: Reports) -> Reports | None:
    """Let replica 1 report what replica 0 sampled, in its own name."""
    (_, first), (_, second) = reports
    if not first.sampled:
        return None
    silent = replace(first, sampled=[], graded=[])
    return [(0, silent), (1, replace(second, sampled=[*second.sampled, *first.sampled]))]


def grade_of_another_replica(reports: Reports) -> Reports | None:
    """Let replica 1 report grades of completions that replica 0 has reported before."""
    (_, first), (_, second) = reports
    new = {(ticket, completion.sample) for ticket, completion in first.sampled}
    earlier = [item for item in first.graded if item[:2] not in new]
    if not earlier:
        return None
    rest = [item for item in first.graded if item not in earlier]
    return [
        (0, replace(first, graded=rest)),
        (1, replace(second, graded=[*second.graded, *earlier])),
    ]


def more_grades(grades: Callable[[Report], list[Any]]) -> Callable[[Reports], Reports | None]:
    def lie(reports: Reports) -> Reports | None:
        (replica, report), *rest = reports
        more = grades(report)
        return [(replica, replace(report, graded=[*report.graded, *more])), *rest] if more else None

    return lie


def as_unfinished(reports: Reports) -> Reports | None:
    """Report a finished completion among the unfinished ones, without an interrupt."""
    (replica, report), *rest = reports
    if not report.sampled:
        return None
    unfinished = [(t, replace(c, finish=Finish.UNFINISHED)) for t, c in report.sampled]
    return [(replica, replace(report, sampled=[], graded=[], unfinished=unfinished)), *rest]


def as_finished(reports: Reports) -> Reports | None:
    (replica, report), *rest = reports
    if not report.unfinished:
        return None
    return [(replica, replace(report, sampled=report.unfinished, unfinished=[])), *rest]


def tokens(num_tokens: int) -> Callable[[Item], Item | None]:
    """Change the number of tokens, with segments that add up."""

    def change(item: Item) -> Item | None:
        *before, last = item[1].segments
        grown = num_tokens - sum(segment.num_tokens for segment in before)
        return with_segments(item, (*before, Segment(last.version, grown)))

    return change


def carried(change: Callable[[Item], Item]) -> Callable[[Item], Item | None]:
    """Change only a completion with tokens of older weights."""
    return lambda item: change(item) if len(item[1].segments) > 1 else None


def fewer_than_before(item: Item) -> Item:
    first, *rest = item[1].segments
    return with_segments(item, (Segment(first.version, first.num_tokens - 1), *rest))


def restarted(item: Item) -> Item:
    """Forget the tokens of older weights."""
    return with_segments(item, item[1].segments[-1:])


def empty(item: Item) -> Item:
    """End with a segment without tokens."""
    *before, last = item[1].segments
    return with_segments(item, (*before, Segment(last.version, 0)))


def older(item: Item) -> Item:
    ticket, completion = item
    *before, last = completion.segments
    stale = Segment(last.version - 1, last.num_tokens)
    return ticket, replace(completion, segments=(*before, stale))


def changed(**fields: Any) -> Callable[[Item], Item]:
    return lambda item: (item[0], replace(item[1], **fields))


RIGHT = Grade(1.0, True, "7")
TICKET = r"ticket \d+, sample \d+: "
LIES: dict[str, tuple[Callable[[Reports], Reports | None], str]] = {
    "a ticket nobody issued": (
        change_sampled(lambda item: (9999, item[1])),
        r"ticket 9999, sample \d: a completion that this replica was not asked for",
    ),
    "a negative ticket": (change_sampled(lambda item: (-1, item[1])), r"ticket -1, sample \d: "),
    "a completion it was not asked for": (
        change_sampled(changed(sample=7)), r"ticket \d+, sample 7: a completion that this replica"
    ),
    "a completion of another replica": (of_another_replica, TICKET + "a completion that this"),
    "a token without a log-prob": (
        change_sampled(lambda item: (item[0], replace(item[1], logprobs=item[1].logprobs[1:]))),
        TICKET + r"\d log-probs for \d tokens",
    ),
    "tokens without segments": (change_sampled(changed(segments=())), TICKET + "segments"),
    "segments that do not add up": (
        change_sampled(
            lambda item: (
                item[0],
                replace(
                    with_segments(item, (*item[1].segments, Segment(0, 1)))[1],
                    segments=item[1].segments,
                ),
            )
        ),
        TICKET + "segments",
    ),
    "more than max_tokens": (
        change_sampled(tokens(MAX_TOKENS + 1)), TICKET + "9 tokens, with a limit of 8"
    ),
    "no tokens": (change_sampled(tokens(0)), TICKET + "0 tokens"),
    "fewer than before": (change_sampled(carried(fewer_than_before)), TICKET + "segments"),
    "a new start": (change_sampled(carried(restarted)), TICKET + "segments"),
    "an empty segment": (change_sampled(carried(empty)), TICKET + "segments"),
    "a stale version": (change_sampled(older), TICKET + "its last tokens are of weights"),
    "a version to come": (
        change_sampled(lambda item: (item[0], replace(item[1], segments=(
            *item[1].segments[:-1], Segment(99, item[1].segments[-1].num_tokens)
        )))),
        TICKET + "its last tokens are of weights 99",
    ),
    "truncated before the limit": (
        change_sampled(
            lambda item: (item[0], replace(item[1], finish=Finish.LENGTH))
            if item[1].num_tokens < MAX_TOKENS
            else None
        ),
        TICKET + "length with",
    ),
    "finished flagged as unfinished": (
        change_sampled(changed(finish=Finish.UNFINISHED)), TICKET + "reported as finished, but"
    ),
    "finished among the unfinished": (as_unfinished, TICKET + "reported as unfinished"),
    "a grade too early": (change_sampled(changed(grade=RIGHT)), TICKET + "graded before"),
    "twice in one report": (
        lambda reports: [
            (replica, replace(report, sampled=report.sampled * 2)) for replica, report in reports
        ] if reports[0][1].sampled else None,
        TICKET + "reported twice",
    ),
    "a grade nobody asked for": (
        more_grades(lambda report: [(9999, 0, RIGHT, "graded")]),
        "ticket 9999, sample 0: a grade that was not asked for",
    ),
    "a grade of another replica": (grade_of_another_replica, TICKET + "a grade that was not"),
    "twice the same grade": (
        more_grades(lambda report: report.graded[:1]), TICKET + "a grade that was not asked for"
    ),
}  # fmt: skip
UNFINISHED_LIES: dict[str, tuple[Callable[[Reports], Reports | None], str]] = {
    "unfinished flagged as finished": (
        change_unfinished(changed(finish=Finish.STOP)), TICKET + "reported as unfinished, but"
    ),
    "unfinished among the finished": (as_finished, TICKET + "reported as finished, but"),
    "unfinished at the limit": (
        change_unfinished(tokens(MAX_TOKENS)), TICKET + "unfinished with 8"
    ),
    "unfinished of nobody": (
        change_unfinished(lambda item: (9999, item[1])), "ticket 9999, sample"
    ),
    "stale unfinished": (change_unfinished(older), TICKET + "its last tokens are of weights"),
    "twice unfinished": (
        lambda reports: [
            (replica, replace(report, unfinished=(report.unfinished or []) * 2))
            for replica, report in reports
        ] if any(report.unfinished for _, report in reports) else None,
        TICKET + "reported twice",
    ),
}  # fmt: skip
CARRYING = {"lookahead": 3.0, "max_overtake": 4}


@pytest.mark.parametrize("honest_turns", [0, 7])
@pytest.mark.parametrize("lie", LIES)
def test_a_report_that_contradicts_the_record_is_refused_by_name(
    lie: str, honest_turns: int
) -> None:
    change, message = LIES[lie]
    driver = LyingDriver(
        correct,
        lengths,
        rng=random.Random(3),
        grade_at_once=False,
        lie=change,
        honest_turns=honest_turns,
    )
    check_refused(run_until_refused(driver, **CARRYING), message)
    assert driver.turns_since_lie == 0


@pytest.mark.parametrize("lie", UNFINISHED_LIES)
def test_a_wrong_answer_to_an_interrupt_is_refused_by_name(lie: str) -> None:
    change, message = UNFINISHED_LIES[lie]
    driver = LyingDriver(
        correct, lengths, rng=random.Random(3), lie=change, is_interrupt_wrong=True
    )
    check_refused(run_until_refused(driver, **CARRYING), message)


def check_refused(error: str, message: str) -> None:
    name = r"replica (0 \(rank 0, host n0\)|1 \(rank 2, host n1\))"
    assert re.match(f"{name}: its report was refused and changed nothing: {message}", error), error


def test_a_completion_or_grade_is_refused_if_it_comes_again_later() -> None:
    earlier: list[Reports] = []

    def again(kind: str) -> Callable[[Reports], Reports | None]:
        def lie(reports: Reports) -> Reports | None:
            earlier.append(reports)
            for (replica, report), (_, old) in zip(reports, earlier[0], strict=True):
                if len(earlier) > 1 and getattr(old, kind):
                    items = [*getattr(report, kind), *getattr(old, kind)]
                    others = [item for item in reports if item[0] != replica]
                    return [(replica, replace(report, **{kind: items})), *others]
            return None

        return lie

    for kind, message in (("sampled", "a completion that this"), ("graded", "a grade that was")):
        earlier.clear()
        driver = LyingDriver(correct, lambda *_: 1, rng=random.Random(3), lie=again(kind))
        check_refused(run_until_refused(driver, prompts_per_step=6), TICKET + message)


# ------------------------------------------------------------------ any change of a field

SEGMENTS = st.lists(
    st.builds(Segment, st.integers(-1, 5), st.integers(-2, MAX_TOKENS + 1)), max_size=3
).map(tuple)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "ticket": st.integers(-1, 40),
    "sample": st.integers(-1, 3),
    "num_tokens": st.integers(0, MAX_TOKENS + 1),
    "segments": SEGMENTS,
    "finish": st.sampled_from(Finish),
    "grade": st.sampled_from([None, RIGHT]),
}
CHANGES = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda name: st.tuples(st.just(name), FIELDS[name])
)


def mutated(item: Item, name: str, value: Any) -> Item | None:
    """Return the item with another value; None if only the replica can know whether it is true."""
    ticket, completion = item
    if name == "ticket":
        return value, completion
    # Whether the last token of a full response ends it, only its replica knows.
    if name == "finish" and completion.num_tokens == MAX_TOKENS and value is not Finish.UNFINISHED:
        return None
    if name == "num_tokens":
        other = completion_of(0, (Segment(0, value),), completion.finish)
        return ticket, replace(completion, tokens=other.tokens, logprobs=other.logprobs)
    return ticket, replace(completion, **{name: value})


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    turn=st.integers(0, 12),
    change=CHANGES,
    is_interrupt_wrong=st.booleans(),
    position=st.integers(0, 5),
)
def test_any_changed_field_is_refused_or_has_no_effect(
    seed: int, turn: int, change: tuple[str, Any], is_interrupt_wrong: bool, position: int
) -> None:
    original: list[Item] = []
    changed_to: list[Item] = []

    def lie(reports: Reports) -> Reports | None:
        items = [item for _, report in reports for item in (report.unfinished or report.sampled)]
        if not items:
            return None
        target = items[position % len(items)]
        new = mutated(target, *change)
        if new is None:
            return None
        original.append(target)
        changed_to.append(new)
        once = iter([new])
        name = "unfinished" if is_interrupt_wrong else "sampled"
        return [
            (
                replica,
                replace(report, **{name: [
                    next(once) if item is target else item for item in getattr(report, name) or ()
                ]}),
            )
            for replica, report in reports
        ]  # fmt: skip

    driver = LyingDriver(
        correct,
        lengths,
        rng=random.Random(seed),
        lie=lie,
        honest_turns=turn % 3 if is_interrupt_wrong else turn,
        is_interrupt_wrong=is_interrupt_wrong,
    )
    try:
        error = run_until_refused(driver, **CARRYING)
    except RefusedByReplica:
        # Another request of this replica that has no tokens yet: only the replica can know.
        assert change[0] in ("ticket", "sample")
        return
    if error:
        check_refused(error, r"ticket -?\d+, sample -?\d+: ")
        assert driver.turns_since_lie == 0
    else:
        assert original == changed_to, f"{original} was silently taken for {changed_to}"


GRADE_CHANGES = st.one_of(
    st.tuples(st.just(0), st.integers(-1, 40)), st.tuples(st.just(1), st.integers(-1, 3))
)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), turn=st.integers(0, 12), change=GRADE_CHANGES)
def test_a_grade_of_another_completion_is_refused_or_the_grade_of_that_one_is(
    seed: int, turn: int, change: tuple[int, int]
) -> None:
    """Also refused is the true grade of the completion that got a wrong one."""
    place, value = change

    def lie(reports: Reports) -> Reports | None:
        for position, (replica, report) in enumerate(reports):
            if report.graded:
                first, *rest = report.graded
                key = list(first)
                key[place] = value
                lied = replace(report, graded=[tuple(key), *rest])
                return [*reports[:position], (replica, lied), *reports[position + 1 :]]
        return None

    driver = LyingDriver(
        correct, lengths, rng=random.Random(seed), lie=lie, honest_turns=turn, grade_at_once=False
    )
    error = run_until_refused_or_stuck(driver)
    if error:
        check_refused(error, r"ticket -?\d+, sample -?\d+: a grade that was not asked for")


def run_until_refused_or_stuck(driver: LyingDriver) -> str:
    """Like `run_until_refused`. A grade that went elsewhere is missing, so a step might not end."""
    driver.on_advance = iter_limit(400)
    try:
        return run_until_refused(driver, **CARRYING)
    except Stuck:
        return ""


class Stuck(Exception):
    """The step does not end."""


def iter_limit(number: int) -> Callable[[], None]:
    calls = iter(range(number))

    def on_advance() -> None:
        if next(calls, None) is None:
            raise Stuck

    return on_advance
