"""A user's own data: named columns, sources given as paths, data sets of the library `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import prepare_data
import pyarrow
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

from dapo_megatron.config import Columns, FileSource, Source
from dapo_megatron.config.file import dump_config, load_config, parse_config
from dapo_megatron.config.yaml12 import parse_yaml
from dapo_megatron.data.columns import OPTIONAL, columns_read
from dapo_megatron.data.prompts import LoadedSource, load_source
from dapo_megatron.data.rows import checked_row
from dapo_megatron.types import DataError
from tests.helpers.configs import REPOSITORY
from tests.helpers.words import Words

TINY = REPOSITORY / "model_configs/tiny_cpu.yaml"
COLUMNS = Columns(prompt="question", answer="solution")
ROWS = [{"question": f"{n} + 1 =", "solution": n + 1} for n in range(5)]


def source_of(value: str) -> Source:
    """Return the source that `data.train=value` describes."""
    (source,) = load_config(TINY, [f"data.train={value}"]).data.train
    return source


def load(value: str, columns: Columns = COLUMNS) -> LoadedSource:
    return load_source(source_of(value), Words(), 10, columns=columns)  # type: ignore[arg-type]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_with_two_columns_gives_prompts(tmp_path: Path, ending: str) -> None:
    prompts = load(write(tmp_path / f"sums.{ending}", ROWS)).prompts
    assert [(prompt.text, prompt.truth) for prompt in prompts] == [
        (row["question"], str(row["solution"])) for row in ROWS
    ]
    assert prompts[0].source == "sums"
    assert prompts[0].extra == {"data_source": "sums", "ability": "", "extra_info": {}}
    setting = r"write columns: \{prompt: question, answer: solution\}"
    with pytest.raises(DataError, match=rf"sums\.{ending}, .*{setting}"):
        load(str(tmp_path / f"sums.{ending}"), Columns())


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(NAMES, NAMES, TEXTS, TEXTS | st.integers(-(10**300), 10**300), st.booleans())
def test_columns_of_any_name_are_read(
    prompt: str, answer: str, question: str, truth: str | int, nested: bool
) -> None:
    assume(prompt != answer and not {prompt, answer} & {*OPTIONAL})
    row: dict[str, Any] = {prompt: question, answer: truth}
    columns = Columns(prompt=prompt, answer=answer)
    if nested:
        assume("." not in prompt and "." not in answer)
        row = {prompt: question, "fields": {answer: truth}}
        columns = Columns(prompt=prompt, answer=f"fields.{answer}")
        assume(columns.answer != prompt != "fields")
    checked = checked_row(0, "file, line 1", json.loads(json.dumps(row)), columns)
    assert checked.messages == [{"role": "user", "content": question}]
    assert checked.truth == str(truth)
    assert checked.extra["data_source"] == ""


@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none()
    | st.lists(st.integers())
    | st.just(" ")
)
def test_an_answer_of_another_type_is_rejected_with_the_users_column_name(value: Any) -> None:
    row = {"question": "1 + 2 =", "solution": value}
    with pytest.raises(DataError, match=r"^file, line 1, column solution: .*; .*(write|drop) "):
        checked_row(0, "file, line 1", row, COLUMNS)


SUGGESTIONS = [
    (["question", "solution"], Columns(), "{prompt: question, answer: solution}"),
    (["Problem", "solution", "answer"], Columns(), "{prompt: Problem, answer: answer}"),
    (["prompt", "ground_truth"], Columns(), "{prompt: prompt, answer: ground_truth}"),
    (["query", "solution"], Columns(prompt="querry", answer="solution"), "{prompt: query, answer"),
    (["problem", "location", "answer"], Columns(prompt="problem", answer="solution"),
     "{prompt: problem, answer: answer}"),
    (["question", "b"], Columns(), "{prompt: COLUMN, answer: COLUMN}, or drop the row"),
    (["a", "answer"], Columns(), "{prompt: COLUMN, answer: COLUMN}, or drop the row"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "columns", "suggestion"), SUGGESTIONS)
def test_missing_columns_are_rejected_with_the_files_columns_and_a_suggestion(
    names: list[str], columns: Columns, suggestion: str
) -> None:
    with pytest.raises(DataError) as raised:
        columns_read(names, columns, "mine.parquet")
    message = str(raised.value)
    assert message.startswith("mine.parquet, column ")
    assert f"is missing; the columns are {', '.join(names)}; " in message
    assert f"columns: {suggestion}" in message


def test_chat_messages_are_read_from_a_column_of_any_name(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 ="}]
    rows = [{"question": messages, "solution": "3"}]
    assert load(write(tmp_path / "chat.jsonl", rows)).prompts[0].text == "Be brief."
    rows.append({"question": messages[:1], "solution": "3"})
    with pytest.raises(DataError, match=r"line 2, column question: the last message must have"):
        load(write(tmp_path / "chat.jsonl", rows))


# ---------------------------------------------------------------------------- the config


def test_a_source_may_be_a_path(tmp_path: Path) -> None:
    value = "[a/b c.jsonl, d.parquet, owner/set, {path: owner/set, subset: main, split: test}]"
    config = load_config(TINY, [f"data.train={value}", "evaluation.sets=held out.jsonl"])
    sources = (*config.data.train, *config.evaluation.sets)
    assert [(source.kind, source.name) for source in sources] == [
        ("jsonl", "b_c"), ("parquet", "d"), ("datasets", "set"), ("datasets", "set-test"),
        ("jsonl", "held_out"),
    ]  # fmt: skip
    assert {source.grader for source in sources} == {"math_verify"}
    assert parse_config(parse_yaml(dump_config(config), "dump")) == config


@settings(max_examples=40)
@given(NAMES)
def test_every_path_gives_a_valid_source_name(path: str) -> None:
    config = parse_yaml(TINY.read_text(encoding="utf-8"), "tiny")
    config["data"]["train"] = [f"{path}.jsonl"]
    assert parse_config(config).data.train[0].name


def test_columns_of_a_source_override_those_of_its_section(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [{"q": "1 + 2 =", "solution": "3"}])
    source = FileSource(
        kind="jsonl", name="own", path=path, columns=Columns(prompt="q", answer="solution")
    )
    assert len(load_source(source, Words(), 10, columns=COLUMNS).prompts) == 1  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- datasets


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def save_in_all_forms(folder: Path) -> dict[str, str]:
    """Save ROWS as `datasets` does (two forms) and as a folder of files. Return the paths."""
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(folder / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(folder / "dict"))
    (folder / "files").mkdir()
    write(folder / "files/train.jsonl", ROWS)
    return {name: str(folder / name) for name in ("one", "dict", "files")}


@pytest.mark.parametrize("form", ["one", "dict", "files"])
def test_a_data_set_folder_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("dapo_megatron.data.hub.CHUNK_ROWS", 2)
    path = save_in_all_forms(tmp_path)[form]
    prompts = load(path).prompts
    assert [(prompt.index, prompt.truth) for prompt in prompts] == [
        (index, str(row["solution"])) for index, row in enumerate(ROWS)
    ]
    assert (tmp_path / "cache").exists() == (form == "files")  # the other forms are not copied
    with pytest.raises(DataError) as raised:
        load(path, Columns(prompt="question", answer="soluton"))
    assert str(raised.value).startswith(f"{path}, split train, column soluton is missing; ")
    assert "columns: {prompt: question, answer: solution}" in str(raised.value)


def test_data_sets_that_cannot_be_read_are_rejected(tmp_path: Path) -> None:
    """Scripts are not executed, and files of unsupported kinds stay unread."""
    forms = save_in_all_forms(tmp_path)
    scripted, other, csv = (tmp_path / name for name in ("evil", "xml", "rows.csv"))
    scripted.mkdir()
    (scripted / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    other.mkdir()
    (other / "train.xml").write_text("<a/>")
    csv.write_text("question,solution\n1,2\n")
    split = r"split dev: cannot be read .*train.*set `subset` and"
    cases = {
        f"{{path: {forms['dict']}, split: dev}}": split,
        f"{{path: {forms['files']}, split: dev}}": split,
        "nobody/nothing": r"nobody/nothing, split train: .*Without a network",
        str(scripted): "scripts are no longer supported",
        str(other): "its files are of kind xml",
        str(csv): r"rows.csv: unsupported kind of file; save it as .jsonl",
    }
    for value, message in cases.items():
        with pytest.raises(DataError, match=message):
            load(value)
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------------------- preparing


def test_prepare_data_keeps_the_users_columns(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.jsonl", [*ROWS, ROWS[0], {**ROWS[1], "question": "1  + 1 ="}])
    output = tmp_path / "out.parquet"
    arguments = [raw, "--output", str(output), "--near-duplicates", "off"]
    completed = CliRunner().invoke(
        prepare_data.app, [*arguments, "--columns", "{prompt: question}"]
    )
    assert completed.exit_code == 2
    names = "{prompt: question, answer: solution}"
    completed = CliRunner().invoke(prepare_data.app, [*arguments, "--columns", names])
    assert completed.exit_code == 0, completed.output
    assert parquet.read_table(output).to_pylist() == ROWS
    assert len(load(str(output)).prompts) == len(ROWS)
