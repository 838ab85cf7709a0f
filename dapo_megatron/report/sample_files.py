"""Readers of a run's recorded rollouts (rollout/recorded.py): the index of a step, the rows of a
group, and the policy's values of a group.

The run may still be writing, and files may be missing or corrupt. Data that cannot be read is None
or skipped; the caller reports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dapo_megatron.files import read_file
from dapo_megatron.report.models import StepIndex, decode
from dapo_megatron.rollout.completion_files import read_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.recorded import (
    completion_files,
    index_path,
    policy_files,
    step_summaries,
)
from dapo_megatron.rollout.sample_index import groups_of, index_of
from dapo_megatron.tracking.policy_files import PolicyRow, read_gaps, read_policy
from dapo_megatron.types import DataError


def read_index(folder: Path, step: int) -> StepIndex | None:
    """Return the index of `step`, or None if it cannot be read. Without an index file, because the
    run was killed or is recording the step, it is made from the files of completions."""
    try:
        index = decode(read_file(index_path(folder)), StepIndex)
    except FileNotFoundError:
        return _made_index(folder, step)
    except (OSError, ValueError):
        return None
    groups, completions = index["groups"], index["completions"]
    is_consistent = (
        len({len(column) for column in groups.values()}) == 1  # type: ignore[arg-type]
        and len({len(column) for column in completions.values()}) == 1  # type: ignore[arg-type]
        and max(completions["group"], default=-1) < len(groups["ticket"])
    )
    return index if is_consistent else None


def _made_index(folder: Path, step: int) -> StepIndex | None:
    try:
        rows = step_summaries(folder)
    except DataError:
        return None
    index = index_of(step, groups_of(rows))
    return {"groups": index["groups"], "completions": index["completions"]}


def read_group(folder: Path, ticket: int) -> list[CompletionRow] | None:
    """Return the completions of a group, by sample. None if there are none, or a file cannot be
    read."""
    try:
        rows = [
            row for path in completion_files(folder) for row in read_completions(path, [ticket])
        ]
    except DataError:
        return None
    return sorted(rows, key=lambda row: row.completion.sample) or None


def policy_of(folder: Path, ticket: int) -> dict[int, PolicyRow]:
    """Return sample -> the policy's values of a group before the step's first update."""
    by_sample: dict[int, PolicyRow] = {}
    for path in policy_files(folder):
        with suppress(DataError):
            by_sample |= {row.sample: row for row in read_policy(path, [ticket])}
    return by_sample


def largest_gaps(folders: Iterable[Path], max_files: int, num: int) -> list[tuple[float, int, int]]:
    """Return the `num` largest gaps of sequences as (gap, ticket, sample), largest first, at most
    one per group.

    Reads the steps in the given order, and starts no further step after `max_files` files.
    """
    best: dict[int, tuple[float, int, int]] = {}
    num_files = 0
    for folder in folders:
        if num_files >= max_files:
            break
        for path in policy_files(folder):
            num_files += 1
            with suppress(DataError):
                for row in read_gaps(path):
                    if math.isfinite(row[0]):
                        best[row[1]] = max(best.get(row[1], row), row)
    return sorted(best.values(), reverse=True)[:num]
