"""The record of a run's rollouts: a folder per step, written when the step is collected.

    samples/step_000012/completions.parquet   completions of the groups that ended, one per row
    samples/step_000012/open.parquet          completions of the groups that are carried on
    samples/step_000012/state.json            metrics, and the coordinator's state
    samples/step_000012/manifest.json         size and SHA-256 of these files

`samples`, the report, `--replay` and a run that repeats the step after a kill read it, and so does
`datasets.load_dataset("parquet", data_files=".../samples/*/completions.parquet")`. A folder is
complete or does not exist. A checkpoint has the same open.parquet.

Tokens, log-probs and routes are restored exactly. In texts, lone surrogates, which UTF-8 cannot
encode, become escapes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.algo.sampling import verdict
from dapo_megatron.checkpoints.folder import LAST_READER, STATE, damaged_file, write_manifest
from dapo_megatron.files import (
    partial_folder,
    publish_folder,
    read_json,
    sha256,
    write_text,
)
from dapo_megatron.protocols import Exchange
from dapo_megatron.rollout.tables import (
    data_errors,
    list_of,
    read_tables,
    required,
    rows_of,
    table_of,
)
from dapo_megatron.segments import Segment
from dapo_megatron.types import (
    Completion,
    ConfigError,
    DataError,
    Finish,
    Grade,
    Group,
    Outcome,
    Prompt,
)

if TYPE_CHECKING:
    from pandas import DataFrame

COMPLETIONS, OPEN = "completions.parquet", "open.parquet"
BATCH_BYTES = 32 * 2**20
"""Rough maximum size of a row group, unless a group of prompts has more."""
SUMMARY = (
    *("ticket", "sample", "source", "index", "outcome", "verdict", "finish", "num_tokens"),
    *("num_prompt_tokens", "oldest_version", "logprob_mean", "logprob_min"),
    *("score", "correct", "pred", "parsed", "reward"),
)
"""Columns of `summaries`."""
_ROW_BYTES = 512
"""Rough size of a row without its tokens and texts."""
_STEP_OF = re.compile(r"step_(\d{6,18})")


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group in a file.

    outcome  an Outcome; empty if the group is open
    rewards  of each completion: score plus length penalty; None without a grade
    """

    group: Group
    outcome: str = ""
    rewards: Sequence[float | None] = ()

    @property
    def verdict(self) -> str | None:
        """Verdict of the grades; None without any."""
        grades = (completion.grade for completion in self.group.completions)
        correct = [grade.correct for grade in grades if grade is not None]
        return verdict(correct).value if correct else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything that a step collected.

    ended  groups that ended
    open   groups that are carried on
    state  JSON-compatible: "metrics" of the collection, state of the "coordinator" afterwards, and
           "facts" that a run must share to repeat the step
    """

    ended: Sequence[RecordedGroup]
    open: Sequence[RecordedGroup]
    state: Mapping[str, Any]

    def write(self, samples: Path, step: int) -> None:
        """Write the folder of the step, and replace an earlier one. Raises OSError."""
        folder = step_folder(samples, step)
        with partial_folder(folder.with_name(f".{folder.name}.partial")) as partial:
            write_groups(partial / COMPLETIONS, self.ended)
            write_groups(partial / OPEN, self.open)
            write_text(partial / STATE, json.dumps(self.state))
            write_manifest(partial, {})
            publish_folder(partial, folder)


@dataclass(frozen=True)
class OpenGroups:
    """Open groups of a checkpoint. Implements protocols.Snapshot. Without groups no file is
    written."""

    groups: Sequence[RecordedGroup]
    checksums: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size on disk in bytes, at most."""
        return _num_bytes(self.groups)

    def write(self, folder: Path) -> None:
        """See protocols.Snapshot."""
        if self.groups:
            write_groups(folder / OPEN, self.groups)
            self.checksums[OPEN] = sha256(folder / OPEN)

    def finish(self, folder: Path, exchange: Exchange) -> None:
        """Do nothing: rank 0 has all groups."""


def read_open(folder: Path) -> dict[tuple[int, int], Completion]:
    """Return the completions of the open groups of a checkpoint or a recorded step, by ticket and
    sample. Raises DataError as `read_groups` does."""
    path = folder / OPEN
    return {
        (recorded.group.ticket, completion.sample): completion
        for recorded in (read_groups(path) if path.exists() else ())
        for completion in recorded.group.completions
    }


# ---------------------------------------------------------------------------- folders


