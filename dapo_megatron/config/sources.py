"""Config sections of the prompt sources in `data.train` and `evaluation.sets`."""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dapo_megatron.config.section import Count, Section, Seed
from dapo_megatron.types import AGENT, VERIFIERS

ENVIRONMENT_GRADER = "environment"
"""Takes the place of a grader if the environment gives the rewards."""
_WORD = r"[^\W_][\w ._+=@(),-]*"
_SOURCE_NAME = re.compile(f"{_WORD}(/{_WORD})?")
_MAX_SOURCE_NAME = 128
"""In bytes. A file name has at most 255."""
_MAX_DERIVED_NAME = 32
"""In characters of at most four bytes each."""


def _check_source_name(name: str) -> str:
    """Return a valid source name; refuse others. The name is part of metric names and of file names
    in the run's folder."""
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


class _AgentName(Section):
    agent: str


class _VerifiersName(Section):
    verifiers: str
    args: dict[str, Any] = Field(default_factory=dict)


def _environment_name(value: Any) -> Any:
    """Return the name of an environment that is given as a mapping."""
    if not isinstance(value, dict):
        return value
    if "verifiers" in value:
        named = _VerifiersName.model_validate(value)
        return f"{VERIFIERS}{named.verifiers}:{json.dumps(named.args, sort_keys=True)}"
    return f"{AGENT}{_AgentName.model_validate(value).agent}"


EnvironmentName = Annotated[str | None, BeforeValidator(_environment_name)]


class ReasoningGymSource(Section):
    kind: Literal["reasoning_gym"]
    name: SourceName
    """Name of this source in metrics."""
    dataset: str
    """Name of the data set in the reasoning-gym package."""
    size: Count
    seed: Seed
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the data set (min_terms, max_digits, ...)."""
    grader: str = "reasoning_gym"
    environment: EnvironmentName = None
    """See RowsSource.environment."""


class Columns(Section):
    """Names of the two columns that a row must have. `a.b` is the field b of column a, which
    contains mappings. The defaults fit the DAPO-Math schema (docs/data.md)."""

    prompt: str = "prompt"
    """Column of the question: a text, which becomes one user message, or a list of chat
    messages."""
    answer: str = "reward_model.ground_truth"
    """Column of the correct answer for the grader: a text or an integer."""


class RowsSource(Section):
    """Common keys of sources that consist of rows."""

    kind: Literal["jsonl", "parquet", "datasets"]
    name: SourceName
    """Name of this source in metrics. Derived from the path by default."""
    path: str
    grader: str | dict[str, str] = "math_verify"
    """dapo_math, math_verify, code, or your own function as module:function; or a mapping from the
    rows' data_source to one of these. environment: the reward that the environment gives."""
    environment: EnvironmentName = None
    """Tools and turns of the completions (docs/environments.md): your own class as module:Class, a
    built-in one, or {agent: module:function}. null: none. See TasksSource, too."""
    limit: Count | None = None
    """Number of rows to read. null: all."""
    columns: Columns | None = None
    """null: the columns of the section (data.columns, evaluation.columns)."""


class FileSource(RowsSource):
    """A file at `path` with one problem per line or row."""

    kind: Literal["jsonl", "parquet"]


class DatasetsSource(RowsSource):
    """A data set of the `datasets` library. `path` is a folder or a name on the HF hub."""

    kind: Literal["datasets"]
    subset: str | None = None
    """Name of the data set's configuration on the hub, such as `main` of gsm8k."""
    split: str = "train"
    revision: str | None = None
    """Branch, tag or commit on the hub. null: the newest."""


class TasksSource(Section):
    """The tasks of an environment of the package verifiers (docs/environments.md)."""

    kind: Literal["tasks"]
    name: SourceName
    """Name of this source in metrics. Derived from the environment by default."""
    environment: Annotated[str, BeforeValidator(_environment_name)]
    """{verifiers: NAME, args: {...}}"""
    grader: Literal["environment"]
    limit: Count | None = None
    """Number of tasks to read. null: all."""


_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""Kind of a source by the suffix of its path. Any other path is a data set."""


def _expand_sources(value: Any) -> Any:
    """Wrap a single source in a list, and turn each path into a source."""
    if isinstance(value, str | dict):
        value = [value]
    return [_expand_source(entry) for entry in value] if isinstance(value, list) else value


def _expand_source(entry: Any) -> Any:
    """Add kind and name to a source that has only a path, and the grader of an agent."""
    source = {"path": entry} if isinstance(entry, str) else entry
    environment = source.get("environment") if isinstance(source, dict) else None
    if isinstance(environment, dict):
        source = {"grader": ENVIRONMENT_GRADER, **source}
        if isinstance(environment.get("verifiers"), str) and "path" not in source:
            name = environment["verifiers"].rpartition("/")[2]
            return {"kind": "tasks", "name": _derived_name(name), **source}
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
    return {"kind": kind, "name": _derived_name(name), **source}


def _derived_name(text: str) -> str:
    """Return a valid source name."""
    safe = re.sub(r"[^\w.+=@(),-]+", "_", text).strip("_.+=@(),-") or "data"
    return safe[:_MAX_DERIVED_NAME]


Source = Annotated[
    ReasoningGymSource | FileSource | DatasetsSource | TasksSource, Field(discriminator="kind")
]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_expand_sources), Field(strict=False)]
