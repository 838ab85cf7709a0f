"""Where prompts come from: sources of `data.train` and of `evaluation.sets`."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dapo_megatron.config.section import Count, Section, Seed

_WORD = r"[^\W_][\w ._+=@(),-]*"
_SOURCE_NAME = re.compile(f"{_WORD}(/{_WORD})?")
_MAX_SOURCE_NAME = 128
"""In bytes: a file name has at most 255."""
_MAX_DERIVED_NAME = 32
"""In characters, of at most four bytes."""


def _check_source_name(name: str) -> str:
    """Refuse a name that is no file name: metrics carry it, and files of the run's folder."""
    if _SOURCE_NAME.fullmatch(name) and len(name.encode()) <= _MAX_SOURCE_NAME:
        return name
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:_MAX_SOURCE_NAME].strip("_-") or "my_data"
    raise PydanticCustomError(
        "source_name",
        "must be NAME or OWNER/NAME, at most {limit} bytes, each name of letters, digits and "
        "' ._+=@(),-', with a letter or digit first; for example {example}",
        {"limit": _MAX_SOURCE_NAME, "example": safe},
    )


SourceName = Annotated[str, AfterValidator(_check_source_name)]


def source_file_name(name: str) -> str:
    """Return a source's name as part of a file name: OWNER/NAME becomes OWNER--NAME."""
    return name.replace("/", "--")


class ReasoningGymSource(Section):
    kind: Literal["reasoning_gym"]
    name: SourceName
    """The name under which figures of this source appear."""
    dataset: str
    """Name of the data set inside the reasoning-gym package."""
    size: Count
    seed: Seed
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the data set (min_terms, max_digits, ...)."""
    grader: str = "reasoning_gym"


class Columns(Section):
    """Names of the two columns that a row needs. `a.b` is the field b of a column a of mappings.
    The defaults are those of the DAPO-Math schema (docs/data.md)."""

    prompt: str = "prompt"
    """The question as text, which becomes one message of the user, or a list of chat messages."""
    answer: str = "reward_model.ground_truth"
    """What the grader compares with: text, or an integer."""


class RowsSource(Section):
    """What sources of rows have in common."""

    kind: Literal["jsonl", "parquet", "datasets"]
    name: SourceName
    """The name under which figures of this source appear; by default from the path."""
    path: str
    grader: str | dict[str, str] = "math_verify"
    """dapo_math, math_verify, code, or a function of yours as module:function; or a mapping from
    the rows' data_source to one of these."""
    limit: Count | None = None
    """Rows to read; null for all."""
    columns: Columns | None = None
    """Null: those of the section (data.columns, evaluation.columns)."""


class FileSource(RowsSource):
    """A file at `path`, one problem per line or row."""

    kind: Literal["jsonl", "parquet"]


class DatasetsSource(RowsSource):
    """A data set for the library `datasets`: `path` is a folder or a name of the hub."""

    kind: Literal["datasets"]
    subset: str | None = None
    """The hub's name for one of several configurations, such as gsm8k's `main`."""
    split: str = "train"
    revision: str | None = None
    """Branch, tag or commit on the hub; null for the newest."""


_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""Kind of a source by the ending of its path; any other path is a data set."""


def _expand_sources(value: Any) -> Any:
    """Accept one source for a list of one, and a path for a source."""
    if isinstance(value, str | dict):
        value = [value]
    return [_expand_source(entry) for entry in value] if isinstance(value, list) else value


def _expand_source(entry: Any) -> Any:
    """Add kind and name to a source that has only a path."""
    source = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(source, dict) or not isinstance(source.get("path"), str):
        return entry
    path = PurePath(source["path"])
    kind = source.get("kind", _KINDS.get(path.suffix, "datasets"))
    if kind != "datasets":
        name = path.stem
    elif "split" in source:
        name = f"{path.name}-{source['split']}"
    else:
        name = path.name
    safe = re.sub(r"[^\w.+=@(),-]+", "_", name).strip("_.+=@(),-") or "data"
    return {"kind": kind, "name": safe[:_MAX_DERIVED_NAME], **source}


Source = Annotated[ReasoningGymSource | FileSource | DatasetsSource, Field(discriminator="kind")]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_expand_sources), Field(strict=False)]
