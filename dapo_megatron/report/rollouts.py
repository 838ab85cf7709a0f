"""The rollouts of a run in its report: a table of chosen completions, and each of them in full.

A blob holds a few groups. Its tokens are places in its `pieces` and `ids`, the most frequent first;
figures are whole numbers: log-probs and entropies in thousandths, gaps (engine less policy) with as
many decimals as the group's `gap_decimals` says. Both halve the page.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.report import recorded
from dapo_megatron.report.choosing import ASKED, Chooser, Pick, Wanted
from dapo_megatron.report.folder import RunData, size_of
from dapo_megatron.report.token_text import find_tokenizer
from dapo_megatron.report.viewer_data import Blob
from dapo_megatron.report.wording import first_few

MAX_BLOB_BYTES = 18_000_000
"""Size of all blobs together, compressed; the page writes them a third longer. A run that shares a
page with others has a share of it, by the completions asked of it."""
FULL_PAGE = 2000
"""Completions."""
BYTES_PER_TOKEN = 4
"""Compressed, about: what a choice is planned with."""
MAX_READ_BYTES = 200_000_000
"""Most bytes to read of samples without an index."""
MAX_POLICY_BYTES = 200_000_000
"""Most bytes of policy values to search for the largest gaps."""
MAX_GAPS = 8
_INSPECTED = 4
"""Groups of a step, where the config does not say it."""
_GROUPS_PER_BLOB = 20
_BYTES_PER_BLOB = 1_000_000

COLUMNS = (
    *("step", "ticket", "sample", "source", "fate", "verdict", "correct", "score", "reward"),
    *("advantage", "num_tokens", "finish", "graded", "age", "logprob_mean", "logprob_min"),
    *("gap_max", "why", "group"),
)


@dataclass(frozen=True)
class Rollouts:
    """Data for the page: one table, and blobs of JSON that it opens one by one."""

    table: dict[str, Any]
    blobs: dict[str, bytes]
    warnings: list[str] = field(default_factory=list)


def rollouts(
    run: RunData,
    completions: int = 2000,
    tickets: Sequence[int] = (),
    steps: tuple[int | None, int | None] | None = None,
) -> Rollouts | None:
    """About `completions` of the run's rollouts, of the steps (first, last), both included, if
    given; and the groups `tickets` in any case. None if none are recorded."""
    reading = _Reading(run, steps)
    if not reading.samples:
        return None
    max_bytes = MAX_BLOB_BYTES * min(completions, FULL_PAGE) // FULL_PAGE
    wanted = Wanted(
        completions=completions,
        tokens=max_bytes // BYTES_PER_TOKEN,
        tickets=frozenset(tickets),
        gaps=reading.gaps(),
        inspected=run.count("tracking.inspected_groups") or _INSPECTED,
    )
    chooser = reading.chooser(wanted)
    page = _Page(run, reading)
    page.fill(chooser.choose(), max_bytes)
    return Rollouts(
        table={
            "note": _note(page, reading, chooser),
            "total": chooser.num_seen,
            "kept": len(page.rows),
            "columns": list(COLUMNS),
            "rows": {name: [row[name] for row in page.rows] for name in COLUMNS},
            "blobs": page.blob_of,
        },
        blobs=page.blobs,
        warnings=reading.warnings,
    )


class _Reading:
    """The files of a run's rollouts, and what could not be read of them."""

    def __init__(self, run: RunData, steps: tuple[int | None, int | None] | None) -> None:
        folder = run.path / "samples"
        self.run = run
        self.first, self.last = steps or (None, None)
        self.warnings: list[str] = []
        self.skipped = 0
        """Steps without an index that were not read, for there are too many."""

        self.samples = recorded.step_files(folder, ".jsonl")
        self.indexes = recorded.step_files(folder / "index", ".json")
        self.policy = recorded.step_files(folder / "policy", ".jsonl")

    def is_wanted(self, step: int) -> bool:
        """True if completions are to be chosen from it."""
        return (self.first is None or self.first <= step) and (
            self.last is None or step <= self.last
        )

    def warn_of(self, numbers: Sequence[int], what: str, each: str) -> None:
        """Note which ones cannot be read, if there are any."""
        if numbers:
            which = f"({each} {first_few(numbers)})"
            self.warnings.append(f"samples: {len(numbers)} {what} cannot be read {which}")

    def gaps(self) -> dict[int, int]:
        """Ticket -> sample of the largest gaps, from the steps whose metrics show the largest."""
        metrics = self.run.metrics
        largest = dict(zip(metrics.steps, metrics.column("mismatch/gap_max")))
        steps = filter(self.is_wanted, self.policy)
        order = sorted(steps, key=lambda step: -(largest.get(step) or 0.0))
        paths = (self.policy[step] for step in order)
        gaps = recorded.largest_gaps(paths, MAX_POLICY_BYTES, MAX_GAPS)
        return {ticket: sample for _, ticket, sample in gaps}

    def chooser(self, wanted: Wanted) -> Chooser:
        """One that has seen every step that can be read."""
        seen = [step for step in self.samples if wanted.tickets or self.is_wanted(step)]
        to_read = self._readable_without_index(seen)
        chooser = Chooser(wanted, num_steps=sum(map(self.is_wanted, seen)))
        damaged = []
        for step in seen:
            path = self.samples[step]
            if step in self.indexes:
                index = recorded.read_index(self.indexes[step], step)
            elif step in to_read:
                index = recorded.index_of_samples(path, step)
            else:
                self.skipped += 1
                continue
            if index is None:
                damaged.append(step)
            elif self.is_wanted(step):
                chooser.see(index, has_policy=step in self.policy)
            else:
                chooser.see_asked(index)
        self.warn_of(damaged, "steps", "step")
        return chooser

    def _readable_without_index(self, steps: Sequence[int]) -> set[int]:
        """Return steps, evenly chosen so that their files are no more than MAX_READ_BYTES."""
        steps = [step for step in steps if step not in self.indexes]
        num_bytes = sum(size_of(self.samples[step]) for step in steps)
        num = len(steps)
        if num_bytes > MAX_READ_BYTES:
            num = max(1, num * MAX_READ_BYTES // num_bytes)
        return {steps[place * len(steps) // num] for place in range(num)} if num else set()


class _Page:
    """The rows of the table and the blobs, filled group by group until the room is full."""

    def __init__(self, run: RunData, reading: _Reading) -> None:
        self.rows: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.blob_of: list[str] = []
        self.is_full = False
        """There was no room for all that was chosen."""
        self._run, self._reading = run, reading
        checkpoints = sorted((run.path / "checkpoints").glob("step_*"), reverse=True)
        self.pieces = find_tokenizer(run.path, run.word("model.path"), checkpoints)
        self._blob = self._new_blob()
        self._num_bytes = 0

    def fill(self, picks: Sequence[Pick], max_bytes: int) -> None:
        """Read the groups and write their blobs, the first ones first, until there are so many
        bytes of them; those asked for in any case, but for a size that no page can have."""
        lost = []
        for pick in picks:
            rows = self._added(pick)
            if rows is None:
                lost.append(pick.group.ticket)
                continue
            self.rows += rows
            self.blob_of.append(str(len(self.blobs)))
            if self._blob.num_groups >= _GROUPS_PER_BLOB or self._blob.size >= _BYTES_PER_BLOB:
                self._close_blob()
                asked = pick.reasons.get(None) == [ASKED]
                if self._num_bytes >= (MAX_BLOB_BYTES if asked else max_bytes):
                    self.is_full = pick is not picks[-1]
                    break
        if self._blob.num_groups:
            self._close_blob()
        self._reading.warn_of(lost, "groups", "ticket")

    def _added(self, pick: Pick) -> list[dict[str, Any]] | None:
        """The rows of a group, which is then in the blob; None if it cannot be shown."""
        group = self._read(pick)
        if group is None:
            return None
        # It may be of another version, or damaged in a way that its form does not show.
        with suppress(ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
            return self._blob.add(len(self.blob_of), group, pick)
        return None

    def _read(self, pick: Pick) -> dict[str, Any] | None:
        """The recorded line, with `policy`: what the policy said, by sample."""
        wanted = pick.group
        group = recorded.read_group(
            self._reading.samples[wanted.step], wanted.offset, wanted.ticket
        )
        if group is not None:
            path = self._reading.policy.get(wanted.step)
            is_trained = group["fate"] == "trained"
            group["policy"] = recorded.policy_of(path, wanted.ticket) if path and is_trained else {}
        return group

    def _new_blob(self) -> Blob:
        return Blob(self._run, self.pieces)

    def _close_blob(self) -> None:
        data = json.dumps(self._blob.to_json(), separators=(",", ":"), allow_nan=False).encode()
        self.blobs[str(len(self.blobs))] = data
        self._num_bytes += len(zlib.compress(data, 1))
        self._blob = self._new_blob()


def _note(page: _Page, reading: _Reading, chooser: Chooser) -> str:
    """Describe how much of the run is here, and what was chosen."""
    said = [f"{len(page.rows):,} of {chooser.num_seen:,} completions are here"]
    if len(page.rows) < chooser.num_seen:
        said[0] += (
            ", in whole groups: the longest, the least likely, the oldest, those with the largest "
            "gaps, without a grade or an answer, truncated, or alone in being right or wrong; some "
            "of every data set and every fate; and an even spread over the steps"
        )
    if not any(map(reading.is_wanted, reading.samples)):
        steps = _steps(min(reading.samples), max(reading.samples))
        asked = _steps(reading.first, reading.last)
        said.append(f"None was recorded of {asked}: this run's completions are of {steps}")
    if page.is_full or chooser.is_full:
        said.append("The page has no room for more")
    if reading.skipped:
        said.append(
            f"This run recorded no index: {reading.skipped:,} of {len(reading.samples):,} steps "
            "were not read"
        )
    if chooser.missing:
        tickets = ", ".join(map(str, chooser.missing))
        said.append(f"Not among the recorded ones: ticket {tickets}")
    if page.pieces is None:
        said.append("No tokenizer was found, so texts are shown whole, not by token")
    return ". ".join(said) + "."


def _steps(first: int | None, last: int | None) -> str:
    """In words; None: no bound."""
    if last is None:
        return f"step {first} or later"
    if first is None:
        return f"step {last} or before"
    return f"steps {first} to {last}" if first < last else f"step {first}"
