"""The ledger of tickets: illegal moves, and books that do not balance, stop the run."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dapo_megatron.rollout.ledger import Ledger, TicketState
from dapo_megatron.types import DapoError, Outcome

ALLOWED: dict[str, set[str]] = {
    "issued": {"running", "expired"},
    "running": {"issued", "grading", "expired"},
    "grading": {"ready", "all_correct", "all_wrong", "overlong", "abstained", "expired"},
    "ready": {"trained", "expired"},
}
TARGETS: list[TicketState | Outcome] = [*TicketState, *Outcome]
PICK = st.integers(0, 99)


class LedgerMachine(RuleBasedStateMachine):
    """A ledger and a model of it: the state or outcome of every ticket ever issued."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: list[str] = []
        self.step: Counter[str] = Counter()

    def groups(self) -> dict[int, bool]:
        """Return the groups that a consistent coordinator has: ticket -> is ready."""
        return {t: now == "ready" for t, now in enumerate(self.model) if now in ALLOWED}

    @rule(number=st.integers(1, 2))
    def issue(self, number: int) -> None:
        before = len(self.model)
        assert self.ledger.issue(number) == range(before, before + number)
        self.model += ["issued"] * number
        self.step["issued"] += number

    @rule(pick=PICK, data=st.data())
    def move_or_end(self, pick: int, data: st.DataObject) -> None:
        """Move a ticket, after a refusal of everything that is not allowed. It may have ended, or
        was never issued."""
        ticket = pick % (len(self.model) + 1)
        now = self.model[ticket] if ticket < len(self.model) else "not issued"
        allowed = [to for to in TARGETS if to.value in ALLOWED.get(now, ())]
        was = f"is {now}" if now in ALLOWED else "is not open"
        for to in TARGETS:
            if to not in allowed:
                with pytest.raises(
                    DapoError, match=f"ticket {ticket} {was}, it cannot become {to}"
                ):
                    self.to(ticket, to)
        if allowed:
            to = data.draw(st.sampled_from(allowed))
            self.to(ticket, to)
            self.model[ticket] = to.value
            self.step[to.value] += isinstance(to, Outcome)

    def to(self, ticket: int, to: TicketState | Outcome) -> None:
        if isinstance(to, TicketState):
            self.ledger.move(ticket, to)
        else:
            self.ledger.close_ticket(ticket, to)

    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        if tickets := list(self.groups()):
            self.ledger.reissue(ticket := tickets[pick % len(tickets)])
            self.model[ticket] = "issued"
            self.step["resampled"] += 1

    @rule()
    def stop_and_resume(self) -> None:
        self.ledger = Ledger.from_state(json.loads(json.dumps(self.ledger.state())))
        self.model = ["issued" if now == "running" else now for now in self.model]

    @rule()
    def finish_step(self) -> None:
        if "running" in self.model:
            with pytest.raises(DapoError, match=f"ticket {self.model.index('running')} is still"):
                self.ledger.close_step(self.groups())
            return
        counts = self.ledger.close_step(self.groups())
        assert counts.pop("carried") == len(self.groups())
        assert counts.pop("carried_ready") == self.model.count("ready")
        assert Counter(counts) == self.step
        self.step.clear()

    @rule(pick=PICK, has=st.sampled_from([None, False, True]))
    def audit_other_groups(self, pick: int, has: bool | None) -> None:
        """Compare with a coordinator that knows otherwise about one ticket."""
        ticket = pick % (len(self.model) + 1)
        groups = self.groups()
        groups.pop(ticket, None)
        if has is not None:
            groups[ticket] = has
        if groups != self.groups():
            with pytest.raises(DapoError, match=f"ticket {ticket} is .*, but the coordinator"):
                self.ledger.audit(groups)

    @invariant()
    def equals_the_model(self) -> None:
        self.ledger.audit(self.groups())
        assert self.ledger.totals == Counter(now for now in self.model if now not in ALLOWED)
        assert self.ledger.num_ready == self.model.count("ready")


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=40)


def test_a_ledger_whose_totals_do_not_match_stops_the_run() -> None:
    ledger = Ledger(next_ticket=3, open={0: TicketState.ISSUED}, totals=Counter(trained=1))
    with pytest.raises(DapoError, match=r"3 tickets issued, but \{'trained': 1\} and 1 open"):
        ledger.close_step({0: False})
