"""Tables in Parquet files: rows to columns and back, with lists of numbers as packed arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_megatron.files import open_regular
from dapo_megatron.types import DataError, packed


def table_of(rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """Return rows as a table. Lists of numbers are packed arrays or None."""
    import numpy as np
    import pyarrow as pa

    arrays = []
    for column in schema:
        values = [row[column.name] for row in rows]
        if not _is_packed(column):
            arrays.append(pa.array(values, column.type))
            continue
        ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
        kept = [np.asarray(value) for value in values if value is not None]
        flat = pa.array(np.concatenate(kept)) if kept else pa.array([], column.type.value_type)
        mask = pa.array([value is None for value in values], pa.bool_())
        arrays.append(pa.ListArray.from_arrays(ends, flat, type=column.type, mask=mask))
    return pa.Table.from_arrays(arrays, schema=schema)


def required(name: str, kind: Any) -> Any:
    """Return a column without nulls."""
    import pyarrow as pa

    return pa.field(name, kind, nullable=False)


def list_of(kind: Any) -> Any:
    """Return the type of lists without nulls."""
    import pyarrow as pa

    return pa.list_(required("element", kind))


def _is_packed(column: Any) -> bool:
    """Return whether a column has lists of numbers."""
    import pyarrow as pa

    return bool(pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type))


def read_tables(
    path: Path,
    schema: Any,
    columns: Sequence[str] | None = None,
    tickets: Collection[int] | None = None,
) -> Iterator[Any]:
    """Yield these columns (None: all) of each row group of a Parquet file, or of its rows of
    `tickets`. Raises DataError naming the file, also if it has not all columns of `schema`."""
    from pyarrow import parquet

    with data_errors(path):
        file = open_regular(path)
    with file, data_errors(path):
        reader = parquet.ParquetFile(file, page_checksum_verification=True)
        actual = reader.schema_arrow
        for column in schema:
            if actual.field(column.name) != column:
                raise ValueError(f"column {column.name} is of another type")
        wanted = None if tickets is None else frozenset(tickets)
        for number in range(reader.num_row_groups):
            if wanted is not None:
                present = reader.read_row_group(number, ["ticket"], use_threads=False)
                tickets_of_rows = present["ticket"].to_pylist()
                places = [row for row, ticket in enumerate(tickets_of_rows) if ticket in wanted]
                if not places:
                    continue
            table = reader.read_row_group(number, columns, use_threads=False)
            table.validate(full=True)
            yield table if wanted is None else table.take(places)


def rows_of(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the values of each row of a table; see `table_of`."""
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if _is_packed(table.schema.field(name)):
            values, ends = column.values.to_numpy(), column.offsets.to_numpy()
            columns[name] = [
                packed(values[start:end]) if is_valid else None
                for start, end, is_valid in zip(ends, ends[1:], column.is_valid().to_pylist())
            ]
        else:
            columns[name] = column.to_pylist()
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


@contextmanager
def data_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of pyarrow into a DataError that names the file."""
    import pyarrow as pa

    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (pa.ArrowException, ValueError, TypeError, KeyError, IndexError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: cannot be read ({reason}); the file is damaged") from error
