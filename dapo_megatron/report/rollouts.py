"""The rollouts of a run in its report: a table of chosen completions, and each of them in full.

A blob holds a group in full, as JSON: see viewer_data.py. The page opens blobs one by one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.report import recorded
from dapo_megatron.report.choosing import Pick, choose, frames
from dapo_megatron.report.folder import RunData, size_of
from dapo_megatron.report.token_text import Pieces, find_tokenizer
from dapo_megatron.report.viewer_data import group_data
from dapo_megatron.report.wording import first_few
from dapo_megatron.rollout.serialization import rounded, significant, summary

MAX_BLOB_BYTES = 18_000_000
"""Size of all blobs together, compressed; the page writes them a third longer. A run that shares a
page with others has a share of it, by the completions asked of it."""
FULL_PAGE = 2000
"""Completions."""
MAX_READ_BYTES = 200_000_000
"""Most bytes to read of samples without an index."""
MAX_POLICY_BYTES = 200_000_000
"""Most bytes of policy values to search for the largest gaps."""
MAX_GAPS = 8
_INSPECTED = 4
"""Groups of a step, where the config does not say it."""
_NOT_READ = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of a group of another version, or damaged in a way that its form does not show."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Rollouts:
    """Rows of the table, and blobs of JSON by ticket that the page opens one by one."""

    rows: list[Row]
    blobs: dict[int, bytes]
    total: int
    """Completions that were looked at."""
    note: str
    warnings: list[str] = field(default_factory=list)


def rollouts(
    run: RunData,
    completions: int = 2000,
    tickets: Sequence[int] = (),
    steps: tuple[int | None, int | None] | None = None,
) -> Rollouts | None:
    """Return about `completions` of the run's rollouts, of the steps (first, last), both included,
    if given; and the groups `tickets` in any case. None if none are recorded."""
    reading = _Reading(run, steps)
    if not reading.samples:
        return None
    picks, total = reading.chosen(completions, frozenset(tickets))
    max_bytes = MAX_BLOB_BYTES * min(completions, FULL_PAGE) // FULL_PAGE
    rows, blobs = reading.opened(picks, max_bytes)
    missing = sorted({*tickets} - {pick.ticket for pick in picks})
    if missing:
        reading.notes.append(f"Not among the recorded ones: ticket {', '.join(map(str, missing))}")
    kept = f"{len(rows):,} of {total:,} completions are here"
    if len(rows) < total:
        kept += (
            ", in whole groups: the longest, the least likely, the oldest, those with the largest "
            "gaps, without a grade or an answer, truncated, or alone in being right or wrong; some "
            "of every data set and every fate; and an even spread over the steps"
        )
    rows.sort(key=lambda row: (row["step"], row["ticket"], row["sample"]))
    return Rollouts(rows, blobs, total, ". ".join([kept, *reading.notes]) + ".", reading.warnings)


class _Reading:
    """The files of a run's rollouts, and notes of what could not be read of them."""

    def __init__(self, run: RunData, steps: tuple[int | None, int | None] | None) -> None:
        folder = run.path / "samples"
        self.run = run
        self.first, self.last = steps or (None, None)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.samples = recorded.step_files(folder, ".jsonl")
        self.indexes = recorded.step_files(folder / "index", ".json")
        self.policy = recorded.step_files(folder / "policy", ".jsonl")

    def chosen(self, num: int, tickets: frozenset[int]) -> tuple[list[Pick], int]:
        """Return the chosen groups, and the number of completions that there were to choose from.
        From steps that are not wanted only `tickets` are chosen."""
        inspected = self.run.count("tracking.inspected_groups") or _INSPECTED
        seen = [step for step in self.samples if tickets or self._is_wanted(step)]
        readable = self._readable_without_index(seen)
        indexes, damaged = {}, []
        for step in seen:
            if step in self.indexes:
                index = recorded.read_index(self.indexes[step])
            elif step in readable:
                index = recorded.index_of_samples(self.samples[step], step)
            else:
                continue
            if index is None:
                damaged.append(step)
            else:
                indexes[step] = index
        self._warn(damaged, "steps", "step")
        if not any(map(self._is_wanted, self.samples)):
            steps = _steps(min(self.samples), max(self.samples))
            self.notes.append(
                f"None was recorded of {_steps(self.first, self.last)}: this run's completions "
                f"are of {steps}"
            )
        groups, completions = frames(indexes, inspected, self.policy)
        groups = groups[groups["step"].map(self._is_wanted) | groups["ticket"].isin(tickets)]
        completions = completions[completions["ticket"].isin(groups["ticket"])]
        return choose(groups, completions, num, tickets, self._gaps()), len(completions)

    def opened(self, picks: Sequence[Pick], max_bytes: int) -> tuple[list[Row], dict[int, bytes]]:
        """Return the rows and blobs of the groups, the first ones first, until there are so many
        bytes. Groups that were asked for are kept up to the size of a whole page."""
        checkpoints = sorted((self.run.path / "checkpoints").glob("step_*"), reverse=True)
        pieces = find_tokenizer(self.run.path, self.run.word("model.path"), checkpoints)
        rows: list[Row] = []
        blobs: dict[int, bytes] = {}
        unreadable = []
        num_bytes = 0
        for pick in picks:
            if num_bytes >= (MAX_BLOB_BYTES if pick.is_asked else max_bytes):
                self.notes.append("The page has no room for more")
                break
            opened = self._open(pick, pieces)
            if opened is None:
                unreadable.append(pick.ticket)
                continue
            rows += opened[0]
            blobs[pick.ticket] = opened[1]
            num_bytes += len(zlib.compress(opened[1], 1))
        self._warn(unreadable, "groups", "ticket")
        if pieces is None:
            self.notes.append("No tokenizer was found, so texts are shown whole, not by token")
        return rows, blobs

    def _open(self, pick: Pick, pieces: Pieces | None) -> tuple[list[Row], bytes] | None:
        """Return the rows and the blob of a group; None if it cannot be read."""
        group = recorded.read_group(self.samples[pick.step], pick.offset, pick.ticket)
        if group is None:
            return None
        path = self.policy.get(pick.step)
        has_policy = path is not None and group["fate"] == "trained"
        policy = recorded.policy_of(path, pick.ticket) if path and has_policy else {}
        with suppress(*_NOT_READ):
            rows = [
                _row(pick, group, one, policy.get(one["sample"], {}))
                for one in group["completions"]
            ]
            data = group_data(group, policy, pieces)
            return rows, json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
        return None

    def _is_wanted(self, step: int) -> bool:
        """Return whether completions are to be chosen from a step."""
        return (self.first or 0) <= step and (self.last is None or step <= self.last)

    def _gaps(self) -> dict[int, int]:
        """Return ticket -> sample of the largest gaps, from the steps whose metrics show the
        largest."""
        metrics = self.run.metrics
        largest = dict(zip(metrics.steps, metrics.column("mismatch/gap_max")))
        steps = filter(self._is_wanted, self.policy)
        order = sorted(steps, key=lambda step: -(largest.get(step) or 0.0))
        paths = (self.policy[step] for step in order)
        gaps = recorded.largest_gaps(paths, MAX_POLICY_BYTES, MAX_GAPS)
        return {ticket: sample for _, ticket, sample in gaps}

    def _readable_without_index(self, steps: Sequence[int]) -> set[int]:
        """Return steps, evenly chosen so that their files are no more than MAX_READ_BYTES."""
        steps = [step for step in steps if step not in self.indexes]
        num_bytes = sum(size_of(self.samples[step]) for step in steps)
        num = len(steps)
        if num_bytes > MAX_READ_BYTES:
            num = max(1, num * MAX_READ_BYTES // num_bytes)
            self.notes.append(
                f"This run recorded no index: {len(steps) - num:,} of {len(self.samples):,} steps "
                "were not read"
            )
        return {steps[place * len(steps) // num] for place in range(num)}

    def _warn(self, numbers: Sequence[int], what: str, each: str) -> None:
        """Note the steps or groups that cannot be read, if there are any."""
        if numbers:
            which = f"({each} {first_few(numbers)})"
            self.warnings.append(f"samples: {len(numbers)} {what} cannot be read {which}")


def _row(
    pick: Pick, group: Mapping[str, Any], one: Mapping[str, Any], policy: Mapping[str, Any]
) -> Row:
    """Return the row of a completion in the table."""
    brief = summary(pick.step, one)
    graded = "wrong" if one["parsed"] else "no answer"
    return {
        "step": pick.step,
        **{name: group[name] for name in ("ticket", "source", "fate", "verdict")},
        **{name: one[name] for name in ("sample", "finish")},
        **{name: brief[name] for name in ("num_tokens", "age", "logprob_mean", "logprob_min")},
        "graded": "no grade" if one["score"] is None else "right" if one["correct"] else graded,
        "reward": rounded(one.get("reward")),
        "advantage": rounded(policy.get("advantage")),
        "gap_max": significant(policy.get("gap_max")),
        "why": pick.why(one["sample"]),
    }


def _steps(first: int | None, last: int | None) -> str:
    """Write a range of steps in words; None: no bound."""
    if last is None:
        return f"step {first} or later"
    if first is None:
        return f"step {last} or before"
    return f"steps {first} to {last}" if first < last else f"step {first}"