def step_folder(samples: Path, step: int) -> Path:
    """Return the folder of a step; `samples` is the run's samples/."""
    return samples / f"step_{step:06d}"


def recorded_steps(samples: Path) -> dict[int, Path]:
    """Return step -> folder, in step order; empty without a folder."""
    try:
        paths = list(samples.iterdir())
    except OSError:
        return {}
    steps = ((_STEP_OF.fullmatch(path.name), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in steps if match))


def forget_after(folder: Path, step: int) -> None:
    """Delete entries of steps after `step` from `folder`, because the run repeats them, and what a
    killed run had not completed. Raises OSError."""
    for path in folder.glob("*step_*"):
        match = _STEP_OF.match(path.name)
        if match is None or int(match[1]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def require_steps(run: Path, own: Path | None = None) -> dict[int, Path]:
    """Return step -> folder of a run's recorded steps. Raises ConfigError if there are none, an
    earlier version recorded them, or `own`, the folder of a replay, is this run."""
    if own is not None and run.resolve() == own.resolve():
        raise ConfigError(f"run.name: {run} is the run to replay; choose another name")
    steps = recorded_steps(run / "samples")
    if not steps:
        raise ConfigError(
            f"{run}/samples has no recorded steps; name the folder of a run that had "
            "tracking.samples=true"
        )
    first = next(iter(steps.values()))
    if not (first / COMPLETIONS).exists():
        raise ConfigError(
            f"{first}: recorded by an earlier version; use commit {LAST_READER} to read it"
        )
    return steps


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state of a recorded step. Raises DataError."""
    return read_json(folder / STATE, error=DataError)


def check(folder: Path) -> None:
    """Raise DataError naming a file of a recorded step that is missing or damaged."""
    if fault := damaged_file(folder):
        raise DataError(fault)


# ---------------------------------------------------------------------------- writing


def write_groups(path: Path, groups: Iterable[RecordedGroup]) -> None:
    """Write the completions of groups, sorted by ticket and sample. Raises OSError."""
    from pyarrow import parquet

    ordered = sorted(groups, key=lambda recorded: recorded.group.ticket)
    routes = (c.routes for recorded in ordered for c in recorded.group.completions)
    schema = _schema(next((each.typecode for each in routes if each is not None), ""))
    with parquet.ParquetWriter(
        path,
        schema,
        compression="zstd",
        write_page_checksum=True,
        write_statistics=False,
        use_dictionary=["source", "prompt", "truth", "extra", "outcome", "verdict", "finish"],
        column_encoding={"logprobs.list.element": "BYTE_STREAM_SPLIT"},  # compresses better
    ) as writer:
        for batch in _batches(ordered):
            rows = (
                _row(recorded, number)
                for recorded in batch
                for number in range(len(recorded.group.completions))
            )
            writer.write_table(table_of(list(rows), schema))


def _batches(groups: Iterable[RecordedGroup]) -> Iterator[list[RecordedGroup]]:
    """Split groups into batches of about BATCH_BYTES, or one group."""
    batch: list[RecordedGroup] = []
    num_bytes = 0
    for recorded in groups:
        size = _num_bytes([recorded])
        if batch and num_bytes + size > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(recorded)
        num_bytes += size
    if batch:
        yield batch


def _num_bytes(groups: Iterable[RecordedGroup]) -> int:
    """Return the size of groups in a file, at most."""
    return sum(
        _ROW_BYTES
        + 16 * completion.num_tokens
        + 4 * (len(recorded.group.prompt.tokens) + len(recorded.group.prompt.text))
        + 4 * len(completion.text)
        + memoryview(completion.routes or b"").nbytes
        for recorded in groups
        for completion in recorded.group.completions
    )


def _schema(route_type: str = "") -> Any:
    """Return the columns. `route_type` is the typecode of the packed routes; empty without any."""
    import pyarrow as pa

    segment = pa.struct(
        [
            required("version", pa.int64()),
            required("num_tokens", pa.int64()),
            required("engine", pa.int32()),
        ]
    )
    routes = {"B": pa.uint8(), "h": pa.int16()}.get(route_type)
    return pa.schema(
        [
            required("ticket", pa.int64()),
            required("sample", pa.int32()),
            required("source", pa.string()),
            required("index", pa.int64()),
            required("prompt", pa.string()),
            required("truth", pa.string()),
            required("extra", pa.string()),
            required("text", pa.string()),
            required("outcome", pa.string()),
            pa.field("verdict", pa.string()),
            pa.field("reward", pa.float64()),
            pa.field("score", pa.float64()),
            pa.field("correct", pa.bool_()),
            pa.field("pred", pa.string()),
            pa.field("parsed", pa.bool_()),
            required("finish", pa.string()),
            required("num_tokens", pa.int32()),
            required("num_prompt_tokens", pa.int32()),
            pa.field("oldest_version", pa.int64()),
            pa.field("logprob_mean", pa.float64()),
            pa.field("logprob_min", pa.float64()),
            required("segments", list_of(segment)),
            required("prompt_tokens", list_of(pa.int32())),
            required("tokens", list_of(pa.int32())),
            required("logprobs", list_of(pa.float32())),
            *([] if routes is None else [pa.field("routes", list_of(routes))]),
        ]
    )


def _row(recorded: RecordedGroup, number: int) -> dict[str, Any]:
    """Return the values of a completion by column."""
    import numpy as np

    group = recorded.group
    prompt, completion = group.prompt, group.completions[number]
    grade = completion.grade
    return {
        "ticket": group.ticket,
        "sample": completion.sample,
        "source": _utf8(prompt.source),
        "index": prompt.index,
        "prompt": _utf8(prompt.text),
        "truth": _utf8(prompt.truth),
        "extra": json.dumps(dict(prompt.extra)),
        "text": _utf8(completion.text),
        "outcome": recorded.outcome,
        "verdict": recorded.verdict,
        "reward": recorded.rewards[number] if recorded.rewards else None,
        "score": None if grade is None else grade.score,
        "correct": None if grade is None else grade.correct,
        "pred": None if grade is None else _utf8(grade.pred),
        "parsed": None if grade is None else grade.parsed,
        "finish": completion.finish.value,
        "num_tokens": completion.num_tokens,
        "num_prompt_tokens": len(prompt.tokens),
        "oldest_version": completion.oldest_version if completion.segments else None,
        "logprob_mean": completion.logprob_mean,
        "logprob_min": completion.logprob_min,
        "segments": [asdict(segment) for segment in completion.segments],
        "prompt_tokens": np.array(prompt.tokens, np.int32),
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "routes": completion.routes,
    }


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


# ---------------------------------------------------------------------------- reading


def read_groups(path: Path, tickets: Collection[int] | None = None) -> Iterator[RecordedGroup]:
    """Yield the groups of a file in order, or of `tickets` only, reading one row group at a time.
    Raises DataError naming the file if it is damaged or cannot be read."""
    for table in read_tables(path, _schema(), tickets=tickets):
        with data_errors(path):
            by_ticket = groupby(rows_of(table), lambda row: row["ticket"])
            recorded = [_group(list(members)) for _, members in by_ticket]
        yield from recorded


def summaries(folder: Path) -> DataFrame:
    """Return the completions of a recorded step without texts and tokens, as a table with the
    columns SUMMARY. Raises DataError as `read_groups` does."""
    import pyarrow as pa

    path = folder / COMPLETIONS
    parts = list(read_tables(path, _schema(), SUMMARY))
    with data_errors(path):
        table = pa.concat_tables(parts) if parts else _schema().empty_table().select(SUMMARY)
        return table.to_pandas()


def _group(rows: Sequence[Mapping[str, Any]]) -> RecordedGroup:
    """Return the group of these rows. Raises ValueError and KeyError for wrong values."""
    first = rows[0]
    prompt = Prompt(
        source=first["source"],
        index=first["index"],
        tokens=tuple(first["prompt_tokens"]),
        text=first["prompt"],
        truth=first["truth"],
        extra=dict(json.loads(first["extra"])),
    )
    return RecordedGroup(
        Group(first["ticket"], prompt, tuple(map(_completion, rows))),
        first["outcome"] and Outcome(first["outcome"]),
        [row["reward"] for row in rows],
    )


def _completion(row: Mapping[str, Any]) -> Completion:
    num_tokens = row["num_tokens"], len(row["tokens"]), len(row["logprobs"])
    if len(set(num_tokens)) > 1:
        raise ValueError("ticket {ticket}, sample {sample}: tokens are missing".format(**row))
    has_grade = row["score"] is not None
    return Completion(
        sample=row["sample"],
        tokens=row["tokens"],
        logprobs=row["logprobs"],
        text=row["text"],
        finish=Finish(row["finish"]),
        segments=tuple(Segment(**segment) for segment in row["segments"]),
        grade=Grade(*map(row.__getitem__, Grade.__dataclass_fields__)) if has_grade else None,
        routes=row.get("routes"),
    )
