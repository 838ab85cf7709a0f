"""Find the distinct prompts of the inputs in one pass, with their repeats and truths.

A prompt is its messages (roles and contents). Two prompts are the same except for whitespace if
they are equal after every run of whitespace is folded to one space. A problem is a prompt without
its frame: the instructions that all prompts of a set share. DAPO-Math-17k wraps every problem in
the same 42 words, which would make any two short problems look near.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Columns
from dapo_megatron.data.hub import dataset_batches, name_of
from dapo_megatron.data.rows import DAPO_MATH_COLUMNS, PromptRow
from preparing.tables import BATCH_ROWS, Batch, checked, read

if TYPE_CHECKING:
    import pyarrow

MIN_PROMPTS = 10
"""Minimum number of prompts to detect a frame. Fewer may share words by chance, so only the known
frame is removed."""
DAPO_MATH = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
"""Opening and closing of the prompts of DAPO-Math-17k and AIME-2024."""


# ---------------------------------------------------------------------------- frames


def fold(text: str) -> str:
    """Replace every run of whitespace by one space, and remove it at both ends."""
    return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Frame:
    """The words with which all prompts of a set open and close."""

    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()

    def strip(self, text: str) -> str:
        """Return the problem of a prompt: folded, without the known frame and this frame."""
        words = _without_known(text)
        first, last = len(self.opening), len(words) - len(self.closing)
        if first < last and (*words[:first], *words[last:]) == self.opening + self.closing:
            words = words[first:last]
        return " ".join(words)

    def to_json(self) -> dict[str, str]:
        """Return the frame for the report and for the metadata of the prepared file."""
        return {"opens": " ".join(self.opening), "closes": " ".join(self.closing)}

    @classmethod
    def from_json(cls, value: Mapping[str, str]) -> Frame:
        """Return the frame that `to_json` wrote."""
        return cls(tuple(value["opens"].split()), tuple(value["closes"].split()))


def frame_of(texts: Iterable[str]) -> Frame:
    """Return the whole words that all `texts` share at both ends; each text keeps a word."""
    opening: list[str] = []
    closing: list[str] = []
    shortest = num_texts = 0
    for num_texts, text in enumerate(texts, start=1):
        words = _without_known(text)
        if num_texts == 1:
            opening, closing, shortest = words, words[::-1], len(words)
        opening = _shared(opening, words)
        closing = _shared(closing, words[::-1])
        shortest = min(shortest, len(words))
    if num_texts < MIN_PROMPTS:
        return Frame()
    opening = opening[: max(0, shortest - 1)]
    closing = closing[: max(0, shortest - 1 - len(opening))]
    return Frame(tuple(opening), tuple(reversed(closing)))


def _shared(left: list[str], right: list[str]) -> list[str]:
    pairs = zip(left, right, strict=False)
    return [word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _without_known(text: str) -> list[str]:
    folded = fold(text)
    opening, closing = DAPO_MATH
    if folded.startswith(opening) and folded.endswith(closing):
        inner = folded[len(opening) : len(folded) - len(closing)].split()
        return inner or folded.split()
    return folded.split()


# ---------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class Source:
    """An input: a Parquet or JSONL file, or a data set on the hub."""

    name: str
    path: Path | None = None
    """None for a data set on the hub."""
    hub_name: str = ""
    revision: str | None = None
    split: str = "train"

    def batches(self, columns: Columns, batch_rows: int) -> Iterator[Batch]:
        """Yield batches of rows. Raises DataError for a bad row, or a hub out of reach."""
        if self.path is not None:
            yield from read(self.path, batch_rows, columns)
            return
        where, first = name_of(f"hub:{self.hub_name}", self.split), 0
        for batch in dataset_batches(self.hub_name, None, self.split, self.revision, batch_rows):
            yield batch, checked(batch, where, first, columns)
            first += len(batch)


@dataclass(slots=True)
class Unique:
    """A prompt that differs from all before it by more than whitespace, and its repeats."""

    row: PromptRow
    truth: str
    exact: bytes
    folded: bytes
    num_exact: int = 0
    """Rows that repeat the prompt exactly, without the first row of each whitespace variant."""
    num_folded: int = 0
    """Variants that differ in whitespace only, without the first."""
    other_truths: dict[str, str] = field(default_factory=dict)
    """Each further truth and the first row that has it."""
    dropped: str | None = None
    """The reason why it was dropped, or None."""
    matches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Details of the match for each reason, also if the prompt was kept."""

    @property
    def where(self) -> str:
        """File and row."""
        return self.row.where

    @property
    def text(self) -> str:
        """Contents of the messages."""
        return "\n".join(message["content"] for message in self.row.messages)


@dataclass(slots=True)
class Inputs:
    """Result of the pass over the inputs."""

    uniques: list[Unique] = field(default_factory=list)
    batches: dict[str, list[pyarrow.RecordBatch]] = field(default_factory=dict)
    """Input -> the rows of `uniques` that it has, with all their columns."""
    num_rows: list[int] = field(default_factory=list)
    """Number of rows of each input."""
    digests: list[str] = field(default_factory=list)
    """SHA-256 over prompt and truth of every row, per input; used where there is no local file."""
    by_exact: dict[bytes, Unique] = field(default_factory=dict)
    by_folded: dict[bytes, Unique] = field(default_factory=dict)


def collect(
    sources: Iterable[Source],
    columns: Columns = DAPO_MATH_COLUMNS,
    batch_rows: int = BATCH_ROWS,
) -> Inputs:
    """Read all rows once. Keep the first row of each unique prompt, count the rest."""
    import pyarrow

    inputs = Inputs()
    for source in sources:
        digest = sha256()
        num_rows = 0
        kept = inputs.batches.setdefault(source.name, [])
        for batch, rows in source.batches(columns, batch_rows):
            new = []
            for place, row in enumerate(rows):
                exact, truth = _digest(row, is_folded=False), fold(row.truth)
                digest.update(exact + truth.encode())
                if _add_row(inputs, row, exact, truth):
                    new.append(place)
            if new or not kept:  # the first batch for its columns
                kept.append(batch.take(pyarrow.array(new, "int64")))
            num_rows += len(rows)
        inputs.num_rows.append(num_rows)
        inputs.digests.append(digest.hexdigest())
    return inputs


def _add_row(inputs: Inputs, row: PromptRow, exact: bytes, truth: str) -> bool:
    """Count one row. Return whether its prompt is new, whitespace ignored."""
    unique = inputs.by_exact.get(exact)
    if unique is not None:
        unique.num_exact += 1
    else:
        folded = _digest(row, is_folded=True)
        unique = inputs.by_folded.get(folded)
        if unique is None:
            unique = Unique(row, truth, exact, folded)
            inputs.uniques.append(unique)
            inputs.by_exact[exact] = inputs.by_folded[folded] = unique
            return True
        unique.num_folded += 1
        inputs.by_exact[exact] = unique
    if truth != unique.truth:
        unique.other_truths.setdefault(truth, row.where)
    return False


def _digest(row: PromptRow, is_folded: bool) -> bytes:
    """Return a hash of roles and contents. It includes lengths, so that messages do not merge."""
    digest = blake2b(digest_size=16)
    for message in row.messages:
        text = fold(message["content"]) if is_folded else message["content"]
        content = text.encode("utf-8", "surrogatepass")
        digest.update(b"%s %d " % (message["role"].encode(), len(content)))
        digest.update(content)
    return digest.digest()
