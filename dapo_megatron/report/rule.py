"""Rule: one finding as data, and its evaluation on a run.

Each threshold of a rule is a constant next to it. The table in docs/report.md lists them all, with
the reason for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from string import Formatter
from typing import Any

from dapo_megatron.report.finding import Column, Finding, Level, Track, track_of
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.wording import named, number, percent


@dataclass(frozen=True)
class Case(Track):
    """The series that a rule looks at, in its run."""

    run: RunData
    bound: float = 0.0
    """Value of the rule's config key."""
    hits: tuple[int, ...] = ()
    """The steps that the finding is about."""

    @property
    def peak(self) -> int:
        """Step of the largest value among `hits`."""
        return max(self.hits, key=self.at)

    @property
    def most(self) -> float:
        """Largest value at `hits`."""
        return self.at(self.peak)

    def at(self, step: int) -> float:
        """Return the value at a step."""
        return self.values[self.steps.index(step)]

    def other(self, metric: str) -> Track:
        """Return another metric of the run."""
        return track_of(self.run.metrics.steps, self.run.metrics.column(metric))


Condition = Callable[[Case], bool]


def always(series: Case) -> bool:
    """Hold for each series that has `Rule.steps`."""
    return True


def lately(series: Case) -> Sequence[int]:
    """Return the steps of the last window."""
    return series.steps[-series.window :]


@dataclass(frozen=True)
class Rule:
    """A finding on one series.

    Title and text are templates. `s` is the Case, `steps` names its `hits`, and `facts` gives more
    fields. `!p` writes a share in percent, `!n` a number as a person would.
    """

    metric: str
    """Metric that is judged, and whose chart the finding leads to."""
    when: Mapping[Level, Condition]
    """The finding has the level of the first condition that holds."""
    title: str
    text: str
    knob: str | Callable[[Case], str | None] | None = None
    trend: bool = False
    """Judge only series that are long enough for trends (Track.is_long)."""
    only: Callable[[RunData], bool] = lambda run: True
    """Judge only these runs."""
    bound: str | None = None
    """Config key of a number above 0, `s.bound`. A run without it has no such finding."""
    column: Callable[[RunData], Column] | None = None
    """Values to judge, where they are not those of `metric`."""
    steps: Callable[[Case], Sequence[int]] = attrgetter("steps")
    """Steps that the finding is about. Without any there is none."""
    facts: Callable[[Case], Mapping[str, Any]] = lambda series: {}
    chart: str | None = None

    def __call__(self, run: RunData) -> Iterator[Finding]:
        """Yield the finding, if the run has it."""
        bound = run.number(self.bound) if self.bound else 0.0
        if not self.only(run) or bound is None or (self.bound and bound <= 0):
            return
        column = self.column(run) if self.column else run.metrics.column(self.metric)
        values = track_of(run.metrics.steps, column)
        series = Case(values.steps, values.values, run, bound)
        if not series or (self.trend and not series.is_long):
            return
        series = replace(series, hits=tuple(self.steps(series)))
        if not series.hits:
            return
        for level, holds in self.when.items():
            if holds(series):
                fields = {"s": series, "steps": named(series.hits), **self.facts(series)}
                title, text = (_WORDS.vformat(part, (), fields) for part in (self.title, self.text))
                about = (series.hits[0], series.hits[-1])
                knob = self.knob(series) if callable(self.knob) else self.knob
                yield Finding(level, title, text, self.metric, about, knob, self.chart)
                return


RunRule = Callable[[RunData], Iterator[Finding]]
"""A Rule, or a function that combines several series."""


def first_of(*rules: RunRule) -> RunRule:
    """Return a rule that yields what the first of these finds."""

    def chosen(run: RunData) -> Iterator[Finding]:
        yield from next(filter(None, (list(rule(run)) for rule in rules)), [])

    return chosen


class _Words(Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        words = {"p": percent, "n": number}.get(conversion or "")
        return words(value) if words else super().convert_field(value, conversion)


_WORDS = _Words()
