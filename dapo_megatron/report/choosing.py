"""Selects the completions of a report: unusual ones of the whole run, and an even spread of steps.

Groups are kept complete, because a completion is compared with its siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ASKED, RANDOM = "asked for", "random"
LONGEST, UNLIKELY, UNSURE = "longest", "lowest log-prob", "lowest mean log-prob"
OLDEST, GAP, TRUNCATED = "oldest weights", "largest gap", "truncated"
UNGRADED, UNPARSED = "no grade", "no answer found"
LONE_WRONG, LONE_RIGHT = "wrong among right", "right among wrong"

KEPT = 8
"""Number of groups per measure of unusualness."""


@dataclass(frozen=True)
class Pick:
    """A selected group, and the reasons."""

    step: int
    ticket: int
    reasons: dict[int | None, list[str]] = field(default_factory=dict)
    """Sample -> reasons. None holds the reasons for the whole group."""

    @property
    def is_asked(self) -> bool:
        """True if the user asked for this ticket."""
        return ASKED in self.reasons.get(None, [])

    def why(self, sample: int) -> str:
        """Return the reasons for a completion of the group, as text."""
        reasons = [*self.reasons.get(sample, []), *self.reasons.get(None, [])]
        siblings = sorted(other for other in self.reasons if other is not None)
        return ", ".join(reasons) or "sibling of sample " + " and ".join(map(str, siblings))


def choose(
    completions: DataFrame,
    num: int,
    tickets: Collection[int] = (),
    gaps: Mapping[int, int] | None = None,
    inspected: Mapping[int, int] | None = None,
) -> list[Pick]:
    """Select groups with at most `num` completions in total, most important first.

    `tickets` come first and are always kept. Then unusual groups and groups of the even spread
    alternate. The first group is kept even if it has more than `num` completions.

    completions  columns of `record.summaries`, and their `step`
    gaps         ticket -> sample with the group's largest gap, in descending order of gap
    inspected    step -> number of its first trained groups that have per-token policy values
    """
    groups = completions.drop_duplicates("ticket").set_index("ticket")
    trained = groups["outcome"] == "trained"
    num_inspected = groups["step"].map(inspected or {}).fillna(0)
    groups["inspected"] = trained & (trained.groupby(groups["step"]).cumsum() <= num_inspected)
    sizes = completions["ticket"].value_counts().to_dict()
    steps = groups["step"].to_dict()
    picks: dict[int, Pick] = {}
    num_left = num
    asked = ((ASKED, ticket, None) for ticket in sorted(tickets))
    spread = ((RANDOM, ticket, None) for ticket in _spread(groups))
    alternating = zip_longest(_unusual(completions, gaps or {}), spread)
    for reason, ticket, sample in filter(None, chain(asked, chain.from_iterable(alternating))):
        if reason != ASKED and num_left <= 0:
            break
        if ticket not in steps or (ticket in picks and reason == RANDOM):
            continue
        if ticket not in picks:
            size = sizes.get(ticket, 0)
            if reason != ASKED and size > num_left and picks:
                continue
            num_left -= size
            picks[ticket] = Pick(int(steps[ticket]), ticket)
        picks[ticket].reasons.setdefault(sample, []).append(reason)
    return list(picks.values())


def _unusual(
    completions: DataFrame, gaps: Mapping[int, int]
) -> Iterator[tuple[str, int, int | None]]:
    """Yield (reason, ticket, sample): the most unusual by each measure, then the second of each,
    and so on."""
    by_measure: list[list[tuple[str, int, int | None]]] = [
        [(GAP, ticket, sample) for ticket, sample in gaps.items()]
    ]
    for reason, values in _measures(completions).items():
        is_of_group = reason.startswith(("set ", "fate "))
        by_measure.append(
            [
                (reason, ticket, None if is_of_group else sample)
                for ticket, sample in _largest(completions, values)
            ]
        )
    for rank in zip_longest(*by_measure):
        yield from filter(None, rank)


def _measures(completions: DataFrame) -> dict[str, Series]:
    """Return measure -> how unusual each completion is. Completions that do not qualify are
    missing. Measures without an order use random values."""
    import numpy as np
    import pandas as pd

    chance = pd.Series(np.random.default_rng(0).random(len(completions)), completions.index)
    correct, parsed = (completions[name].astype(float) for name in ("correct", "parsed"))
    age = completions["step"] - 1 - completions["oldest_version"]
    share = correct.groupby(completions["ticket"]).transform("mean")
    measures = {
        LONGEST: completions["num_tokens"],
        UNLIKELY: -completions["logprob_min"],
        UNSURE: -completions["logprob_mean"],
        OLDEST: age[age > 0],
        TRUNCATED: chance[completions["finish"] == "length"],
        UNGRADED: chance[completions["score"].isna()],
        UNPARSED: chance[parsed == 0],
        LONE_WRONG: share[(share > 0.5) & (correct == 0)],
        LONE_RIGHT: -share[(share < 0.5) & (correct == 1)],
    }
    for name, column in (("set", "source"), ("fate", "outcome")):
        values = completions[column]
        kinds = values.unique()
        if name == "fate" or len(kinds) > 1:
            measures |= {f"{name} {kind}": chance[values == kind] for kind in kinds}
    return measures


def _largest(completions: DataFrame, values: Series) -> list[tuple[int, int]]:
    """Return (ticket, sample) of the KEPT largest values, at most one per group."""
    values = values.dropna()
    if values.empty:
        return []
    best = values.groupby(completions["ticket"]).idxmax()
    rows = completions.loc[values.loc[best].nlargest(KEPT).index]
    return list(zip(rows["ticket"].tolist(), rows["sample"].tolist()))


def _spread(groups: DataFrame) -> list[int]:
    """Return all tickets in an order of which any prefix is an even spread over the steps.

    Each round takes one group of every step, alternating between groups with and without per-token
    policy values. Within a round, steps are in bit-reversed order (van der Corput sequence).
    """
    steps = enumerate(sorted(groups["step"].unique()))
    bit_reversed = {step: int(f"{position:032b}"[::-1], 2) for position, step in steps}
    order = groups.sample(frac=1, random_state=0)
    round_of = 2 * order.groupby(["step", "inspected"]).cumcount() + ~order["inspected"]
    order = order.assign(round=round_of, position=order["step"].map(bit_reversed))
    tickets: list[int] = order.sort_values(["round", "position"]).index.tolist()
    return tickets
