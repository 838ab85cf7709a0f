"""Prompts from reasoning-gym, files or data sets (docs/data.md), and the resumable prompt
stream."""

from __future__ import annotations

import difflib
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dapo_megatron.config import (
    Columns,
    DatasetsSource,
    ReasoningGymSource,
    RowsSource,
    Source,
    TasksSource,
)
from dapo_megatron.data.conversation import Conversation
from dapo_megatron.data.hub import read_dataset
from dapo_megatron.data.rows import (
    CHUNK_ROWS,
    DAPO_MATH_COLUMNS,
    PromptRow,
    checked_row,
    read_jsonl,
    read_parquet,
)
from dapo_megatron.files import read_json
from dapo_megatron.rewards.registry import DENIED_DATASETS, grader_names, row_check
from dapo_megatron.types import CheckpointError, ConfigError, DataError, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
LONG_TEXT = 2**16
"""Characters of a prompt from which on only as many are tokenized as are needed to drop it."""
DRAWS = 4
"""Maximum number of problems to draw from a reasoning-gym data set, per problem wanted."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """The prompts of a source, in order, and the numbers of dropped prompts."""

    prompts: tuple[Prompt, ...]
    num_dropped_long: int
    """Prompts with more tokens than rollout.max_prompt_tokens."""
    num_duplicates: int = 0
    """Repeated questions of a reasoning-gym source. Rows of a file are never deduplicated."""
    num_held_out: int = 0
    """Prompts among the texts to exclude."""


def load_source(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    *,
    columns: Columns = DAPO_MATH_COLUMNS,
    exclude: Collection[str] = frozenset(),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    vocab_size: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    writes: Literal["", "end", "all"] = "",
    tasks: Iterable[tuple[str, Mapping[str, Any]]] = (),
) -> LoadedSource:
    """Return all prompts of `source`, rendered with the tokenizer's chat template.

    columns          columns of the config section, used if the source names none
    exclude          prompt texts to drop: all of the held-out sets
    template_kwargs  variables of the chat template
    vocab_size       rows of the model's embedding; None: not checked
    tools            descriptions of the environment's tools
    writes           what the environment writes of each prompt. If it is all, there are no tokens
    tasks            text and data of the tasks of a TasksSource

    A reasoning-gym source draws until it has `size` prompts, at most DRAWS times as many problems.
    For other sources, `limit` counts the rows read, and dropped rows are not replaced.

    Raises DataError naming file, row and column, or the source, also for a row that its grader can
    never grade. Raises ConfigError for an unknown reasoning-gym data set or option.
    """
    check_template(tokenizer, "model.path")
    dropped = Counter[str]()
    wanted = source.size if isinstance(source, ReasoningGymSource) else None
    rows = _all_rows(source, columns, tasks, dropped)
    prompts: list[Prompt] = []
    rows = _gradable(rows, source)
    conversation = Conversation(tokenizer, (), template_kwargs, tools)
    for prompt in render(
        rows, conversation, source.name, max_prompt_tokens, vocab_size, writes=writes
    ):
        prompt = replace(prompt, environment=source.environment or "")
        if len(prompts) == wanted:
            break
        if prompt.text in exclude:
            dropped["held out"] += 1
        elif len(prompt.tokens) > max_prompt_tokens:
            dropped["long"] += 1
        else:
            prompts.append(prompt)
    if not prompts and not dropped:
        raise DataError(f"source {source.name!r} is empty; use other data")
    if not prompts:
        raise DataError(
            f"source {source.name!r}: no prompt left ({dropped['long']} longer than "
            f"rollout.max_prompt_tokens = {max_prompt_tokens}, {dropped['held out']} held out, "
            f"{dropped['duplicates']} duplicates); raise max_prompt_tokens or use other data"
        )
    return LoadedSource(tuple(prompts), dropped["long"], dropped["duplicates"], dropped["held out"])


def _all_rows(
    source: Source,
    columns: Columns,
    tasks: Iterable[tuple[str, Mapping[str, Any]]],
    dropped: Counter[str],
) -> Iterator[PromptRow]:
    if isinstance(source, ReasoningGymSource):
        return _problems(source, dropped)
    if isinstance(source, TasksSource):
        return _tasks(source, tasks)
    return _rows(source, columns)


def _gradable(rows: Iterator[PromptRow], source: Source) -> Iterator[PromptRow]:
    """Yield the rows after checking that their grader can grade them. Raises DataError, because a
    row that cannot be graded would fail for every completion during training."""
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
        try:
            if check := checks[grader]:
                check(row.truth, row.extra)
        except ValueError as error:
            raise DataError(f"{row.where}, grader {grader!r}: {error}") from error
        yield row


def check_template(tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raise DataError naming `key` if a tokenizer has no chat template, or only named ones."""
    template = tokenizer.chat_template
    if template is None:
        raise DataError(
            f"{key}: its tokenizer has no chat template; add chat_template.jinja to the folder"
        )
    if isinstance(template, dict) and "default" not in template:
        raise DataError(
            f"{key}: none of its chat templates ({', '.join(template)}) is named default; write "
            "the one to use to chat_template.jinja in the folder"
        )


