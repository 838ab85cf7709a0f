"""Damaged or hostile rows raise DataError with file, row and column, and no other error."""

from __future__ import annotations

import datetime
import gzip
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing.tables import read
from pyarrow import parquet

from dapo_megatron.config import FileSource, ReasoningGymSource
from dapo_megatron.data.prompts import load_source
from dapo_megatron.data.rows import PromptRow, checked_row, read_jsonl, read_parquet
from dapo_megatron.types import DataError
from tests.helpers.words import Words

REPOSITORY = Path(__file__).resolve().parents[2]
GOOD: dict[str, Any] = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "6 * 7 ="}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule"},
    "extra_info": {"index": "1"},
}
LINE = json.dumps(GOOD).encode()


def with_extra(text: bytes) -> bytes:
    """Return a row with more JSON text in its extra_info."""
    return LINE.replace(b'"index": "1"', b'"index": "1", ' + text)


def rows_of(path: Path) -> list[PromptRow]:
    """Return the rows of a file, after checking that training and prepare_data.py read the same."""
    read_rows = read_parquet if path.suffix == ".parquet" else read_jsonl
    in_preparation = [row for _, batch in read(path) for row in batch]
    loaded = [checked_row(*row) for row in read_rows(str(path))]
    assert loaded == in_preparation
    return loaded


def rejections(path: Path) -> Iterator[str]:
    """Yield the DataError of a training run, then that of tools/prepare_data.py."""
    read_rows = read_parquet if path.suffix == ".parquet" else read_jsonl
    with pytest.raises(DataError) as in_training:
        _ = [checked_row(*row) for row in read_rows(str(path))]
    yield str(in_training.value)
    with pytest.raises(DataError) as in_preparation:
        list(read(path))
    yield str(in_preparation.value)


# ---------------------------------------------------------------------------- JSONL

READABLE = {
    "plain": LINE + b"\n",
    "byte order mark": b"\xef\xbb\xbf" + LINE + b"\n",
    "CRLF": LINE + b"\r\n",
    "surrogate pair": with_extra(b'"x": "\\ud83d\\ude00"'),
    "number of 4,000 digits": LINE.replace(b'"index": "1"', b'"index": ' + b"9" * 4000),
    "nested 60 deep": with_extra(b'"x": ' + b"[" * 60 + b"]" * 60),
}
UNREADABLE = {
    "unclosed objects": (b'{"a":' * 100_000, "not valid JSON: nested more than 64 deep"),
    "NaN": (with_extra(b'"x": NaN'), "column extra_info.x: must be a finite number or null"),
    "Infinity": (with_extra(b'"x": [1, -Infinity]'), "column extra_info.x[1]: must be a finite"),
    "1e999": (with_extra(b'"x": {"y": 1e999}'), "column extra_info.x.y: must be a finite"),
    "duplicate key": (
        LINE.replace(b'"ground_truth"', b'"ground_truth": "1", "ground_truth"'),
        "not valid JSON: the key 'ground_truth' is given twice; remove one of them",
    ),
    "number of 5,000 digits": (
        LINE.replace(b'"index": "1"', b'"index": ' + b"9" * 5000),
        "not valid JSON: a number has too many digits; write it as a string",
    ),
    "lone surrogate in extra_info": (
        with_extra(b'"tests": {"inputs": ["\\ud800"]}'),
        "column extra_info.tests.inputs[0]: half a character (a lone surrogate) at 0",
    ),
    "lone surrogate in a key": (with_extra(b'"\\ud800": 1'), "half a character"),
    "array": (b"[1]", "must be a mapping of columns, found list [1]"),
    "null": (b"null", "must be a mapping of columns, found nothing"),
    "Latin-1": (LINE.replace(b"42", b"\xe9"), "not valid JSON: 'utf-8' codec can't decode"),
    "gzip": (gzip.compress(LINE, mtime=0), "not valid JSON: 'utf-8' codec can't decode"),
}


