"""The recorded rollouts of a run's folder as the report reads them: the index of each step, single
groups by their offset, and what the policy said of single groups.

A run may be writing meanwhile, and files may be missing or damaged: what cannot be read is None or
left out, and the caller reports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dapo_megatron.files import parse_json
from dapo_megatron.report.models import INDEX_COMPLETIONS, INDEX_GROUPS, Group, PolicyValues, decode
from dapo_megatron.rollout.serialization import SampleIndex

_STEP = re.compile(r"step_(\d+)\.jsonl?")
_POLICY_BEGIN = re.compile(rb'\{"ticket": ?(\d{1,18}), ?"sample": ?(\d{1,18})\b')
_GAP_MAX = re.compile(rb'"gap_max": ?(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)')
_LINE_BEGIN = 400
"""Bytes of a line of policy values in which its figures stand, before the lists."""


@dataclass(frozen=True)
class StepIndex:
    """One step's completions as columns, as tracking/samples.py writes them."""

    step: int
    groups: dict[str, list[Any]]
    completions: dict[str, list[Any]]


def step_files(folder: Path, ending: str) -> dict[int, Path]:
    """Return the files of steps in `folder`, in step order; empty without a folder."""
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ending]
    except OSError:
        return {}
    files = {int(m[1]): path for path in paths if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(files.items()))


def read_index(path: Path, step: int) -> StepIndex | None:
    """Return the index of a step, or None if it cannot be read."""
    try:
        value = parse_json(path.read_bytes())
        groups = _columns(value["groups"], INDEX_GROUPS)
        completions = _columns(value["completions"], INDEX_COMPLETIONS)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if max(completions["group"], default=-1) >= len(groups["ticket"]):
        return None  # a completion of a group that is not there
    return StepIndex(step, groups, completions)


def _columns(value: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the columns of these forms. Raises KeyError or ValueError unless all are there, and of
    one length."""
    columns = {name: msgspec.convert(value[name], form) for name, form in forms.items()}
    if len({*map(len, columns.values())}) > 1:
        raise ValueError("columns of different lengths")
    return columns


def index_of_samples(path: Path, step: int) -> StepIndex | None:
    """Return the index of a run that recorded none, made by reading all of a step's groups."""
    index, offset = SampleIndex(step), 0
    try:
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):  # one line is damaged; the others are not
                    index.add(_group(line), offset)
                offset += len(line)
    except OSError:
        return None
    columns = index.columns()
    return StepIndex(step, columns["groups"], columns["completions"])


def read_group(path: Path, offset: int, ticket: int) -> dict[str, Any] | None:
    """Return the group whose line begins at byte `offset`, if it is that of `ticket`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            group = _group(file.readline())
    except (OSError, ValueError):
        return None
    return group if group["ticket"] == ticket else None


def policy_of(path: Path, ticket: int) -> dict[int, dict[str, Any]]:
    """Return, by sample, the policy's values of a group before the step's first update.

    Reads only as far as the group's last line: the lists of a step may be tens of megabytes.
    """
    by_sample: dict[int, dict[str, Any]] = {}
    for line, of_ticket, sample in _policy_lines(path):
        if of_ticket == ticket:
            with suppress(ValueError):
                by_sample[sample] = {**decode(line, PolicyValues)}
        elif by_sample:
            break
    return by_sample


def largest_gaps(paths: Iterable[Path], max_bytes: int, num: int) -> list[tuple[float, int, int]]:
    """Return the largest gaps of sequences, at most one per group, as (gap, ticket, sample),
    largest first.

    Reads the files in their order, until it has read `max_bytes`.
    """
    best: dict[int, tuple[float, int, int]] = {}
    num_bytes = 0
    for path in paths:
        if num_bytes >= max_bytes:
            break
        for line, ticket, sample in _policy_lines(path):
            num_bytes += len(line)
            match = _GAP_MAX.search(line, 0, _LINE_BEGIN)
            if match and math.isfinite(gap := float(match[1])):
                best[ticket] = max(best.get(ticket, (gap, ticket, sample)), (gap, ticket, sample))
    return sorted(best.values(), reverse=True)[:num]


def _policy_lines(path: Path) -> Iterator[tuple[bytes, int, int]]:
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            if begin := _POLICY_BEGIN.match(line):
                yield line, int(begin[1]), int(begin[2])


def _group(line: bytes) -> dict[str, Any]:
    """Return a line of the samples. Raises ValueError for a line of another form."""
    group: dict[str, Any] = {**decode(line, Group)}
    for completion in group["completions"]:
        if len(completion["tokens"]) != len(completion["logprobs"]):
            raise ValueError("not a log-prob for each token")
    return group
