"""Completions in Parquet files: restored bit for bit, read in part, and checked against damage."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from dapo_megatron.rollout import completion_files, completion_rows, parquet
from dapo_megatron.rollout.completion_files import (
    num_rows,
    read_completions,
    read_summaries,
    write_completions,
)
from dapo_megatron.rollout.completion_rows import CompletionRow, SummaryRow
from dapo_megatron.types import Completion, DataError, Finish, Grade, Prompt, Segment
from tests.helpers.groups import rows_of_completions

NUM_DAMAGES = 250
PROMPT = Prompt("chain_sum", 17, (12, 9, 3), "4 + 3 =", "7", {"entry": {"a": [1.5]}})


def completion(sample: int, num_tokens: int = 2, **changes: Any) -> Completion:
    made = Completion(
        sample,
        array("i", range(num_tokens)),
        array("f", [-0.5] * num_tokens),
        "7",
        Finish.STOP,
        (Segment(3, num_tokens),),
        Grade(1.0, True, "7"),
    )
    return replace(made, **changes)


def row(ticket: int, sample: int, **changes: Any) -> CompletionRow:
    return replace(CompletionRow(ticket, PROMPT, completion(sample), "trained", "mixed"), **changes)


def exact(row: CompletionRow) -> tuple[Any, ...]:
    """Return the content of a row so that equal values have equal bits."""
    old, made = row.old_logprobs, row.completion
    return (
        repr(replace(row, completion=None, old_logprobs=None)),
        repr(replace(made, tokens=(), logprobs=())),
        made.tokens.tobytes(),
        made.logprobs.tobytes(),
        None if old is None else (old.dtype, old.tobytes()),
    )


def in_order(rows: list[CompletionRow]) -> list[CompletionRow]:
    return sorted(rows, key=lambda row: (row.ticket, row.completion.sample))


@settings(max_examples=60)
@given(rows_of_completions())
def test_rows_are_restored_bit_for_bit_in_order(rows: list[CompletionRow]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "rows.parquet"
        write_completions(path, rows)
        assert [*map(exact, read_completions(path))] == [*map(exact, in_order(rows))]
        summaries = read_summaries(path)
        assert num_rows(path) == len(rows)
    assert repr(summaries) == repr([summary_of(row) for row in in_order(rows)])


def summary_of(row: CompletionRow) -> SummaryRow:
    completion = row.completion
    return SummaryRow(
        ticket=row.ticket,
        source=row.prompt.source,
        index=row.prompt.index,
        prompt_tokens=len(row.prompt.tokens),
        outcome=row.outcome,
        verdict=row.verdict,
        reward=row.reward,
        **{
            name: getattr(completion, name)
            for name in (
                *("sample", "num_tokens", "finish", "segments", "logprob_mean", "logprob_min"),
                "grade",
            )
        },
    )


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_files, "ROW_GROUP_BYTES", 1200)


@pytest.mark.usefixtures("small_row_groups")
def test_only_row_groups_with_the_wanted_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(ticket, sample) for ticket in range(8) for sample in range(3)]
    path = tmp_path / "rows.parquet"
    write_completions(path, rows[::-1])
    numbers: list[int] = []
    read = pq.ParquetFile.read_row_group

    def counted(file: Any, number: int, *arguments: Any, **options: Any) -> Any:
        numbers.append(number)
        return read(file, number, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    assert list(read_completions(path)) == rows
    num_groups = len(numbers)
    assert num_groups >= 8
    numbers.clear()
    assert list(read_completions(path, tickets=[2])) == rows[6:9]
    assert len(numbers) <= 2
    assert list(read_completions(path, sequences=[(7, 1), (0, 2)])) == [rows[2], rows[22]]
    assert list(read_completions(path, tickets=[0, 1], sequences=[(7, 1), (0, 2)])) == [rows[2]]
    assert list(read_completions(path, tickets=[99], sequences=[])) == []


def test_a_prompt_is_shared_by_the_rows_of_a_group(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_completions(path, [row(1, 0), row(1, 1), row(2, 0, prompt=replace(PROMPT, index=0))])
    first, second, third = read_completions(path)
    assert first.prompt is second.prompt
    assert third.prompt.index == 0


def test_statistics_of_log_probs_are_those_of_float64(tmp_path: Path) -> None:
    values = array("f", np.float32(-np.random.default_rng(0).random(1000)).tolist())
    summary = completion(0, 1000, logprobs=values)
    assert summary.logprob_mean == pytest.approx(sum(values) / 1000, rel=1e-12)
    assert summary.logprob_min == min(values)
    empty = completion(0, 0, segments=())
    assert (empty.logprob_mean, empty.logprob_min, empty.num_tokens) == (None, None, 0)


def test_two_rows_of_one_sample_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ticket 1, sample 4: two rows"):
        write_completions(tmp_path / "rows.parquet", [row(1, 4), row(2, 4), row(1, 4)])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    write_completions(path, [row(1, 0)])
    old = path.read_bytes()

    def failing(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", failing)
        with pytest.raises(OSError, match="No space left"):
            write_completions(path, [row(1, 0), row(2, 0)])
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_other_programs_read_plain_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_completions(path, [row(1, 0), row(2, 0, completion=completion(0, text="a \ud800"))])
    table = pq.read_table(path, filters=[("ticket", "=", 2)])
    assert table.column("text").to_pylist() == ['\0"a \\ud800"']
    assert table.column("tokens").to_pylist() == [[0, 1]]
    assert table.column("segments").to_pylist() == [[{"version": 3, "num_tokens": 2}]]


# ---------------------------------------------------------------------------- damage


@pytest.fixture
def damaged_file(tmp_path: Path, small_row_groups: None) -> tuple[Path, bytes, list[Any]]:
    path = tmp_path / "rows.parquet"
    old = np.zeros(2, np.float32)
    rows = [
        row(ticket, sample, reward=None if sample else 0.5, old_logprobs=old if sample else None)
        for ticket in (1, 2, 5)
        for sample in (0, 1)
    ]
    write_completions(path, rows)
    return path, path.read_bytes(), [*map(exact, rows)]


def read_all(path: Path) -> list[Any]:
    rows, summaries = [*read_completions(path)], read_summaries(path)
    assert summaries == [summary_of(row) for row in rows]
    return [*map(exact, rows)]


def test_a_truncated_file_is_a_data_error(
    damaged_file: tuple[Path, bytes, list[Any]],
) -> None:
    path, data, _ = damaged_file
    for size in [*range(0, len(data), len(data) // 40), *range(len(data) - 12, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=f"^{path}: "):
            read_all(path)


def test_a_flipped_bit_is_a_data_error_or_changes_nothing(
    damaged_file: tuple[Path, bytes, list[Any]],
) -> None:
    path, data, rows = damaged_file
    rng = random.Random(0)
    num_errors = 0
    for _ in range(NUM_DAMAGES):
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        try:
            assert read_all(path) == rows, at
        except DataError as error:
            num_errors += 1
            assert str(error).startswith(f"{path}: ")
    assert num_errors > NUM_DAMAGES / 2


def test_every_bit_of_the_footer_is_checked(damaged_file: tuple[Path, bytes, list[Any]]) -> None:
    path, data, _ = damaged_file
    begin = len(data) - len(parquet._footer(path)) - 8
    for at in random.Random(1).sample(range(begin, len(data)), 60):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DataError, match=f"^{path}: "):
            read_all(path)


def test_a_damaged_column_is_named(damaged_file: tuple[Path, bytes, list[Any]]) -> None:
    path, data, _ = damaged_file
    metadata = pq.ParquetFile(path).metadata
    chunks = [metadata.row_group(1).column(at) for at in range(metadata.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema.startswith("tokens.")]
    at = chunk.data_page_offset + chunk.total_compressed_size - 1
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(DataError, match="row group 1, column tokens is damaged"):
        list(read_completions(path))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_text("{}\n"), "cannot be read"),
        (lambda path: pq.write_table(pa.table({"ticket": [1]}), path), "of another program"),
        (
            lambda path: parquet.write_parquet(path, "policy", OTHER, []),
            "holds policy, format 1; expected completions, format 1",
        ),
        (
            lambda path: parquet.write_parquet(path, "completions", OTHER, []),
            "column sample, source, .* is not as in a file of completions",
        ),
    ],
    ids=["folder", "text", "other program", "other kind", "other columns"],
)
def test_a_foreign_file_is_a_data_error(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*No such file"):
        read_summaries(path)
    write(path)
    with pytest.raises(DataError, match=f"^{path}: .*{message}"):
        read_summaries(path)
    with pytest.raises(DataError, match=f"^{path}: .*{message}"):
        list(read_completions(path))


OTHER = pa.schema([pa.field("ticket", pa.int64(), nullable=False)])


def changed(column: str, value: Any) -> Callable[[Any], Any]:
    """Return a function that replaces a column of a table by one with `value` in the last row."""

    def change(table: Any) -> Any:
        at = table.schema.get_field_index(column)
        values = [*table.column(column).to_pylist()[:-1], value]
        field = table.schema.field(column)
        return table.set_column(at, field, pa.array(values, field.type))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("num_tokens", 3), "ticket 2, sample 0: num_tokens is 3, with 2 tokens"),
        (changed("logprobs", [0.5]), "ticket 2, sample 0: .* 2 tokens and 1 log-probs"),
        (changed("finish", "lost"), "ticket 2, sample 0: 'lost' is not a valid Finish"),
        (changed("pred", None), "ticket 2, sample 0: a grade without pred"),
        (changed("extra", "[]"), "ticket 2, sample 0: extra is not a JSON object"),
        (changed("text", "\0x"), "column text is damaged"),
        (changed("ticket", 0), "ticket 0, sample 0 comes after ticket 1, sample 0"),
    ],
)
def test_rows_that_contradict_themselves_are_a_data_error(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "rows.parquet"
    schema = completion_rows.schema(False)
    [batch] = completion_files._batches([row(1, 0), row(2, 0)])
    table = change(completion_rows.table_of(batch, schema))
    parquet.write_parquet(path, "completions", schema, [table])
    with pytest.raises(DataError, match=f"^{path}: {message}"):
        list(read_completions(path))
