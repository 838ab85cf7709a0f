"""The ledger: whatever happens, in whatever order, the sums match; and no fate is entered twice."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rollout.ledger import Fate, Ledger
from dapo_megatron.types import DapoError

FINAL = [fate for fate in Fate if fate is not Fate.CARRIED]


@given(st.data())
def test_sums_match_after_every_step_and_across_a_resume(data: st.DataObject) -> None:
    ledger = Ledger()
    carried: list[int] = []
    ever: Counter[str] = Counter()
    issued = 0
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        if data.draw(st.booleans(), label="killed and resumed"):
            ledger = Ledger.from_state(json.loads(json.dumps(ledger.state())))
        in_step: Counter[str] = Counter()
        tickets = list(carried)
        for size in data.draw(st.lists(st.integers(0, 5), max_size=3), label="rounds"):
            new = list(ledger.issue(size))
            assert new == list(range(issued, issued + size))  # in order, none twice
            issued += size
            in_step["issued"] += size
            tickets += new
        carried = []
        for ticket in data.draw(st.permutations(tickets), label="order of settling"):
            fate = data.draw(st.sampled_from(Fate), label=f"fate of {ticket}")
            ledger.settle(ticket, fate)
            if fate is Fate.CARRIED:
                carried.append(ticket)
            else:
                in_step[fate] += 1
                ever[fate] += 1
        counts = ledger.close_step()
        assert counts == {
            "issued": in_step["issued"],
            **{fate.value: in_step[fate] for fate in FINAL},
            "carried": len(carried),
        }
        assert issued == sum(ever.values()) + len(carried)
        assert ledger.totals == ever
        assert ledger.state()["carried"] == sorted(carried)


def test_a_ticket_has_one_final_fate() -> None:
    ledger = Ledger()
    ledger.issue(1)
    ledger.settle(0, Fate.TRAINED)
    with pytest.raises(DapoError, match="ticket 0 is not open, it cannot become expired"):
        ledger.settle(0, Fate.EXPIRED)


def test_a_ticket_never_issued_is_refused() -> None:
    ledger = Ledger()
    ledger.issue(2)
    with pytest.raises(DapoError, match="ticket 2 is not open"):
        ledger.settle(2, Fate.TRAINED)


def test_a_ticket_without_a_fate_stops_the_run() -> None:
    ledger = Ledger()
    ledger.issue(3)
    ledger.settle(0, Fate.TRAINED)
    ledger.settle(2, Fate.CARRIED)
    with pytest.raises(DapoError, match="ticket 1 ended the step without a fate"):
        ledger.close_step()


def test_books_that_do_not_balance_stop_the_run() -> None:
    state = {"next_ticket": 5, "totals": {"trained": 3}, "carried": [4]}  # one is lost
    with pytest.raises(DapoError, match="5 tickets issued"):
        Ledger.from_state(state).close_step()


def test_a_carried_ticket_is_settled_later_and_counted_once() -> None:
    ledger = Ledger()
    ledger.issue(1)
    ledger.settle(0, Fate.CARRIED)
    assert ledger.close_step()["carried"] == 1
    ledger.settle(0, Fate.TRAINED)
    counts = ledger.close_step()
    assert (counts["issued"], counts["trained"], counts["carried"]) == (0, 1, 0)
