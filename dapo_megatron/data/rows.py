"""Reads and validates the rows of JSONL files, Parquet files and data sets (docs/data.md).

Validation is strict. A truth that was once a float, or a prompt without its question, would
otherwise show only as a reward that never rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Columns
from dapo_megatron.data.columns import check_columns, columns_read, value_of
from dapo_megatron.files import parse_json
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    import pyarrow

CHUNK_ROWS = 256
MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of a line of a JSONL file. A longer line means that the file is corrupt."""
ROLES = ("system", "user", "assistant")
DAPO_MATH_COLUMNS = Columns()
"""Columns of DAPO-Math-17k."""
_NO_MEMORY = "not enough memory to read it; free some, or split the file"
_NOT_PLAIN = (ValueError, TypeError, OverflowError, RecursionError)
"""Errors of Arrow for a value without a Python form: invalid UTF-8, a date out of range, a struct
with duplicate field names."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One problem before the chat template. `where` identifies it in error messages."""

    index: int
    where: str
    messages: list[dict[str, str]]
    truth: str
    extra: Mapping[str, Any]


def read_jsonl(path: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (index from 0, "file, line N" with N from 1, value). Blank lines are skipped.

    Raises DataError for a line that is not JSON, has a duplicate key, is nested too deeply, or is
    longer than MAX_LINE_BYTES, and for a file that is one JSON value. At most MAX_LINE_BYTES + 1
    bytes of a line are read.
    """
    where, is_first = path, True
    try:
        with open(path, "rb") as file:
            for index in count():
                where = f"{path}, line {index + 1}"
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if line.strip():
                    if is_first:
                        _check_first_line(line, path, where)
                    is_first = False
                    yield index, where, _parse_line(line, where)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except MemoryError as error:
        raise DataError(f"{where}: {_NO_MEMORY}") from error


def _check_first_line(line: bytes, path: str, where: str) -> None:
    """Raise DataError if a file is a JSON array, or one object over several lines."""
    start = line.removeprefix(b"\xef\xbb\xbf").strip()
    if start.startswith(b"[") or start == b"{":
        kind, items = ("array", ".[]") if start != b"{" else ("object over several lines", ".")
        raise DataError(
            f"{where}: a JSON {kind}, but one object per line is needed; "
            f"convert it: jq -c '{items}' {path} > NAME.jsonl"
        )


def _parse_line(line: bytes, where: str) -> Any:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{where}: longer than {MAX_LINE_BYTES:,} bytes; write one problem per line, and drop "
            "fields that no grader reads"
        )
    try:
        # utf-8-sig: Windows programs write a byte order mark at the start of a file.
        return parse_json(line.decode("utf-8-sig"), unique_keys=True)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error


def read_parquet(path: str, columns: Columns = DAPO_MATH_COLUMNS) -> Iterator[tuple[int, str, Any]]:
    """Yield (index, "file, row N", value); index and N count from 0. Only the columns that a run
    reads are read."""
    first = 0
    for batch in parquet_batches(path, CHUNK_ROWS, columns, only_read=True):
        yield from plain_rows(batch, path, first)
        first += len(batch)


def parquet_batches(
    path: str, batch_rows: int, columns: Columns = DAPO_MATH_COLUMNS, *, only_read: bool = False
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a Parquet file in order. `only_read` selects only the columns that a run
    reads. Raises DataError naming the file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = columns_read(file.schema_arrow.names, columns, path)
            yield from file.iter_batches(
                batch_rows, columns=names if only_read else None, use_threads=False
            )
    # Before ArrowException: Arrow's out-of-memory error is both.
    except MemoryError as error:
        raise DataError(f"{path}: {_NO_MEMORY}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    # ValueError: a column name that is not UTF-8.
    except (pyarrow.lib.ArrowException, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def plain_rows(
    batch: pyarrow.RecordBatch, name: str, first: int
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (N, "name, row N", plain values) of an Arrow batch that starts at row `first` of
    `name`.

    Raises DataError naming row and column of a value that Python cannot represent. One example is a
    string that is not UTF-8, because writers of Parquet files do not check that.
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


def checked_row(
    index: int, where: str, row: Any, columns: Columns = DAPO_MATH_COLUMNS, data_source: str = ""
) -> PromptRow:
    """Return `row` as a validated Row. `data_source` is the default of that column. Raises
    DataError naming row and column."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a mapping of columns, found {_shown(row)}")
    check_columns(row, columns, where)
    prompt, answer = (value_of(row, name, where) for name in (columns.prompt, columns.answer))
    extra = {
        "data_source": _optional_string(row, "data_source", where) or data_source,
        "ability": _optional_string(row, "ability", where),
        "extra_info": _mapping(_or_none(row.get("extra_info")) or {}, where, "extra_info"),
    }
    for name, value in ((columns.prompt, prompt), (columns.answer, answer), *extra.items()):
        _check_plain(value, where, name)
    return PromptRow(
        index=index,
        where=where,
        messages=_messages(prompt, where, columns.prompt),
        truth=_truth(answer, where, columns.answer),
        extra=extra,
    )


