"""The ledger: whatever happens, in whatever order, the sums match; and no outcome is
entered twice."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rollout.ledger import _NEXT, Ledger, TicketState
from dapo_megatron.types import DapoError, Outcome


def held(ledger: Ledger) -> dict[int, bool]:
    """What an honest coordinator would hold."""
    return {ticket: state is TicketState.READY for ticket, state in ledger.open.items()}


@given(st.data())
def test_sums_match_after_every_move_and_across_a_resume(data: st.DataObject) -> None:
    ledger = Ledger()
    ever: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 40), label="moves")):
        if data.draw(st.booleans(), label="killed and resumed"):
            ledger = Ledger.from_state(json.loads(json.dumps(ledger.state())))
        if not ledger.open or data.draw(st.booleans(), label="issue"):
            before = ledger.next_ticket
            number = data.draw(st.integers(1, 4))
            assert list(ledger.issue(number)) == list(range(before, before + number))
            continue
        ticket = data.draw(st.sampled_from(sorted(ledger.open)), label="ticket")
        to = data.draw(st.sampled_from(sorted(_NEXT[ledger.open[ticket]], key=str)), label="to")
        if isinstance(to, TicketState):
            ledger.move(ticket, to)
            assert ledger.open[ticket] is to
        else:
            ledger.close_ticket(ticket, to)
            ever[to.value] += 1
            assert ticket not in ledger.open
        ledger.audit(held(ledger))
    assert ledger.totals == ever
    for ticket, state in list(ledger.open.items()):
        if state is TicketState.RUNNING:
            ledger.move(ticket, TicketState.ISSUED)
    counts = ledger.close_step(held(ledger))
    assert counts["issued"] == ledger.next_ticket
    assert counts["issued"] == counts["carried"] + sum(counts[outcome.value] for outcome in Outcome)
    assert ledger.close_step(held(ledger))["issued"] == 0


@pytest.mark.parametrize("state", TicketState)
@pytest.mark.parametrize("to", [*TicketState, *Outcome])
def test_what_cannot_follow_is_refused(state: TicketState, to: TicketState | Outcome) -> None:
    ledger = Ledger(next_ticket=1, open={0: state})
    act = ledger.move if isinstance(to, TicketState) else ledger.close_ticket
    if to in _NEXT[state]:
        act(0, to)  # type: ignore[arg-type]
    else:
        with pytest.raises(DapoError, match=f"ticket 0 is {state.value}, it cannot become"):
            act(0, to)  # type: ignore[arg-type]


def test_a_group_still_running_cannot_be_trained_on_or_filtered() -> None:
    unfinished = {TicketState.ISSUED, TicketState.RUNNING}
    for state in unfinished:
        assert {to for to in _NEXT[state] if isinstance(to, Outcome)} == {Outcome.EXPIRED}
    assert _NEXT[TicketState.READY] == {Outcome.TRAINED, Outcome.EXPIRED}


def test_a_ticket_ends_once() -> None:
    ledger = Ledger(next_ticket=1, open={0: TicketState.READY})
    ledger.close_ticket(0, Outcome.TRAINED)
    with pytest.raises(DapoError, match="ticket 0 is not open, it cannot become trained"):
        ledger.close_ticket(0, Outcome.TRAINED)


def test_a_step_cannot_end_while_an_engine_is_at_a_ticket() -> None:
    ledger = Ledger(next_ticket=2, open={0: TicketState.ISSUED, 1: TicketState.RUNNING})
    with pytest.raises(DapoError, match="ticket 1 is still running"):
        ledger.close_step(held(ledger))


def test_books_that_do_not_balance_stop_the_run() -> None:
    ledger = Ledger(next_ticket=3, open={0: TicketState.ISSUED}, totals=Counter(trained=1))
    with pytest.raises(DapoError, match=r"3 tickets issued, but \{'trained': 1\} and 1 open"):
        ledger.close_step(held(ledger))
    with pytest.raises(DapoError, match="3 tickets issued"):
        Ledger.from_state(ledger.state()).audit(held(ledger))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({0: False}, "ticket 1 is ready, but the coordinator does not have it"),
        (
            {0: False, 1: True, 2: False},
            "ticket 2 is not open, but the coordinator has it as undec",
        ),
        ({0: True, 1: True}, "ticket 0 is grading, but the coordinator has it as ready"),
    ],
)
def test_the_books_are_held_against_what_the_coordinator_holds(
    found: dict[int, bool], message: str
) -> None:
    ledger = Ledger(next_ticket=2, open={0: TicketState.GRADING, 1: TicketState.READY})
    ledger.audit({0: False, 1: True})
    with pytest.raises(DapoError, match=message):
        ledger.audit(found)


def test_what_ran_when_it_was_saved_is_not_running_when_resumed() -> None:
    ledger = Ledger(next_ticket=2, open={0: TicketState.RUNNING, 1: TicketState.GRADING})
    assert Ledger.from_state(ledger.state()).open == {0: TicketState.ISSUED, 1: TicketState.GRADING}
