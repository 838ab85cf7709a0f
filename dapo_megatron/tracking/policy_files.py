"""The policy's values of training sequences before the step's first update, for the report:
policy/step_000012_00001.parquet has those that data-parallel rank 1 trained on in step 12.

One row per sequence. Log-probs and entropy of each token are recorded for a few groups only.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dapo_megatron.files import atomic_write
from dapo_megatron.rollout.tables import (
    data_errors,
    list_of,
    read_tables,
    required,
    rows_of,
    table_of,
)
from dapo_megatron.types import SequenceDiagnostics, packed

FOLDER = "policy"


def policy_path(run: Path, step: int, index: int) -> Path:
    """Return the file of the sequences that data-parallel rank `index` trained on in a step."""
    return run / FOLDER / f"step_{step:06d}_{index:05d}.parquet"


def policy_files(run: Path) -> dict[int, list[Path]]:
    """Return step -> files of a run."""
    by_step: dict[int, list[Path]] = {}
    for path in sorted((run / FOLDER).glob("step_*_*.parquet")):
        step = path.name.split("_")[1]
        if step.isdecimal():
            by_step.setdefault(int(step), []).append(path)
    return by_step


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """The policy's values of a sequence. `logprobs` and `entropy` are float32, one per response
    token; None if they are not recorded."""

    ticket: int
    sample: int
    advantage: float
    gap_mean: float
    gap_max: float
    logprobs: array[float] | None = None
    entropy: array[float] | None = None


def policy_row(sequence: SequenceDiagnostics, *, has_tokens: bool) -> PolicyRow:
    """Return the row of a sequence, with copies of its values per token if `has_tokens`."""
    return PolicyRow(
        ticket=sequence.ticket,
        sample=sequence.sample,
        advantage=sequence.advantage,
        gap_mean=sequence.gap_mean,
        gap_max=sequence.gap_max,
        logprobs=packed(sequence.logprobs.float().cpu().numpy()) if has_tokens else None,
        entropy=packed(sequence.entropy.float().cpu().numpy()) if has_tokens else None,
    )


def write_policy(path: Path, rows: Iterable[PolicyRow]) -> None:
    """Write rows atomically, sorted by ticket and sample. Raises OSError."""
    from pyarrow import parquet

    ordered = sorted(rows, key=lambda row: (row.ticket, row.sample))
    table = table_of(list(map(asdict, ordered)), _schema())
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        parquet.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_policy(path: Path, tickets: Collection[int] | None = None) -> Iterator[PolicyRow]:
    """Yield the rows of a file in order, or of `tickets` only. Raises DataError naming the file if
    it is damaged or cannot be read."""
    for table in read_tables(path, _schema(), tickets=tickets):
        with data_errors(path):
            rows = [PolicyRow(**row) for row in rows_of(table)]
        yield from rows


@cache
def _schema() -> Any:
    import pyarrow as pa

    values = list_of(pa.float32())
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
