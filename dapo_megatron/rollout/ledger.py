"""The ledger: every ticket is open in one state or ended with one outcome, and the sums always
match.

    issued (ever)  =  trained + all_correct + all_wrong + overlong + abstained + expired + open

Tickets that are open at the end of a step are carried. The ledger does not use the groups
themselves, so it is an independent check of the coordinator. It is audited at every step, and a run
whose ledger does not balance stops. It is saved in checkpoints, so the sums hold across a resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dapo_megatron.types import DapoError, Outcome

RESAMPLED = "resampled"
"""Name of the count of tickets that are sampled again, because an engine with a part was lost."""


class TicketState(StrEnum):
    """State of an open ticket."""

    ISSUED = "issued"
    """No engine works on it yet, or the end of a step interrupted it."""
    RUNNING = "running"
    """An engine was asked for some of its completions."""
    GRADING = "grading"
    """All completions are sampled, but not all are graded."""
    READY = "ready"
    """Decided and waiting to be trained on; mixed, if dynamic sampling is on."""


_NEXT: dict[TicketState, set[TicketState | Outcome]] = {
    TicketState.ISSUED: {TicketState.RUNNING, Outcome.EXPIRED},
    # Back to ISSUED if the step ends before its last token.
    TicketState.RUNNING: {TicketState.ISSUED, TicketState.GRADING, Outcome.EXPIRED},
    TicketState.GRADING: {
        TicketState.READY,
        Outcome.ALL_CORRECT,
        Outcome.ALL_WRONG,
        Outcome.OVERLONG,
        Outcome.ABSTAINED,
        Outcome.EXPIRED,
    },
    TicketState.READY: {Outcome.TRAINED, Outcome.EXPIRED},
}
"""Allowed transitions. An unfinished ticket expires with on_policy only, never for being slow."""

_KNOWN = {None: "does not have it", False: "has it as undecided", True: "has it as ready"}


@dataclass
class Ledger:
    """Ledger of one run. Tickets are numbered from 0 in the order of issue."""

    next_ticket: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    """Number of tickets with each outcome, over the whole run."""
    open: dict[int, TicketState] = field(default_factory=dict)
    """State of each open ticket."""
    step: Counter[str] = field(default_factory=Counter)
    """Number of tickets issued, with each outcome, and sampled again, since the last `close_step`.
    """

    @property
    def num_ready(self) -> int:
        """Number of open tickets that are ready."""
        return list(self.open.values()).count(TicketState.READY)

    def issue(self, num_tickets: int) -> range:
        """Issue and return the next tickets."""
        tickets = range(self.next_ticket, self.next_ticket + num_tickets)
        self.next_ticket += num_tickets
        self.open.update(dict.fromkeys(tickets, TicketState.ISSUED))
        self.step["issued"] += num_tickets
        return tickets

    def move(self, ticket: int, state: TicketState) -> None:
        """Move an open ticket to `state`. Raises DapoError if the transition is not allowed."""
        self._check(ticket, state)
        self.open[ticket] = state

    def reissue(self, ticket: int) -> None:
        """Return an open ticket in any state to ISSUED, because completions of it were lost."""
        self.open[ticket] = TicketState.ISSUED
        self.step[RESAMPLED] += 1

    def close_ticket(self, ticket: int, outcome: Outcome) -> None:
        """End an open ticket with `outcome`. Raises DapoError if the transition is not allowed."""
        self._check(ticket, outcome)
        del self.open[ticket]
        self.totals[outcome.value] += 1  # by value, for readable messages
        self.step[outcome.value] += 1

    def close_step(self, open_groups: Mapping[int, bool]) -> dict[str, int]:
        """Return this step's counts: issued, each outcome, sampled again if there are any, carried,
        and how many carried are ready.

        Raises DapoError as `audit` does, or if an engine still works on a ticket.
        """
        self.audit(open_groups)
        if TicketState.RUNNING in self.open.values():
            running = [
                ticket for ticket, state in self.open.items() if state is TicketState.RUNNING
            ]
            raise DapoError(f"ledger: ticket {running[0]} is still running at the end of a step")
        counts = {"issued": self.step["issued"]}
        counts |= {outcome.value: self.step[outcome.value] for outcome in Outcome}
        if self.step[RESAMPLED]:
            counts[RESAMPLED] = self.step[RESAMPLED]
        counts["carried"] = len(self.open)
        counts["carried_ready"] = self.num_ready
        self.step = Counter()
        return counts

    def audit(self, open_groups: Mapping[int, bool]) -> None:
        """Check that every issued ticket is ended or open, and that the open tickets match the
        coordinator's `open_groups` (ticket -> is ready). Raises DapoError if not."""
        ready = {ticket: state is TicketState.READY for ticket, state in self.open.items()}
        if ready != open_groups:
            differing = {
                ticket
                for ticket in (*ready, *open_groups)
                if ready.get(ticket) is not open_groups.get(ticket)
            }
            ticket = min(differing)
            raise DapoError(
                f"ledger: ticket {ticket} is {self.open.get(ticket, 'not open')}, but the "
                f"coordinator {_KNOWN[open_groups.get(ticket)]}"
            )
        if self.next_ticket != sum(self.totals.values()) + len(self.open):
            raise DapoError(
                f"ledger: {self.next_ticket} tickets issued, but {dict(self.totals)} and "
                f"{len(self.open)} open"
            )

    def state(self) -> dict[str, Any]:
        """Return JSON-compatible state for a checkpoint. Can be called at any time."""
        return {
            "next_ticket": self.next_ticket,
            "totals": dict(self.totals),
            "open": {str(ticket): state.value for ticket, state in self.open.items()},
            "step": dict(self.step),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """Return the ledger that `state` describes, with running tickets back to ISSUED."""
        ledger = cls(
            next_ticket=state["next_ticket"],
            totals=Counter(state["totals"]),
            open={int(ticket): TicketState(value) for ticket, value in state["open"].items()},
            step=Counter(state["step"]),
        )
        for ticket, ticket_state in ledger.open.items():
            if ticket_state is TicketState.RUNNING:
                ledger.open[ticket] = TicketState.ISSUED
        return ledger

    def _check(self, ticket: int, to: TicketState | Outcome) -> None:
        if ticket not in self.open:
            raise DapoError(f"ledger: ticket {ticket} is not open, it cannot become {to.value}")
        now = self.open[ticket]
        if to not in _NEXT[now]:
            raise DapoError(f"ledger: ticket {ticket} is {now.value}, it cannot become {to.value}")
