"""Choice of the completions in a report: the strange ones of the whole run, and an even spread.

Groups are kept whole because a completion is judged against its siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from dapo_megatron.report.models import StepIndex

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ASKED, RANDOM = "asked for", "random"
LONGEST, UNLIKELY, UNSURE = "longest", "lowest log-prob", "lowest mean log-prob"
OLDEST, GAP, TRUNCATED = "oldest weights", "largest gap", "truncated"
UNGRADED, UNPARSED = "no grade", "no answer found"
LONE_WRONG, LONE_RIGHT = "wrong among right", "right among wrong"

KEPT = 8
"""Groups of each way to be strange."""


@dataclass(frozen=True)
class Pick:
    """A chosen group, its place in the samples, and why it was chosen."""

    step: int
    ticket: int
    offset: int
    reasons: dict[int | None, list[str]] = field(default_factory=dict)
    """Reasons by sample; None: of the group as a whole."""

    @property
    def is_asked(self) -> bool:
        """True if the reader asked for this ticket."""
        return ASKED in self.reasons.get(None, [])

    def why(self, sample: int) -> str:
        """Return the reasons for one of its completions, in words."""
        own = [*self.reasons.get(sample, []), *self.reasons.get(None, [])]
        extremes = sorted(place for place in self.reasons if place is not None)
        return ", ".join(own) or "beside sample " + " and ".join(map(str, extremes))


def frames(
    indexes: Mapping[int, StepIndex], inspected: int, policy_steps: Collection[int]
) -> tuple[DataFrame, DataFrame]:
    """Return the groups and the completions of all steps. In `policy_steps` the first `inspected`
    groups trained on have policy values by token."""
    import pandas as pd

    groups = pd.DataFrame(
        {
            name: list(chain.from_iterable(index["groups"][name] for index in indexes.values()))
            for name in ("ticket", "offset", "source", "fate")
        }
    )
    sizes = [len(index["groups"]["ticket"]) for index in indexes.values()]
    groups["step"] = pd.Series([*indexes], dtype=int).repeat(sizes).to_numpy()
    trained = groups["fate"] == "trained"
    is_early = trained.groupby(groups["step"]).cumsum() <= inspected
    groups["inspected"] = trained & is_early & groups["step"].isin(policy_steps)
    columns = [index["completions"] for index in indexes.values()]
    numbers = ("score", "correct", "parsed", "age", "logprob_mean", "logprob_min")
    completions = pd.DataFrame(
        {
            name: list(chain.from_iterable(of_step[name] for of_step in columns))  # type: ignore[literal-required]
            for name in ("sample", "num_tokens", "finish", *numbers)
        }
    ).astype(dict.fromkeys(numbers, float))
    completions["ticket"] = [
        index["groups"]["ticket"][place]
        for index in indexes.values()
        for place in index["completions"]["group"]
    ]
    return groups, completions


def choose(
    groups: DataFrame,
    completions: DataFrame,
    num: int,
    tickets: Collection[int] = (),
    gaps: Mapping[int, int] | None = None,
) -> list[Pick]:
    """Choose groups of at most `num` completions in all, the most wanted first: `tickets`, which
    are kept in any case, then in turn the next strange one and the next of the spread.

    `gaps` maps tickets to the sample with the largest gap, largest first. A first group is kept
    even if it is larger than `num`.
    """
    groups = groups.drop_duplicates("ticket").set_index("ticket")
    sizes = completions["ticket"].value_counts().to_dict()
    known = groups[["step", "offset"]].to_dict("index")
    picks: dict[int, Pick] = {}
    room = num
    asked = ((ASKED, ticket, None) for ticket in sorted(tickets))
    spread = ((RANDOM, ticket, None) for ticket in _spread(groups))
    in_turn = zip_longest(_strange(groups, completions, gaps or {}), spread)
    for reason, ticket, sample in filter(None, chain(asked, chain.from_iterable(in_turn))):
        if reason != ASKED and room <= 0:
            break
        if ticket not in known or (ticket in picks and reason == RANDOM):
            continue
        if ticket not in picks:
            size = sizes.get(ticket, 0)
            if reason != ASKED and size > room and picks:
                continue
            room -= size
            place = known[ticket]
            picks[ticket] = Pick(int(place["step"]), ticket, int(place["offset"]))
        picks[ticket].reasons.setdefault(sample, []).append(reason)
    return list(picks.values())


def _strange(
    groups: DataFrame, completions: DataFrame, gaps: Mapping[int, int]
) -> Iterator[tuple[str, int, int | None]]:
    """Yield (reason, ticket, sample): the strangest by each measure, then the second of each."""
    by_measure: list[list[tuple[str, int, int | None]]] = [
        [(GAP, ticket, sample) for ticket, sample in gaps.items()]
    ]
    for reason, values in _measures(groups, completions).items():
        of_group = reason.startswith(("set ", "fate "))
        by_measure.append(
            [
                (reason, ticket, None if of_group else sample)
                for ticket, sample in _largest(completions, values)
            ]
        )
    for turn in zip_longest(*by_measure):
        yield from filter(None, turn)


def _measures(groups: DataFrame, completions: DataFrame) -> dict[str, Series]:
    """Return the ways to be strange: how strange each completion is, of those that are at all."""
    import numpy as np
    import pandas as pd

    chance = pd.Series(np.random.default_rng(0).random(len(completions)), completions.index)
    correct, age = completions["correct"], completions["age"]
    share = correct.groupby(completions["ticket"]).transform("mean")
    measures = {
        LONGEST: completions["num_tokens"],
        UNLIKELY: -completions["logprob_min"],
        UNSURE: -completions["logprob_mean"],
        OLDEST: age[age > 0],
        TRUNCATED: chance[completions["finish"] == "length"],
        UNGRADED: chance[completions["score"].isna()],
        UNPARSED: chance[completions["parsed"] == 0],
        LONE_WRONG: share[(share > 0.5) & (correct == 0)],
        LONE_RIGHT: -share[(share < 0.5) & (correct == 1)],
    }
    for name, column in (("set", "source"), ("fate", "fate")):
        values = completions["ticket"].map(groups[column])
        kinds = values.unique()
        if name == "fate" or len(kinds) > 1:
            measures |= {f"{name} {kind}": chance[values == kind] for kind in kinds}
    return measures


def _largest(completions: DataFrame, values: Series) -> list[tuple[int, int]]:
    """Return (ticket, sample) of the largest values, at most one of each group."""
    values = values.dropna()
    if values.empty:
        return []
    best = values.groupby(completions["ticket"]).idxmax()
    rows = completions.loc[values.loc[best].nlargest(KEPT).index]
    return list(zip(rows["ticket"].tolist(), rows["sample"].tolist()))


def _spread(groups: DataFrame) -> list[int]:
    """Return all tickets: one of every step, then a second of every one, in turn one with policy
    values by token and one without. Any beginning of the list is an even spread over the steps,
    which are in the order of their places' bits read backwards (van der Corput's sequence)."""
    steps = enumerate(sorted(groups["step"].unique()))
    backwards = {step: int(f"{place:032b}"[::-1], 2) for place, step in steps}
    order = groups.sample(frac=1, random_state=0)
    turn = 2 * order.groupby(["step", "inspected"]).cumcount() + ~order["inspected"]
    order = order.assign(turn=turn, place=order["step"].map(backwards))
    tickets: list[int] = order.sort_values(["turn", "place"]).index.tolist()
    return tickets
