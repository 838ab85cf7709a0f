"""Checked Parquet files: row groups of bounded size, sorted by ticket, that are read one at a time.

Every page has a CRC, and so has the footer: four bytes between its end and its length, where the
format has the signature of a signed footer, and where other readers ignore them. The footer names
the kind of the file, and lists the rows and the first and last ticket of each row group. A file
that is damaged, truncated or of another program is a DataError that names it.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dapo_megatron.files import atomic_write, open_regular
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

# pyarrow has no type hints.
Array: TypeAlias = Any
Table: TypeAlias = Any
Schema: TypeAlias = Any
DataType: TypeAlias = Any
Field: TypeAlias = Any

FORMAT_VERSION = 1
ROW_GROUP_BYTES = 8 * 2**20
"""Size of a row group in memory. A group of 16 completions of 5,000 tokens takes 0.6 MB."""
_CONTENTS = b"dapo_megatron"
_CRC_BYTES = 4
_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")
"""End of a Parquet file: length of the footer, magic."""
_DTYPES = {
    "uint8": "u1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "float": "f4",
    "double": "f8",
    "bool": "?",
}
"""numpy's names of arrow's types. Arrays are made from buffers, and types are named here, because
`pyarrow.array` and `to_pandas_dtype` import pandas: 100 MB and half a second."""
_SURROGATES = "\0"
"""First character of a text that is stored as JSON."""


class RowGroup(NamedTuple):
    """A row group: number of rows, first and last ticket."""

    num_rows: int
    first: int
    last: int


def part_path(folder: Path, kind: str, number: int) -> Path:
    """Return the file of `kind` that one of many writers, such as a replica, writes."""
    return folder / f"{kind}_{number:05d}.parquet"


def parts_among(paths: Iterable[Path], kind: str) -> dict[int, Path]:
    """Return number -> file of `kind`, in order, for those of `paths` that are such files."""
    name = re.compile(rf"{kind}_(\d{{5,18}})\.parquet")
    return dict(
        sorted((int(match[1]), path) for path in paths if (match := name.fullmatch(path.name)))
    )


def write_parquet(path: Path, kind: str, schema: Schema, tables: Iterable[Table]) -> None:
    """Write a file of `kind` atomically, with a row group per table. `tables` have a column
    `ticket`, in ascending order also across tables. Raises OSError."""
    import pyarrow.parquet as pq

    row_groups = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        with pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[field.name for field in schema if _repeats(field)],
            column_encoding=_encodings(schema),
            write_page_checksum=True,
            # Dictionaries of long prompts; beyond this size their repetitions are written.
            dictionary_pagesize_limit=ROW_GROUP_BYTES,
            store_schema=False,
        ) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=table.num_rows)
                tickets = table.column("ticket")
                row_groups.append([table.num_rows, tickets[0].as_py(), tickets[-1].as_py()])
            contents = {"kind": kind, "version": FORMAT_VERSION, "row_groups": row_groups}
            writer.add_key_value_metadata({_CONTENTS: json.dumps(contents).encode()})
        file.flush()
        footer = _footer(Path(file.name))
        file.seek(-_TAIL.size, os.SEEK_END)
        file.write(zlib.crc32(footer).to_bytes(_CRC_BYTES, "little"))
        file.write(_TAIL.pack(len(footer) + _CRC_BYTES, _MAGIC))


def _footer(path: Path) -> bytes:
    """Return the footer of a Parquet file; b"" if it has none."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL.size, 0))
        tail = file.read()
        length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
        if magic != _MAGIC or length + _TAIL.size > size:
            return b""
        file.seek(-_TAIL.size - length, os.SEEK_END)
        return file.read(length)


def _repeats(field: Field) -> bool:
    """Return True for columns whose values repeat often enough for a dictionary."""
    import pyarrow as pa

    return bool(pa.types.is_string(field.type)) and field.name != "text"


def _encodings(schema: Schema) -> dict[str, str]:
    """Return the encoding of the columns of floats. Their bytes compress better when split."""
    import pyarrow as pa

    return {
        f"{field.name}.list.element": "BYTE_STREAM_SPLIT"
        for field in schema
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    }


