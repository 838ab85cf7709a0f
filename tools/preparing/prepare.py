"""Prepare published data: drop rows for stated reasons, and check that the counts add up.

One pass over the inputs (`unique.py`) writes the first row of every distinct prompt to disk. All
later steps read these rows. Every dropped row has one reason, the first that applies in the order
of `report.LABELS`. The remaining rows keep their order and types.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dapo_megatron.config import Columns
from dapo_megatron.data.prompts import check_template, render
from dapo_megatron.data.rows import DAPO_MATH_COLUMNS, PromptRow
from dapo_megatron.types import DataError
from preparing.report import LABELS
from preparing.tables import BATCH_ROWS, Spool, checked, read, write
from preparing.unique import Frame, Inputs, Source, Unique, collect, file_source, frame_of

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

FRAME_KEY = b"dapo_megatron.frame"
"""Key of `Frame.to_json` in the metadata of a prepared file."""
NUM_EXAMPLES = 50
"""Examples that are kept per reason."""
EXAMPLE_CHARACTERS = 300
REMEDIES = {
    "conflicting": "correct the truths",
    "too_long": "raise --max-prompt-tokens",
    "overlap_exact": "use --overlap report, or other --evaluation files",
    "overlap_folded": "use --overlap report, or other --evaluation files",
    "overlap_near": "use --overlap report, or raise --similarity",
    "near_duplicate": "use --near-duplicates report, or raise --similarity",
}


class Index(Protocol):
    """Problems by key, searchable for the nearest."""

    def add(self, key: int, sketch: Any) -> None:
        """Add a problem under a key."""

    def nearest(self, sketch: Any) -> tuple[int, float] | None:
        """Return (key, similarity) of the nearest problem, the first of equals; None if none."""


class Similarity(Protocol):
    """A measure of how near two problems are."""

    def sketch(self, problem: str) -> Any:
        """Return what `Index` needs to know of a problem."""

    def index(self) -> Index:
        """Return a new, empty index."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to find duplicates and overlap, and what to do with them."""

    similarity: Similarity
    overlap: Literal["drop", "report"] = "drop"
    near_duplicates: Literal["drop", "report", "off"] = "report"
    tokenizer: PreTrainedTokenizerBase | None = None
    max_prompt_tokens: int = 0
    batch_rows: int = BATCH_ROWS
    columns: Columns = DAPO_MATH_COLUMNS
    evaluation_columns: Columns = DAPO_MATH_COLUMNS


def prepare(
    sources: Sequence[Source],
    evaluation: Sequence[Path],
    settings: Settings,
    output: Path,
    on_rows: Callable[[int], object] = lambda num_rows: None,
) -> dict[str, Any]:
    """Write the remaining prompts to `output`, and return the counts and examples of the report.

    The caller removes the folder of `output`, because it holds the spool too. Raises DataError for
    bad rows, for inputs with columns that cannot be combined, and if no row remains.
    """
    spool = Spool(output.with_suffix(".spool"))
    inputs = collect(sources, settings.batch_rows, spool, on_rows)
    spool.close()
    if not inputs.uniques:
        raise DataError(f"no rows in {_names(sources)}: name other files")
    schema = spool.schema()
    for unique in inputs.uniques:
        if unique.other_truths:
            unique.dropped = "conflicting"
    if settings.tokenizer is not None:
        drop_long(inputs.uniques, spool, settings)
    held_out = collect(
        [file_source(path, settings.evaluation_columns) for path in evaluation],
        settings.batch_rows,
    )
    for path, num_rows in zip(evaluation, held_out.num_rows, strict=True):
        if not num_rows:
            raise DataError(f"--evaluation {path}: no rows, so nothing could overlap with it")
    frame = _written_frame(schema) if len(sources) == 1 else None
    frame = frame or frame_of(_text(row) for _, _, row in _alive(inputs.uniques, spool, settings))
    compare(inputs.uniques, spool, frame, held_out, evaluation, settings)
    rows = count(inputs)
    if not rows["out"]:
        raise DataError(_nothing_left(rows, sources))
    framed = {**(schema.metadata or {}), FRAME_KEY: json.dumps(frame.to_json())}
    write(output, schema.with_metadata(framed), _kept(inputs.uniques, spool))
    return {
        "rows": rows,
        "prompts": {
            "distinct": len(inputs.by_exact),
            "distinct_folded": len(inputs.uniques),
            "conflicting": sum(bool(unique.other_truths) for unique in inputs.uniques),
            "clean": sum(not unique.other_truths for unique in inputs.uniques),
        },
        "files": list(zip(inputs.num_rows, inputs.digests, strict=True)),
        "evaluation_rows": held_out.num_rows,
        "frame": frame.to_json(),
        "examples": examples(inputs.uniques, spool, frame, settings.columns),
    }


