"""Result of a check, and the overall status of several. Used by `doctor env` and `doctor nodes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

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