class ParquetReader:
    """An open file that `write_parquet` wrote. Every error of reading it is a DataError."""

    def __init__(self, path: Path, kind: str, schemas: Sequence[Schema]) -> None:
        """Open a file of `kind` with one of these schemas."""
        import pyarrow.parquet as pq

        self.path = path
        with data_errors(path):
            footer = _footer(path)
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        try:
            with data_errors(path, "its footer is damaged"):
                self.row_groups = self._check(footer, kind, schemas)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._file.schema_arrow.names)

    @property
    def num_rows(self) -> int:
        """Number of rows of the file."""
        return sum(group.num_rows for group in self.row_groups)

    def tables(
        self, columns: Collection[str] | None = None, tickets: Collection[int] | None = None
    ) -> Iterator[Table]:
        """Yield these columns (None: all) of each row group, or of each that may have one of
        `tickets`."""
        names = list(columns or self._file.schema_arrow.names)
        for number, group in enumerate(self.row_groups):
            if tickets is None or any(group.first <= ticket <= group.last for ticket in tickets):
                yield self._read(number, names)

    def _read(self, number: int, columns: list[str]) -> Table:
        try:
            with data_errors(self.path):
                table = self._file.read_row_group(number, columns, use_threads=False)
                table.validate(full=True)
        except DataError:
            for column in columns:  # find the column to name
                with data_errors(self.path, f"row group {number}, column {column} is damaged"):
                    self._file.read_row_group(number, [column], use_threads=False).validate(
                        full=True
                    )
            raise
        if table.num_rows != self.row_groups[number].num_rows:
            raise DataError(
                f"{self.path}: row group {number} has {table.num_rows} rows, but its footer lists "
                f"{self.row_groups[number].num_rows}; the file is damaged"
            )
        return table

    def _check(self, footer: bytes, kind: str, schemas: Sequence[Schema]) -> list[RowGroup]:
        """Return the row groups. Raises DataError if the footer is not that of such a file."""
        contents = (self._file.metadata.metadata or {}).get(_CONTENTS)
        if contents is None:
            raise DataError(f"{self.path}: a Parquet file of another program, not of {kind}")
        signed, crc = footer[:-_CRC_BYTES], footer[-_CRC_BYTES:]
        if zlib.crc32(signed).to_bytes(_CRC_BYTES, "little") != crc:
            raise DataError(f"{self.path}: its footer is damaged (checksum)")
        value = json.loads(contents)
        if value["version"] != FORMAT_VERSION or value["kind"] != kind:
            raise DataError(
                f"{self.path}: holds {value['kind']}, format {value['version']}; expected {kind}, "
                f"format {FORMAT_VERSION}"
            )
        schema = self._file.schema_arrow.remove_metadata()
        if not any(schema.equals(expected) for expected in schemas):
            names = [field.name for field in schemas[0] if field not in list(schema)]
            raise DataError(
                f"{self.path}: column {', '.join(names) or 'order'} is not as in a file of {kind}"
            )
        return [RowGroup(*group) for group in value["row_groups"]]


@contextmanager
def data_errors(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Turn errors of the file system and of pyarrow into a DataError that names the file."""
    import pyarrow as pa

    try:
        yield
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise DataError(f"{path}: {what} ({reason})") from error
    except (pa.ArrowException, ValueError, TypeError, KeyError, IndexError, MemoryError) as error:
        raise DataError(f"{path}: {what} ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------------------- values


def strings(texts: Iterable[str | None]) -> Array:
    """Return texts as an array. A text with a lone surrogate, which UTF-8 cannot encode, becomes
    NUL and its JSON form; so does a text that begins with NUL."""
    import pyarrow as pa

    encoded = [None if text is None else _escaped(text).encode() for text in texts]
    data = b"".join(text for text in encoded if text is not None)
    buffers = [_validity(encoded), _offsets(encoded), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def numbers(values: Sequence[Any], kind: DataType) -> Array:
    """Return numbers or bools, with None as null, as an array."""
    import numpy as np
    import pyarrow as pa

    filled = np.array([0 if value is None else value for value in values], _DTYPES[str(kind)])
    data = np.packbits(filled, bitorder="little") if pa.types.is_boolean(kind) else filled
    return pa.Array.from_buffers(kind, len(values), [_validity(values), pa.py_buffer(data)])


def _validity(values: Sequence[Any]) -> Any:
    """Return the bitmap of the values that are not None; None if all are."""
    import numpy as np
    import pyarrow as pa

    is_valid = np.array([value is not None for value in values], np.bool_)
    return None if is_valid.all() else pa.py_buffer(np.packbits(is_valid, bitorder="little"))


def _offsets(values: Sequence[Any]) -> Any:
    """Return the buffer with the start of each value in the concatenation of all."""
    import numpy as np
    import pyarrow as pa

    lengths = [0 if value is None else len(value) for value in values]
    return pa.py_buffer(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def texts_of(column: Array) -> list[Any]:
    """Return the texts of a column that `strings` made, with None for null. Raises DataError for
    an invalid one."""
    return [
        json.loads(text[1:]) if text and text[0] == _SURROGATES else text
        for text in column.to_pylist()
    ]


def _escaped(text: str) -> str:
    if text.isascii() and not text.startswith(_SURROGATES):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES + json.dumps(text)
    return _SURROGATES + json.dumps(text) if text.startswith(_SURROGATES) else text


def lists(values: Sequence[Any], kind: DataType) -> Array:
    """Return packed arrays (anything with a buffer; None is null) as an array of lists."""
    import numpy as np
    import pyarrow as pa

    dtype = _DTYPES[str(kind.value_type)]
    views = [_view(value, dtype) for value in values if value is not None and len(value)]
    flat = np.concatenate(views) if views else np.empty(0, dtype)
    elements = pa.Array.from_buffers(kind.value_type, len(flat), [None, pa.py_buffer(flat)])
    buffers = [_validity(values), _offsets(values)]
    return pa.Array.from_buffers(kind, len(values), buffers, children=[elements])


def _view(value: Any, dtype: str) -> Any:
    import numpy as np

    view = np.asarray(value)
    if view.dtype != dtype:
        raise TypeError(f"an array of {view.dtype} cannot be stored as {np.dtype(dtype)}")
    return view


def views_of(column: Array) -> list[Any]:
    """Return the lists of a column as numpy views of its memory, with None for null."""
    array = column.combine_chunks()
    values, ends = array.values.to_numpy(), array.offsets.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[start:end] if is_valid else None
        for start, end, is_valid in zip(ends[:-1], ends[1:], valid, strict=True)
    ]
