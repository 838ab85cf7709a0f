"""Completions as rows: the records, and their columns in pyarrow. Files: completion_files.py.

All values are restored exactly. Tokens and log-probs are copied as packed arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.files import parse_json
from dapo_megatron.rollout.parquet import (
    Schema,
    Table,
    data_errors,
    lists,
    numbers,
    strings,
    texts_of,
    views_of,
)
from dapo_megatron.types import (
    Completion,
    DataError,
    Finish,
    Grade,
    Prompt,
    Segment,
    packed,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUMMARY_COLUMNS = (
    *("ticket", "sample", "source", "index", "num_prompt_tokens", "outcome", "verdict"),
    *("finish", "num_tokens", "segments", "logprob_mean", "logprob_min"),
    *("score", "correct", "pred", "parsed", "reward"),
)
"""Columns of a `SummaryRow`."""
_PROMPT = ("source", "index", "prompt_tokens", "prompt", "truth", "extra")
_TEXTS = ("source", "prompt", "truth", "extra", "outcome", "verdict", "text", "finish", "pred")
_TOKENS = ("tokens", "logprobs", "old_logprobs", "reference_logprobs", "prompt_tokens", "routes")


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """A completion in a file.

    outcome        outcome of its group; "" if the group is open
    verdict        verdict of its group; None without grades
    reward         score plus length penalty; None without a grade
    old_logprobs   float32 or float64 [tokens]: log-probs of the policy before the step's first
                   update; None if they are not known
    reference_logprobs  the same of the reference of loss.kl; None without one
    """

    ticket: int
    prompt: Prompt
    completion: Completion
    outcome: str = ""
    verdict: str | None = None
    reward: float | None = None
    old_logprobs: NDArray[Any] | None = None
    reference_logprobs: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A row without tokens, log-probs and texts. `prompt_tokens` is their number."""

    ticket: int
    sample: int
    source: str
    index: int
    prompt_tokens: int
    num_tokens: int
    finish: Finish
    segments: tuple[Segment, ...]
    logprob_mean: float | None = None
    logprob_min: float | None = None
    grade: Grade | None = None
    outcome: str = ""
    verdict: str | None = None
    reward: float | None = None

    @property
    def oldest_version(self) -> int:
        """Version of the weights that sampled the first token."""
        return self.segments[0].version


# ---------------------------------------------------------------------------- writing


@cache
def schema(is_float64: bool, *, has_reference: bool = False, routes: str | None = None) -> Schema:
    """Return the columns. `is_float64` is of old_logprobs and reference_logprobs; the column of the
    latter exists only with `has_reference`. `routes` is the dtype of routes, None if no row has
    any."""
    import pyarrow as pa

    def required(name: str, kind: Any) -> Any:
        return pa.field(name, kind, nullable=False)

    def listed(kind: Any) -> Any:
        return pa.list_(required("element", kind))

    by_policy = listed(pa.float64() if is_float64 else pa.float32())
    segment = pa.struct([required("version", pa.int64()), required("num_tokens", pa.int64())])
    return pa.schema(
        [
            required("ticket", pa.int64()),
            required("sample", pa.int32()),
            required("source", pa.string()),
            required("index", pa.int64()),
            required("prompt", pa.string()),
            required("truth", pa.string()),
            required("text", pa.string()),
            required("outcome", pa.string()),
            pa.field("verdict", pa.string()),
            pa.field("reward", pa.float64()),
            pa.field("score", pa.float64()),
            pa.field("correct", pa.bool_()),
            pa.field("pred", pa.string()),
            pa.field("parsed", pa.bool_()),
            required("finish", pa.string()),
            required("segments", listed(segment)),
            required("num_tokens", pa.int32()),
            required("num_prompt_tokens", pa.int32()),
            pa.field("logprob_mean", pa.float64()),
            pa.field("logprob_min", pa.float64()),
            required("tokens", listed(pa.int32())),
            required("logprobs", listed(pa.float32())),
            pa.field("old_logprobs", by_policy),
            *([pa.field("reference_logprobs", by_policy)] if has_reference else []),
            required("prompt_tokens", listed(pa.int32())),
            required("extra", pa.string()),
            *([pa.field("routes", listed(getattr(pa, routes)()))] if routes else ()),
        ]
    )


