"""Which columns of a user's data hold prompts and answers, and what to write where they are not
found."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dapo_megatron.config import Columns
from dapo_megatron.types import DataError

OPTIONAL = ("data_source", "ability", "extra_info")
"""Columns that a run also reads where they exist."""
_LIKELY: Mapping[str, Sequence[str]] = {
    "prompt": ("prompt", "question", "problem", "query", "instruction", "messages", "input"),
    "answer": (
        "answer", "final_answer", "ground_truth", "truth", "expected_answer", "target", "label",
        "solution", "output",
    ),
}  # fmt: skip
"""Names that published data sets use, best first. A `solution` next to an `answer` is a text."""
_MAX_SHOWN = 12
"""Names of columns in a message."""


def columns_read(names: Sequence[str], columns: Columns, where: str) -> list[str]:
    """Return the columns of a file that a run reads, in the order of the file.

    Raises DataError for a column that is missing, or that the file has twice.
    """
    check_columns(names, columns, where)
    wanted = {_column_of(name, names) for name in (columns.prompt, columns.answer)} | {*OPTIONAL}
    for name in sorted(wanted):
        if names.count(name) > 1:
            raise DataError(f"{where}: the column {name} is there twice; remove one of them")
    return [name for name in names if name in wanted]


def check_columns(names: Collection[str], columns: Columns, where: str) -> None:
    """Raise DataError if the column of prompts or of answers is not among `names`. The message
    lists them, and suggests the likely pair."""
    configured = (columns.prompt, columns.answer)
    missing = [name for name in configured if _column_of(name, names) not in names]
    if missing:
        shown = ", ".join(f"{name:.40}" for name in list(names)[:_MAX_SHOWN])
        more = ", ..." if len(names) > _MAX_SHOWN else ""
        raise DataError(
            f"{where}, column {' and column '.join(missing)} is missing; there are "
            f"{shown or 'none'}{more}; {_suggestion(names, columns)}"
        )


def value_of(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value of a column of `row`, or with `a.b` of the field b of column a; None for a
    field that is not there."""
    if name in row:
        return row[name]
    column, _, field = name.partition(".")
    mapping = row[column]
    if not isinstance(mapping, dict):
        found = "nothing" if mapping is None else f"{type(mapping).__name__} {mapping!r:.60}"
        raise DataError(f"{where}, column {column}: must be a mapping, found {found}")
    return mapping.get(field)


def _column_of(name: str, names: Collection[str]) -> str:
    """Return the column that `name` is in: itself, or column a for `a.b`."""
    return name if name in names else name.partition(".")[0]


def _suggestion(names: Collection[str], columns: Columns) -> str:
    """Return what to write in the config."""
    prompt = _likely("prompt", columns.prompt, names)
    answer = _likely("answer", columns.answer, [name for name in names if name != prompt])
    if prompt and answer:
        return f"write columns: {{prompt: {prompt}, answer: {answer}}}"
    return (
        "name those of question and answer, columns: {prompt: COLUMN, answer: COLUMN}, or drop the "
        "row"
    )


def _likely(role: str, configured: str, names: Collection[str]) -> str | None:
    """Return the column that a user most likely means, or None."""
    if _column_of(configured, names) in names:
        return configured
    by_folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(configured.casefold(), by_folded, n=1, cutoff=0.75)
    known = [name for name in (*close, *_LIKELY[role]) if name in by_folded]
    return by_folded[known[0]] if known else None
