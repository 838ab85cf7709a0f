"""The ledger of tickets: totals match after any sequence of moves, and no ticket ends twice."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rollout.ledger import _NEXT, Ledger, TicketState
from dapo_megatron.types import DapoError, Outcome


def groups_of(ledger: Ledger) -> dict[int, bool]:
    """Return the groups that a consistent coordinator has: ticket -> is_ready."""
    return {ticket: state is TicketState.READY for ticket, state in ledger.open.items()}


@given(st.data())
def test_totals_match_after_every_move_and_after_a_resume(data: st.DataObject) -> None:
    ledger = Ledger()
    ended: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 40), label="moves")):
        if data.draw(st.booleans(), label="killed and resumed"):
            ledger = Ledger.from_state(json.loads(json.dumps(ledger.state())))
        if not ledger.open or data.draw(st.booleans(), label="issue"):
            before = ledger.next_ticket
            number = data.draw(st.integers(1, 4))
            assert list(ledger.issue(number)) == list(range(before, before + number))
            continue
        ticket = data.draw(st.sampled_from(sorted(ledger.open)), label="ticket")
        target = data.draw(st.sampled_from(sorted(_NEXT[ledger.open[ticket]], key=str)), label="to")
        if isinstance(target, TicketState):
            ledger.move(ticket, target)
            assert ledger.open[ticket] is target
        else:
            ledger.close_ticket(ticket, target)
            ended[target.value] += 1
            assert ticket not in ledger.open
        ledger.audit(groups_of(ledger))
    assert ledger.totals == ended
    for ticket, state in list(ledger.open.items()):
        if state is TicketState.RUNNING:
            ledger.move(ticket, TicketState.ISSUED)
    counts = ledger.close_step(groups_of(ledger))
    assert counts["issued"] == ledger.next_ticket
    assert counts["issued"] == counts["carried"] + sum(counts[outcome.value] for outcome in Outcome)
    assert ledger.close_step(groups_of(ledger))["issued"] == 0


@pytest.mark.parametrize("state", TicketState)
@pytest.mark.parametrize("target", [*TicketState, *Outcome])
def test_an_invalid_transition_is_rejected(
    state: TicketState, target: TicketState | Outcome
) -> None:
    ledger = Ledger(next_ticket=1, open={0: state})
    move = ledger.move if isinstance(target, TicketState) else ledger.close_ticket
    if target in _NEXT[state]:
        move(0, target)  # type: ignore[arg-type]
    else:
        with pytest.raises(DapoError, match=f"ticket 0 is {state.value}, it cannot become"):
            move(0, target)  # type: ignore[arg-type]


def test_an_unfinished_group_can_only_expire() -> None:
    unfinished = {TicketState.ISSUED, TicketState.RUNNING}
    for state in unfinished:
        assert {target for target in _NEXT[state] if isinstance(target, Outcome)} == {
            Outcome.EXPIRED
        }
    assert _NEXT[TicketState.READY] == {Outcome.TRAINED, Outcome.EXPIRED}


def test_a_ticket_cannot_end_twice() -> None:
    ledger = Ledger(next_ticket=1, open={0: TicketState.READY})
    ledger.close_ticket(0, Outcome.TRAINED)
    with pytest.raises(DapoError, match="ticket 0 is not open, it cannot become trained"):
        ledger.close_ticket(0, Outcome.TRAINED)


def test_a_step_cannot_end_while_a_ticket_is_running() -> None:
    ledger = Ledger(next_ticket=2, open={0: TicketState.ISSUED, 1: TicketState.RUNNING})
    with pytest.raises(DapoError, match="ticket 1 is still running"):
        ledger.close_step(groups_of(ledger))


def test_a_ledger_whose_totals_do_not_match_stops_the_run() -> None:
    ledger = Ledger(next_ticket=3, open={0: TicketState.ISSUED}, totals=Counter(trained=1))
    with pytest.raises(DapoError, match=r"3 tickets issued, but \{'trained': 1\} and 1 open"):
        ledger.close_step(groups_of(ledger))
    with pytest.raises(DapoError, match="3 tickets issued"):
        Ledger.from_state(ledger.state()).audit(groups_of(ledger))


@pytest.mark.parametrize(
    ("coordinator_groups", "message"),
    [
        ({0: False}, "ticket 1 is ready, but the coordinator does not have it"),
        (
            {0: False, 1: True, 2: False},
            "ticket 2 is not open, but the coordinator has it as undec",
        ),
        ({0: True, 1: True}, "ticket 0 is grading, but the coordinator has it as ready"),
    ],
)
def test_the_ledger_is_compared_with_the_coordinators_groups(
    coordinator_groups: dict[int, bool], message: str
) -> None:
    ledger = Ledger(next_ticket=2, open={0: TicketState.GRADING, 1: TicketState.READY})
    ledger.audit({0: False, 1: True})
    with pytest.raises(DapoError, match=message):
        ledger.audit(coordinator_groups)


def test_a_running_ticket_is_issued_again_after_a_resume() -> None:
    ledger = Ledger(next_ticket=2, open={0: TicketState.RUNNING, 1: TicketState.GRADING})
    assert Ledger.from_state(ledger.state()).open == {0: TicketState.ISSUED, 1: TicketState.GRADING}