# ------------------------------------------------------------------------------- remaining rows


def _alive(
    uniques: Sequence[Unique], spool: Spool, settings: Settings
) -> Iterator[tuple[int, Unique, PromptRow]]:
    """Yield place, prompt and row of each prompt that is not dropped when it is reached."""
    first = 0
    for batch in spool.batches():
        rows = checked(batch, "spool", first, settings.columns)
        for place, row in enumerate(rows, start=first):
            if uniques[place].dropped is None:
                yield place, uniques[place], row
        first += len(batch)


def _kept(uniques: Sequence[Unique], spool: Spool) -> Iterator[Any]:
    import pyarrow

    prompts = iter(uniques)
    for batch in spool.batches():
        mask = [unique.dropped is None for unique in islice(prompts, len(batch))]
        yield pyarrow.Table.from_batches([batch]).filter(pyarrow.array(mask, pyarrow.bool_()))


def drop_long(uniques: Sequence[Unique], spool: Spool, settings: Settings) -> None:
    """Drop prompts with more than `max_prompt_tokens` tokens, chat template included."""
    assert settings.tokenizer is not None
    check_template(settings.tokenizer, "--tokenizer")
    alive = [unique for unique in uniques if unique.dropped is None]
    rows = (replace(row, where=unique.where) for _, unique, row in _alive(uniques, spool, settings))
    prompts = render(rows, settings.tokenizer, "", settings.max_prompt_tokens)
    for unique, prompt in zip(alive, prompts, strict=True):
        if len(prompt.tokens) > settings.max_prompt_tokens:
            unique.dropped = "too_long"
            unique.matches["too_long"] = {"where": unique.where, "tokens": len(prompt.tokens)}


def compare(
    uniques: Sequence[Unique],
    spool: Spool,
    frame: Frame,
    held_out: Inputs,
    evaluation: Sequence[Path],
    settings: Settings,
) -> None:
    """Find overlap with the evaluation sets, and near-duplicates of an earlier, kept prompt."""
    for unique in uniques:
        if unique.dropped is None:
            _same_as_held_out(unique, held_out, settings)
    if evaluation or settings.near_duplicates != "off":
        _near(uniques, spool, frame, _index_held_out(evaluation, settings), settings)


def _written_frame(schema: pyarrow.Schema) -> Frame | None:
    """Return the frame stored in a prepared file, or None.

    A frame computed again could differ, because fewer prompts may share more words, or too few to
    have a frame. With another frame, prompts that were not near could become near.
    """
    written = (schema.metadata or {}).get(FRAME_KEY)
    return None if written is None else Frame.from_json(json.loads(written))


def _text(row: PromptRow) -> str:
    return "\n".join(message["content"] for message in row.messages)


def _same_as_held_out(unique: Unique, held_out: Inputs, settings: Settings) -> None:
    same = held_out.by_folded.get(unique.folded)
    if same is None:
        return
    reason = "overlap_exact" if unique.exact in held_out.by_exact else "overlap_folded"
    _record(unique, reason, settings.overlap, {"where": unique.where, "of": same.where})


def _record(unique: Unique, reason: str, action: str, match: dict[str, Any]) -> None:
    unique.matches[reason] = match
    if action == "drop":
        unique.dropped = reason


HeldOut = tuple[Index, list[str]]
"""Problems of the evaluation sets, and the file and row of each."""


def _index_held_out(evaluation: Sequence[Path], settings: Settings) -> HeldOut | None:
    if not evaluation:
        return None
    index, places = settings.similarity.index(), list[str]()
    for path in evaluation:
        batches = read(path, settings.batch_rows, settings.evaluation_columns)
        rows = {_text(row): row for _, batch_rows in batches for row in batch_rows}
        frame = frame_of(rows)
        for text, row in rows.items():
            index.add(len(places), settings.similarity.sketch(frame.strip(text)))
            places.append(row.where)
    return index, places


