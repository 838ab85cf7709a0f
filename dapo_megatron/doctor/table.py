"""Table of `doctor layouts`: tolerances, and one line per finished case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.text import Text

from dapo_megatron.doctor.matrix import LayoutCase
from dapo_megatron.doctor.measure import Differences
from dapo_megatron.literal_console import LiteralConsole


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed differences; see measure.Differences.

    `gradient` limits gradient, loss and log-probs. `updates` limits the losses, gradient norms and
    weights of three updates; it is larger because Megatron always computes the norm in float32.
    """

    gradient: float
    updates: float

    def failures(self, differences: Differences) -> list[str]:
        """Return the names of the differences that are too large (or nan)."""
        bounds = {
            "gradient": self.gradient,
            "logprobs": self.gradient,
            "loss": self.gradient,
            "losses": self.updates,
            "grad_norm": self.updates,
            "weights": self.updates,
        }
        return [name for name, bound in bounds.items() if not getattr(differences, name) <= bound]


TOLERANCES = {
    "float64": Tolerance(gradient=1e-9, updates=1e-5),
    "float32": Tolerance(gradient=1e-5, updates=1e-5),
    # Compared with one process in bfloat16. Tensor parallelism 2 rounds partial sums, which gives
    # 0.2 in the worst tensor of a small model, 0.01 elsewhere. A wrong factor of 2 gives at least
    # 0.5.
    "bfloat16": Tolerance(gradient=0.4, updates=5e-2),
}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case with its differences. `failures` names those beyond the tolerance."""

    case: LayoutCase
    differences: Differences
    seconds: float
    failures: list[str]

    @property
    def ok(self) -> bool:
        """True if all differences are within the tolerance."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for the JSON file."""
        case, differences = self.case, asdict(self.differences)
        for name, value in differences.items():
            if isinstance(value, float) and not math.isfinite(value):
                differences[name] = str(value)  # JSON has no inf and no nan
        return {
            "layout": case.layout,
            "yours": case.yours,
            "num_ranks": case.num_ranks,
            "split": case.split,
            "packed": case.packed,
            **differences,
            "seconds": self.seconds,
            "failures": self.failures,
            "ok": self.ok,
        }


class CaseTable:
    """Table on a terminal, printed row by row."""

    def __init__(self, file: TextIO, cases: Sequence[LayoutCase]) -> None:
        terminal = file.isatty()
        # soft_wrap keeps each row on one line, for grep and for narrow windows.
        self._console = LiteralConsole(
            file=file,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            highlight=False,
            soft_wrap=True,
        )
        self._width = max((len(case.label) for case in cases), default=0)
        self.rows: list[CaseResult] = []

    def note(self, text: str, style: str = "") -> None:
        """Print a line of text."""
        self._console.print(text, style=style)

    def header(self) -> None:
        """Print the names of the columns."""
        columns = f"{'layout':<{self._width}}  split    rows    gradient     loss  updates  seconds"
        self._console.print(columns, style="bold")

    def add(self, row: CaseResult) -> None:
        """Print a row, and the differences that fail."""
        self.rows.append(row)
        differences, case = row.differences, row.case
        cells = (
            f"{case.label:<{self._width}}  {case.split:<7}  {case.rows}  "
            f"{differences.gradient:8.1e} {differences.loss:8.1e} {differences.weights:8.1e} "
            f"{row.seconds:8.1f}  "
        )
        verdict = Text("ok", "green") if row.ok else Text("FAIL", "bold red")
        self._console.print(Text(cells) + verdict + Text(_failures(row), "red"))

    def verdict(self, left_out: str) -> None:
        """Print the overall result, and the note `left_out` about a layout that was not tested."""
        failed = sum(not row.ok for row in self.rows)
        if failed:
            self._console.print(f"{failed} of {len(self.rows)} cases FAIL", style="bold red")
        else:
            text = f"all {len(self.rows)} cases agree" if len(self.rows) > 1 else "the case agrees"
            self._console.print(text, style="bold green")
        if left_out:
            self.note(left_out, style="yellow")

    @property
    def ok(self) -> bool:
        """True if there are rows, and all of them are ok."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the overall result and the rows, for the JSON file."""
        return {
            "ok": self.ok,
            "yours_tried": any(row.case.yours for row in self.rows),
            "rows": [row.to_dict() for row in self.rows],
        }


def _failures(row: CaseResult) -> str:
    """Return the differences of a failed row that are too large, and the tensor at fault."""
    if row.ok:
        return ""
    failures = [f"{name} {getattr(row.differences, name):.1e}" for name in row.failures]
    tensor = f" in {row.differences.tensor}" if "gradient" in row.failures else ""
    return f"  {', '.join(failures)}{tensor}"
