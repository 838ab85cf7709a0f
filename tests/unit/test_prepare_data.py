"""Preparing published data: every row has exactly one outcome, and no incomplete file is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from preparing.prepare import LABELS, Settings, prepare
from preparing.similarity import RECALL, Index, bands_of, jaccard, sketch_of
from preparing.unique import Frame, Source, fold, frame_of
from pyarrow import parquet
from typer.testing import CliRunner

from dapo_megatron.config import Columns, FileSource
from dapo_megatron.data.prompts import load_source, report_of
from dapo_megatron.data.rows import DAPO_MATH_COLUMNS, checked_row, read_jsonl, read_parquet
from dapo_megatron.files import sha256
from dapo_megatron.types import DataError
from tests.helpers import published_data as made
from tools.make_tiny_model import make_tokenizer
from tools.prepare_data import app

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "tools" / "prepare_data.py"
OFF = ("--near-duplicates", "off")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> str:
    """Return the output of the program, which must exit with 0."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    """Return the output of the program, which must exit with 2, as one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def report(output: Path) -> dict[str, Any]:
    path = report_of(output)
    assert path is not None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def contents(path: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in parquet.read_table(path).to_pylist()]


def dropped(output: Path) -> dict[str, int]:
    """Return the reasons for which rows were dropped, with their counts."""
    return {reason: n for reason, n in report(output)["rows"]["dropped"].items() if n}


def long_problem(seed: int = 0) -> str:
    return made.make_problems(1, random.Random(seed))[0]


# ---------------------------------------------------------------------------- as published


@pytest.mark.parametrize(
    "counts", [made.SMALL, pytest.param(made.PUBLISHED, marks=pytest.mark.long)], ids=["s", "all"]
)
def test_a_generated_file_gives_the_published_counts(counts: made.Counts, tmp_path: Path) -> None:
    raw = made.write_published(tmp_path / "raw.parquet", counts)
    output, without = tmp_path / "out.parquet", tmp_path / "without.parquet"
    run(raw, "--output", output)
    summary = report(output)
    assert summary["prompts"] == {
        "distinct": counts.distinct,
        "distinct_folded": counts.distinct_folded,
        "conflicting": counts.conflicting,
        "clean": counts.clean,
    }
    rows = summary["rows"]
    assert (rows["in"], rows["out"]) == (counts.rows, counts.clean)
    assert sum(rows["dropped"].values()) == counts.rows - counts.clean
    # Each conflicting prompt has two rows in a block; all copies of both are dropped.
    assert rows["dropped"]["conflicting"] == 2 * counts.conflicting * counts.copies
    assert rows["kept"]["near_duplicate"] == counts.near
    assert all(len(example["truths"]) == 2 for example in summary["examples"]["conflicting"])
    # Types and order of the rows are kept, and the same command writes the same bytes.
    before, after = parquet.read_table(raw), parquet.read_table(output)
    assert after.schema == before.schema
    firsts = {row["prompt"][0]["content"]: n for n, row in reversed([*enumerate(
        before.slice(0, counts.block_rows).to_pylist())])}  # fmt: skip
    assert (places := [firsts[text] for text in contents(output)]) == sorted(places)
    first = output.read_bytes(), (tmp_path / "out.report.json").read_bytes()
    run(raw, "--output", output, "--force")
    assert (output.read_bytes(), (tmp_path / "out.report.json").read_bytes()) == first
    # Near-duplicates are dropped on request, except the first.
    run(raw, "--output", without, "--near-duplicates", "drop")
    assert dropped(without)["near_duplicate"] == counts.near
    survivors = contents(without)
    assert survivors == [text for text in contents(output) if text in set(survivors)]
    for example in report(without)["examples"]["near_duplicate"]:
        assert example["similarity"] >= 0.8
        number = [int(example[key].rsplit(" ", 1)[1]) for key in ("of", "where")]
        assert number == sorted(number)


def test_the_960_rows_of_aime_become_30_and_a_run_loads_them(tmp_path: Path) -> None:
    output = tmp_path / "aime.parquet"
    run(made.write_aime(tmp_path / "raw.parquet"), "--output", output)
    table = parquet.read_table(output)
    assert len(table) == 30
    assert table.schema.field("extra_info").type.field("index").type == pyarrow.int64()
    assert "__index_level_0__" in table.schema.names
    source = FileSource(kind="parquet", name="aime", path=str(output), grader="dapo_math")
    prompts = load_source(source, make_tokenizer(), 4000).prompts
    assert sorted(int(prompt.truth) for prompt in prompts) == list(range(100, 130))


