"""Rollouts of a run in its report: a table of selected completions, and their complete groups.

A blob is a complete group as JSON (viewer_data.py). The page unpacks blobs on demand.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from dapo_megatron.report.choosing import Pick, choose
from dapo_megatron.report.run_data import RunData
from dapo_megatron.report.token_text import TokenPieces, find_tokenizer
from dapo_megatron.report.viewer_data import group_data
from dapo_megatron.report.wording import first_few, rounded, significant
from dapo_megatron.rollout.record import (
    COMPLETIONS,
    RecordedGroup,
    read_groups,
    recorded_steps,
    summaries,
)
from dapo_megatron.tracking.policy_files import PolicyRow, policy_files, read_gaps, read_policy
from dapo_megatron.types import Completion, DataError, Grade

MAX_BLOB_BYTES = 18_000_000
"""Maximum size of all blobs together, compressed; base64 makes them a third larger. Runs that share
a page share this budget in proportion to their completions."""
FULL_PAGE = 2000
"""Number of completions that may use all of MAX_BLOB_BYTES."""
MAX_POLICY_FILES = 2000
"""Maximum number of files of policy values to search for the largest gaps."""
MAX_GAPS = 8
_INSPECTED = 4
"""Default of tracking.inspected_groups, for configs without it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Rollouts:
    """Rows of the table of completions, and the blobs of their groups."""

    rows: list[Row]
    blobs: dict[int, bytes]
    """Ticket -> JSON of the group."""
    total: int
    """Number of completions to select from."""
    note: str
    warnings: list[str] = field(default_factory=list)


def rollouts(
    run: RunData,
    completions: int = 2000,
    tickets: Sequence[int] = (),
    steps: tuple[int | None, int | None] | None = None,
) -> Rollouts | None:
    """Select about `completions` of the run's rollouts. None if none are recorded.

    tickets   groups that are always included
    steps     (first, last) step to select from, both inclusive; None: no bound
    """
    reading = _Reading(run, steps)
    if not reading.samples:
        return None
    picks, total = reading.select(completions, frozenset(tickets))
    max_bytes = MAX_BLOB_BYTES * min(completions, FULL_PAGE) // FULL_PAGE
    rows, blobs = reading.load(picks, max_bytes)
    missing = sorted({*tickets} - {pick.ticket for pick in picks})
    if missing:
        reading.notes.append(f"Not recorded: ticket {', '.join(map(str, missing))}")
    selection = f"{len(rows):,} of {total:,} completions are here"
    if len(rows) < total:
        selection += (
            ", in complete groups: the longest, the least likely, the oldest, those with the "
            "largest gaps, without a grade or an answer, truncated, and the only right or wrong "
            "ones of a group; some of every data set and every outcome; and an even spread over "
            "the steps"
        )
    rows.sort(key=lambda row: (row["step"], row["ticket"], row["sample"]))
    note = ". ".join([selection, *reading.notes]) + "."
    return Rollouts(rows, blobs, total, note, reading.warnings)


