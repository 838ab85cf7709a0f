"""Rows of a JSONL or Parquet file in the DAPO-Math schema (docs/data.md), read and checked.

Rows are checked strictly: a truth that was once a float, or a prompt without its question, would
only show as a reward that never rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from dapo_megatron.files import parse_json
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    import pyarrow

CHUNK_ROWS = 256
MAX_LINE_BYTES = 64 * 2**20
"""A longer line of a JSONL file is not a problem for a model but a damaged file."""
ROLES = ("system", "user", "assistant")
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
_NO_MEMORY = "not enough memory to read it; free some, or split the file"
_NOT_PLAIN = (ValueError, TypeError, OverflowError, RecursionError)
"""Raised by Arrow where a value has no Python form: bad UTF-8, dates out of range, equal names."""


@dataclass(frozen=True, slots=True)
class Row:
    """One problem before the chat template; `where` names it in an error."""

    index: int
    where: str
    messages: list[dict[str, str]]
    truth: str
    extra: Mapping[str, Any]


def read_jsonl(path: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (index from 0, "file, line N" from 1, value); blank lines are skipped.

    Raises DataError for a line that is not JSON, repeats a key, is nested too deeply, or is longer
    than MAX_LINE_BYTES, of which no more than that is read.
    """
    where = path
    try:
        with open(path, "rb") as file:
            for index in count():
                where = f"{path}, line {index + 1}"
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if line.strip():
                    yield index, where, _parse_line(line, where)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except MemoryError as error:
        raise DataError(f"{where}: {_NO_MEMORY}") from error


def _parse_line(line: bytes, where: str) -> Any:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{where}: longer than {MAX_LINE_BYTES:,} bytes; write one problem per line, and leave "
            "out what no grader reads"
        )
    try:
        # A byte order mark stands at the start of what Windows programs write.
        return parse_json(line.decode("utf-8-sig"), unique_keys=True)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error


def read_parquet(path: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (index from 0, "file, row N" from 0, value); a row group at a time, known columns."""
    first = 0
    for batch in parquet_batches(path, CHUNK_ROWS, known_only=True):
        yield from plain_rows(batch, path, first)
        first += len(batch)


def parquet_batches(
    path: str, batch_rows: int, *, known_only: bool = False
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a Parquet file in order, `known_only` without columns that no run reads.
    Raises DataError naming the file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in COLUMNS:
                if names.count(name) > 1:
                    raise DataError(f"{path}: the column {name} is there twice; remove one of them")
            columns = [name for name in COLUMNS if name in names] if known_only else None
            yield from file.iter_batches(batch_rows, columns=columns, use_threads=False)
    # Before OSError: out of memory, Arrow's error is a MemoryError too.
    except MemoryError as error:
        raise DataError(f"{path}: {_NO_MEMORY}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    # ValueError: names of columns that are not UTF-8.
    except (pyarrow.lib.ArrowException, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def plain_rows(
    batch: pyarrow.RecordBatch, name: str, first: int
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (N, "name, row N", plain values) of an Arrow batch that starts at row `first` of
    `name`.

    Raises DataError naming row and column of a value that Python cannot represent, such as a string
    that is not UTF-8: Parquet files are not checked for that when they are written.
    """
    try:
        rows = batch.to_pylist()
    except _NOT_PLAIN as error:
        raise DataError(_first_not_plain(batch, name, first) or f"{name}: {error}") from error
    except MemoryError as error:
        raise DataError(f"{name}, row {first}: {_NO_MEMORY}") from error
    for index, row in enumerate(rows, start=first):
        yield index, f"{name}, row {index}", row


def _first_not_plain(batch: pyarrow.RecordBatch, name: str, first: int) -> str | None:
    for index in range(len(batch)):
        for column, values in zip(batch.schema.names, batch.columns):
            try:
                values[index].as_py()
            except _NOT_PLAIN as error:
                wanted = "UTF-8 text" if isinstance(error, UnicodeError) else "JSON values"
                return (
                    f"{name}, row {first + index}, column {column}: cannot be read ({error}); "
                    f"write {wanted}, or drop the row"
                )
    return None


def checked_row(index: int, where: str, row: Any) -> Row:
    """Return one row of the DAPO-Math schema. Raises DataError naming row and column."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a mapping of columns, found {_shown(row)}")
    _check_plain(row, where, "")
    extra_info = _mapping(row.get("extra_info"), where, "extra_info")
    number = extra_info.get("index")
    if isinstance(number, bool) or not isinstance(number, str | int):
        raise DataError(
            f"{where}, column extra_info.index: must be a string or an integer, "
            f"found {_shown(number)}"
        )
    reward_model = _mapping(row.get("reward_model"), where, "reward_model")
    return Row(
        index=index,
        where=where,
        messages=_messages(row.get("prompt"), where),
        truth=_string(reward_model.get("ground_truth"), where, "reward_model.ground_truth"),
        extra={
            "data_source": _string(row.get("data_source"), where, "data_source"),
            "ability": _string(row.get("ability"), where, "ability"),
            "extra_info": extra_info,
        },
    )


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}, column prompt: must be a list of messages {{content, role}}, "
            f"found {_shown(value)}"
        )
    messages = []
    for place, entry in enumerate(value):
        column = f"prompt[{place}]"
        message = _mapping(entry, where, column)
        role = message.get("role")
        if role not in ROLES:
            raise DataError(
                f"{where}, column {column}.role: must be one of {', '.join(ROLES)}, "
                f"found {_shown(role)}"
            )
        content = _string(message.get("content"), where, f"{column}.content")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{where}, column prompt: the last message must be the user's, "
            f"found {_shown(messages[-1]['role'])}"
        )
    return messages


def _mapping(value: Any, where: str, column: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}, column {column}: must be a mapping, found {_shown(value)}")
    return value


def _string(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        hint = " (a number loses digits: write it as a string)" if _is_number(value) else ""
        raise DataError(
            f"{where}, column {column}: must be a non-empty string, found {_shown(value)}{hint}"
        )
    return value


def _check_plain(value: Any, where: str, column: str) -> None:
    """Refuse what JSON and UTF-8 have no form for: graders get rows as JSON, in other processes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}, column {column}: half a character (a lone surrogate) at {error.start}; "
                "write the whole character"
            ) from error
    elif isinstance(value, dict):
        prefix = f"{column}." if column else ""
        for key, child in value.items():
            _check_plain(key, where, f"{prefix}{key!r:.60}")
            _check_plain(child, where, f"{prefix}{key}")
    elif isinstance(value, list | tuple):
        for place, child in enumerate(value):
            _check_plain(child, where, f"{column}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}, column {column}: must be a finite number or null, found {value}")
    elif not isinstance(value, int | float | None):
        raise DataError(f"{where}, column {column}: must be a JSON value, found {_shown(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
