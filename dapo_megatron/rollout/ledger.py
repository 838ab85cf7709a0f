"""The ledger: every ticket is open in one state or ended with one fate, and the sums always match.

    issued (ever)  =  trained + all_correct + all_wrong + overlong + abstained + expired + open

At the end of a step what is open is carried. The books know nothing of the groups themselves, so
that they check the coordinator rather than repeat it. Checked at every step; a run whose books do
not balance stops. Part of the checkpoint, so it also holds across a crash and a resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dapo_megatron.types import DapoError, Fate


class State(StrEnum):
    """Where an open ticket is."""

    ISSUED = "issued"
    """No engine works on it: not yet, or not since a step ended."""
    RUNNING = "running"
    """An engine was asked for some of its completions."""
    GRADING = "grading"
    """All completions are sampled, not all are graded."""
    READY = "ready"
    """Decided: it can be trained on (is mixed, with dynamic sampling), and waits its turn."""


_NEXT: dict[State, set[State | Fate]] = {
    State.ISSUED: {State.RUNNING, Fate.EXPIRED},
    # Back to ISSUED: the step ended before its last token.
    State.RUNNING: {State.ISSUED, State.GRADING, Fate.EXPIRED},
    State.GRADING: {
        State.READY,
        Fate.ALL_CORRECT,
        Fate.ALL_WRONG,
        Fate.OVERLONG,
        Fate.ABSTAINED,
        Fate.EXPIRED,
    },
    State.READY: {Fate.TRAINED, Fate.EXPIRED},
}
"""What may follow. An unfinished ticket expires by on_policy alone, never for being slow."""

_HELD = {None: "does not have it", False: "has it as undecided", True: "has it as ready"}


@dataclass
class Ledger:
    """Books of one run. Tickets are numbered from 0 in the order of issue."""

    next_ticket: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    """Fates over the whole run."""
    open: dict[int, State] = field(default_factory=dict)
    """State of each ticket without a fate."""
    step: Counter[str] = field(default_factory=Counter)
    """Issued, and fates, since the last close_step."""

    def issue(self, num_tickets: int) -> range:
        """The next tickets, now open."""
        tickets = range(self.next_ticket, self.next_ticket + num_tickets)
        self.next_ticket += num_tickets
        self.open.update(dict.fromkeys(tickets, State.ISSUED))
        self.step["issued"] += num_tickets
        return tickets

    def move(self, ticket: int, state: State) -> None:
        """An open ticket goes on. Raises DapoError if it cannot be there."""
        self._check(ticket, state)
        self.open[ticket] = state

    def settle(self, ticket: int, fate: Fate) -> None:
        """Enter what became of an open ticket. Raises DapoError if that cannot be."""
        self._check(ticket, fate)
        del self.open[ticket]
        self.totals[fate.value] += 1  # a plain word in messages
        self.step[fate.value] += 1

    def close_step(self, held: Mapping[int, bool]) -> dict[str, int]:
        """This step's counts: issued, each fate, what is carried, and how much of it is ready.

        Raises DapoError as `audit` does, or if an engine still works on a ticket.
        """
        self.audit(held)
        if State.RUNNING in self.open.values():
            running = [ticket for ticket, state in self.open.items() if state is State.RUNNING]
            raise DapoError(f"ledger: ticket {running[0]} is still running at the end of a step")
        counts = {"issued": self.step["issued"]}
        counts |= {fate.value: self.step[fate.value] for fate in Fate}
        counts["carried"] = len(self.open)
        counts["carried_ready"] = sum(state is State.READY for state in self.open.values())
        self.step = Counter()
        return counts

    def audit(self, held: Mapping[int, bool]) -> None:
        """Raises DapoError unless every ticket issued has ended or is open, and what is open is
        what the coordinator holds: ticket -> whether it is ready to be trained on."""
        ready = {ticket: state is State.READY for ticket, state in self.open.items()}
        if ready != held:
            odd = {t for t in (*ready, *held) if ready.get(t) is not held.get(t)}
            ticket = min(odd)
            raise DapoError(
                f"ledger: ticket {ticket} is {self.open.get(ticket, 'not open')}, but the "
                f"coordinator {_HELD[held.get(ticket)]}"
            )
        if self.next_ticket != sum(self.totals.values()) + len(self.open):
            raise DapoError(
                f"ledger: {self.next_ticket} tickets issued, but {dict(self.totals)} and "
                f"{len(self.open)} open"
            )

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, at any moment."""
        return {
            "next_ticket": self.next_ticket,
            "totals": dict(self.totals),
            "open": {str(ticket): state.value for ticket, state in self.open.items()},
            "step": dict(self.step),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger that `state` was taken from, its engines stopped."""
        ledger = cls(
            next_ticket=state["next_ticket"],
            totals=Counter(state["totals"]),
            open={int(ticket): State(value) for ticket, value in state["open"].items()},
            step=Counter(state["step"]),
        )
        for ticket, value in ledger.open.items():
            if value is State.RUNNING:
                ledger.open[ticket] = State.ISSUED
        return ledger

    def _check(self, ticket: int, to: State | Fate) -> None:
        if ticket not in self.open:
            raise DapoError(f"ledger: ticket {ticket} is not open, it cannot become {to.value}")
        now = self.open[ticket]
        if to not in _NEXT[now]:
            raise DapoError(f"ledger: ticket {ticket} is {now.value}, it cannot become {to.value}")
