"""Read rows in batches with their Arrow types.

`dapo_megatron/data/prompts.py` reads the same files for a run. This module also keeps the columns
that a run ignores. A column of Parquet has one type, and values of JSONL may have several: where
they do, they are written as text (`uniform`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Columns
from dapo_megatron.data.columns import columns_read
from dapo_megatron.data.rows import (
    DAPO_MATH_COLUMNS,
    PromptRow,
    checked_row,
    parquet_batches,
    plain_rows,
    read_jsonl,
)
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 4096
Batch = tuple["pyarrow.RecordBatch", list[PromptRow]]


def read(
    path: Path, batch_rows: int = BATCH_ROWS, columns: Columns = DAPO_MATH_COLUMNS
) -> Iterator[Batch]:
    """Yield batches of a Parquet or JSONL file, as Arrow and as checked rows.

    Raises DataError, which names file, row or line, and column.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path, batch_rows, columns)
    elif path.suffix in (".jsonl", ".json"):
        kinds: Kinds = {}
        for _, _, value in read_jsonl(str(path)):
            add_kinds(value, (), kinds)
        are_mixed = kinds.get((columns.prompt,)) == {"str", "list"}
        lines = read_jsonl(str(path))
        while chunk := list(islice(lines, batch_rows)):
            rows = [checked_row(*line, columns) for line in chunk]
            values = [uniform(row, (), kinds) for _, _, row in chunk]
            if are_mixed:  # text in some rows, messages in others
                for value, row in zip(values, rows, strict=True):
                    value[columns.prompt] = row.messages
            yield _as_arrow(values, chunk[0][1]), rows
    else:
        raise DataError(f"{path}: must end in .parquet or .jsonl")


def _read_parquet(path: Path, batch_rows: int, columns: Columns) -> Iterator[Batch]:
    first = 0
    for batch in parquet_batches(str(path), batch_rows, columns):
        yield batch, checked(batch, str(path), first, columns)
        first += len(batch)


def checked(batch: pyarrow.RecordBatch, name: str, first: int, columns: Columns) -> list[PromptRow]:
    """Return the rows of an Arrow batch that starts at row `first` of `name`. Raises DataError."""
    known = batch.select(columns_read(batch.schema.names, columns, name))
    return [checked_row(*row, columns) for row in plain_rows(known, name, first)]


Kinds = dict[tuple[str, ...], set[str]]
"""Kinds of the values at each place in the rows of a file; a list's values are at place []."""
_INT64 = range(-(2**63), 2**63)


def add_kinds(value: Any, place: tuple[str, ...], kinds: Kinds) -> None:
    """Add the kinds of a JSON value and of all values inside it to `kinds`."""
    if value is None:
        return
    kind = type(value).__name__
    if kind == "int" and value not in _INT64:
        kind = "large int"
    kinds.setdefault(place, set()).add(kind)
    if isinstance(value, dict):
        for name, inner in value.items():
            add_kinds(inner, (*place, name), kinds)
    elif isinstance(value, list):
        for inner in value:
            add_kinds(inner, (*place, "[]"), kinds)


def uniform(value: Any, place: tuple[str, ...], kinds: Kinds) -> Any:
    """Return a JSON value whose parts have one type each in the whole file.

    Where `kinds` has several, a value becomes text: itself, or JSON. An object that is empty in all
    rows becomes null, because Parquet has no type for it.
    """
    here = kinds.get(place, set())
    if value is None or (here == {"dict"} and not any(p[:-1] == place for p in kinds)):
        return None
    if (len(here) > 1 and here != {"int", "float"}) or "large int" in here:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: uniform(inner, (*place, name), kinds) for name, inner in value.items()}
    if isinstance(value, list):
        return [uniform(inner, (*place, "[]"), kinds) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # half a character in an unread column
    return float(value) if "float" in here else value


def _as_arrow(rows: list[dict[str, Any]], where: str) -> pyarrow.RecordBatch:
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    arrays = []
    for name in names:
        try:
            arrays.append(pyarrow.array([row.get(name) for row in rows]))
        except (pyarrow.lib.ArrowException, OverflowError, ValueError) as error:
            raise DataError(
                f"{where} and the {len(rows) - 1} after it, column {name}: cannot be written as "
                f"Parquet ({error}); write text, or remove the column"
            ) from error
    return pyarrow.RecordBatch.from_arrays(arrays, names=list(names))


def schema_of(batches: Mapping[str, Sequence[pyarrow.RecordBatch]]) -> pyarrow.Schema:
    """Return a schema that fits the batches of all inputs, by name.

    Raises DataError, which names the first input whose columns do not fit those before it.
    """
    import pyarrow

    schema = pyarrow.schema([])
    for name, parts in batches.items():
        for part in parts:
            try:
                schema = pyarrow.unify_schemas([schema, part.schema], promote_options="permissive")
            except pyarrow.lib.ArrowException as error:
                raise DataError(
                    f"{name}: its columns do not fit those of the inputs before it; prepare it "
                    f"into a separate file: {error}"
                ) from error
            schema = schema.with_metadata(schema.metadata or part.schema.metadata)
    return schema