@pytest.mark.parametrize("name", READABLE)
def test_unusual_but_valid_lines_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(READABLE[name])
    if name != "number of 4,000 digits":  # Arrow, which prepare_data.py uses, has no type for it
        assert [row.truth for row in rows_of(path)] == ["42"]
    assert [checked_row(*row).truth for row in read_jsonl(str(path))] == ["42"]


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_damaged_line_is_rejected_with_file_line_and_column(tmp_path: Path, name: str) -> None:
    content, problem = UNREADABLE[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE + b"\n" + content + b"\n")
    for message in rejections(path):
        assert message.startswith(f"{path}, line 2")
        assert problem in message
        assert len(message) < 500


def test_an_endless_line_is_rejected_without_loading_it(tmp_path: Path) -> None:
    """The line has 4 GiB in a sparse file, more than the memory limit of the process."""
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(LINE + b"\n")
        file.truncate(4 * 2**30)
    code = f"""
import resource
from dapo_megatron.data.rows import read_jsonl
from dapo_megatron.types import DataError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 512 * 2**20,) * 2)
try:
    list(read_jsonl({str(path)!r}))
except DataError as error:
    print(error)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert completed.stdout.startswith(
        f"{path}, line 2: longer than 67,108,864 bytes; write one"
    ), completed.stdout + completed.stderr


@pytest.mark.parametrize(("limit", "is_read"), [(len(LINE) + 1, True), (len(LINE), False)])
def test_a_line_may_be_as_long_as_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, is_read: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE + b"\n")
    monkeypatch.setattr("dapo_megatron.data.rows.MAX_LINE_BYTES", limit)
    too_long = pytest.raises(DataError, match=f"line 1: longer than {limit} bytes; write one")
    with nullcontext() if is_read else too_long:
        assert len(list(read_jsonl(str(path)))) == 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_missing_file_is_named(tmp_path: Path, ending: str) -> None:
    for message in rejections(tmp_path / f"none.{ending}"):
        assert message.startswith(f"{tmp_path}/none.{ending}: cannot be read (")
        assert message.endswith("No such file or directory)")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.builds(
    lambda info, column, value: GOOD | {"extra_info": {"index": "1"} | info} | {column: value},
    st.dictionaries(st.text(), JSON, max_size=3),
    st.sampled_from(["other", "other", *GOOD]),
    JSON,
)
FRAGMENTS = [LINE, LINE[:-1], b"}", b"\n", b"[", b"]", b'{"a":', b",", b'"a":', b"1", b"NaN"]
FRAGMENTS += [
    b"\xff",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"9" * 5000,
    b'"\\ud800"',
    b"\xef\xbb\xbf",
    b"\0",
    b"1e999",
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=9), max_size=8).map(b"".join))
def test_any_bytes_give_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "rows.jsonl"
    path.write_bytes(content)
    try:
        for row in read_jsonl(str(path)):
            checked_row(*row)
    except DataError as error:
        assert str(error).startswith(f"{path}, line ")


@settings(max_examples=300)
@given(JSON | ROWS)
def test_any_json_value_gives_a_row_or_a_data_error(value: Any) -> None:
    try:
        row = checked_row(0, "file, line 1", json.loads(json.dumps(value)))
    except DataError as error:
        assert str(error).startswith("file, line 1")
    else:
        # An accepted row can be sent to a grader and written to a UTF-8 file.
        json.dumps([row.extra, row.truth], allow_nan=False, ensure_ascii=False).encode()


# ---------------------------------------------------------------------------- Parquet


def not_utf8(values: list[bytes]) -> pyarrow.Array:
    """Return a string column that is not UTF-8, as written by a program without checks."""
    binary = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(values), binary.buffers())


def extra(**values: Any) -> dict[str, Any]:
    return {**GOOD, "extra_info": {"index": "1", **values}}


PARQUET = {
    "null": ({**GOOD, "reward_model": None}, "column reward_model: must be a mapping, found noth"),
    "bytes": (extra(x=b"x"), "column extra_info.x: must be a JSON value, found bytes b'x'"),
    "date": (extra(x=datetime.datetime(2026, 1, 1)), "column extra_info.x: must be a JSON value"),
    "NaN": (extra(x=math.nan), "column extra_info.x: must be a finite number or null, found nan"),
    "infinity": (extra(x=[-math.inf]), "column extra_info.x[0]: must be a finite number or null"),
}


@pytest.mark.parametrize("name", PARQUET)
def test_a_parquet_value_without_a_json_form_is_rejected(tmp_path: Path, name: str) -> None:
    bad, problem = PARQUET[name]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([bad]), path)
    for message in rejections(path):
        assert message.startswith(f"{path}, row 0, {problem}")


UNREADABLE_COLUMNS = {
    "not UTF-8": (
        not_utf8([b"", b"\xff\xfe"]),
        "'utf-8' codec can't decode byte 0xff",
        "UTF-8 text",
    ),
    "a date beyond Python's": (
        *(pyarrow.array([0, 10**7], pyarrow.date32()), "date value out of range", "JSON values"),
    ),
}


@pytest.mark.parametrize("name", UNREADABLE_COLUMNS)
def test_a_parquet_value_that_cannot_be_read_is_rejected(tmp_path: Path, name: str) -> None:
    values, problem, wanted = UNREADABLE_COLUMNS[name]
    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([GOOD, GOOD])
    index = table.schema.get_field_index("ability")
    parquet.write_table(table.set_column(index, "ability", values), path)
    for message in rejections(path):
        assert message.startswith(f"{path}, row 1, column ability: cannot be read ({problem}")
        assert message.endswith(f"; write {wanted}, or drop the row")


def test_a_duplicate_parquet_column_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([GOOD])
    parquet.write_table(table.append_column("ability", pyarrow.array(["other"])), path)
    for message in rejections(path):
        assert message == f"{path}: duplicate column ability; remove one of them"


@settings(max_examples=50)
@given(st.integers(0, 2000), st.integers(0, 2000), st.binary(max_size=20))
def test_a_damaged_parquet_file_gives_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, start: int, end: int, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([GOOD]), path)
    intact = path.read_bytes()
    path.write_bytes(intact[:start] + content + intact[end:])
    try:
        rows_of(path)
    except DataError as error:
        assert str(error).startswith(str(path))


# ---------------------------------------------------------------------------- graders

TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


def source(path: Path, grader: str | dict[str, str]) -> FileSource:
    return FileSource(kind="jsonl", name="mine", path=str(path), grader=grader)


@pytest.mark.parametrize("grader", ["code", {"math": "dapo_math", "taco": "code"}], ids=str)
def test_a_row_that_the_code_grader_cannot_grade_is_rejected_on_load(
    tmp_path: Path, grader: str | dict[str, str]
) -> None:
    good, bad = (
        {**extra(**values), "data_source": "taco"}
        for values in ({"tests": TESTS}, {"tests": {**TESTS, "fn_name": "solve"}})
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(DataError, match=r"line 2, grader 'code': tests: .*fn_name.* call"):
        load_source(source(path, grader), Words(), 10)  # type: ignore[arg-type]


def test_rows_that_the_graders_can_grade_are_loaded(tmp_path: Path) -> None:
    as_text = {**extra(tests=json.dumps(TESTS)), "data_source": "taco"}
    in_truth = {**GOOD, "data_source": "taco", "reward_model": {"ground_truth": json.dumps(TESTS)}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (as_text, in_truth, GOOD)))
    graders = {"math": "dapo_math", "taco": "code"}
    assert len(load_source(source(path, graders), Words(), 10).prompts) == 3  # type: ignore[arg-type]
    message = (
        "line 1, column data_source: source 'mine' has no grader for 'taco'; known: aime, math$"
    )
    with pytest.raises(DataError, match=message):
        load_source(source(path, dict.fromkeys(["math", "aime"], "code")), Words(), 10)  # type: ignore[arg-type]


def test_file_rows_are_rejected_for_the_reasoning_gym_grader(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE)
    with pytest.raises(DataError, match="line 1, grader 'reasoning_gym': it grades prob"):
        load_source(source(path, "reasoning_gym"), Words(), 10)  # type: ignore[arg-type]


def test_generated_problems_are_checked_by_their_grader() -> None:
    gym = ReasoningGymSource(
        kind="reasoning_gym", name="gym", dataset="chain_sum", size=1, seed=1, grader="code"
    )
    with pytest.raises(DataError, match=r"'gym', problem 0, grader 'code': tests: .* is not in a"):
        load_source(gym, Words(), 1000)  # type: ignore[arg-type]