Batch = list[tuple[CompletionRow, "NDArray[Any]", str]]
"""Rows, each with the tokens and the JSON of `extra` of its prompt."""


def table_of(batch: Batch, schema: Schema) -> Table:
    """Return rows as a table."""
    import pyarrow as pa

    rows = [row for row, _, _ in batch]
    completions = [row.completion for row in rows]
    grades = [completion.grade for completion in completions]
    columns: dict[str, Any] = {
        "ticket": [row.ticket for row in rows],
        "sample": [completion.sample for completion in completions],
        "source": strings(row.prompt.source for row in rows),
        "index": [row.prompt.index for row in rows],
        "prompt": strings(row.prompt.text for row in rows),
        "truth": strings(row.prompt.truth for row in rows),
        "text": strings(completion.text for completion in completions),
        "outcome": strings(str(row.outcome) for row in rows),
        "verdict": strings(row.verdict for row in rows),
        "reward": [row.reward for row in rows],
        "score": [None if grade is None else grade.score for grade in grades],
        "correct": [None if grade is None else grade.correct for grade in grades],
        "pred": strings(None if grade is None else grade.pred for grade in grades),
        "parsed": [None if grade is None else grade.parsed for grade in grades],
        "finish": strings(completion.finish.value for completion in completions),
        "segments": _segments(completions, schema.field("segments").type),
        "num_tokens": [completion.num_tokens for completion in completions],
        "num_prompt_tokens": [len(tokens) for _, tokens, _ in batch],
        "logprob_mean": [completion.logprob_mean for completion in completions],
        "logprob_min": [completion.logprob_min for completion in completions],
        "tokens": [completion.tokens for completion in completions],
        "logprobs": [completion.logprobs for completion in completions],
        "old_logprobs": [row.old_logprobs for row in rows],
        "reference_logprobs": [row.reference_logprobs for row in rows],
        "prompt_tokens": [tokens for _, tokens, _ in batch],
        "extra": strings(extra for _, _, extra in batch),
        "routes": [completion.routes for completion in completions],
    }
    arrays = []
    for field in schema:
        values = columns[field.name]
        if field.name in _TOKENS:
            values = lists(values, field.type)
        elif isinstance(values, list):
            values = numbers(values, field.type)
        arrays.append(values)
    return pa.Table.from_arrays(arrays, schema=schema)


def _segments(completions: list[Completion], kind: Any) -> Any:
    import pyarrow as pa

    ends = [0]
    for completion in completions:
        ends.append(ends[-1] + len(completion.segments))
    segments = [segment for completion in completions for segment in completion.segments]
    values = pa.StructArray.from_arrays(
        [
            numbers([segment.version for segment in segments], pa.int64()),
            numbers([segment.num_tokens for segment in segments], pa.int64()),
        ],
        fields=list(kind.value_type),
    )
    return pa.ListArray.from_arrays(numbers(ends, pa.int32()), values, type=kind)


# ---------------------------------------------------------------------------- reading


def _columns(path: Path, table: Table) -> dict[str, list[Any]]:
    """Return the values of each column, with lists of tokens and log-probs as numpy views."""
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        with data_errors(path, f"column {name} is damaged"):
            if name in _TOKENS:
                columns[name] = views_of(column)
            else:
                columns[name] = texts_of(column) if name in _TEXTS else column.to_pylist()
    return columns


