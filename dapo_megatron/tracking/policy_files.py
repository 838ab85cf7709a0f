"""Parquet files of the policy's values of training sequences, before the step's first update.

One row per sequence. Log-probs and entropy of each token are recorded for a few groups only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.rollout.parquet import (
    ParquetReader,
    Schema,
    Table,
    lists,
    numbers,
    views_of,
    write_parquet,
)
from dapo_megatron.types import SequenceDiagnostics

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIND = "policy"
_ROWS = 4096
"""Rows of a row group."""
_NUMBERS = ("ticket", "sample", "advantage", "gap_mean", "gap_max")


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """The policy's values of a sequence. `logprobs` and `entropy` are float32 [response tokens], or
    None if they are not recorded."""

    ticket: int
    sample: int
    advantage: float
    gap_mean: float
    gap_max: float
    logprobs: NDArray[Any] | None = None
    entropy: NDArray[Any] | None = None


def policy_row(sequence: SequenceDiagnostics, *, has_tokens: bool) -> PolicyRow:
    """Return the row of a sequence, with copies of its values per token if `has_tokens`."""
    return PolicyRow(
        ticket=sequence.ticket,
        sample=sequence.sample,
        advantage=sequence.advantage,
        gap_mean=sequence.gap_mean,
        gap_max=sequence.gap_max,
        logprobs=sequence.logprobs.float().cpu().numpy().copy() if has_tokens else None,
        entropy=sequence.entropy.float().cpu().numpy().copy() if has_tokens else None,
    )


def write_policy(path: Path, rows: Iterable[PolicyRow]) -> None:
    """Write rows atomically, sorted by ticket and sample. Raises OSError."""
    ordered = sorted(rows, key=lambda row: (row.ticket, row.sample))
    batches = (ordered[at : at + _ROWS] for at in range(0, len(ordered), _ROWS))
    write_parquet(path, KIND, _schema(), map(_table, batches))


def read_policy(path: Path, tickets: Collection[int] | None = None) -> Iterator[PolicyRow]:
    """Yield the rows of a file in order, or those of `tickets`. Raises DataError naming the file if
    it is damaged or cannot be read."""
    with ParquetReader(path, KIND, [_schema()]) as reader:
        for table in reader.tables(_schema().names, tickets):
            numbers = zip(*(table.column(name).to_pylist() for name in _NUMBERS), strict=True)
            logprobs, entropy = (views_of(table.column(name)) for name in ("logprobs", "entropy"))
            for values, *of_tokens in zip(numbers, logprobs, entropy, strict=True):
                if tickets is None or values[0] in tickets:
                    copies = (None if array is None else array.copy() for array in of_tokens)
                    yield PolicyRow(*values, *copies)


def read_gaps(path: Path) -> list[tuple[float, int, int]]:
    """Return (gap_max, ticket, sample) of every row. Raises DataError as `read_policy` does."""
    names = ("gap_max", "ticket", "sample")
    with ParquetReader(path, KIND, [_schema()]) as reader:
        return [
            row
            for table in reader.tables(names)
            for row in zip(*(table.column(name).to_pylist() for name in names), strict=True)
        ]


@cache
def _schema() -> Schema:
    import pyarrow as pa

    def required(name: str, kind: Any) -> Any:
        return pa.field(name, kind, nullable=False)

    values = pa.list_(required("element", pa.float32()))
    return pa.schema(
        [
            required("ticket", pa.int64()),
            required("sample", pa.int32()),
            required("advantage", pa.float64()),
            required("gap_mean", pa.float64()),
            required("gap_max", pa.float64()),
            pa.field("logprobs", values),
            pa.field("entropy", values),
        ]
    )


def _table(rows: list[PolicyRow]) -> Table:
    import pyarrow as pa

    arrays = []
    for field in _schema():
        values = [getattr(row, field.name) for row in rows]
        is_list = pa.types.is_list(field.type)
        arrays.append(lists(values, field.type) if is_list else numbers(values, field.type))
    return pa.Table.from_arrays(arrays, schema=_schema())
