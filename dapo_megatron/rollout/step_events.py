"""Events of the groups of a rollout step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.types import Group


@dataclass
class StepEvents:
    """Events since the end of the last step."""

    version: int = 0
    """Version of the weights that the step started from."""
    issued: int = 0
    decided: list[Group] = field(default_factory=list)
    gradings: Counter[tuple[str, str]] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-compatible state, without the version. Groups are named by their tickets."""
        return {
            "issued": self.issued,
            "decided": [group.ticket for group in self.decided],
            "gradings": [[*key, count] for key, count in self.gradings.items()],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any] | None, groups: Iterable[OpenGroup]) -> Self:
        """Return the events of `to_json`; none for None, which older versions saved."""
        if state is None:
            return cls()
        by_ticket = {group.ticket: group for group in groups}
        return cls(
            issued=state["issued"],
            decided=[by_ticket[ticket].group() for ticket in state["decided"]],
            gradings=Counter({(source, what): num for source, what, num in state["gradings"]}),
        )