class _Reading:
    """Reads the files of a run's rollouts. Collects notes and warnings for the reader."""

    def __init__(self, run: RunData, steps: tuple[int | None, int | None] | None) -> None:
        self.run = run
        self.first, self.last = steps or (None, None)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.samples = recorded_steps(run.path / "samples")
        self.policy = policy_files(run.path)

    def select(self, num: int, tickets: frozenset[int]) -> tuple[list[Pick], int]:
        """Return the selected groups, and the number of completions to select from. Outside the
        wanted steps, only `tickets` are selected."""
        import pandas as pd

        tables, damaged = [], []
        for step, folder in self.samples.items():
            if tickets or self._is_wanted(step):
                try:
                    tables.append(summaries(folder).assign(step=step))
                except DataError:
                    damaged.append(step)
        self._warn(damaged, "steps", "step")
        if not any(map(self._is_wanted, self.samples)):
            recorded_steps = _steps(min(self.samples), max(self.samples))
            self.notes.append(
                f"None was recorded of {_steps(self.first, self.last)}: this run's completions "
                f"are of {recorded_steps}"
            )
        if not tables:
            return [], 0
        completions = pd.concat(tables, ignore_index=True).drop_duplicates(["ticket", "sample"])
        wanted = completions["step"].map(self._is_wanted) | completions["ticket"].isin(tickets)
        completions = completions[wanted]
        num_inspected = self.run.count("tracking.inspected_groups") or _INSPECTED
        inspected = dict.fromkeys(self.policy, num_inspected)
        return choose(completions, num, tickets, self._gaps(), inspected), len(completions)

    def load(self, picks: Sequence[Pick], max_bytes: int) -> tuple[list[Row], dict[int, bytes]]:
        """Return the rows and blobs of the groups, in order, until `max_bytes` is reached. Groups
        that the user asked for are loaded up to MAX_BLOB_BYTES."""
        checkpoints = sorted((self.run.path / "checkpoints").glob("step_*"), reverse=True)
        pieces = find_tokenizer(self.run.path, self.run.word("model.path"), checkpoints)
        rows: list[Row] = []
        blobs: dict[int, bytes] = {}
        unreadable = []
        num_bytes = 0
        for pick in picks:
            if num_bytes >= (MAX_BLOB_BYTES if pick.is_asked else max_bytes):
                self.notes.append("The page has no room for more completions")
                break
            loaded = self._load_group(pick, pieces)
            if loaded is None:
                unreadable.append(pick.ticket)
                continue
            group_rows, blob = loaded
            rows += group_rows
            blobs[pick.ticket] = blob
            num_bytes += len(zlib.compress(blob, 1))
        self._warn(unreadable, "groups", "ticket")
        if pieces is None:
            self.notes.append("No tokenizer was found, so texts are not split into tokens")
        return rows, blobs

    def _load_group(self, pick: Pick, pieces: TokenPieces | None) -> tuple[list[Row], bytes] | None:
        """Return the rows and the blob of a group; None if it cannot be read."""
        recorded = None
        with suppress(DataError):
            path = self.samples[pick.step] / COMPLETIONS
            recorded = next(read_groups(path, [pick.ticket]), None)
        if recorded is None:
            return None
        policy: dict[int, PolicyRow] = {}
        for path in self.policy.get(pick.step, ()):
            with suppress(DataError):
                policy |= {row.sample: row for row in read_policy(path, [pick.ticket])}
        data = group_data(recorded.group, policy, pieces)
        blob = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
        return _rows(pick, recorded, policy), blob

    def _is_wanted(self, step: int) -> bool:
        """Return True if `step` is within the range to select from."""
        return (self.first or 0) <= step and (self.last is None or step <= self.last)

    def _gaps(self) -> dict[int, int]:
        """Return ticket -> sample of the largest gaps. Steps with the largest gaps in their metrics
        are searched first."""
        metrics = self.run.metrics
        largest = dict(zip(metrics.steps, metrics.column("mismatch/gap_max")))
        steps = filter(self._is_wanted, self.policy)
        order = sorted(steps, key=lambda step: -(largest.get(step) or 0.0))
        best: dict[int, tuple[float, int]] = {}
        for path in [path for step in order for path in self.policy[step]][:MAX_POLICY_FILES]:
            with suppress(DataError):
                for gap, ticket, sample in read_gaps(path):
                    if math.isfinite(gap):
                        best[ticket] = max(best.get(ticket, (gap, sample)), (gap, sample))
        return {ticket: best[ticket][1] for ticket in nlargest(MAX_GAPS, best, best.__getitem__)}

    def _warn(self, numbers: Sequence[int], plural: str, singular: str) -> None:
        """Add a warning for steps or groups that cannot be read, if there are any."""
        if numbers:
            which = f"({singular} {first_few(sorted(numbers))})"
            self.warnings.append(f"samples: {len(numbers)} {plural} cannot be read {which}")


def _rows(pick: Pick, recorded: RecordedGroup, policy: Mapping[int, PolicyRow]) -> list[Row]:
    """Return the rows of a group in the table."""
    group = recorded.group
    of_group = {
        "step": pick.step,
        "ticket": group.ticket,
        "source": group.prompt.source,
        "fate": recorded.outcome,
        "verdict": recorded.verdict,
    }
    rows = []
    for completion, reward in zip(group.completions, recorded.rewards, strict=True):
        values = policy.get(completion.sample)
        rows.append(
            {
                **of_group,
                "sample": completion.sample,
                "finish": completion.finish.value,
                "num_tokens": completion.num_tokens,
                "age": age_of(completion, pick.step),
                "logprob_mean": rounded(completion.logprob_mean),
                "logprob_min": rounded(completion.logprob_min),
                "graded": graded_as(completion.grade),
                "reward": rounded(reward),
                "advantage": rounded(values.advantage) if values else None,
                "gap_max": significant(values.gap_max) if values else None,
                "why": pick.why(completion.sample),
            }
        )
    return rows


def age_of(completion: Completion, step: int) -> int | None:
    """Return the number of versions between the first token and the weights at the start of the
    step; None without tokens."""
    return step - 1 - completion.oldest_version if completion.segments else None


def graded_as(grade: Grade | None) -> str:
    """Return a grade as a word: right, wrong, no answer or no grade."""
    if grade is None:
        return "no grade"
    if grade.correct:
        return "right"
    return "wrong" if grade.parsed else "no answer"


def _steps(first: int | None, last: int | None) -> str:
    """Return a range of steps as text. None means no bound."""
    if last is None:
        return f"step {first} or later"
    if first is None:
        return f"step {last} or before"
    return f"steps {first} to {last}" if first < last else f"step {first}"
