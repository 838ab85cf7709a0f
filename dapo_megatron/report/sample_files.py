"""Readers of a run's recorded rollouts: the index of a step, a group by its byte offset, and the
policy's values of a group.

The run may still be writing, and files may be missing or corrupt. Data that cannot be read is None
or skipped; the caller reports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_megatron.report.models import GroupRecord, PolicyValues, StepIndex, decode
from dapo_megatron.rollout.serialization import SampleIndex

_STEP = re.compile(r"step_(\d+)\.jsonl?")
_POLICY_BEGIN = re.compile(rb'\{"ticket": ?(\d{1,18}), ?"sample": ?(\d{1,18})\b')
_GAP_MAX = re.compile(rb'"gap_max": ?(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)')
_LINE_BEGIN = 400
"""Number of bytes at the start of a line of policy values that contain its scalars."""


def step_files(folder: Path, ending: str) -> dict[int, Path]:
    """Return step -> file in `folder`, in step order; empty without a folder."""
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ending]
    except OSError:
        return {}
    files = {int(m[1]): path for path in paths if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(files.items()))


def read_index(path: Path) -> StepIndex | None:
    """Return the index of a step, or None if it cannot be read."""
    try:
        index = decode(path.read_bytes(), StepIndex)
    except (OSError, ValueError):
        return None
    groups, completions = index["groups"], index["completions"]
    is_consistent = (
        len({len(column) for column in groups.values()}) == 1  # type: ignore[arg-type]
        and len({len(column) for column in completions.values()}) == 1  # type: ignore[arg-type]
        and max(completions["group"], default=-1) < len(groups["ticket"])
    )
    return index if is_consistent else None


def index_of_samples(path: Path, step: int) -> StepIndex | None:
    """Return the index of a step that has no index file, built by reading all of its groups."""
    index, offset = SampleIndex(step), 0
    try:
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):  # skip corrupt lines
                    index.add(_group(line), offset)
                offset += len(line)
    except OSError:
        return None
    columns = index.columns()
    return {"groups": columns["groups"], "completions": columns["completions"]}


def read_group(path: Path, offset: int, ticket: int) -> dict[str, Any] | None:
    """Return the group whose line starts at byte `offset`; None if it is not `ticket`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            group = _group(file.readline())
    except (OSError, ValueError):
        return None
    return group if group["ticket"] == ticket else None


def policy_of(path: Path, ticket: int) -> dict[int, dict[str, Any]]:
    """Return sample -> the policy's values of a group before the step's first update.

    Stops after the group's last line, because the file of a step may have tens of megabytes.
    """
    by_sample: dict[int, dict[str, Any]] = {}
    for line, line_ticket, sample in _policy_lines(path):
        if line_ticket == ticket:
            with suppress(ValueError):
                by_sample[sample] = {**decode(line, PolicyValues)}
        elif by_sample:
            break
    return by_sample


def largest_gaps(paths: Iterable[Path], max_bytes: int, num: int) -> list[tuple[float, int, int]]:
    """Return the `num` largest gaps of sequences as (gap, ticket, sample), largest first, at most
    one per group.

    Reads the files in the given order, and starts no further file after `max_bytes`.
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
    """Parse a line of the samples. Raises ValueError if it does not match the schema."""
    group: dict[str, Any] = {**decode(line, GroupRecord)}
    for completion in group["completions"]:
        if len(completion["tokens"]) != len(completion["logprobs"]):
            raise ValueError("numbers of tokens and log-probs differ")
    return group
