"""Result of a check, and tables of several. Used by `doctor env` and `doctor nodes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.table import Table
from rich.text import Text


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"

    @property
    def text(self) -> Text:
        """The status in its color."""
        return Text(self, style={"ok": "green", "warn": "yellow", "fail": "bold red"}[self])


@dataclass(frozen=True)
class Check:
    """One line of a report. `remedy` is empty only if `status` is ok.

    Example: Check("apex", Status.FAIL, "not NVIDIA's package", "pip uninstall apex")
    """

    name: str
    status: Status
    finding: str
    remedy: str = ""


def worst(checks: Sequence[Check]) -> Status:
    """Return the worst status of all checks; ok without checks. The command fails if it is
    `fail`."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def to_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the worst `status` and the list of `checks`, field by field."""
    return {"status": worst(checks), "checks": [asdict(check) for check in checks]}


def table(title: str, checks: Mapping[str, Sequence[Check]]) -> Table:
    """Return a table of checks by place, such as a node, with their remedies."""
    rows = Table("where", "check", "status", "finding and remedy", title=title)
    for place, here in checks.items():
        for check in here:
            text = Text(check.finding)
            if check.remedy:
                text.append(f"\n-> {check.remedy}", style="bold")
            rows.add_row(place, check.name, check.status.text, text)
    return rows
