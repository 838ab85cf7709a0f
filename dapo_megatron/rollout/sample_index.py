"""Index of a step's recorded completions: columns for display, made without their tokens.

The report selects completions by it. Values are rounded; exact values are in the Parquet files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dapo_megatron.rollout.completion_rows import SummaryRow
from dapo_megatron.types import Completion, Grade, Verdict

DECIMALS = 4
"""Decimal places of display columns."""
GROUP_COLUMNS = ("ticket", "source", "outcome", "verdict")
COMPLETION_COLUMNS = (
    *("group", "sample", "score", "correct", "parsed", "num_tokens", "finish", "age"),
    *("logprob_mean", "logprob_min"),
)


@dataclass(frozen=True, slots=True)
class IndexedGroup:
    """A group that ended in a step. `verdict` is that of its grades; None without any."""

    ticket: int
    source: str
    outcome: str
    verdict: str | None
    completions: Sequence[Completion | SummaryRow]


def index_of(step: int, groups: Iterable[IndexedGroup]) -> dict[str, Any]:
    """Return `{"step", "groups": {column: [...]}, "completions": {column: [...]}}`.

    The column `group` of completions is an index into the columns of groups.
    """
    group_rows: list[tuple[Any, ...]] = []
    completion_rows: list[tuple[Any, ...]] = []
    for group_index, group in enumerate(groups):
        group_rows.append(tuple(getattr(group, name) for name in GROUP_COLUMNS))
        for completion in group.completions:
            completion_rows.append((group_index, *display_values(step, completion).values()))
    return {
        "step": step,
        "groups": _columns(GROUP_COLUMNS, group_rows),
        "completions": _columns(COMPLETION_COLUMNS, completion_rows),
    }


def groups_of(rows: Iterable[SummaryRow]) -> list[IndexedGroup]:
    """Return the groups of rows, which may come from several files, sorted by ticket."""
    ordered = sorted(rows, key=lambda row: (row.ticket, row.sample))
    groups = []
    for ticket, members in groupby(ordered, key=lambda row: row.ticket):
        first, *others = members
        groups.append(
            IndexedGroup(ticket, first.source, first.outcome, first.verdict, (first, *others))
        )
    return groups


def display_values(step: int, completion: Completion | SummaryRow) -> dict[str, Any]:
    """Return the COMPLETION_COLUMNS, except `group`, of a completion whose group ended in `step`.

    `age` is the number of versions between its first token and the weights at the start of the
    step. Log-probs are the engine's. Score, correct and parsed are None without a grade; age and
    log-probs are None without tokens.
    """
    grade = completion.grade
    return {
        "sample": completion.sample,
        "score": None if grade is None else rounded(grade.score),
        "correct": None if grade is None else grade.correct,
        "parsed": None if grade is None else grade.parsed,
        "num_tokens": completion.num_tokens,
        "finish": completion.finish.value,
        "age": step - 1 - completion.oldest_version if completion.segments else None,
        "logprob_mean": rounded(completion.logprob_mean),
        "logprob_min": rounded(completion.logprob_min),
    }


def verdict_of(grades: Iterable[Grade | None]) -> str | None:
    """Return the verdict of the grades of a group, ignoring missing ones; None without any."""
    correct = {grade.correct for grade in grades if grade is not None}
    if not correct:
        return None
    if correct == {True, False}:
        return Verdict.MIXED.value
    return (Verdict.ALL_CORRECT if correct == {True} else Verdict.ALL_WRONG).value


def rounded(value: float | None, decimals: int = DECIMALS) -> float | None:
    """Round a value for display. Return None if it is not finite, which JSON cannot represent."""
    return round(value, decimals) if value is not None and math.isfinite(value) else None


def significant(value: float | None) -> float | None:
    """Round to four significant digits, so that a gap of 1e-6 is not displayed as 0.

    Return None if the value is not finite.
    """
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
