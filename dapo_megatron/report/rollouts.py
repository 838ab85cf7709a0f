"""Rollouts of a run in its report: a table of selected completions, and the data of their complete
groups for the viewer.

Groups are kept complete, because a completion is compared with its siblings.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.report.run_data import RunData
from dapo_megatron.report.token_text import TokenPieces, find_tokenizer
from dapo_megatron.report.viewer_data import group_data
from dapo_megatron.report.wording import first_few, significant
from dapo_megatron.rollout.record import (
    COMPLETIONS,
    SUMMARY,
    RecordedGroup,
    read_groups,
    recorded_steps,
    summaries,
)
from dapo_megatron.tracking.policy_files import PolicyRow, policy_files, read_policy
from dapo_megatron.types import Completion, DataError, Grade

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_BYTES = 18_000_000
"""Maximum size of the compressed groups of a page; base64 makes them a third larger."""
NUM_PER_REASON = 8
"""Number of groups that are the longest, the least likely, or without a grade or an answer."""
_INSPECTED = 4
"""Default of tracking.inspected_groups, for configs without it."""

LONGEST, UNLIKELY, UNGRADED, RANDOM = "longest", "least likely", "no grade or answer", "random"
ASKED = "asked for"
SIGNS = {"right": "✓", "wrong": "✗", "no answer": "∅", "no grade": "?"}
DASH = "\N{EN DASH}"

Row = dict[str, Any]
Steps = tuple[int | None, int | None]
"""First and last step, both inclusive; None: no bound."""


@dataclass(frozen=True)
class Column:
    """A column of the table of completions. `form` formats its numbers; "" is for words."""

    name: str
    form: str = ""
    help: str = ""
    has_choice: bool = False
    """True if the page can filter by its values."""

    def cell(self, row: Row) -> str:
        """Return the text of a cell."""
        value = row[self.name]
        if value is None:
            return DASH
        return format(value, self.form).replace("-", "\N{MINUS SIGN}") if self.form else str(value)

    def choices(self, rows: Sequence[Row]) -> list[str]:
        """Return the distinct texts of the column."""
        return sorted({self.cell(row) for row in rows})


COLUMNS = (
    Column("step", ","),
    Column("set", has_choice=True),
    Column("outcome", help="Outcome of its group", has_choice=True),
    Column("graded", has_choice=True),
    Column("reward", ".2f"),
    Column("advantage", ".2f", "Advantage used in training"),
    Column("tokens", ","),
    Column("finish", has_choice=True),
    Column("age", ",", "Weight versions between the sampling of its first token and its step"),
    Column("log-prob", ".2f", "Mean of the engine's log-probs"),
    Column("lowest", ".2f", "Engine's log-prob of its least likely token"),
    Column("gap", ".1e", "Largest |engine log-prob - policy log-prob| of its tokens"),
    Column("here because", help="Why the page includes it", has_choice=True),
)


@dataclass(frozen=True)
class Rollouts:
    """Rows of the table of completions, and the groups for the viewer."""

    rows: list[Row]
    groups: dict[int, bytes]
    """Ticket -> gzipped JSON of the group."""
    note: str
    warnings: list[str]


Picks = dict[int, dict[int | None, str]]
"""Ticket -> sample -> why it was chosen. None stands for the whole group."""


def rollouts(
    run: RunData,
    num: int,
    tickets: Collection[int] = (),
    steps: Steps = (None, None),
    max_bytes: int = MAX_BYTES,
) -> Rollouts | None:
    """Select about `num` completions of the run's rollouts. None if none are recorded.

    tickets     groups that are always included, whatever their step
    steps       steps to select from
    max_bytes   maximum size of the compressed groups
    """
    folders = recorded_steps(run.path / "samples")
    if not folders:
        return None
    reading = _Reading(run, folders)
    completions = reading.completions()
    is_wanted = completions["step"].between(steps[0] or 0, steps[1] or max(folders))
    completions = completions[is_wanted | completions["ticket"].isin(tickets)]
    picks = choose(completions, num, tickets)
    step_of = dict(zip(completions["ticket"].tolist(), completions["step"].tolist(), strict=True))
    rows, groups = reading.load(picks, step_of, max_bytes)
    note = f"{len(rows):,} of {len(completions):,} completions are here"
    if len(rows) < len(completions):
        note += (
            ", in complete groups: the longest, the least likely, some without a grade or an "
            "answer, and random ones"
        )
    if reading.pieces is None:
        note += ". No tokenizer was found, so texts are not split into tokens"
    if absent := sorted({*tickets} - {*groups}):
        note += f". Not recorded: ticket {first_few(absent)}"
    return Rollouts(rows, groups, f"{note}.", reading.warnings)


# ---------------------------------------------------------------------------- selection


def choose(completions: DataFrame, num: int, tickets: Collection[int] = ()) -> Picks:
    """Select groups with about `num` completions in total, most important first: `tickets`, then
    in turns the longest, the least likely, those without a grade or an answer, and random ones. Of
    the random ones, every second has per-token values of the policy, if there are any.

    completions  columns of `record.summaries`, `step`, and `inspected`: whether the group has
                 per-token values of the policy
    """
    by_length = completions.sort_values("num_tokens", ascending=False, kind="stable")
    by_logprob = completions.dropna(subset="logprob_mean").sort_values("logprob_mean")
    unclear = completions[~completions["parsed"].eq(True)].sample(frac=1, random_state=0)
    chosen = zip_longest(
        _first(by_length, LONGEST),
        _first(by_logprob, UNLIKELY),
        _first(unclear, UNGRADED),
        ((ticket, None, RANDOM) for ticket in _random_order(completions)),
    )
    sizes = completions["ticket"].value_counts().to_dict()
    picks: Picks = {ticket: {None: ASKED} for ticket in sorted(tickets) if ticket in sizes}
    num_left = num - sum(sizes[ticket] for ticket in picks)
    for ticket, sample, reason in filter(None, chain.from_iterable(chosen)):
        if ticket in picks and reason != RANDOM:
            picks[ticket].setdefault(sample, reason)
        elif ticket not in picks and (sizes[ticket] <= num_left or (num > 0 and not picks)):
            picks[ticket] = {sample: reason}
            num_left -= sizes[ticket]
    return picks


def _first(completions: DataFrame, reason: str) -> Iterator[tuple[int, int | None, str]]:
    """Yield (ticket, sample, reason) of the first completions, one per group."""
    first = completions.drop_duplicates("ticket").head(NUM_PER_REASON)
    return ((int(row.ticket), int(row.sample), reason) for row in first.itertuples())


def _random_order(completions: DataFrame) -> list[int]:
    """Return all tickets in a random order, alternating between groups with and without per-token
    values of the policy."""
    groups = completions.drop_duplicates("ticket").sample(frac=1, random_state=0)
    rank = groups.groupby("inspected").cumcount().sort_values(kind="stable")
    return [int(ticket) for ticket in groups.loc[rank.index, "ticket"]]


# ---------------------------------------------------------------------------- reading


class _Reading:
    """Reads the files of a run's rollouts. `folders` is step -> folder."""

    def __init__(self, run: RunData, folders: Mapping[int, Path]) -> None:
        self.run = run
        self.folders = folders
        self.policy = policy_files(run.path)
        checkpoints = sorted((run.path / "checkpoints").glob("step_*"), reverse=True)
        self.pieces: TokenPieces | None = find_tokenizer(
            run.path, run.word("model.path"), checkpoints
        )
        self.warnings: list[str] = []

    def completions(self) -> DataFrame:
        """Return the summaries of all completions, with their step, and whether their group has
        per-token values of the policy."""
        import pandas as pd

        tables, damaged = [], []
        for step, folder in self.folders.items():
            try:
                tables.append(summaries(folder).assign(step=step))
            except DataError:
                damaged.append(step)
        self._warn(damaged, "steps", "step")
        if not tables:
            tables = [pd.DataFrame(columns=[*SUMMARY, "step"])]
        completions = pd.concat(tables, ignore_index=True).drop_duplicates(["ticket", "sample"])
        trained = completions[completions["outcome"] == "trained"].drop_duplicates("ticket")
        num = self.run.count("tracking.inspected_groups") or _INSPECTED
        first = trained.groupby("step").head(num)
        inspected = first[first["step"].isin(self.policy)]["ticket"]
        return completions.assign(inspected=completions["ticket"].isin(inspected))

    def load(
        self, picks: Picks, step_of: Mapping[int, int], max_bytes: int
    ) -> tuple[list[Row], dict[int, bytes]]:
        """Return the rows in the order of the run, and the groups, until `max_bytes` is reached."""
        rows: list[Row] = []
        groups: dict[int, bytes] = {}
        unreadable = []
        for ticket, reasons in picks.items():
            if sum(map(len, groups.values())) >= max_bytes:
                self.warnings.append("samples: the page has no room for more completions")
                break
            step, recorded = step_of[ticket], None
            with suppress(DataError):
                path = self.folders[step] / COMPLETIONS
                recorded = next(read_groups(path, [ticket]), None)
            if recorded is None:
                unreadable.append(ticket)
                continue
            policy = self._policy_of(step, ticket)
            data = group_data(recorded.group, policy, self.pieces)
            text = json.dumps(data, separators=(",", ":"), allow_nan=False)
            groups[ticket] = gzip.compress(text.encode(), compresslevel=6, mtime=0)
            rows += _rows(recorded, step, policy, reasons)
        self._warn(unreadable, "groups", "ticket")
        return sorted(rows, key=lambda row: (row["step"], row["ticket"], row["sample"])), groups

    def _policy_of(self, step: int, ticket: int) -> dict[int, PolicyRow]:
        """Return the policy's values of a group by sample."""
        values: dict[int, PolicyRow] = {}
        for path in self.policy.get(step, ()):
            with suppress(DataError):
                values |= {row.sample: row for row in read_policy(path, [ticket])}
        return values

    def _warn(self, numbers: Sequence[int], plural: str, singular: str) -> None:
        """Add a warning for steps or groups that cannot be read, if there are any."""
        if numbers:
            which = f"({singular} {first_few(sorted(numbers))})"
            self.warnings.append(f"samples: {len(numbers)} {plural} cannot be read {which}")


def _rows(
    recorded: RecordedGroup,
    step: int,
    policy: Mapping[int, PolicyRow],
    reasons: Mapping[int | None, str],
) -> list[Row]:
    """Return the rows of a group in the table."""
    rows = []
    for completion, reward in zip(recorded.group.completions, recorded.rewards, strict=True):
        values = policy.get(completion.sample)
        graded = graded_as(completion.grade)
        rows.append(
            {
                "ticket": recorded.group.ticket,
                "sample": completion.sample,
                "step": step,
                "set": recorded.group.prompt.source,
                "outcome": recorded.outcome.replace("_", " "),
                "graded": f"{SIGNS[graded]} {graded}",
                "reward": significant(reward),
                "advantage": significant(values.advantage) if values else None,
                "tokens": completion.num_tokens,
                "finish": completion.finish.value,
                "age": age_of(completion, step),
                "log-prob": significant(completion.logprob_mean),
                "lowest": significant(completion.logprob_min),
                "gap": significant(values.gap_max) if values else None,
                "here because": reasons.get(completion.sample) or reasons.get(None, "sibling"),
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
