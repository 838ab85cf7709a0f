"""The rollouts of a run in its report: a table of chosen completions, and each of them in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.report.folder import RunData


@dataclass(frozen=True)
class Rollouts:
    """What the page gets: one table, and blobs of JSON that it opens one by one."""

    table: dict[str, Any]
    blobs: dict[str, bytes]
    warnings: list[str] = field(default_factory=list)


def rollouts(
    run: RunData,
    completions: int = 2000,
    tickets: Sequence[int] = (),
    steps: tuple[int | None, int | None] | None = None,
) -> Rollouts | None:
    """The run's rollouts; None if none are recorded."""
    return None
