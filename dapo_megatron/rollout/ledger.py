"""The ledger: every ticket has exactly one fate, and the sums always match.

    issued (ever)  =  trained + all_correct + all_wrong + overlong + ungraded + expired + carried

where `carried` are the tickets waiting for a later step. Checked at every step; a run whose books
do not balance stops. Part of the checkpoint, so it also holds across a crash and a resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dapo_megatron.types import DapoError


class Fate(StrEnum):
    """What became of a group. All but CARRIED are final."""

    TRAINED = "trained"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    OVERLONG = "overlong"
    """Every completion was truncated while overlong.filter keeps those out of the loss."""
    UNGRADED = "ungraded"
    """The grader answered for fewer than two of its completions."""
    EXPIRED = "expired"
    """Mixed, but beyond what the step needed (on_policy), or carried for too many versions."""
    CARRIED = "carried"
    """Mixed, and kept for a later step."""


@dataclass
class Ledger:
    """Books of one run. Tickets are numbered from 0 in the order of issue."""

    next_ticket: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    """Final fates over the whole run."""
    open: dict[int, bool] = field(default_factory=dict)
    """Tickets without a final fate -> whether they are carried (False: in this step's rounds)."""
    _step: Counter[str] = field(default_factory=Counter)

    def issue(self, num_tickets: int) -> range:
        """The next tickets, now open."""
        tickets = range(self.next_ticket, self.next_ticket + num_tickets)
        self.next_ticket += num_tickets
        self.open.update(dict.fromkeys(tickets, False))
        self._step["issued"] += num_tickets
        return tickets

    def settle(self, ticket: int, fate: Fate) -> None:
        """Enter what became of an open ticket. Raises DapoError for one that is not open."""
        if ticket not in self.open:
            raise DapoError(f"ledger: ticket {ticket} is not open, it cannot become {fate}")
        if fate is Fate.CARRIED:
            self.open[ticket] = True
            return
        del self.open[ticket]
        self.totals[fate.value] += 1  # a plain word in messages
        self._step[fate] += 1

    def close_step(self) -> dict[str, int]:
        """This step's counts: issued, each final fate, and what is carried now.

        Raises DapoError if a ticket was left undecided or the sums do not match.
        """
        undecided = [ticket for ticket, carried in self.open.items() if not carried]
        if undecided:
            raise DapoError(f"ledger: ticket {undecided[0]} ended the step without a fate")
        if self.next_ticket != sum(self.totals.values()) + len(self.open):
            raise DapoError(
                f"ledger: {self.next_ticket} tickets issued, but {dict(self.totals)} and "
                f"{len(self.open)} carried"
            )
        counts = {"issued": self._step["issued"]}
        counts |= {fate: self._step[fate] for fate in Fate if fate is not Fate.CARRIED}
        counts["carried"] = len(self.open)
        self._step = Counter()
        return counts

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, taken between steps."""
        return {
            "next_ticket": self.next_ticket,
            "totals": dict(self.totals),
            "carried": sorted(self.open),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger that `state` was taken from."""
        return cls(
            next_ticket=state["next_ticket"],
            totals=Counter(state["totals"]),
            open=dict.fromkeys(state["carried"], True),
        )
