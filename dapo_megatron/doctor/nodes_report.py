"""What the check of all nodes found, as a record, a table and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_megatron.doctor.check_result import STYLES, Check, Status, worst


@dataclass(frozen=True, slots=True)
class Findings:
    """What all ranks found together. `checks` has a list for each node, `whole` what no node can be
    blamed for, `figures` the bandwidths."""

    checks: dict[str, list[Check]]
    whole: list[Check]
    figures: dict[str, Any]

    @property
    def bad(self) -> list[str]:
        """The nodes to leave out."""
        return [node for node, checks in self.checks.items() if worst(checks) is Status.FAIL]

    @property
    def is_good(self) -> bool:
        """Whether a run may start."""
        return not self.bad and worst(self.whole) is not Status.FAIL


def as_json(findings: Findings) -> str:
    """An object: good, bad (names of nodes), nodes (checks of each), whole, bandwidth."""
    body = {
        "good": findings.is_good,
        "bad": findings.bad,
        "nodes": {
            node: {"status": worst(checks), "checks": [asdict(check) for check in checks]}
            for node, checks in findings.checks.items()
        },
        "whole": [asdict(check) for check in findings.whole],
        "bandwidth": findings.figures,
    }
    return json.dumps(body, indent=2) + "\n"


def render(findings: Findings, console: Console) -> None:
    """Print a row for each node, the bandwidths, and the bad nodes."""
    table = Table("node", "status", "findings and remedies", title="doctor nodes")
    everything = {**findings.checks, "all together": findings.whole}
    for node, checks in everything.items():
        status, text = worst(checks), Text()
        for check in checks:
            if check.status is not Status.OK or check.name in ("GPUs", "clock"):
                text.append(f"{check.name}: {check.finding}\n")
            if check.remedy:
                text.append(f"-> {check.remedy}\n", style="bold")
        text.rstrip()
        table.add_row(node, Text(status, style=STYLES[status]), text)
    console.print(table)
    rows = [(" - ".join(pair["nodes"]), pair["gbps"]) for pair in findings.figures["pairs"]]
    for name in ("all_reduce", "all_to_all"):
        if (gbps := findings.figures[f"{name}_gbps"]) is not None:
            rows.append((f"{name.replace('_', '-')}, all ranks", gbps))
    if rows:
        speeds = Table("bandwidth", "GB/s per rank")
        for name, gbps in rows:
            speeds.add_row(name, f"{gbps:.2f}")
        console.print(speeds)
    if findings.bad:
        console.print(f"bad: {', '.join(findings.bad)}", style="bold red", highlight=False)
