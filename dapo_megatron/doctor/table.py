"""What the proof reports: a line per case as it ends, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from dapo_megatron.doctor.matrix import Case
from dapo_megatron.doctor.measure import Differences


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences allowed; see measure.Differences.

    `gradient` bounds the gradient, the loss and the log-probs; `updates` what comes of three
    updates: losses, gradient norms and weights. Megatron computes the norm in float32, whatever the
    precision.
    """

    gradient: float
    updates: float

    def failures(self, found: Differences) -> list[str]:
        """The names of the differences that are too large (or nan)."""
        bounds = {
            "gradient": self.gradient,
            "logprobs": self.gradient,
            "loss": self.gradient,
            "losses": self.updates,
            "grad_norm": self.updates,
            "weights": self.updates,
        }
        return [name for name, bound in bounds.items() if not getattr(found, name) <= bound]


TOLERANCES = {
    "float64": Tolerance(gradient=1e-9, updates=1e-5),
    "float32": Tolerance(gradient=1e-5, updates=1e-5),
    # Against one process in bfloat16. Tensor parallel 2 rounds half sums: 0.2 in the worst tensor
    # of a small model, 0.01 elsewhere; a factor of 2 anywhere is 0.5 at least.
    "bfloat16": Tolerance(gradient=0.4, updates=5e-2),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its figures; `failures` names those beyond the tolerance."""

    case: Case
    differences: Differences
    seconds: float
    failures: list[str]

    @property
    def ok(self) -> bool:
        """Whether all figures are within the tolerance."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the JSON file."""
        case = self.case
        return {
            "layout": case.layout,
            "yours": case.yours,
            "num_ranks": case.num_ranks,
            "split": case.split,
            "packed": case.packed,
            **asdict(self.differences),
            "seconds": self.seconds,
            "failures": self.failures,
            "ok": self.ok,
        }


class Report:
    """Prints the table to `file`, and keeps its rows."""

    def __init__(self, file: TextIO, cases: Sequence[Case]) -> None:
        terminal = file.isatty()
        # soft_wrap: a line stays one line, for grep and for narrow windows alike.
        self._console = Console(
            file=file,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        self._width = max((len(case.label) for case in cases), default=0)
        self.rows: list[Row] = []

    def note(self, text: str, style: str = "") -> None:
        """A line of text."""
        self._console.print(text, style=style)

    def header(self) -> None:
        """The names of the columns."""
        columns = f"{'layout':<{self._width}}  split    rows    gradient     loss  updates  seconds"
        self._console.print(columns, style="bold")

    def add(self, row: Row) -> None:
        """Print a row, with what is wrong about it."""
        self.rows.append(row)
        found, case = row.differences, row.case
        cells = (
            f"{case.label:<{self._width}}  {case.split:<7}  {case.rows}  "
            f"{found.gradient:8.1e} {found.loss:8.1e} {found.weights:8.1e} {row.seconds:8.1f}  "
        )
        verdict = Text("ok", "green") if row.ok else Text("FAIL", "bold red")
        self._console.print(Text(cells) + verdict + Text(_what(row), "red"))

    def verdict(self, left_out: str) -> None:
        """The last lines; `left_out` says what is not among the cases."""
        failed = sum(not row.ok for row in self.rows)
        if failed:
            self._console.print(f"{failed} of {len(self.rows)} cases FAIL", style="bold red")
        else:
            said = f"all {len(self.rows)} cases agree" if len(self.rows) > 1 else "the case agrees"
            self._console.print(said, style="bold green")
        if left_out:
            self.note(left_out, style="yellow")

    @property
    def ok(self) -> bool:
        """Whether every row is ok, and there is one."""
        return bool(self.rows) and all(row.ok for row in self.rows)


def _what(row: Row) -> str:
    """Which figures of a failed row are too large, and the tensor at fault."""
    if row.ok:
        return ""
    figures = [f"{name} {getattr(row.differences, name):.1e}" for name in row.failures]
    tensor = f" in {row.differences.tensor}" if "gradient" in row.failures else ""
    return f"  {', '.join(figures)}{tensor}"


def to_json(facts: dict[str, Any], report: Report) -> str:
    """Facts about the run, the verdict, and the rows."""
    rows = [{key: _plain(value) for key, value in row.to_json().items()} for row in report.rows]
    yours = any(row.case.yours for row in report.rows)
    body = {**facts, "ok": report.ok, "yours_tried": yours, "rows": rows}
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no inf and no nan: their names."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