def _messages(value: Any, where: str, column: str) -> list[dict[str, str]]:
    """Return a prompt as chat messages. Plain text becomes one user message."""
    if isinstance(value, str):
        return [{"role": "user", "content": _string(value, where, column)}]
    if not isinstance(value, list) or not value:
        wanted = "text, or a list of messages {content, role}"
        raise _wrong(where, column, wanted, value)
    messages = []
    for number, entry in enumerate(value):
        message_column = f"{column}[{number}]"
        message = _mapping(entry, where, message_column)
        role = message.get("role")
        if role not in ROLES:
            raise _wrong(where, f"{message_column}.role", f"one of {', '.join(ROLES)}", role)
        content = _content(message.get("content"), where, message_column)
        if role == "user" or not isinstance(content, str):
            content = _string(content, where, f"{message_column}.content")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{where}, column {column}: the last message must have the role user, "
            f"found {_shown(messages[-1]['role'])}"
        )
    return messages


def _content(value: Any, where: str, column: str) -> Any:
    """Return the text of a list of text parts, as of an OpenAI API. Any other value is returned
    unchanged. Raises DataError for a part that is an image, or another known kind."""
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise DataError(
                f"{where}, column {column}.content: a part of the type {kind!r:.40}; models are "
                "trained on text only, drop the row"
            )
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in value
    ):
        return "".join(part["text"] for part in value)
    return value


_REMEDIES: Sequence[tuple[type, str]] = (
    (bool, "write the word that the grader should compare with, as text"),
    (float, "a float does not keep its notation (1.10 becomes 1.1); write it as text"),
    (list, "write one answer as text; if several are right, use a custom grader that reads a list"),
    (dict, "name one of its fields, as {column}.FIELD, or write the answer as text"),
    (type(None), "write the answer as text, or drop the row"),
    (str, "write the answer, or drop the row"),
)
"""Advice for an answer of an invalid type, by type."""


def _truth(value: Any, where: str, column: str) -> str:
    """Return an answer as text. An integer becomes its digits."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    remedy = next(text for kind, text in _REMEDIES if isinstance(value, kind))
    error = _wrong(where, column, "a non-empty string or an integer", value)
    raise DataError(f"{error}; {remedy.format(column=column)}")


def _optional_string(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return a column as text. It is empty if the column is missing or null."""
    value = _or_none(row.get(column))
    if value is None:
        return ""
    if isinstance(value, list | dict):
        raise _wrong(where, column, "text", value)
    return str(value)


def _or_none(value: Any) -> Any:
    """Return a value, or None for NaN, which pandas writes for null."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _mapping(value: Any, where: str, column: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, column, "a mapping", value)
    return value


def _string(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, column, "a non-empty string", value)
    return value


def _check_plain(value: Any, where: str, column: str) -> None:
    """Raise DataError for a value that JSON or UTF-8 cannot represent. Graders run in other
    processes and get rows as JSON."""
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
        for number, child in enumerate(value):
            _check_plain(child, where, f"{column}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}, column {column}: must be a finite number or null, found {value}")
    elif not isinstance(value, int | float | None):
        raise _wrong(where, column, "a JSON value", value)


def _wrong(where: str, column: str, wanted: str, value: Any) -> DataError:
    return DataError(f"{where}, column {column}: must be {wanted}, found {_shown(value)}")


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