def _near(
    uniques: Sequence[Unique],
    spool: Spool,
    frame: Frame,
    held_out: HeldOut | None,
    settings: Settings,
) -> None:
    """Find near matches of the remaining prompts, in order."""
    kept = settings.similarity.index()
    for place, unique, row in _alive(uniques, spool, settings):
        problem = frame.strip(_text(row))
        sketch = settings.similarity.sketch(problem)
        same = {"overlap_exact", "overlap_folded"} & unique.matches.keys()
        if held_out and not same and (nearest := held_out[0].nearest(sketch)):
            match = {
                "where": unique.where,
                "of": held_out[1][nearest[0]],
                "similarity": round(nearest[1], 3),
            }
            _record(unique, "overlap_near", settings.overlap, match)
        if unique.dropped is not None or settings.near_duplicates == "off":
            continue
        if nearest := kept.nearest(sketch):
            first = uniques[nearest[0]]
            match = {
                "where": unique.where,
                "of": first.where,
                "similarity": round(nearest[1], 3),
                "truth": unique.truth,
                "truth_of": first.truth,
            }
            _record(unique, "near_duplicate", settings.near_duplicates, match)
        if unique.dropped is None and "near_duplicate" not in unique.matches:
            kept.add(place, sketch)


# ------------------------------------------------------------------------------- counts


def count(inputs: Inputs) -> dict[str, Any]:
    """Return the rows in, dropped by reason, out, and kept in spite of a match.

    Raises AssertionError if they do not add up.
    """
    dropped: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for unique in inputs.uniques:
        if unique.dropped == "conflicting":
            dropped["conflicting"] += 1 + unique.num_exact + unique.num_folded
            continue
        dropped["exact_duplicate"] += unique.num_exact
        dropped["folded_duplicate"] += unique.num_folded
        if unique.dropped is not None:
            dropped[unique.dropped] += 1
        else:
            kept.update(unique.matches.keys())
    num_in = sum(inputs.num_rows)
    num_out = sum(unique.dropped is None for unique in inputs.uniques)
    if num_in != num_out + dropped.total():
        raise AssertionError(f"{num_in} rows in, {num_out} out, {dict(dropped)} dropped")
    return {
        "in": num_in,
        "dropped": {reason: dropped[reason] for reason in LABELS},
        "out": num_out,
        "kept": {reason: kept[reason] for reason in LABELS if reason in kept},
    }


def _nothing_left(rows: dict[str, Any], sources: Sequence[Source]) -> str:
    reasons = [
        f"{number:,} {LABELS[reason]}" + (f" ({REMEDIES[reason]})" if reason in REMEDIES else "")
        for reason, number in rows["dropped"].items()
        if number
    ]
    return f"nothing is left of the {rows['in']:,} rows of {_names(sources)}: {'; '.join(reasons)}"


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(source.name for source in sources)


def examples(
    uniques: Sequence[Unique], spool: Spool, frame: Frame, columns: Columns
) -> dict[str, list[dict[str, Any]]]:
    """Return the first matches per reason, with both problems, without their frame."""
    chosen: dict[str, list[tuple[Unique, dict[str, Any]]]] = {
        "conflicting": [(u, {"truths": u.truths}) for u in uniques if u.other_truths]
    }
    for reason in list(LABELS)[list(LABELS).index("too_long") :]:
        chosen[reason] = [(u, u.matches[reason]) for u in uniques if reason in u.matches]
    chosen = {reason: pairs[:NUM_EXAMPLES] for reason, pairs in chosen.items()}
    needed = {unique.where for pairs in chosen.values() for unique, _ in pairs}
    needed |= {match["of"] for pairs in chosen.values() for _, match in pairs if "of" in match}
    mask = [unique.where in needed for unique in uniques]
    texts: dict[str, str] = {}
    first = 0
    for batch in spool.batches():
        part = mask[first : first + len(batch)]
        if any(part):
            rows = checked(batch, "spool", first, columns)
            for unique, row in zip(compress(uniques[first:], part), compress(rows, part)):
                texts[unique.where] = frame.strip(_text(row))[:EXAMPLE_CHARACTERS]
        first += len(batch)

    def with_problems(unique: Unique, match: dict[str, Any]) -> dict[str, Any]:
        problems = {"problem": texts[unique.where]}
        if match.get("of") in texts:
            problems["problem_of"] = texts[match["of"]]
        return {**match, **problems}

    return {
        reason: [with_problems(unique, match) for unique, match in pairs]
        for reason, pairs in chosen.items()
        if pairs
    }
