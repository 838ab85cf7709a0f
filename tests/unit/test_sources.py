"""Prompt sources: rows that are read, left out, or refused with their place. The stream of prompts:
complete epochs, an order that depends only on the seed, exact resumption."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any, cast

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dapo_megatron.config import FileSource, ReasoningGymSource
from dapo_megatron.data.conversation import Conversation
from dapo_megatron.data.prompts import DRAWS, LONG_TEXT, PromptStream, load_source, render
from dapo_megatron.data.rows import (
    CHUNK_ROWS,
    PromptRow,
    checked_row,
    parquet_batches,
    read_parquet,
)
from dapo_megatron.types import ConfigError, DataError, Prompt

TEMPLATE = (
    "{%- for message in messages -%}{{- message['role'][0] + ':' + message['content'] -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<answer>' -}}{%- endif -%}"
)
KINDS = ("jsonl", "parquet")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, and one for all others in a row; <answer> starts the
    answer, and <eos> every text that the template did not write."""
    names = ["<eos>", "<unk>", "<answer>", *(chr(code) for code in range(32, 127)), "\n"]
    vocab = {name: number for number, name in enumerate(names)}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True))
    model.post_processor = TemplateProcessing("<eos> $0", special_tokens=[("<eos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<answer>"],
        chat_template=TEMPLATE,
    )


def row(question: str = "1 + 2 =", index: Any = "b1f3", **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "3", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    } | columns


def write_source(folder: Path, kind: str, rows: list[Any], **options: Any) -> FileSource:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return FileSource(kind=kind, name="file", path=str(path), grader="dapo_math", **options)  # type: ignore[arg-type]


def gym(**changes: Any) -> ReasoningGymSource:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    values: dict[str, Any] = {
        "dataset": "chain_sum",
        "size": 30,
        "seed": 5,
        "options": options,
    } | changes
    return ReasoningGymSource(kind="reasoning_gym", name="gym", **values)


# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", ["b1f3", 29], ids=["string", "int64"])
def test_rows_become_prompts(tmp_path: Path, tokenizer: Any, kind: str, index: Any) -> None:
    truth = "-98765432109876543210987"  # keeps every digit
    rows = [row(index=index, reward_model={"ground_truth": truth}), row("4 - 1 =", index=index)]
    # Duplicate rows are kept: AIME-2024 has 32 copies of 30 problems, for avg@32.
    source = write_source(tmp_path, kind, [*rows, rows[1]])
    first, second, third = load_source(source, tokenizer, 100).prompts
    assert (first.source, first.index, first.truth) == ("file", 0, truth)
    assert third.text == second.text
    assert first.text == "u:1 + 2 =<answer>"
    assert first.tokens == tuple(
        tokenizer.apply_chat_template(
            row()["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
    assert first.extra == {
        "data_source": "math_dapo",
        "ability": "MATH",
        "extra_info": {"index": index},
    }
    assert (second.index, second.text) == (1, "u:4 - 1 =<answer>")


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = [row("x" * 7), row("x" * 8), row("x" * 6)]
    loaded = load_source(write_source(tmp_path, kind, rows), tokenizer, 10)  # "u:" + 7 + <answer>
    assert [prompt.index for prompt in loaded.prompts] == [0, 2]
    assert loaded.num_dropped_long == 1


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_limit_hold_across_chunks(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = [row(str(number)) for number in range(CHUNK_ROWS + 7)]
    everything = load_source(write_source(tmp_path, kind, rows), tokenizer, 100).prompts
    assert [prompt.text for prompt in everything] == [f"u:{n}<answer>" for n in range(len(rows))]
    limited = load_source(write_source(tmp_path, kind, rows, limit=5), tokenizer, 100).prompts
    assert limited == everything[:5]


def test_only_used_columns_of_parquet_are_read_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_source(tmp_path, "parquet", [row(other=number) for number in range(5)]).path
    monkeypatch.setattr("dapo_megatron.data.rows.CHUNK_ROWS", 2)
    assert list(read_parquet(path)) == [(n, f"{path}, row {n}", row()) for n in range(5)]
    batches = list(parquet_batches(path, 3))
    assert [len(batch) for batch in batches] == [3, 2]
    assert {*batches[0].schema.names} == {*row(), "other"}


def test_excluded_texts_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    source = write_source(tmp_path, "jsonl", [row(), row("4 - 1 =")])
    loaded = load_source(source, tokenizer, 100, exclude={"u:1 + 2 =<answer>"})
    assert [prompt.index for prompt in loaded.prompts] == [1]
    assert loaded.num_held_out == 1


def bad(path: str, value: Any) -> dict[str, Any]:
    """A row with `value` at a dotted path; DELETE removes the entry."""
    changed: Any = deepcopy(row())
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    node = changed
    for part in parents:
        node = node[part]
    if value is DELETE:
        del node[last]
    else:
        node[last] = value
    return changed  # type: ignore[no-any-return]


DELETE = object()
BAD_ROWS = [
    *(("prompt", value) for value in (" ", 12, [], None, DELETE)),
    *(("prompt.0", "hello"), ("prompt.0.role", "robot"), ("prompt.0.role", ["user"])),
    *(("prompt", [{"role": "assistant", "content": "x"}]), ("prompt.0.content", " ")),
    *(("prompt.0.content", "7 \ud800"), ("reward_model", None), ("reward_model", DELETE)),
    *(("reward_model", "3"), ("data_source", {"name": 3}), ("ability", ["MATH"])),
    *(
        ("reward_model.ground_truth", value)
        for value in (DELETE, 3.0, True, ["3"], {"value": "3"}, "")
    ),
    ("extra_info", "3"),
]


def test_bad_rows_are_refused_by_place_and_column(tmp_path: Path, tokenizer: Any) -> None:
    for place, value in BAD_ROWS:
        source = write_source(tmp_path, "jsonl", [row(), row(), bad(place, value)])
        column = re.sub(r"\.(\d+)", r"\\[\1\\]", place)
        with pytest.raises(DataError, match=rf"rows.jsonl, line 3, column {column}"):
            load_source(source, tokenizer, 100)
    before = source.model_copy(update={"limit": 2})
    assert len(load_source(before, tokenizer, 100).prompts) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": \n', "line 1: not valid JSON"),
        (
            b"\n[1, 2]\n",
            "a JSON array, but one object per line is needed; convert it: jq -c '.\\[\\]'",
        ),
        (b"\xef\xbb\xbf [\n  {}\n]\n", "a JSON array"),
        (b'{\n  "prompt": "x"\n}\n', r"a JSON object over several lines, .*: jq -c '\.' "),
        (b"", "is empty; use other data"),
    ],
)
def test_a_file_that_is_not_jsonl_is_refused(
    tmp_path: Path, tokenizer: Any, content: bytes, message: str
) -> None:
    source = write_source(tmp_path, "jsonl", [])
    Path(source.path).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_source(source, tokenizer, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_if_no_prompt_is_left_the_setting_to_change_is_named(
    tmp_path: Path, tokenizer: Any, kind: str
) -> None:
    with pytest.raises(DataError, match=r"'file': no prompt left \(2 longer than .* = 3.*raise"):
        load_source(write_source(tmp_path, kind, [row(), row()]), tokenizer, 3)


# ---------------------------------------------------------------------------- reasoning-gym


def test_reasoning_gym_problems_become_prompts(tokenizer: Any) -> None:
    prompts = load_source(gym(), tokenizer, 200).prompts
    assert prompts == load_source(gym(), tokenizer, 200).prompts
    assert prompts != load_source(gym(seed=500), tokenizer, 200).prompts
    prompt = prompts[0]
    entry = prompt.extra["entry"]
    assert prompt.extra["dataset"] == "chain_sum"
    assert prompt.text == f"u:{entry['question']}<answer>"
    assert prompt.truth == entry["answer"]
    assert prompt.extra["options"] == gym().options
    assert (
        load_source(gym(dataset="graph_color", options={}), tokenizer, 999).prompts[0].truth == ""
    )
    assert eval(entry["metadata"]["expression"]) == int(prompt.truth)
    assert json.loads(json.dumps(prompt.extra))["entry"]["question"] == entry["question"]


@pytest.mark.parametrize("size", [60, 400])
def test_repeated_questions_are_replaced_as_long_as_there_are_others(
    tokenizer: Any, size: int
) -> None:
    loaded = load_source(gym(size=size), tokenizer, 200)  # sums of two digits: few are distinct
    texts = {prompt.text for prompt in loaded.prompts}
    assert len(texts) == len(loaded.prompts)
    assert loaded.num_duplicates > 0
    assert len(texts) == (60 if size == 60 else DRAWS * 400 - loaded.num_duplicates)


def test_train_and_held_out_prompts_do_not_overlap(tokenizer: Any) -> None:
    held_out = load_source(gym(seed=900), tokenizer, 200)
    overlapping = load_source(gym(size=30), tokenizer, 200)
    texts = {prompt.text for prompt in held_out.prompts}
    shared = [prompt.text for prompt in overlapping.prompts if prompt.text in texts]
    assert shared, "the test needs seeds that overlap"
    train = load_source(gym(size=30), tokenizer, 200, exclude=texts)
    assert not texts & {prompt.text for prompt in train.prompts}
    assert train.num_held_out >= len(shared)
    assert len(train.prompts) == 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "chain_summ"}, "'gym': dataset: 'chain_summ'.* did you mean 'chain_sum'"),
        # Five names are similar to this one.
        ({"dataset": "basic_arithmetics"}, "did you mean '[a-z_]+' or '[a-z_]+' or '[a-z_]+'[?]$"),
        ({"dataset": "qqqqq"}, "'gym': dataset: 'qqqqq' .*known: .*chain_sum"),
        ({"options": {"min_termz": 3}}, r"options.min_termz: .* did you mean 'min_terms'"),
        *(
            ({"options": {name: 3}}, f"options.{name}: chain_sum has no such option; .*")
            for name in ("seed", "size")
        ),
        ({"dataset": "simple_integration"}, "'gym': dataset: .* simple_integration evaluates answ"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "options: refused by chain_sum: max_terms"),
        ({"options": {"min_terms": "two"}}, "options: refused by chain_sum"),
    ],
)
def test_unknown_data_sets_and_options_are_refused(
    tokenizer: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_source(gym(**changes), tokenizer, 200)


# ---------------------------------------------------------------------------- templates and tokens

FAILING = {
    "raises": ("{{ raise_exception('no system role') }}", "no system role"),
    "index out of range": ("{{ messages[-1]['content'].split('</think>')[1] + '' }}", "Undefined"),
    "undefined variable": ("{{ thinking.mode }}", "UndefinedError"),
    "syntax": ("{% for m in messages %}", "TemplateSyntaxError"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "unsafe": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "writes nothing": ("", "make no tokens of it"),
    "writes nothing for this row": ("{% if messages | length > 1 %}x{% endif %}", "no tokens"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_refused_with_the_row(
    name: str, tmp_path: Path, tokenizer: Any
) -> None:
    template, message = FAILING[name]
    failing = deepcopy(tokenizer)
    failing.chat_template = template
    with pytest.raises(DataError, match=f"line 1, column prompt: .*{message}"):
        load_source(write_source(tmp_path, "jsonl", [row()]), failing, 100)


def test_named_templates_need_a_default(tmp_path: Path, tokenizer: Any) -> None:
    source, named = write_source(tmp_path, "jsonl", [row()]), deepcopy(tokenizer)
    named.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        load_source(source, named, 100)
    named.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    with pytest.raises(DataError, match=r"chat templates \(rag, tool_use\) is named default"):
        load_source(source, named, 100)
    named.chat_template["default"] = TEMPLATE
    assert load_source(source, named, 100) == load_source(source, tokenizer, 100)


def test_a_template_gets_the_configured_variables(tmp_path: Path, tokenizer: Any) -> None:
    source, thinking = write_source(tmp_path, "jsonl", [row()]), deepcopy(tokenizer)
    thinking.chat_template = "{{ 'think' if enable_thinking is not false else 'answer' }}"
    texts = [
        load_source(source, thinking, 100, template_kwargs=kwargs).prompts[0].text
        for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert texts == ["think", "think", "answer"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_beyond_the_embedding_is_refused_with_the_row(
    kind: str, tmp_path: Path, tokenizer: Any
) -> None:
    source = write_source(tmp_path, kind, [row("1"), row("~")])
    highest = tokenizer.convert_tokens_to_ids("~")
    assert len(load_source(source, tokenizer, 100, vocab_size=highest + 1).prompts) == 2
    place = "line 2" if kind == "jsonl" else "row 1"
    with pytest.raises(DataError, match=rf"{place}, column prompt: token {highest} \('~'\)"):
        load_source(source, tokenizer, 100, vocab_size=highest)


def test_a_text_of_megabytes_is_dropped_before_it_is_tokenized(tokenizer: Any) -> None:
    limit = 50
    lengths: list[int] = []

    class Counting:
        chat_template = "{{ messages[0]['content'] }}"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return str(messages[0]["content"])

        def __call__(self, texts: Any, **options: Any) -> Any:
            lengths.extend(map(len, [texts] if isinstance(texts, str) else texts))
            return tokenizer(texts, **options)

    texts = ["1" * 10**6, "1 + 1", "é" * 10**5 + "1"]
    rows = [
        PromptRow(index, f"line {index}", [{"role": "user", "content": text}], "3", {})
        for index, text in enumerate(texts)
    ]
    prompts = list(render(iter(rows), Conversation(cast(Any, Counting()), ()), "x", limit))
    assert lengths == [LONG_TEXT, 5, LONG_TEXT, 10**5 + 1]  # the last one's start is one token
    assert [len(prompt.tokens) for prompt in prompts] == [LONG_TEXT, 5, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["data_source", "ability"])
def test_optional_columns_may_be_empty(
    kind: str, column: str, tmp_path: Path, tokenizer: Any
) -> None:
    default = {"data_source": "file", "ability": ""}[column]
    values = [(None, default), ("", default), ("math", "math"), (3, "3"), (DELETE, default)]
    if kind == "parquet":
        values.append((float("nan"), default))  # as pandas writes it
    for value, expected in values:
        source = write_source(tmp_path, kind, [bad(column, value)])
        (prompt,) = load_source(source, tokenizer, 100).prompts
        assert prompt.extra[column] == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip


@given(
    unread=st.dictionaries(st.text("xyz", min_size=1, max_size=3), json_values), index=json_values
)
def test_what_nothing_reads_is_not_checked(unread: Any, index: Any) -> None:
    """Other columns may hold anything that is JSON, and so may the fields of extra_info."""
    line = row(extra_info={"index": index}) | unread
    checked = checked_row(0, "line 1", line)
    assert checked.extra["extra_info"] == {"index": index}
    assert checked.truth == "3"
    line["unread"] = {"a date": date(2026, 1, 1), "NaN": float("nan"), "bytes": b"1"}
    assert checked_row(0, "line 1", line) == checked


@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        ([{"role": "system", "content": ""}, {"role": "user", "content": "x"}], ["", "x"]),
        (
            [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}],
            ["ab"],
        ),
        ([{"role": "user", "content": "x", "name": None, "tool_calls": None}], ["x"]),
    ],
)  # fmt: skip
def test_messages_as_other_programs_write_them(messages: Any, texts: list[str]) -> None:
    checked = checked_row(0, "line 1", row(prompt=messages))
    assert [message["content"] for message in checked.messages] == texts


def test_an_image_in_a_prompt_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    with pytest.raises(DataError, match=r"prompt\[0\].content: a part of the type 'image_url'"):
        checked_row(0, "line 1", row(prompt=[{"role": "user", "content": parts}]))


# ---------------------------------------------------------------------------- the stream


def numbered(num: int) -> list[Prompt]:
    return [Prompt("s", index, (index,), str(index), "0") for index in range(num)]


def take_indices(stream: PromptStream, num: int) -> list[int]:
    return [prompt.index for prompt in stream.take(num)]


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # Otherwise a resumed run would continue in another order.
    orders = {(7, True): [6, 3, 2, 1, 7, 0, 4, 5], (7, False): [*range(8)]}
    for (seed, shuffle), order in orders.items():
        assert take_indices(PromptStream(numbered(8), seed=seed, shuffle=shuffle), 8) == order


@given(
    num=st.integers(1, 20),
    seed=st.integers(),
    shuffle=st.booleans(),
    before=st.lists(st.integers(0, 30), max_size=4),
    after=st.integers(1, 60),
)
def test_a_restored_position_continues_exactly(
    num: int, seed: int, shuffle: bool, before: list[int], after: int
) -> None:
    stream = PromptStream(numbered(num), seed=seed, shuffle=shuffle)
    for count in before:
        stream.take(count)
    assert stream.position == sum(before)
    restored = PromptStream(numbered(num), seed=seed, shuffle=shuffle)
    restored.seek(stream.position)
    assert restored.position == stream.position
    assert take_indices(restored, after) == take_indices(stream, after)


@given(num=st.integers(1, 20), seed=st.integers(), shuffle=st.booleans())
def test_an_epoch_has_every_prompt_once_and_the_next_one_another_order(
    num: int, seed: int, shuffle: bool
) -> None:
    stream = PromptStream(numbered(num), seed=seed, shuffle=shuffle)
    epochs = [take_indices(stream, num) for _ in range(20)]
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs)
    if shuffle and num > 4:
        assert len({tuple(epoch) for epoch in epochs}) > 1
    else:
        assert shuffle or epochs == [list(range(num))] * 20


def test_an_empty_stream_and_a_negative_position_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="-1"):
        PromptStream(numbered(1), seed=0, shuffle=True).seek(-1)
