"""Rule: a finding defined as data, and its evaluation on a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from dapo_megatron.report.charts import columns_of
from dapo_megatron.report.finding import Finding, Level, Track
from dapo_megatron.report.groups import DECIDED
from dapo_megatron.report.run_data import Metrics, RunData, frame_of
from dapo_megatron.report.wording import named, number, percent
from dapo_megatron.types import STEP_PHASES, Phase

CLIPPED_TOKENS = "derived/clipped_tokens"
UNPARSED = "derived/unparsed_share"
PLAIN_STEP = "derived/step_without_extras"
PER_TOKEN = "derived/{}_per_token"

EVERY_STEP = [p for p in STEP_PHASES if p not in (Phase.CHECKPOINT, Phase.EVALUATE)]


def judged(run: RunData) -> RunData:
    """Return the run with the derived columns that rules use added to its metrics."""
    run = replace(run, metrics=Metrics(columns_of(run)))
    column, steps = run.metrics.series, run.metrics.steps
    completions = column(DECIDED) * (run.count("rollout.samples_per_prompt") or 0)
    tokens = column("throughput/tokens_per_second") * column("time/step")
    extras = sum(column(f"time/{phase}").fillna(0) for phase in ("checkpoint", "evaluate"))
    columns = {
        CLIPPED_TOKENS: column("policy/clip_fraction_high") + column("policy/clip_fraction_low"),
        UNPARSED: column("grading/unparsed") / completions.where(completions > 0),
        PLAIN_STEP: column("time/step") - extras,
    }
    for phase in EVERY_STEP:
        per_token = column(f"time/{phase}") / tokens.where(tokens > 0)
        columns[PER_TOKEN.format(phase)] = per_token
    columns |= dict(run.metrics.frame.items())
    return replace(run, metrics=Metrics(frame_of(steps, columns)))


@dataclass(frozen=True)
class JudgedSeries(Track):
    """The series that a rule judges, and its run."""

    run: RunData
    bound: float = 0.0
    """Value of the config key `FindingRule.bound`."""
    hits: tuple[int, ...] = ()
    """Steps that the finding refers to (`FindingRule.steps`)."""

    @property
    def peak(self) -> int:
        """Step of the largest value among `hits`."""
        return int(self.series[list(self.hits)].idxmax())

    @property
    def most(self) -> float:
        """Largest value at `hits`."""
        return float(self.series[self.peak])

    def other(self, metric: str) -> Track:
        """Return another metric of the run."""
        return track(self.run, metric)


def track(run: RunData, metric: str) -> Track:
    """Return a metric of a run."""
    return Track(run.metrics.series(metric).dropna())


def always(series: JudgedSeries) -> bool:
    """Condition that always holds. The finding then depends only on `FindingRule.steps`."""
    return True


@dataclass(frozen=True)
class FindingRule:
    """A possible finding on one series.

    Title, text and setting are format templates. `s` is the series, `steps` lists its `hits`. `!p`
    formats a share in percent, `!n` a number for people.
    """

    metric: str
    """Column of judged()."""
    when: Mapping[Level, Callable[[JudgedSeries], Any]]
    """Level -> condition. The first condition that holds gives the level of the finding."""
    title: str
    text: str
    setting: str | None = None
    trend: bool = False
    """Judge only series that are long enough for trends (Track.is_long)."""
    only: Callable[[RunData], bool] = lambda run: True
    """Judge only runs for which this is True."""
    bound: str | None = None
    """Config key of a number above 0, available as `s.bound`. Runs without it are not judged."""
    steps: Callable[[JudgedSeries], Sequence[int]] = lambda s: list(s.series.index)
    """Steps that the finding refers to. Without steps there is no finding."""
    facts: Callable[[JudgedSeries], Mapping[str, Any]] = lambda series: {}
    """Additional fields of the templates."""
    chart: str | None = None

    def __call__(self, run: RunData) -> Iterator[Finding]:
        """Yield the finding if the rule applies to the run."""
        bound = run.number(self.bound) if self.bound else 0.0
        if not self.only(run) or bound is None or (self.bound and bound <= 0):
            return
        series = JudgedSeries(track(run, self.metric).series, run, bound)
        if not series or (self.trend and not series.is_long):
            return
        series = replace(series, hits=tuple(self.steps(series)))
        level = next((level for level, holds in self.when.items() if holds(series)), None)
        if level and series.hits:
            fields = {"s": series, "steps": named(series.hits), **self.facts(series)}
            parts = (self.title, self.text, self.setting or "")
            title, text, setting = (_WORDS.vformat(part, (), fields) for part in parts)
            yield Finding(level, title, text, self.metric, setting or None, self.chart)


RunRule = Callable[[RunData], Iterator[Finding]]
"""A FindingRule, or a function that combines several series."""


def first_of(*rules: RunRule) -> RunRule:
    """Return a rule that yields the findings of the first of `rules` that has any."""

    def apply(run: RunData) -> Iterator[Finding]:
        yield from next(filter(None, (list(rule(run)) for rule in rules)), [])

    return apply


class _Words(Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        convert = {"p": percent, "n": number}.get(conversion or "")
        return convert(value) if convert else super().convert_field(value, conversion)


_WORDS = _Words()