def completion_rows(path: Path, table: Table) -> Iterator[CompletionRow]:
    """Yield the rows of a table. Raises DataError naming the file and the row of a wrong value."""
    columns = _columns(path, table)
    prompt, prompt_values = None, None
    for row in range(table.num_rows):
        with _naming_row(path, columns, row):
            values = tuple(columns[name][row] for name in _PROMPT)
            if prompt is None or not _same_prompt(values, prompt_values):
                prompt, prompt_values = _prompt(*values), values
            completion = _completion(columns, row)
        yield CompletionRow(
            ticket=columns["ticket"][row],
            prompt=prompt,
            completion=completion,
            outcome=columns["outcome"][row],
            verdict=columns["verdict"][row],
            reward=columns["reward"][row],
            old_logprobs=_copy(columns["old_logprobs"][row]),
            reference_logprobs=_copy(columns["reference_logprobs"][row])
            if "reference_logprobs" in columns
            else None,
        )


def _copy(values: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return a copy. A view would keep the row group in memory."""
    return None if values is None else values.copy()


def _same_prompt(values: tuple[Any, ...], others: tuple[Any, ...] | None) -> bool:
    """Return True if a row has the prompt of the row before, which is then shared."""
    assert others is not None
    pairs = list(zip(_PROMPT, values, others, strict=True))
    return all(a == b for name, a, b in pairs if name != "prompt_tokens") and all(
        a.tobytes() == b.tobytes() for name, a, b in pairs if name == "prompt_tokens"
    )


def _prompt(source: str, index: int, tokens: Any, text: str, truth: str, extra: str) -> Prompt:
    value = parse_json(extra)
    if not isinstance(value, dict):
        raise ValueError("extra is not a JSON object")
    return Prompt(source, index, tuple(tokens.tolist()), text, truth, value)


def _completion(columns: dict[str, list[Any]], row: int) -> Completion:
    tokens, logprobs = columns["tokens"][row], columns["logprobs"][row]
    routes = columns["routes"][row] if "routes" in columns else None
    if not columns["num_tokens"][row] == len(tokens) == len(logprobs):
        raise ValueError(
            f"num_tokens is {columns['num_tokens'][row]}, with {len(tokens)} tokens and "
            f"{len(logprobs)} log-probs"
        )
    return Completion(
        sample=columns["sample"][row],
        tokens=packed(tokens),
        logprobs=packed(logprobs),
        text=columns["text"][row],
        finish=Finish(columns["finish"][row]),
        segments=_segments_of(columns["segments"][row]),
        grade=_grade(columns, row),
        routes=None if routes is None else packed(routes),
    )


def summary_rows(path: Path, table: Table) -> Iterator[SummaryRow]:
    """Yield the rows of a table with SUMMARY_COLUMNS. Raises DataError as `completion_rows`."""
    columns = _columns(path, table)
    for row in range(table.num_rows):
        with _naming_row(path, columns, row):
            summary = _summary_row(columns, row)
        yield summary


def _summary_row(columns: dict[str, list[Any]], row: int) -> SummaryRow:
    values = {name: column[row] for name, column in columns.items()}
    return SummaryRow(
        ticket=values["ticket"],
        sample=values["sample"],
        source=values["source"],
        index=values["index"],
        prompt_tokens=values["num_prompt_tokens"],
        num_tokens=values["num_tokens"],
        finish=Finish(values["finish"]),
        segments=_segments_of(values["segments"]),
        logprob_mean=values["logprob_mean"],
        logprob_min=values["logprob_min"],
        grade=_grade(columns, row),
        outcome=values["outcome"],
        verdict=values["verdict"],
        reward=values["reward"],
    )


def _segments_of(values: list[dict[str, int]]) -> tuple[Segment, ...]:
    return tuple(Segment(value["version"], value["num_tokens"]) for value in values)


def _grade(columns: dict[str, list[Any]], row: int) -> Grade | None:
    values = {name: columns[name][row] for name in Grade.__dataclass_fields__}
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise ValueError(f"a grade without {missing[0]}")
    return Grade(**values)


@contextmanager
def _naming_row(path: Path, columns: dict[str, list[Any]], row: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: ticket {columns['ticket'][row]}, sample {columns['sample'][row]}: {error}"
        ) from error
