"""Columns of the table of completions: format of their values, and filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dapo_megatron.report.rollouts import Row

SIGNS = {"right": "✓", "wrong": "✗", "no answer": "∅", "no grade": "?"}


class Filter(Enum):
    NONE = ""
    CHOICE = "choice"
    """Selects one of the values, or one of the reasons in a value."""
    RANGE = "range"


def _text(value: Any) -> str:
    return str(value).replace("_", " ")


def _decimal(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    name: str
    label: str
    write: Callable[[Any], str] = "{:,}".format
    is_number: bool = True
    filter: Filter = Filter.NONE
    help: str = ""

    def cell(self, row: Row) -> str:
        """Return the text of a cell."""
        value = row[self.name]
        if value is None:
            return "\N{EN DASH}"
        text = self.write(value)
        return text.replace("-", "\N{MINUS SIGN}") if self.is_number else text

    def choices(self, rows: Sequence[Row]) -> list[str]:
        """Return the options of a CHOICE filter."""
        texts = {self.cell(row) for row in rows}
        if self.name == "why":
            texts = {reason for text in texts for reason in text.split(", ")}
        return sorted(text for text in texts if not text.startswith("sibling of "))

    def bounds(self, rows: Sequence[Row]) -> tuple[float, float] | None:
        """Return the lowest and the highest value, None without values."""
        values = [row[self.name] for row in rows if row[self.name] is not None]
        return (min(values), max(values)) if values else None


COLUMNS = (
    Column("step", "step", filter=Filter.RANGE),
    Column("source", "set", str, False, Filter.CHOICE),
    Column("fate", "fate", _text, False, Filter.CHOICE, "Outcome of its group"),
    Column("verdict", "verdict", _text, False, Filter.CHOICE, "Whether its group is mixed"),
    Column("graded", "graded", lambda text: f"{SIGNS[text]} {text}", False, Filter.CHOICE),
    Column("reward", "reward", _decimal, filter=Filter.RANGE),
    Column("advantage", "advantage", _decimal, help="Advantage used in training"),
    Column("num_tokens", "tokens", filter=Filter.RANGE),
    Column("finish", "finish", _text, False, Filter.CHOICE),
    Column(
        "age",
        "age",
        filter=Filter.RANGE,
        help="Weight versions between the sampling of its first token and its step",
    ),
    Column("logprob_mean", "log-prob", _decimal, help="Mean of the engine's log-probs"),
    Column("logprob_min", "lowest", _decimal, help="Engine's log-prob of its least likely token"),
    Column(
        "gap_max",
        "gap",
        "{:.1e}".format,
        help="Largest |engine log-prob - policy log-prob| of its tokens",
    ),
    Column("why", "here because", str, False, Filter.CHOICE, "Why the page includes it"),
)
