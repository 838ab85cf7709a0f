"""Parquet files of completions, one row per completion: the on-disk form of rollouts.

Recorded rollouts (samples/) and the open groups of a checkpoint use it. All values are restored
exactly. Tokens and log-probs go to the file and back as packed arrays. Rows are sorted by ticket
and sample; each (ticket, sample) occurs once.

The columns are those of `Prompt`, `Completion` and `Grade`, with `prompt`, `truth` and `extra`
(JSON) of the prompt, and the outcome and verdict of the group. `num_tokens`, `num_prompt_tokens`,
`logprob_mean` and `logprob_min` are there to be read without the tokens. A text with a lone
surrogate, which UTF-8 cannot encode, is stored as NUL and its JSON form.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise, product
from pathlib import Path

from dapo_megatron.rollout.completion_rows import (
    SUMMARY_COLUMNS,
    Batch,
    CompletionRow,
    SummaryRow,
    completion_rows,
    schema,
    summary_rows,
    table_of,
)
from dapo_megatron.rollout.parquet import ROW_GROUP_BYTES, ParquetReader, Table, write_parquet
from dapo_megatron.types import DataError, Prompt

KIND = "completions"
_ROW_BYTES = 300
"""Rough size of a row without its tokens and texts."""


def write_completions(path: Path, rows: Iterable[CompletionRow]) -> None:
    """Write rows atomically, sorted by ticket and sample. Only one row group at a time is copied.

    Raises OSError, and ValueError for rows with the same ticket and sample.
    """
    import numpy as np

    ordered = sorted(rows, key=lambda row: (row.ticket, row.completion.sample))
    for row, following in pairwise(ordered):
        if (row.ticket, row.completion.sample) == (following.ticket, following.completion.sample):
            raise ValueError(f"ticket {row.ticket}, sample {row.completion.sample}: two rows")
    old = (row.old_logprobs for row in ordered if row.old_logprobs is not None)
    all_routes = (row.completion.routes for row in ordered)
    routes = (np.dtype(routes.typecode).name for routes in all_routes if routes is not None)
    columns = schema(
        any(values.dtype.itemsize == 8 for values in old),
        has_reference=any(row.reference_logprobs is not None for row in ordered),
        routes=next(routes, None),
    )
    tables = (table_of(batch, columns) for batch in _batches(ordered))
    write_parquet(path, KIND, columns, tables)


def read_completions(
    path: Path,
    tickets: Collection[int] | None = None,
    sequences: Collection[tuple[int, int]] | None = None,
) -> Iterator[CompletionRow]:
    """Yield the rows of a file in order, reading one row group at a time.

    tickets     read only rows of these tickets
    sequences   read only these (ticket, sample)

    Raises DataError naming the file for a damaged file, one of another program, and one that cannot
    be read.
    """
    for table in _tables(path, None, tickets, sequences):
        yield from completion_rows(path, table)


def read_summaries(path: Path) -> list[SummaryRow]:
    """Return the rows of a file without tokens, log-probs and texts. Raises DataError as
    `read_completions` does."""
    return [row for table in _tables(path, SUMMARY_COLUMNS) for row in summary_rows(path, table)]


def num_rows(path: Path) -> int:
    """Return the number of rows of a file, from its footer. Raises DataError."""
    with _reader(path) as reader:
        return reader.num_rows


# ---------------------------------------------------------------------------- writing


def _batches(rows: Iterable[CompletionRow]) -> Iterator[Batch]:
    """Split rows into row groups of about ROW_GROUP_BYTES."""
    import numpy as np

    batch: Batch = []
    num_bytes = 0
    prompt: Prompt | None = None
    for row in rows:
        if row.prompt is not prompt:
            prompt = row.prompt
            prompt_tokens = np.array(prompt.tokens, np.int32)
            extra = json.dumps(dict(prompt.extra))
            prompt_bytes = 4 * len(prompt_tokens) + sum(
                map(len, (extra, prompt.text, prompt.truth))
            )
        completion = row.completion
        size = _ROW_BYTES + prompt_bytes + 8 * completion.num_tokens + len(completion.text)
        size += memoryview(completion.routes or b"").nbytes
        if batch and num_bytes + size > ROW_GROUP_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append((row, prompt_tokens, extra))
        num_bytes += size
    if batch:
        yield batch


# ---------------------------------------------------------------------------- reading


def _reader(path: Path) -> ParquetReader:
    kinds = product((False, True), (False, True), (None, "uint8", "int16"))
    return ParquetReader(
        path,
        KIND,
        [schema(wide, has_reference=reference, routes=routes) for reference, wide, routes in kinds],
    )


def _tables(
    path: Path,
    columns: Collection[str] | None,
    tickets: Collection[int] | None = None,
    sequences: Collection[tuple[int, int]] | None = None,
) -> Iterator[Table]:
    """Yield the table of each row group, with these columns (None: all), restricted to rows of
    `tickets` and `sequences`."""
    if sequences is not None:
        sequences = frozenset(sequences)
        of_sequences = {ticket for ticket, _ in sequences}
        tickets = of_sequences if tickets is None else of_sequences.intersection(tickets)
    if tickets is not None:
        tickets = frozenset(tickets)
    with _reader(path) as reader:
        for table in reader.tables(columns or reader.columns, tickets):
            keys = list(zip(table["ticket"].to_pylist(), table["sample"].to_pylist(), strict=True))
            for key, following in pairwise(keys):
                if key >= following:
                    raise DataError(
                        f"{path}: ticket {following[0]}, sample {following[1]} comes after ticket "
                        f"{key[0]}, sample {key[1]}; the file is damaged"
                    )
            if tickets is not None:
                rows = [
                    row
                    for row, key in enumerate(keys)
                    if key[0] in tickets and (sequences is None or key in sequences)
                ]
                table = table.take(rows) if rows else table.slice(0, 0)
            if table.num_rows:
                yield table