def render(
    rows: Iterator[PromptRow],
    conversation: Conversation,
    name: str,
    max_tokens: int,
    vocab_size: int | None = None,
    *,
    writes: Literal["", "end", "all"] = "",
) -> Iterator[Prompt]:
    """Yield the prompts of `rows`: chat template, then tokenizer. The tokenizer adds no special
    tokens, because the template contains them. The text of a prompt does not show the tools, so
    that it is the same for data sets with and without them.

    Raises DataError naming the row of a prompt without tokens or with one that is not below
    `vocab_size`, and of one whose template fails.
    """
    tokenizer = conversation.tokenizer
    plain = replace(conversation, tools=None)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        texts, shown_texts = [], []
        for row in chunk:
            try:
                if writes == "end":
                    texts.append(conversation.prompt_without_end(row.messages))
                else:
                    texts.append(conversation.render(row.messages, starts_turn=True))
                has_more = writes or conversation.tools
                shown = plain.render(row.messages, starts_turn=True) if has_more else texts[-1]
                shown_texts.append(shown)
            except DataError as error:
                raise DataError(f"{row.where}, column prompt: {error}") from error
        for row, text, tokens in zip(
            chunk, shown_texts, _tokens(tokenizer, texts, max_tokens), strict=True
        ):
            if not tokens:
                raise DataError(
                    f"{row.where}, column prompt: the chat template and the tokenizer make no "
                    "tokens of it; fix the template in the model's folder, or drop the row"
                )
            if vocab_size is not None and (token := max(tokens)) >= vocab_size:
                name_of_token = tokenizer.convert_ids_to_tokens(token)
                raise DataError(
                    f"{row.where}, column prompt: token {token} ({name_of_token!r:.60}) is not in "
                    f"the model, whose embedding has {vocab_size} rows; use the tokenizer that "
                    "belongs to the model, or resize the embedding"
                )
            extra = row.extra
            if writes == "all":
                tokens, extra = [], {**extra, "prompt": row.messages}
            yield Prompt(name, row.index, tuple(tokens), text, row.truth, extra)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Return the tokens of each text; of a long one maybe only the first ones, which are more than
    `max_tokens` then. Tokenizing megabytes may take minutes."""
    starts = list(texts)
    if max(map(len, texts)) > LONG_TEXT:
        enough = (max_tokens + 1) * max(map(len, tokenizer.get_vocab()))
        starts = [text[: max(enough, LONG_TEXT)] for text in texts]
    encoded: list[list[int]] = tokenizer(starts, add_special_tokens=False)["input_ids"]
    for index, (text, start) in enumerate(zip(texts, starts)):
        if text != start and len(encoded[index]) <= max_tokens:  # one unknown token may be long
            encoded[index] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoded


# ---------------------------------------------------------------------------- reasoning-gym


def _problems(source: ReasoningGymSource, dropped: Counter[str]) -> Iterator[PromptRow]:
    questions: set[str] = set()
    for index, entry in enumerate(_entries(source)):
        question = entry["question"]
        if question in questions:
            dropped["duplicates"] += 1
        else:
            questions.add(question)
            yield PromptRow(
                index=index,
                where=f"source {source.name!r}, problem {index}",
                messages=[{"role": "user", "content": question}],
                # Data sets with many right answers give none; their scorers do not need it.
                truth=entry["answer"] or "",
                extra={"dataset": source.dataset, "options": dict(source.options), "entry": entry},
            )


def _entries(source: ReasoningGymSource) -> Iterable[dict[str, Any]]:
    """Return the package's entries {question, answer, metadata}, generated lazily."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    where = f"source {source.name!r}"
    if source.dataset not in DATASETS:
        raise ConfigError(
            f"{where}: dataset: {source.dataset!r} is not in reasoning-gym"
            f"{_nearest(source.dataset, DATASETS)}"
        )
    if source.dataset in DENIED_DATASETS:
        raise ConfigError(
            f"{where}: dataset: the package's scorer of {source.dataset} evaluates answers as "
            "code, which would run what a model writes; use another data set"
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
    """Return the end of a message about an unknown name: the nearest names, or all of them."""
    if near := difflib.get_close_matches(name, known):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; known: {', '.join(sorted(known))}"


# ---------------------------------------------------------------------------- tasks


def _tasks(
    source: TasksSource, tasks: Iterable[tuple[str, Mapping[str, Any]]]
) -> Iterator[PromptRow]:
    for index, (text, data) in enumerate(tasks):
        where = f"source {source.name!r}, task {index}"
        messages = [{"role": "user", "content": text}]
        yield PromptRow(index, where, messages, truth="", extra={"task": data})


# ---------------------------------------------------------------------------- files


def _rows(source: RowsSource, section_columns: Columns) -> Iterator[PromptRow]:
    """Yield checked rows. A row without data_source gets the name of the source."""
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
    """Return the path of the JSON report that tools/prepare_data.py writes for a data file."""
    return data.with_suffix(".report.json")


def report_of(path: str | Path) -> Path | None:
    """Return the path of the JSON report of a data file, or None if there is none or it belongs to
    another file. Compares name and size; the data is not read."""
    data, report = Path(path), report_path(Path(path))
    try:
        output = read_json(report)["output"]
        matches = (output["name"], output["bytes"]) == (data.name, data.stat().st_size)
    except (CheckpointError, OSError, KeyError, TypeError):
        return None
    return report if matches else None


# ---------------------------------------------------------------------------- order


class PromptStream:
    """Resumable stream of prompts, epoch after epoch.

    Each epoch yields each prompt once. The order of epoch e depends only on (seed, e). The position
    is the number of prompts handed out since the start of the run. `seek(position)` on an equal
    stream continues identically, at the cost of one shuffle.
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
        """Number of prompts handed out so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Continue as if `position` prompts had been handed out."""
        if position < 0:
            raise ValueError(f"position {position}: must not be negative")
        self._position = position
        self._order = self._order_of(position // len(self._prompts))

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next `num_prompts` prompts, which may cross into the next epoch."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        offset = self._position % len(self._prompts)
        prompt = self._prompts[self._order[offset]]
        self._position += 1
        if offset + 1 == len(self._prompts):
            self._order = self._order_of(self._position // len(self._prompts))
        return prompt

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            # random hashes a string seed with SHA-512: the order is the same on every machine.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
