"""The recorded rollouts of a run's folder as the report reads them: the index of each step, single
groups by their offset, and what the policy said of single groups.

A run may be writing meanwhile, and files may be missing or damaged: whatever cannot be read is None
or left out, and told of by whoever asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP_COLUMNS = ("offset", "ticket", "source", "fate", "verdict")
COMPLETION_COLUMNS = (
    *("group", "sample", "score", "correct", "parsed", "num_tokens", "finish", "age"),
    *("logprob_mean", "logprob_min"),
)
_STEP = re.compile(r"step_(\d+)\.jsonl?")
_POLICY_BEGIN = re.compile(rb'\{"ticket": ?(\d+), ?"sample": ?(\d+)\b')
_GAP_MAX = re.compile(rb'"gap_max": ?([-+.\deE]+)')
_LINE_BEGIN = 400
"""Bytes of a line of policy values in which its figures stand, before the lists."""


@dataclass(frozen=True)
class StepIndex:
    """One step's completions as columns, as tracking/samples.py writes them."""

    step: int
    groups: dict[str, list[Any]]
    completions: dict[str, list[Any]]

    def __post_init__(self) -> None:
        """Raises ValueError unless the columns are there and as long as each other."""
        for columns, names in (
            (self.groups, GROUP_COLUMNS),
            (self.completions, COMPLETION_COLUMNS),
        ):
            lengths = {len(columns[name]) if name in columns else -1 for name in names}
            if len(lengths) != 1 or -1 in lengths:
                raise ValueError("columns are missing, or not of one length")
        places = self.completions["group"]
        if places and not 0 <= min(places) <= max(places) < len(self.groups["ticket"]):
            raise ValueError("a completion is of a group that is not there")


def step_files(folder: Path, ending: str) -> dict[int, Path]:
    """The files of steps in `folder`, in step order; empty without a folder."""
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ending]
    except OSError:
        return {}
    found = {int(m[1]): path for path in paths if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_index(path: Path, step: int) -> StepIndex | None:
    """The index of a step, or None if it is not to be read."""
    try:
        value = json.loads(path.read_bytes())
        return StepIndex(step, value["groups"], value["completions"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def index_of_samples(path: Path, step: int) -> StepIndex | None:
    """The index of a run that recorded none, made by reading all of a step's groups."""
    groups: list[tuple[Any, ...]] = []
    rows: list[tuple[Any, ...]] = []
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    group = json.loads(line)
                    made = [_row(len(groups), step, one) for one in group["completions"]]
                    groups.append((offset, *(group[name] for name in GROUP_COLUMNS[1:])))
                    rows += made
                except (ValueError, TypeError, KeyError, RecursionError):
                    pass  # one line is damaged; the others are not
                offset += len(line)
    except OSError:
        return None
    return StepIndex(step, _columns(GROUP_COLUMNS, groups), _columns(COMPLETION_COLUMNS, rows))


def read_group(path: Path, offset: int, ticket: int) -> dict[str, Any] | None:
    """The group whose line begins at byte `offset`, if it is that of `ticket`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            group = json.loads(file.readline())
        found = group["ticket"] == ticket and isinstance(group["completions"], list)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return group if found else None


def policy_of(path: Path, ticket: int) -> dict[int, dict[str, Any]]:
    """By sample, what the policy said of a group before the step's first update; empty if nothing.

    Reads as far as the group's last line alone: the lists of a step may be tens of megabytes.
    """
    found: dict[int, dict[str, Any]] = {}
    for line, of_ticket, sample in _policy_lines(path):
        if of_ticket == ticket:
            try:
                found[sample] = json.loads(line)
            except (ValueError, RecursionError):
                continue
        elif found:
            break
    return found


def largest_gaps(paths: Iterable[Path], max_bytes: int, num: int) -> list[tuple[float, int, int]]:
    """The largest gaps of sequences, at most one a group, as (gap, ticket, sample), largest first.

    Reads the files in their order, until it has read `max_bytes`.
    """
    best: dict[int, tuple[float, int, int]] = {}
    num_bytes = 0
    for path in paths:
        if num_bytes >= max_bytes:
            break
        for line, ticket, sample in _policy_lines(path):
            num_bytes += len(line)
            if found := _GAP_MAX.search(line, 0, _LINE_BEGIN):
                one = (float(found[1]), ticket, sample)
                best[ticket] = max(best.get(ticket, one), one)
    return sorted(best.values(), reverse=True)[:num]


def _policy_lines(path: Path) -> Iterator[tuple[bytes, int, int]]:
    try:
        with path.open("rb") as file:
            for line in file:
                if begin := _POLICY_BEGIN.match(line):
                    yield line, int(begin[1]), int(begin[2])
    except OSError:
        return


def age_of(step: int, completion: dict[str, Any]) -> int | None:
    """Versions between the weights that sampled its first token and those the step began with."""
    segments = completion["segments"]
    return step - 1 - segments[0][0] if segments else None


def _row(place: int, step: int, one: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = one["logprobs"]
    return (
        *(place, one["sample"], one["score"], one["correct"], one["parsed"]),
        *(len(one["tokens"]), one["finish"], age_of(step, one)),
        round(sum(logprobs) / len(logprobs), 4) if logprobs else None,
        round(min(logprobs), 4) if logprobs else None,
    )


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}
