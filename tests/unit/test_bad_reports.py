"""Reports of replicas that contradict what they were asked for: refused by name, without effect."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dapo_megatron.engine.messages import Report, Returned, Sampling
from dapo_megatron.rollout.coordinator import Coordinator, SavePoint
from dapo_megatron.rollout.dispatch import Dispatcher
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.segments import ENVIRONMENT, Segment
from dapo_megatron.types import Finish, Prompt, RankError
from tests.helpers.rollouts import (
    MAX_TOKENS,
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
    """Lie about what an interrupt returns, instead of what comes before."""
    coordinator: Coordinator | None = None
    before: str = ""
    """The coordinator's state before the last reports."""
    turns_since_lie: int = -1
    """-1: it has not lied yet."""

    def name(self, replica: int) -> str:
        return f"replica {replica} (rank {2 * replica}, host n{replica})"

    def advance(self, requests: Any) -> Reports:
        return self._changed(super().advance(requests), may_lie=not self.is_interrupt_wrong)

    def interrupt(self) -> Reports:
        return self._changed(super().interrupt(), may_lie=self.is_interrupt_wrong)

    def _changed(self, reports: Reports, *, may_lie: bool) -> Reports:
        assert self.coordinator is not None
        self.before = state_of(self.coordinator)
        self.honest_turns -= may_lie
        if self.turns_since_lie >= 0:
            self.turns_since_lie += 1
        elif may_lie and self.honest_turns < 0:
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

Item = Returned


def with_segments(item: Item, segments: tuple[Segment, ...]) -> Item:
    """Return the completion with as many tokens as the segments."""
    ticket, completion, why = item
    other = completion_of(completion.sample, segments, completion.finish, completion.grade)
    return ticket, other, why


def change(change_item: Callable[[Item], Item | None]) -> Callable[[Reports], Reports | None]:
    """Return a lie about the first completion that `change_item` can change."""

    def lie(reports: Reports) -> Reports | None:
        for place, (replica, report) in enumerate(reports):
            for number, item in enumerate(report.returned):
                if (changed := change_item(item)) is not None:
                    items = [*report.returned]
                    items[number] = changed
                    lied = replace(report, returned=items)
                    return [*reports[:place], (replica, lied), *reports[place + 1 :]]
        return None

    return lie


def of_another_replica(reports: Reports) -> Reports | None:
    """Let replica 1 return what replica 0 had, in its own name."""
    (_, first), (_, second) = reports
    if not first.returned:
        return None
    returned = [*second.returned, *first.returned]
    return [(0, replace(first, returned=[])), (1, replace(second, returned=returned))]


def twice(reports: Reports) -> Reports | None:
    if not any(report.returned for _, report in reports):
        return None
    return [(r, replace(report, returned=report.returned * 2)) for r, report in reports]


def more_sampled(reports: Reports) -> Reports:
    return [(r, replace(report, num_sampled=report.num_sampled + 99)) for r, report in reports]


def tokens(num_tokens: int) -> Callable[[Item], Item | None]:
    """Change the number of tokens, with segments that add up."""

    def change(item: Item) -> Item | None:
        *before, last = item[1].segments
        grown = num_tokens - sum(segment.num_tokens for segment in before)
        return with_segments(item, (*before, Segment(last.version, grown)))

    return change


def older(item: Item) -> Item:
    *before, last = item[1].segments
    stale = Segment(last.version - 1, last.num_tokens)
    return changed(segments=(*before, stale))(item)


def changed(**fields: Any) -> Callable[[Item], Item]:
    return lambda item: (item[0], replace(item[1], **fields), item[2])


def ungraded(item: Item) -> Item:
    return item[0], replace(item[1], grade=None), ""


def unfinished(change_item: Callable[[Item], Item]) -> Callable[[Item], Item | None]:
    """Change only an unfinished completion."""
    return lambda item: change_item(item) if item[1].finish is Finish.UNFINISHED else None


TICKET = r"ticket \d+, sample \d+: "
LIES: dict[str, tuple[Callable[[Reports], Reports | None], str]] = {
    "a ticket nobody issued": (change(lambda item: (9999, *item[1:])),
        r"ticket 9999, sample \d: a completion that this replica was not asked for"),
    "a completion of another replica": (of_another_replica, TICKET + "a completion that this"),
    "a token without a log-prob": (change(lambda it: changed(logprobs=it[1].logprobs[1:])(it)),
        TICKET + r"\d log-probs for \d tokens"),
    "segments that do not add up": (
        change(
            lambda item: changed(segments=item[1].segments)(
                with_segments(item, (*item[1].segments, Segment(0, 1)))
            )
        ),
        TICKET + "segments",
    ),
    "a stale version": (change(older), TICKET + "its last tokens are of weights"),
    "unfinished without an interrupt": (
        change(lambda item: ungraded(changed(finish=Finish.UNFINISHED)(item))),
        TICKET + "returned without a grade, but",
    ),
    "twice in a report": (twice, TICKET + "returned twice"),
}  # fmt: skip
INTERRUPT_LIES: dict[str, tuple[Callable[[Reports], Reports | None], str]] = {
    "unfinished, but graded": (
        change(unfinished(lambda item: (*item[:2], "graded"))), TICKET + "graded, but not finished"
    ),
    "empty": (
        change(unfinished(changed(segments=(), tokens=b"", logprobs=b""))),
        TICKET + "none of its tokens was sampled",
    ),
    "beyond the limit": (
        change(unfinished(tokens(MAX_TOKENS + 1))), TICKET + "9 tokens, with a limit of 8"  # type: ignore[arg-type]
    ),
    "stale unfinished": (change(unfinished(older)), TICKET + "its last tokens are of weights"),
    "twice unfinished": (twice, TICKET + "returned twice"),
}  # fmt: skip
CARRYING = {"lookahead": 3.0, "max_overtake": 4}


