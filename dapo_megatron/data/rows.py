"""Rows of a JSONL or Parquet file in the DAPO-Math schema (docs/data.md), read and checked.

Rows are checked strictly: a truth that was once a float, or a prompt without its question, would
only show as a reward that never rises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_megatron.types import DataError

CHUNK_ROWS = 256
ROLES = ("system", "user", "assistant")
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


@dataclass(frozen=True, slots=True)
class Row:
    """One problem before the chat template; `where` names it in an error."""

    index: int
    where: str
    messages: list[dict[str, str]]
    truth: str
    extra: Mapping[str, Any]


def read_jsonl(path: str) -> Iterator[tuple[int, str, Any]]:
    """(index from 0, "file, line N" from 1, value); blank lines are skipped."""
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{where}: not valid JSON: {error}") from error
                yield number - 1, where, row
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_parquet(path: str) -> Iterator[tuple[int, str, Any]]:
    """(index from 0, "file, row N" from 0, value); a row group at a time, known columns only."""
    import pyarrow
    from pyarrow import parquet

    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield index, f"{path}, row {index}", row
                    index += 1
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except pyarrow.lib.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def checked_row(index: int, where: str, row: Any) -> Row:
    """One row of the DAPO-Math schema, or DataError naming row and column."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a mapping of columns, found {_shown(row)}")
    extra_info = _mapping(row.get("extra_info"), where, "extra_info")
    number = extra_info.get("index")
    if isinstance(number, bool) or not isinstance(number, str | int):
        raise DataError(
            f"{where}, column extra_info.index: must be a string or an integer, "
            f"found {_shown(number)}"
        )
    try:
        json.dumps(extra_info)
    except TypeError as error:
        raise DataError(f"{where}, column extra_info: {error}") from error
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
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}, column {column}: half a character at {error.start}") from error
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
