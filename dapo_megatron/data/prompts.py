"""Prompts from reasoning-gym, from files or from data sets (docs/data.md), and the resumable order
in which a run takes them."""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Columns, DatasetsSource, ReasoningGymSource, RowsSource, Source
from dapo_megatron.data.hub import read_dataset
from dapo_megatron.data.rows import (
    CHUNK_ROWS,
    DAPO_MATH_COLUMNS,
    Row,
    checked_row,
    read_jsonl,
    read_parquet,
)
from dapo_megatron.files import read_json
from dapo_megatron.rewards.registry import names as grader_names
from dapo_megatron.rewards.registry import row_check
from dapo_megatron.types import CheckpointError, ConfigError, DataError, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAWS = 4
"""Problems drawn at most from a reasoning-gym data set, per problem wanted."""


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


@dataclass(slots=True)
class _Dropped:
    long: int = 0
    duplicates: int = 0
    held_out: int = 0


def load_source(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    *,
    columns: Columns = DAPO_MATH_COLUMNS,
    exclude: Collection[str] = frozenset(),
) -> LoadedSource:
    """Return all prompts of `source`, through the tokenizer's chat template.

    `columns` are those of the section, for a source that names none of its own. `exclude` holds
    prompt texts to leave out: those of the held-out sets. A reasoning-gym source draws on until it
    has `size` prompts (at most DRAWS times as many problems); the limit of other sources is of rows
    read, and what is left out is not made up for.

    Raises DataError naming file, row and column, or the source, also for a row that its grader can
    never grade; ConfigError for an unknown reasoning-gym data set or option.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "model.path: its tokenizer has no chat template; add chat_template.jinja to the folder"
        )
    dropped = _Dropped()
    wanted: int | None = None
    if isinstance(source, ReasoningGymSource):
        rows, wanted = _problems(source, dropped), source.size
    else:
        rows = _rows(source, columns)
    prompts: list[Prompt] = []
    for prompt in render(_gradable(rows, source), tokenizer, source.name):
        if len(prompts) == wanted:
            break
        if prompt.text in exclude:
            dropped.held_out += 1
        elif len(prompt.tokens) > max_prompt_tokens:
            dropped.long += 1
        else:
            prompts.append(prompt)
    if not prompts and dropped == _Dropped():
        raise DataError(f"source {source.name!r}: it is empty; name other data")
    if not prompts:
        raise DataError(
            f"source {source.name!r}: no prompt left ({dropped.long} longer than "
            f"rollout.max_prompt_tokens = {max_prompt_tokens}, {dropped.held_out} held out, "
            f"{dropped.duplicates} duplicates); raise max_prompt_tokens or name other data"
        )
    return LoadedSource(tuple(prompts), dropped.long, dropped.duplicates, dropped.held_out)


def _gradable(rows: Iterator[Row], source: Source) -> Iterator[Row]:
    """Yield the rows after a check by their graders. A row that can never be graded is refused
    here; while training it would fail at every completion."""
    checks = {name: row_check(name) for name in grader_names(source.grader)}
    for row in rows:
        grader = source.grader
        if isinstance(grader, dict):
            data_source = row.extra["data_source"]
            if data_source not in grader:
                raise DataError(
                    f"{row.where}, column data_source: source {source.name!r} has no grader for "
                    f"{data_source!r}; known: {', '.join(sorted(grader))}"
                )
            grader = grader[data_source]
        check = checks[grader]
        if check is not None:
            try:
                check(row.truth, row.extra)
            except ValueError as error:
                raise DataError(f"{row.where}, for the grader {grader!r}: {error}") from error
        yield row


def render(rows: Iterator[Row], tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[Prompt]:
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


def _problems(source: ReasoningGymSource, dropped: _Dropped) -> Iterator[Row]:
    asked: set[str] = set()
    for index, entry in enumerate(_entries(source)):
        question = entry["question"]
        if question in asked:
            dropped.duplicates += 1
        else:
            asked.add(question)
            yield Row(
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


def _rows(source: RowsSource, section_columns: Columns) -> Iterator[Row]:
    """Yield checked rows. One without a data_source gets the source's name for it."""
    columns = source.columns or section_columns
    if isinstance(source, DatasetsSource):
        rows = read_dataset(source, columns)
    elif source.kind == "parquet":
        rows = read_parquet(source.path, columns)
    else:
        rows = read_jsonl(source.path)
    for index, where, row in islice(rows, source.limit):
        yield checked_row(index, where, row, columns, source.name)


def report_path(data: Path) -> Path:
    """Return the path of the JSON report that tools/prepare_data.py writes of a data file."""
    return data.with_suffix(".report.json")


def report_of(path: str | Path) -> Path | None:
    """Return the JSON report of a data file, or None if there is none or it is of another file.

    Compares name and size only; the data is not read.
    """
    data, report = Path(path), report_path(Path(path))
    try:
        output = read_json(report)["output"]
        fits = (output["name"], output["bytes"]) == (data.name, data.stat().st_size)
    except (CheckpointError, OSError, KeyError, TypeError):
        return None
    return report if fits else None


# ---------------------------------------------------------------------------- order


class PromptStream:
    """Hands out prompts epoch after epoch; the order of epoch e depends on (seed, e) alone.

    Within an epoch each prompt comes once. A position is the number of prompts handed out since
    the start of the run: `seek(position)` on an equal stream gives exactly the same continuation,
    at the cost of one shuffle.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.seek(0)

    @property
    def position(self) -> int:
        """Prompts handed out so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Continue as if `position` prompts had been handed out."""
        if position < 0:
            raise ValueError(f"position {position}: must not be negative")
        self._position = position
        self._order = self._order_of(position // len(self._prompts))

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next `num_prompts` prompts; may cross into the next epoch."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        place = self._position % len(self._prompts)
        prompt = self._prompts[self._order[place]]
        self._position += 1
        if place + 1 == len(self._prompts):
            self._order = self._order_of(self._position // len(self._prompts))
        return prompt

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            # A string seed is hashed with SHA-512: the same order on every machine.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
