"""What a check reports, as a record, a table and JSON; shared by the `doctor` commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report. `remedy` is empty only where `status` is ok.

    Example: Check("apex", Status.FAIL, "a stranger's package", "pip uninstall apex")
    """

    name: str
    status: Status
    finding: str
    remedy: str = ""


def worst(checks: Sequence[Check]) -> Status:
    """The gravest status of all, ok for none. The command fails where it is `fail`."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def to_json(checks: Sequence[Check]) -> str:
    """An object with the worst `status` and the list of `checks`, field by field."""
    body = {"status": worst(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(body, indent=2) + "\n"


STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def render(checks: Sequence[Check], console: Console) -> None:
    """Prints a table, and under it how many problems there are."""
    table = Table("check", "status", "finding and remedy", title="doctor env", show_lines=False)
    for check in checks:
        text = Text(check.finding)
        if check.remedy:
            text.append(f"\n-> {check.remedy}", style="bold")
        table.add_row(check.name, Text(check.status, style=STYLES[check.status]), text)
    console.print(table)
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
