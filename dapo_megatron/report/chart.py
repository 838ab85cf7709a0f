"""A chart of the report, and the choice of charts that have data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Section = Literal["dynamics", "groups", "time"]


@dataclass(frozen=True)
class Chart:
    """A chart over the rollout steps, with a help text for newcomers."""

    section: Section
    id: str
    title: str
    help: str
    y: str
    """Title of the y axis, with its unit."""
    series: Mapping[str, str] = field(default_factory=dict)
    """Metric -> label."""
    tick: str = ""
    """d3 format of the y axis."""
    ghosts: tuple[str, ...] = ()
    """Keys of curves.GHOSTS, drawn if the reader enables the paper's curves."""
    evaluations: tuple[str, ...] = ()
    """Prefixes of evaluation metrics ("avg@"): points with 95% intervals, one trace per set."""
    stacked: bool = False
    lines: tuple[str, ...] = ()
    """Metrics drawn as lines over the stack."""
    colors: Mapping[str, int] = field(default_factory=dict)
    """Metric -> index in curves.PALETTE. Default: its position in the chart."""
    log: bool = False

    @property
    def overlay(self) -> bool:
        """True if one figure shows all runs, False if each run has a figure."""
        return self.section == "dynamics"

    def draws(self, figure: str) -> bool:
        """Return True if the chart draws an evaluation metric such as avg@4."""
        return bool(self.evaluations) and figure.startswith(self.evaluations)


def charts_with_data(charts: Iterable[Chart], names: set[str], figures: set[str]) -> list[Chart]:
    """Return the charts that have data, each without the series that no run has.

    names     metrics that some run has a value of
    figures   evaluation metrics that some run has, such as avg@4
    """
    shown = []
    for chart in charts:
        series = {metric: label for metric, label in chart.series.items() if metric in names}
        if series or any(map(chart.draws, figures)):
            shown.append(replace(chart, series=series))
    return shown


def chart_of(metric: str | None, charts: Sequence[Chart]) -> str | None:
    """Return the id of the first chart that shows a metric or an evaluation metric
    (eval/<set>/<figure>); None without one."""
    prefix, _, figure = (metric or "").rpartition("/")
    is_evaluation = prefix.startswith("eval/")
    for chart in charts:
        if metric in chart.series or (is_evaluation and chart.draws(figure)):
            return chart.id
    return None