@pytest.mark.parametrize(
    ("lie", "honest_turns"),
    [*((lie, turns) for lie in LIES for turns in (0, 7)), *((lie, 0) for lie in INTERRUPT_LIES)],
)
def test_a_report_that_contradicts_the_record_is_refused_by_name(
    lie: str, honest_turns: int
) -> None:
    lie_of, message = (LIES | INTERRUPT_LIES)[lie]
    driver = LyingDriver(
        correct,
        lengths,
        rng=random.Random(3),
        grade_at_once=False,
        lie=lie_of,
        honest_turns=honest_turns,
        is_interrupt_wrong=lie in INTERRUPT_LIES,
    )
    check_refused(run_until_refused(driver, **CARRYING), message)
    assert driver.turns_since_lie == 0


def test_a_replica_that_claims_more_than_it_was_asked_for_is_refused() -> None:
    driver = LyingDriver(correct, lengths, lie=more_sampled)
    error = run_until_refused(driver, **CARRYING)
    assert re.match(r"replica \d \(.*\): \d+ requests sampled, but \d+ sent$", error), error


def check_refused(error: str, message: str) -> None:
    name = r"replica (0 \(rank 0, host n0\)|1 \(rank 2, host n1\))"
    assert re.match(f"{name}: its report was refused and changed nothing: {message}", error), error


def test_a_completion_is_refused_if_it_comes_again_later() -> None:
    earlier: list[Reports] = []

    def again(reports: Reports) -> Reports | None:
        earlier.append(sorted(reports))
        for (replica, report), (_, old) in zip(reports, earlier[0], strict=True):
            if len(earlier) > 1 and old.returned:
                items = [*report.returned, *old.returned]
                others = [item for item in reports if item[0] != replica]
                return [(replica, replace(report, returned=items)), *others]
        return None

    driver = LyingDriver(correct, lambda *_: 1, rng=random.Random(3), lie=again)
    error = run_until_refused(driver, prompts_per_step=6)
    check_refused(error, TICKET + "a completion that this")


# ------------------------------------------------------------------ conversations

SAID, READ, NEXT = Segment(3, 2, 1), Segment(3, 1, ENVIRONMENT), Segment(4, 1, 1)


def dispatcher_of(driver: Any, environment: str = "e") -> Dispatcher:
    """Return a dispatcher with two completions that continue, and a new one."""
    so_far = (SAID, READ) if environment else (SAID,)
    group = OpenGroup(0, Prompt("sums", 0, (1,), "?", "7", environment=environment), 3)
    for sample in (0, 2):
        group.completions[sample] = completion_of(sample, so_far, Finish.UNFINISHED)
    dispatcher = Dispatcher(driver, Sampling("", MAX_TOKENS, 1.0, 1.0, is_seeded=False), {0: group})
    dispatcher.start(4)
    assert dispatcher.submit(group)
    dispatcher.advance()
    return dispatcher


@pytest.mark.parametrize(
    ("lost", "samples"), [(set(), [[1], [0, 2], []]), ({1}, [[0, 1], [], [2]])]
)
def test_a_conversation_goes_on_where_its_environment_is_or_starts_anew(
    lost: set[int], samples: list[list[int]]
) -> None:
    driver = MagicMock(num_replicas=3, max_sequences=4, lost=lost)
    dispatcher = dispatcher_of(driver)
    [sent] = driver.advance.call_args.args
    assert [[sample for r in requests for sample, _ in r.samples] for requests in sent] == samples
    assert dispatcher.room == 4 * (3 - len(lost)) - 3
    replica = dispatcher._in_flight[0, 0].replica
    item = 0, completion_of(0, (NEXT,), Finish.STOP), ""
    assert not dispatcher._fault(replica, item, is_interrupted=True)


@pytest.mark.parametrize(
    ("environment", "segments", "finish", "fault"),
    [
        ("e", (SAID, READ), Finish.UNFINISHED, "$"),
        ("e", (SAID, READ), Finish.DONE, "$"),
        ("e", (SAID, READ, NEXT, READ, NEXT), Finish.TURNS, "$"),
        ("e", (SAID, READ, SAID), Finish.STOP, "its last tokens are of weights 3, not 4"),
        ("e", (NEXT,), Finish.STOP, "$"),
        ("", (SAID, NEXT), Finish.STOP, "$"),
        ("", (replace(SAID, num_tokens=1), NEXT, NEXT), Finish.STOP, "its last .* 3, not 4"),
        ("", (replace(SAID, num_tokens=4),), Finish.STOP, "its last tokens are of weights 3, not"),
        ("", (replace(SAID, num_tokens=1),), Finish.STOP, "segments .* after"),
    ],
)
def test_what_comes_back_continues_what_was_sent(
    environment: str, segments: tuple[Segment, ...], finish: Finish, fault: str
) -> None:
    dispatcher = dispatcher_of(MagicMock(num_replicas=2, max_sequences=4, lost=set()), environment)
    replica = dispatcher._in_flight[0, 0].replica
    item = 0, completion_of(0, segments, finish), ""
    assert re.match(fault, dispatcher._fault(replica, item, is_interrupted=True))
