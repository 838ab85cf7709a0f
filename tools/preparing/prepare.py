"""Prepare published data: drop rows for stated reasons, and check that the counts add up.

One pass over the inputs (`unique.py`) keeps the first row of every distinct prompt. Every dropped
row has one reason, the first that applies in the order of LABELS. The remaining rows keep their
order and types.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dapo_megatron.config import Columns
from dapo_megatron.data.conversation import Conversation
from dapo_megatron.data.prompts import check_template, render
from dapo_megatron.data.rows import DAPO_MATH_COLUMNS
from dapo_megatron.types import DataError
from preparing.similarity import Index, sketch_of
from preparing.tables import BATCH_ROWS, schema_of
from preparing.unique import Frame, Inputs, Source, Unique, collect, frame_of

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

LABELS = {
    "conflicting": "prompts with more than one truth, all their rows",
    "exact_duplicate": "the same prompt again",
    "folded_duplicate": "the same except for whitespace",
    "too_long": "longer than --max-prompt-tokens",
    "overlap_exact": "in an evaluation set, exactly",
    "overlap_folded": "in an evaluation set, except for whitespace",
    "overlap_near": "in an evaluation set, nearly",
    "near_duplicate": "nearly the same as an earlier prompt",
}
"""Reasons to drop a row, in the order in which they are checked."""
REMEDIES = {
    "conflicting": "correct the truths",
    "too_long": "raise --max-prompt-tokens",
    "overlap_exact": "use --overlap report, or other --evaluation files",
    "overlap_folded": "use --overlap report, or other --evaluation files",
    "overlap_near": "use --overlap report, or raise --similarity",
    "near_duplicate": "use --near-duplicates report, or raise --similarity",
}
FRAME_KEY = b"dapo_megatron.frame"
"""Key of `Frame.to_json` in the metadata of a prepared file."""
NUM_EXAMPLES = 50
"""Examples that are kept per reason."""
EXAMPLE_CHARACTERS = 300
ROW_GROUP = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """How to find duplicates and overlap, and what to do with them."""

    similarity: float = 0.8
    overlap: Literal["drop", "report"] = "drop"
    near_duplicates: Literal["drop", "report", "off"] = "report"
    tokenizer: PreTrainedTokenizerBase | None = None
    max_prompt_tokens: int = 0
    batch_rows: int = BATCH_ROWS
    columns: Columns = DAPO_MATH_COLUMNS
    evaluation_columns: Columns = DAPO_MATH_COLUMNS


def prepare(
    sources: Sequence[Source], evaluation: Sequence[Source], settings: Settings, output: Path
) -> dict[str, Any]:
    """Write the remaining prompts to `output`, and return the counts and examples of the report.

    Raises DataError for bad rows, for inputs with columns that cannot be combined, and if no row
    remains.
    """
    inputs = collect(sources, settings.columns, settings.batch_rows)
    names = ", ".join(source.name for source in sources)
    if not inputs.uniques:
        raise DataError(f"no rows in {names}: name other files")
    schema = schema_of(inputs.batches)
    for unique in inputs.uniques:
        if unique.other_truths:
            unique.dropped = "conflicting"
    if settings.tokenizer is not None:
        drop_long(inputs.uniques, settings.tokenizer, settings.max_prompt_tokens)
    held_out = [
        collect([source], settings.evaluation_columns, settings.batch_rows) for source in evaluation
    ]
    for source, rows_of_set in zip(evaluation, held_out, strict=True):
        if not rows_of_set.uniques:
            raise DataError(
                f"--evaluation {source.name}: no rows, so nothing could overlap with it"
            )
    frame = _written_frame(schema) if len(sources) == 1 else None
    frame = frame or frame_of(unique.text for unique in _kept(inputs))
    find_same(inputs, held_out, settings)
    if held_out or settings.near_duplicates != "off":
        find_near(inputs, frame, held_out, settings)
    rows = count(inputs)
    if not rows["out"]:
        raise DataError(f"nothing is left of the {rows['in']:,} rows of {names}: {_reasons(rows)}")
    _write(output, schema, inputs, frame)
    return {
        "rows": rows,
        "prompts": {
            "distinct": len(inputs.by_exact),
            "distinct_folded": len(inputs.uniques),
            "conflicting": sum(bool(unique.other_truths) for unique in inputs.uniques),
            "clean": sum(not unique.other_truths for unique in inputs.uniques),
        },
        "files": list(zip(inputs.num_rows, inputs.digests, strict=True)),
        "evaluation_rows": [sum(rows_of_set.num_rows) for rows_of_set in held_out],
        "frame": frame.to_json(),
        "examples": examples(inputs.uniques, frame),
    }


def _kept(inputs: Inputs) -> list[Unique]:
    return [unique for unique in inputs.uniques if unique.dropped is None]


def _write(output: Path, schema: pyarrow.Schema, inputs: Inputs, frame: Frame) -> None:
    import pyarrow
    from pyarrow import parquet

    parts = [pyarrow.Table.from_batches([b]) for part in inputs.batches.values() for b in part]
    table = pyarrow.concat_tables([schema.empty_table(), *parts], promote_options="permissive")
    mask = pyarrow.array([unique.dropped is None for unique in inputs.uniques])
    framed = {**(schema.metadata or {}), FRAME_KEY: json.dumps(frame.to_json())}
    table = table.filter(mask).combine_chunks().replace_schema_metadata(framed)
    parquet.write_table(table, output, row_group_size=ROW_GROUP, compression="zstd")


def _written_frame(schema: pyarrow.Schema) -> Frame | None:
    """Return the frame stored in a prepared file, or None.

    A frame computed again could differ, because fewer prompts may share more words, or too few to
    have a frame. With another frame, prompts that were not near could become near.
    """
    written = (schema.metadata or {}).get(FRAME_KEY)
    return None if written is None else Frame.from_json(json.loads(written))


def drop_long(
    uniques: Sequence[Unique], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> None:
    """Drop prompts with more than `max_tokens` tokens, chat template included."""
    check_template(tokenizer, "--tokenizer")
    alive = [unique for unique in uniques if unique.dropped is None]
    rows = iter([unique.row for unique in alive])
    prompts = render(rows, Conversation(tokenizer, ()), "", max_tokens)
    for unique, prompt in zip(alive, prompts, strict=True):
        if len(prompt.tokens) > max_tokens:
            unique.dropped = "too_long"
            unique.matches["too_long"] = {"where": unique.where, "tokens": len(prompt.tokens)}


def find_same(inputs: Inputs, held_out: Sequence[Inputs], settings: Settings) -> None:
    """Find prompts of the evaluation sets, exactly or except for whitespace."""
    for unique in _kept(inputs):
        for rows in held_out:
            if same := rows.by_folded.get(unique.folded):
                is_exact = any(unique.exact in rows.by_exact for rows in held_out)
                reason = "overlap_exact" if is_exact else "overlap_folded"
                _record(unique, reason, settings.overlap, {"of": same.where})
                break


def find_near(inputs: Inputs, frame: Frame, held_out: Sequence[Inputs], settings: Settings) -> None:
    """Find near matches of the remaining prompts, in order: in the evaluation sets, each without
    its own frame, and among the earlier prompts that have no match."""
    evaluated: list[Unique] = []
    in_evaluation, earlier = Index(settings.similarity), Index(settings.similarity)
    for rows in held_out:
        frame_of_set = frame_of(unique.text for unique in rows.uniques)
        for unique in rows.uniques:
            in_evaluation.add(len(evaluated), sketch_of(frame_of_set.strip(unique.text)))
            evaluated.append(unique)
    for place, unique in enumerate(inputs.uniques):
        if unique.dropped is not None:
            continue
        sketch = sketch_of(frame.strip(unique.text))
        is_same = {"overlap_exact", "overlap_folded"} & unique.matches.keys()
        if not is_same and (nearest := in_evaluation.nearest(sketch)):
            match = {"of": evaluated[nearest[0]].where, "similarity": round(nearest[1], 3)}
            _record(unique, "overlap_near", settings.overlap, match)
        if unique.dropped is not None or settings.near_duplicates == "off":
            continue
        if nearest := earlier.nearest(sketch):
            first = inputs.uniques[nearest[0]]
            match = {"of": first.where, "similarity": round(nearest[1], 3)}
            truths = {"truth": unique.truth, "truth_of": first.truth}
            _record(unique, "near_duplicate", settings.near_duplicates, match | truths)
        else:
            earlier.add(place, sketch)


def _record(unique: Unique, reason: str, action: str, match: dict[str, Any]) -> None:
    unique.matches[reason] = {"where": unique.where, **match}
    if action == "drop":
        unique.dropped = reason


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
    num_in, num_out = sum(inputs.num_rows), len(_kept(inputs))
    if num_in != num_out + dropped.total():
        raise AssertionError(f"{num_in} rows in, {num_out} out, {dict(dropped)} dropped")
    return {
        "in": num_in,
        "dropped": {reason: dropped[reason] for reason in LABELS},
        "out": num_out,
        "kept": {reason: kept[reason] for reason in LABELS if reason in kept},
    }


def _reasons(rows: dict[str, Any]) -> str:
    return "; ".join(
        f"{number:,} {LABELS[reason]}" + (f" ({REMEDIES[reason]})" if reason in REMEDIES else "")
        for reason, number in rows["dropped"].items()
        if number
    )


def examples(uniques: Sequence[Unique], frame: Frame) -> dict[str, list[dict[str, Any]]]:
    """Return the first matches per reason, with both problems, without their frame."""
    by_place = {unique.where: unique for unique in uniques}
    chosen: dict[str, list[dict[str, Any]]] = {}
    for unique in uniques:
        matches = dict(unique.matches)
        if unique.other_truths:
            matches["conflicting"] = {"truths": {unique.truth: unique.where, **unique.other_truths}}
        for reason, match in matches.items():
            shown = {"problem": unique, "problem_of": by_place.get(match.get("of", ""))}
            problems = {
                key: frame.strip(other.text)[:EXAMPLE_CHARACTERS]
                for key, other in shown.items()
                if other is not None
            }
            reason_examples = chosen.setdefault(reason, [])
            if len(reason_examples) < NUM_EXAMPLES:
                reason_examples.append({**match, **problems})
    return {reason: chosen[reason] for reason in LABELS if reason in chosen}