# ---------------------------------------------------------------------------- every row once


WORDS = st.lists(st.sampled_from("abc 积"), min_size=1, max_size=3).map("".join)
SPACES = st.sampled_from([" ", "  ", "\n", " \t"])


@st.composite
def many_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows with exact and folded duplicates and with conflicting truths."""
    pool = draw(st.lists(WORDS.filter(str.strip), min_size=1, max_size=6))
    return [
        made.row(
            draw(SPACES).join(draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4))),
            draw(st.sampled_from(["1", "1", "1", "2", " 1"])),
            f"row {number}",
        )
        for number in range(draw(st.integers(1, 40)))
    ]


def prepared(
    folder: Path, rows: Sequence[dict[str, Any]], name: str = "out", **changes: Any
) -> tuple[Path, dict[str, Any]]:
    path = write_rows(folder / f"{name}-in.parquet", rows)
    source = Source(str(path), path)
    output = folder / f"{name}.parquet"
    evaluation = changes.pop("evaluation", [])
    return output, prepare([source], evaluation, Settings(**changes), output)


def expected(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count outcomes in another way: by grouping rows, without passes and digests."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        text = row["prompt"][0]["content"]
        truth = row["reward_model"]["ground_truth"]
        groups.setdefault(fold(text), []).append((text, fold(truth)))
    account: Counter[str] = Counter()
    for group in groups.values():
        if len({truth for _, truth in group}) > 1:
            account["conflicting"] += len(group)
            continue
        spellings = len({text for text, _ in group})
        account["exact_duplicate"] += len(group) - spellings
        account["folded_duplicate"] += spellings - 1
        account["out"] += 1
    return dict(account)


SLOW = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@SLOW
@given(rows=many_rows(), cut=st.integers(0, 40), batch_rows=st.integers(1, 50))
def test_every_row_has_exactly_one_outcome(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, cut: int, batch_rows: int
) -> None:
    """Whatever the size of batches is, and also if the rows are in two files."""
    outcomes, folder = expected(rows), tmp_path_factory.mktemp("rows")
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    paths = [write_rows(folder / f"{n}.jsonl", part) for n, part in enumerate(parts)]
    sources, output = [Source(str(path), path) for path in paths], folder / "out.parquet"
    how = Settings(near_duplicates="off", batch_rows=batch_rows)
    if not outcomes.get("out"):
        with pytest.raises(DataError, match="nothing is left"):
            prepare(sources, [], how, output)
        return
    account = prepare(sources, [], how, output)["rows"]
    for reason in LABELS:
        assert account["dropped"][reason] == outcomes.get(reason, 0), reason
    assert account["out"] == outcomes["out"] == len(contents(output))
    assert account["in"] == len(rows) == account["out"] + sum(account["dropped"].values())


@SLOW
@given(rows=many_rows(), near=st.sampled_from(["drop", "report", "off"]))
def test_preparing_a_prepared_file_drops_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, near: Any
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    if not expected(rows).get("out"):
        return
    once, _ = prepared(folder, rows, "once", near_duplicates=near)
    kept = parquet.read_table(once).to_pylist()
    again, summary = prepared(folder, kept, "again", near_duplicates=near)
    assert sum(summary["rows"]["dropped"].values()) == 0
    assert parquet.read_table(again) == parquet.read_table(once)


def test_a_prepared_file_records_its_frame(tmp_path: Path) -> None:
    # A frame is detected in ten prompts, but not in the nine that are left. Unless it is removed,
    # their short problems look similar.
    opening = "Think it over with great care, then write down what you have found as a number."
    tasks = ["6 + 7", "x = 2", "2 of 9", "max 3", "7!", "gcd 8", "5^2", "ln e", "pi"]
    rows = [made.row("", "0", task) for task in [*tasks, "6 + 7  ?"]]
    for row in rows:
        row["prompt"][0]["content"] = f"{opening} {row['extra_info']['index']}"
    rows[-1]["prompt"][0]["content"] = f"{opening} {'6 + 7' * 9}"
    rows[0]["prompt"][0]["content"] = f"{opening} {'6 + 7' * 8}"
    once, first = prepared(tmp_path, rows, "once", near_duplicates="drop")
    assert first["frame"]["opens"] == opening
    assert first["rows"]["dropped"]["near_duplicate"] == 1
    output = tmp_path / "again.parquet"
    run(once, "--output", output, "--near-duplicates", "drop")
    assert dropped(output) == {}
    assert len(contents(output)) == 9


def test_columns_of_later_files_are_added(tmp_path: Path) -> None:
    row = made.row("a", "1", "x")
    wider_row = made.row("b", "1", "y") | {"extra_info": {"index": "y", "split": "train"}}
    output = tmp_path / "out.parquet"
    run(write_rows(tmp_path / "one.parquet", [row]),
        write_rows(tmp_path / "two.parquet", [wider_row]), "--output", output)  # fmt: skip
    infos = [row["extra_info"] for row in parquet.read_table(output).to_pylist()]
    assert infos == [{"index": "x", "split": None}, {"index": "y", "split": "train"}]


# ---------------------------------------------------------------------------- too long, overlap


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def test_too_long_counts_what_the_chat_template_adds(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = [made.row("x" * number, "1", str(number)) for number in range(1, 700)]
    limit = len(made.wrapped("")) + 500 + 1  # one token per character, and one for <answer>
    output = tmp_path / "out.parquet"
    run(write_rows(tmp_path / "in.parquet", rows), "--output", output,
        "--tokenizer", tokenizer_folder, "--max-prompt-tokens", limit, *OFF)  # fmt: skip
    assert dropped(output) == {"too_long": 199}
    assert contents(output) == [made.wrapped("x" * number) for number in range(1, 501)]
    assert report(output)["examples"]["too_long"][0]["tokens"] == limit + 1


@pytest.mark.parametrize("overlap", ["drop", "report"])
def test_overlap_with_the_evaluation_sets_is_dropped_or_reported(
    tmp_path: Path, overlap: str
) -> None:
    exact, spaced, near, bare, other = (long_problem(seed) for seed in range(5))
    held_out = made.write_aime(tmp_path / "aime.parquet", [exact, spaced, near])
    unframed = made.row("", "1", 0) | {"prompt": [{"content": bare, "role": "user"}]}
    in_another_frame = write_rows(tmp_path / "bare.jsonl", [unframed])
    texts = [other, exact, spaced.replace(" ", "\n", 2), near + " Why?", bare]
    rows = [made.row(text, "1", str(place)) for place, text in enumerate(texts)]
    raw, output = write_rows(tmp_path / "in.parquet", rows), tmp_path / "out.parquet"
    printed = run(raw, "--output", output, "--evaluation", held_out, "--overlap", overlap,
                  "--evaluation", in_another_frame)  # fmt: skip
    reasons = {"overlap_exact": 1, "overlap_folded": 1, "overlap_near": 2}
    summary = report(output)["rows"]
    kept = {reason: count for reason, count in summary["kept"].items() if count}
    assert (dropped(output), kept) == ((reasons, {}) if overlap == "drop" else ({}, reasons))
    assert contents(output) == [
        made.wrapped(t) for t in (texts[:1] if overlap == "drop" else texts)
    ]
    example = report(output)["examples"]["overlap_near"][0]
    assert "aime.parquet, row" in example["of"]
    assert example["where"].endswith("in.parquet, row 3")
    assert ("in an evaluation set, nearly (kept)" in printed) == (overlap == "report")


# ---------------------------------------------------------------------------- similarity


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.8, 0.9, 0.99])
def test_bands_find_pairs_at_the_threshold_with_the_promised_recall(threshold: float) -> None:
    bands, rows = bands_of(threshold)
    assert bands * rows <= 128
    assert rows == 1 or 1 - (1 - threshold**rows) ** bands >= RECALL


def test_the_frame_is_detected_from_the_prompts() -> None:
    texts = [f"Think hard. The task: {n} apples, {n} pears? Put it in a box." for n in range(12)]
    frame = frame_of(texts)
    assert " ".join(frame.opening) == "Think hard. The task:"
    assert " ".join(frame.closing) == "pears? Put it in a box."
    assert frame.strip(texts[3]) == "3 apples, 3"
    assert frame_of(texts[:9]) == Frame()
    assert frame_of([]) == Frame()


def test_all_pairs_above_the_threshold_are_found_and_none_below() -> None:
    rng = random.Random(0)
    near = far = 0
    for base in made.make_problems(60, rng):
        for cut in range(0, 120, 12):
            index = Index(0.8)
            sketch, other = sketch_of(base), sketch_of(base[cut:] + "?")
            index.add(7, sketch)
            shingles, others = (
                {text[n : n + 5] for n in range(len(text) - 4)} for text in (base, base[cut:] + "?")
            )
            truth = len(shingles & others) / len(shingles | others)
            assert truth == jaccard(sketch[1], other[1])
            if truth >= 0.8:
                near += 1
                assert index.nearest(other) == (7, truth)
            else:
                far += 1
                assert index.nearest(other) is None
    assert near > 50
    assert far > 50


# ---------------------------------------------------------------------------- bad input


def test_if_no_row_is_left_the_reasons_are_named_and_no_file_is_written(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = [made.row("a", "1", "x"), made.row("a", "2", "y"), made.row("bb", "2", "z")] * 2
    raw = write_rows(tmp_path / "in.parquet", rows)
    message = refused(raw, "--output", tmp_path / "out" / "o.parquet",
                      "--tokenizer", tokenizer_folder, "--max-prompt-tokens", 5)  # fmt: skip
    assert "nothing is left of the 6 rows of" in message
    assert "4 prompts with more than one truth, all their rows (correct the truths)" in message
    assert "1 longer than --max-prompt-tokens (raise --max-prompt-tokens)" in message
    assert "1 the same prompt again;" in message
    assert list((tmp_path / "out").iterdir()) == []


BAD = made.row("b", "", "x")  # no truth


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("in.parquet -o o.jsonl", "--output o.jsonl: must end in .parquet"),
        ("in.parquet -o in.parquet", "is an input too"),
        ("in.parquet -o o.parquet --evaluation o.parquet", "is an input too"),
        ("none.parquet -o o.parquet", "none.parquet: no such file"),
        ("some/name -o o.parquet", "from the hub: hub:some/name"),
        ("in.csv -o o.parquet", "in.csv: must end in .parquet or .jsonl"),
        ("in.parquet -o o.parquet --tokenizer t", "set both, or neither"),
        ("in.parquet -o o.parquet --tokenizer t --max-prompt-tokens 9", "--tokenizer t: no token"),
        ("in.parquet -o o.parquet --evaluation no.jsonl", "no.jsonl: cannot"),
        ("in.parquet -o o.parquet --evaluation empty.jsonl", "--evaluation empty.jsonl: no rows"),
        ("in.parquet -o in.csv/o.parquet", "cannot be written"),
        ("empty.jsonl -o o.parquet", "no rows in empty.jsonl"),
        ("bad.jsonl -o o.parquet", "bad.jsonl, line 2, column reward_model.ground_truth"),
        ("bad.parquet -o o.parquet", "bad.parquet, row 1, column reward_model.ground_truth"),
        (
            "in.parquet hub:nobody/no@v1#train -o o.parquet",
            "nobody/no, split train: cannot",
        ),
        ("in.parquet other.jsonl -o o.parquet", "other.jsonl: its columns do not fit those of"),
    ],
)
def test_bad_arguments_and_rows_are_refused_by_name_and_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    good = made.row("a", "1", "x")
    write_rows(tmp_path / "in.parquet", [good])
    write_rows(tmp_path / "other.jsonl", [made.row("c", "1", 3)])
    for ending in ("jsonl", "parquet"):
        write_rows(tmp_path / f"bad.{ending}", [good, BAD])
    (tmp_path / "in.csv").write_text("a")
    (tmp_path / "empty.jsonl").write_text("\n")
    before = sorted(file.name for file in tmp_path.iterdir())
    assert message in refused(*arguments.replace(" -o ", " --output ").split())
    assert sorted(file.name for file in tmp_path.iterdir()) == before


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "q": st.sampled_from(["Add 1", [{"role": "user", "content": "Add 2"}]]),
                "a": st.sampled_from([2, "x+1", 2**64, "1.10", "\U0001d54f"]),
            },
            optional={
                "extra_info": st.none() | st.dictionaries(st.text("ix", max_size=1), ANY_JSON),
                "level": ANY_JSON,
                "data_source": st.sampled_from([None, "", "x"]),
            },
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_prepared_file_has_the_prompts_and_truths_of_the_original(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    """Whatever types the values of other columns have, and those of answers."""
    for number, row in enumerate(rows):  # distinct prompts
        question = row["q"]
        is_text = isinstance(question, str)
        row["q"] = f"{number} {question}" if is_text else [question[0] | {"content": f"{number}"}]
    raw, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    arguments = ("--columns", "{prompt: q, answer: a}", "--force", *OFF)
    run(raw, "--output", output, *arguments)
    columns = Columns(prompt="q", answer="a")
    loaded = [
        [checked_row(*row, columns) for row in rows]
        for rows in (read_jsonl(str(raw)), read_parquet(str(output), columns))
    ]
    assert [(row.messages, row.truth) for row in loaded[0]] == [
        (row.messages, row.truth) for row in loaded[1]
    ]
    assert [row.extra["data_source"] for row in loaded[0]] == [
        row.extra["data_source"] for row in loaded[1]
    ]


def test_values_of_several_types_become_text(tmp_path: Path) -> None:
    rows = [
        {"q": "a", "a": 2, "level": 5, "extra_info": {"index": 1, "tags": [1]}, "empty": {}},
        {"q": "b", "a": "x", "level": "hard", "extra_info": {"index": "b2", "tags": ["t"]}},
        {"q": "c", "a": "y", "level": 1.5, "extra_info": {"index": None, "rate": 1}, "empty": {}},
        {"q": "d", "a": "z", "level": [1], "extra_info": {"rate": 0.5}},
    ]
    raw, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    run(raw, "--output", output, "--columns", "{prompt: q, answer: a}", *OFF)
    written = parquet.read_table(output).to_pydict()
    assert written["a"] == ["2", "x", "y", "z"]
    assert written["level"] == ["5", "hard", "1.5", "[1]"]
    assert [info["index"] for info in written["extra_info"]] == ["1", "b2", None, None]
    assert [info["rate"] for info in written["extra_info"]] == [None, None, 1.0, 0.5]
    assert [info["tags"] for info in written["extra_info"]] == [["1"], ["t"], None, None]
    assert written["empty"] == [None] * 4


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    raw = write_rows(tmp_path / "in.parquet", [made.row("a", "1", "x")])
    output = tmp_path / "o.parquet"
    (tmp_path / "o.report.json").write_text("my notes")
    assert "o.report.json: exists; --force replaces it" in refused(raw, "--output", output)
    run(raw, "--output", output, "--force")
    assert "--force replaces it" in refused(raw, "--output", output)


def test_an_interrupt_leaves_no_file_and_the_next_run_removes_those_of_a_killed_one(
    tmp_path: Path,
) -> None:
    output = tmp_path / "o.parquet"
    fifo = tmp_path / "slow.jsonl"  # never ends: the program waits for its rows
    os.mkfifo(fifo)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for number, is_left in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(fifo), "--output", str(output)], env=environment
        )
        with fifo.open("w") as writer:  # returns once the program reads
            writer.write(json.dumps(made.row("a", "1", "x")) + "\n")
            writer.flush()
            process.send_signal(number)
            code = process.wait(300)
        assert code == (-signal.SIGKILL if is_left else 130)
        assert (tmp_path / "o.parquet.partial").exists() == is_left
    raw = write_rows(tmp_path / "in.jsonl", [made.row("a", "1", "x")])
    run(raw, "--output", output, *OFF)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "in.jsonl", "o.parquet", "o.report.json", "slow.jsonl",
    ]  # fmt: skip


# ---------------------------------------------------------------------------- hub, report


def test_a_hub_data_set_is_an_input(tmp_path: Path) -> None:
    # `datasets` loads a local folder in the same way as a data set of the hub.
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [made.row(f"p {n % 7}", "1", str(n)) for n in range(20)]
    write_rows(folder / "train.parquet", rows)
    output = tmp_path / "o.parquet"
    run(f"hub:{folder}", "--output", output, *OFF)
    assert report(output)["rows"]["out"] == 7
    assert report(output)["inputs"][0]["sha256"].endswith("(of the rows)")
    assert parquet.read_table(output).to_pylist() == rows[:7]
    batches = [rows for _, rows in Source("", None, str(folder)).batches(DAPO_MATH_COLUMNS, 6)]
    assert [row.index for rows in batches for row in rows] == list(range(20))


def test_the_report_records_checksums_and_is_found_only_for_the_same_data(tmp_path: Path) -> None:
    raw = write_rows(tmp_path / "in.parquet", [made.row("a | b", "1", "x")])
    output = tmp_path / "some.v2.parquet"
    assert report_of(output) is None
    run(raw, "--output", output)
    assert report_of(output) == tmp_path / "some.v2.report.json"
    summary = report(output)
    assert summary["inputs"] == [{"name": str(raw), "rows": 1, "sha256": sha256(raw)}]
    assert summary["output"]["sha256"] == sha256(output)
    assert summary["output"]["bytes"] == output.stat().st_size
    output.write_bytes(output.read_bytes() + b"more")
    assert report_of(output) is None, "the report describes another file"
    (tmp_path / "some.v2.report.json").write_text("[]")
    assert report_of(output) is None
