"""Prompts from reasoning-gym or from a file in the DAPO-Math schema (docs/data.md).

Rows are checked strictly: a truth that was once a float, or a prompt without its question, would
only show as a reward that never rises.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import FileSource, ReasoningGymSource
from dapo_megatron.types import ConfigError, DataError, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 256
DRAWS = 4
"""Problems drawn at most from a reasoning-gym data set, per problem wanted."""
ROLES = ("system", "user", "assistant")
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """The prompts of a source, in its order, and what was left out of them."""

    prompts: tuple[Prompt, ...]
    num_dropped_long: int
    """More tokens than rollout.max_prompt_tokens."""
    num_duplicates: int = 0
    """Asked before in the same reasoning-gym source. Rows of a file are never merged."""
    num_held_out: int = 0
    """Among the texts to exclude."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One problem before the chat template; `where` names it in an error."""

    index: int
    where: str
    messages: list[dict[str, str]]
    truth: str
    extra: Mapping[str, Any]


@dataclass(slots=True)
class _Dropped:
    long: int = 0
    duplicates: int = 0
    held_out: int = 0


def load_source(
    source: ReasoningGymSource | FileSource,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    *,
    exclude: Collection[str] = frozenset(),
) -> LoadedSource:
    """All prompts of `source`, through the tokenizer's chat template.

    `exclude` holds prompt texts to leave out: those of the held-out sets. A reasoning-gym source
    draws on until it has `size` prompts (at most DRAWS times as many problems); the limit of a
    file is of rows read, and what is left out is not made up for.

    Raises DataError naming file, row and column, or the source; ConfigError for an unknown
    reasoning-gym data set or option.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "model.path: its tokenizer has no chat template; add chat_template.jinja to the folder"
        )
    dropped = _Dropped()
    rows = _problems(source, dropped) if isinstance(source, ReasoningGymSource) else _rows(source)
    wanted = source.size if isinstance(source, ReasoningGymSource) else None
    prompts: list[Prompt] = []
    for prompt in _render(rows, tokenizer, source.name):
        if len(prompts) == wanted:
            break
        if prompt.text in exclude:
            dropped.held_out += 1
        elif len(prompt.tokens) > max_prompt_tokens:
            dropped.long += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise DataError(
            f"source {source.name!r}: no prompt left ({dropped.long} longer than "
            f"rollout.max_prompt_tokens = {max_prompt_tokens}, {dropped.held_out} held out, "
            f"{dropped.duplicates} duplicates); raise max_prompt_tokens or name other data"
        )
    return LoadedSource(tuple(prompts), dropped.long, dropped.duplicates, dropped.held_out)


def _render(
    rows: Iterator[_Row], tokenizer: PreTrainedTokenizerBase, name: str
) -> Iterator[Prompt]:
    """Chat template, then tokens. The template writes the special tokens; none are added."""
    from jinja2 import TemplateError

    while chunk := list(islice(rows, CHUNK_ROWS)):
        texts = []
        for row in chunk:
            try:
                text = tokenizer.apply_chat_template(
                    row.messages, add_generation_prompt=True, tokenize=False
                )
            except TemplateError as error:
                raise DataError(
                    f"{row.where}, column prompt: the chat template: {error}"
                ) from error
            texts.append(str(text))
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for row, text, tokens in zip(chunk, texts, encoded, strict=True):
            yield Prompt(name, row.index, tuple(tokens), text, row.truth, row.extra)


# ---------------------------------------------------------------------------- reasoning-gym


def _problems(source: ReasoningGymSource, dropped: _Dropped) -> Iterator[_Row]:
    asked: set[str] = set()
    for index, entry in enumerate(_entries(source)):
        question = entry["question"]
        if question in asked:
            dropped.duplicates += 1
        else:
            asked.add(question)
            yield _Row(
                index=index,
                where=f"source {source.name!r}, problem {index}",
                messages=[{"role": "user", "content": question}],
                # Some data sets have many right answers and give none; their scorer needs none.
                truth=entry["answer"] or "",
                extra={
                    "dataset": source.dataset,
                    "options": dict(source.options),
                    "entry": entry,
                },
            )


def _entries(source: ReasoningGymSource) -> Iterable[dict[str, Any]]:
    """The package's own entries, made as they are asked for: {question, answer, metadata}."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    where = f"source {source.name!r}"
    if source.dataset not in DATASETS:
        raise ConfigError(
            f"{where}: dataset: {source.dataset!r} is not in reasoning-gym"
            f"{_nearest(source.dataset, DATASETS)}"
        )
    known = {field.name for field in fields(DATASETS[source.dataset][1])} - {"size", "seed"}
    for option in source.options:
        if option not in known:
            raise ConfigError(
                f"{where}: options.{option}: {source.dataset} has no such option"
                f"{_nearest(option, known)}"
            )
    try:
        dataset: Iterable[dict[str, Any]] = reasoning_gym.create_dataset(
            source.dataset, size=DRAWS * source.size, seed=source.seed, **source.options
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: options: refused by {source.dataset}: {error}") from error
    return dataset


def _nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name."""
    near = difflib.get_close_matches(name, known, n=3)
    return (
        f"; did you mean {' or '.join(map(repr, near))}?"
        if near
        else (f"; known: {', '.join(sorted(known))}")
    )


# ---------------------------------------------------------------------------- files


def _rows(source: FileSource) -> Iterator[_Row]:
    read = _parquet if source.kind == "parquet" else _jsonl
    for index, where, row in islice(read(source.path), source.limit):
        checked = _checked(index, where, row)
        if isinstance(source.grader, dict) and checked.extra["data_source"] not in source.grader:
            raise DataError(
                f"{where}, column data_source: source {source.name!r} has no grader for "
                f"{checked.extra['data_source']!r}; known: {', '.join(sorted(source.grader))}"
            )
        yield checked


def _jsonl(path: str) -> Iterator[tuple[int, str, Any]]:
    """(index from 0, "file, line N" from 1, value); blank lines are skipped."""
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{where}: not valid JSON: {error}") from error
                yield number - 1, where, row
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _parquet(path: str) -> Iterator[tuple[int, str, Any]]:
    """(index from 0, "file, row N" from 0, value); a row group at a time, known columns only."""
    import pyarrow
    from pyarrow import parquet

    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield index, f"{path}, row {index}", row
                    index += 1
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except pyarrow.lib.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _checked(index: int, where: str, row: Any) -> _Row:
    """One row of the DAPO-Math schema, or DataError naming row and column."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a mapping of columns, found {_shown(row)}")
    extra_info = _mapping(row.get("extra_info"), where, "extra_info")
    number = extra_info.get("index")
    if isinstance(number, bool) or not isinstance(number, str | int):
        raise DataError(
            f"{where}, column extra_info.index: must be a string or an integer, "
            f"found {_shown(number)}"
        )
    try:
        json.dumps(extra_info)
    except TypeError as error:
        raise DataError(f"{where}, column extra_info: {error}") from error
    reward_model = _mapping(row.get("reward_model"), where, "reward_model")
    return _Row(
        index=index,
        where=where,
        messages=_messages(row.get("prompt"), where),
        truth=_string(reward_model.get("ground_truth"), where, "reward_model.ground_truth"),
        extra={
            "data_source": _string(row.get("data_source"), where, "data_source"),
            "ability": _string(row.get("ability"), where, "ability"),
            "extra_info": extra_info,
        },
    )


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}, column prompt: must be a list of messages {{content, role}}, "
            f"found {_shown(value)}"
        )
    messages = []
    for place, entry in enumerate(value):
        column = f"prompt[{place}]"
        message = _mapping(entry, where, column)
        role = message.get("role")
        if role not in ROLES:
            raise DataError(
                f"{where}, column {column}.role: must be one of {', '.join(ROLES)}, "
                f"found {_shown(role)}"
            )
        content = _string(message.get("content"), where, f"{column}.content")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{where}, column prompt: the last message must be the user's, "
            f"found {_shown(messages[-1]['role'])}"
        )
    return messages


def _mapping(value: Any, where: str, column: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}, column {column}: must be a mapping, found {_shown(value)}")
    return value


def _string(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        hint = " (a number loses digits: write it as a string)" if _is_number(value) else ""
        raise DataError(
            f"{where}, column {column}: must be a non-empty string, found {_shown(value)}{hint}"
        )
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
