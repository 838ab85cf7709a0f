"""Columns of a user's data that hold prompts and answers, and suggestions if they are missing."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dapo_megatron.config import Columns
from dapo_megatron.types import DataError

OPTIONAL = ("data_source", "ability", "extra_info")
"""Columns that a run also reads if they exist."""
_LIKELY: Mapping[str, Sequence[str]] = {
    "prompt": ("prompt", "question", "problem", "query", "instruction", "messages", "input"),
    "answer": (
        "answer", "final_answer", "ground_truth", "truth", "expected_answer", "target", "label",
        "solution", "output",
    ),
}  # fmt: skip
"""Column names that published data sets use, best first. `solution` comes after `answer`, because a
data set with both has a worked solution in the former."""
_MAX_SHOWN = 12
"""Maximum number of column names in a message."""


def columns_read(names: Sequence[str], columns: Columns, where: str) -> list[str]:
    """Return the columns of a file that a run reads, in the order of the file.

    Raises DataError for a missing or duplicate column.
    """
    check_columns(names, columns, where)
    wanted = {_column_of(name, names) for name in (columns.prompt, columns.answer)} | {*OPTIONAL}
    for name in sorted(wanted):
        if names.count(name) > 1:
            raise DataError(f"{where}: duplicate column {name}; remove one of them")
    return [name for name in names if name in wanted]


def check_columns(names: Collection[str], columns: Columns, where: str) -> None:
    """Raise DataError if the prompt or answer column is not among `names`. The message lists the
    columns and suggests the likely pair."""
    configured = (columns.prompt, columns.answer)
    missing = [name for name in configured if _column_of(name, names) not in names]
    if missing:
        shown = ", ".join(f"{name:.40}" for name in list(names)[:_MAX_SHOWN])
        more = ", ..." if len(names) > _MAX_SHOWN else ""
        raise DataError(
            f"{where}, column {' and column '.join(missing)} is missing; the columns are "
            f"{shown or 'none'}{more}; {_suggestion(names, columns)}"
        )


def value_of(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value of column `name` of `row`. For `a.b`, return field b of column a, or None
    without that field. Raises DataError if column a is not a mapping."""
    if name in row:
        return row[name]
    column, _, field = name.partition(".")
    mapping = row[column]
    if not isinstance(mapping, dict):
        actual = "nothing" if mapping is None else f"{type(mapping).__name__} {mapping!r:.60}"
        raise DataError(f"{where}, column {column}: must be a mapping, found {actual}")
    return mapping.get(field)


def _column_of(name: str, names: Collection[str]) -> str:
    """Return the column that holds `name`: `name` itself, or column a for `a.b`."""
    return name if name in names else name.partition(".")[0]


def _suggestion(names: Collection[str], columns: Columns) -> str:
    """Return the config entry to write."""
    prompt = _likely("prompt", columns.prompt, names)
    answer = _likely("answer", columns.answer, [name for name in names if name != prompt])
    if prompt and answer:
        return f"write columns: {{prompt: {prompt}, answer: {answer}}}"
    return (
        "name the columns of question and answer, columns: {prompt: COLUMN, answer: COLUMN}, or "
        "drop the row"
    )


def _likely(role: str, configured: str, names: Collection[str]) -> str | None:
    """Return the column that the user most likely means, or None."""
    if _column_of(configured, names) in names:
        return configured
    by_folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(configured.casefold(), by_folded, n=1, cutoff=0.75)
    known = [name for name in (*close, *_LIKELY[role]) if name in by_folded]
    return by_folded[known[0]] if known else None
