"""Rows of data sets read with the library `datasets`: local folders, and names on the hub.

No code of a data set is executed: the library refuses scripts, and only its readers of plain tables
are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Columns, DatasetsSource
from dapo_megatron.data.columns import columns_read
from dapo_megatron.data.rows import CHUNK_ROWS, plain_rows
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    import pyarrow

READERS = ("arrow", "csv", "json", "parquet", "text")
"""Readers of `datasets` that yield rows of plain values. Other readers unpack archives and
media."""


def read_dataset(source: DatasetsSource, columns: Columns) -> Iterator[tuple[int, str, Any]]:
    """Yield (index, "path, split S, row N", value); index and N count from 0. A value has only the
    columns that a run reads."""
    where = name_of(source.path, source.split)
    first = 0
    for batch in dataset_batches(
        source.path, source.subset, source.split, source.revision, CHUNK_ROWS
    ):
        names = columns_read(batch.schema.names, columns, where)
        yield from plain_rows(batch.select(names), where, first)
        first += len(batch)


def name_of(path: str, split: str) -> str:
    """Return the name of a data set in messages."""
    return f"{path}, split {split}"


def dataset_batches(
    path: str, subset: str | None, split: str, revision: str | None, batch_rows: int
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a data set in order. Raises DataError if it cannot be read."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(
            f"{path}: the library `datasets` is not installed ({error}); install it, or save the "
            "data as a .jsonl or .parquet file and name that file"
        ) from error
    if Path(path).is_file():
        raise DataError(
            f"{path}: unsupported kind of file; save it as .jsonl or .parquet, or name the folder "
            "that contains it"
        )
    try:
        opened = _open(datasets, path, subset, split, revision).with_format("arrow")
        for table in opened.iter(batch_size=batch_rows):
            yield from table.combine_chunks().to_batches()
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(f"{name_of(path, split)}: cannot be read ({error}); {_advice(path)}") from (
            error
        )


def _open(datasets: Any, path: str, subset: str | None, split: str, revision: str | None) -> Any:
    folder = Path(path)
    if (folder / "dataset_dict.json").exists():
        saved = datasets.load_from_disk(path)
        if split not in saved:
            raise ValueError(f"unknown split; the splits are {', '.join(saved)}")
        return saved[split]
    if (folder / "state.json").exists():
        return datasets.load_from_disk(path)
    builder = datasets.load_dataset_builder(path, name=subset, revision=revision)
    reader = type(builder).__module__.rpartition(".")[2]
    if reader not in READERS:
        raise ValueError(f"its files are of kind {reader}; supported are {', '.join(READERS)}")
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _advice(path: str) -> str:
    if Path(path).exists():
        return "set `subset` and `split` to values that it has"
    return (
        "there is no such folder here; if it is a name on the hub, check the name, `subset` and "
        "`split`. Without a network, download it elsewhere and name its folder"
    )
