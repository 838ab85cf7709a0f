"""The bound on the age of trained tokens, rollout.max_staleness, in weight versions.

A group's tokens are at most as old as its ticket. So the bound holds if every ticket is trained on
within `max_staleness` versions of its issue. Each step trains on N groups, in ticket order except
for overtaking. Two rules keep the bound, and neither drops a group:

- A prompt is issued only if, with every group before it mixed, its turn still comes in time. So
  at most max_staleness x N groups are open besides those that the current step trains on.
- A step waits for a running group instead of overtaking it, if a group would otherwise be late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo_megatron.rollout.open_group import OpenGroup


@dataclass(frozen=True)
class StalenessBound:
    """Bound of `max_staleness` versions (None: no bound) in a run that trains on `num_groups`
    groups per step."""

    max_staleness: int | None
    num_groups: int

    def room(self, num_staying: int) -> float:
        """Return how many prompts may be issued if `num_staying` groups are open besides those that
        the current step will train on (negative while these are not all issued yet)."""
        if self.max_staleness is None:
            return math.inf
        return self.max_staleness * self.num_groups - num_staying

    def allows(
        self, chosen: Sequence[OpenGroup], groups: Mapping[int, OpenGroup], version: int
    ) -> bool:
        """Return whether the step of weights `version` may train on `chosen` now.

        `groups` are all open groups by ticket, in ticket order. The n-th of those that stay is
        trained on at the latest n // N steps after the next. If no group is overtaken, waiting
        would change nothing, so the answer is yes, even if a resumed run has a lower bound than
        before.
        """
        if self.max_staleness is None:
            return True
        leaving = {group.ticket for group in chosen}
        staying = [group for ticket, group in groups.items() if ticket not in leaving]
        is_overtaking = bool(staying) and staying[0].ticket < chosen[-1].ticket
        return not is_overtaking or all(
            version + 1 + place // self.num_groups - group.issued_version <= self.max_staleness
            for place, group in enumerate(staying)
        )
