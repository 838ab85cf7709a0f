"""The charts of the report, from the table in charts.yaml."""

from __future__ import annotations

import math
import re
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from dapo_megatron.types import Phase

PALETTE = (
    *("#2f8fd0", "#e0702b", "#1fa37a", "#c56aa2"),
    *("#b8920a", "#808080", "#7d70d8", "#58b4e0"),
)
"""Colors that are legible on light and dark backgrounds."""

PHASE_COLORS: dict[str, str] = {
    Phase.GENERATE: PALETTE[0],
    "wait for graders": PALETTE[5],
    Phase.LOGPROBS: PALETTE[4],
    Phase.UPDATE: PALETTE[2],
    Phase.SYNC: PALETTE[1],
    Phase.CHECKPOINT: PALETTE[3],
    Phase.EVALUATE: PALETTE[6],
    "the rest": PALETTE[7],
}
"""Phase -> color, in charts and timelines."""


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding about a metric that is above a bound at the end of the run."""

    metric: str
    title: str
    """With {} for the value in percent."""
    text: str
    setting: str
    """Config keys to change, see findings.Finding."""
    warn: float
    """Bound of a warning."""
    note: float = math.inf
    """Bound of a note."""


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chart over the rollout steps."""

    title: str
    unit: str
    help: str
    """A sentence or two for newcomers."""
    series: dict[str, str] = {}
    """Metric -> label."""
    kind: Literal["lines", "log", "stacked"] = "lines"
    evaluations: tuple[str, ...] = ()
    """Prefixes of evaluation metrics ("avg@"): points with 95% intervals, one trace per set."""
    bounds: list[Bound] = []

    @property
    def id(self) -> str:
        """Id of the chart in the page: "response-length"."""
        return re.sub(r"\W+", "-", self.title.lower())

    def draws(self, metric: str) -> bool:
        """Return True if the chart shows a metric, or an evaluation metric (eval/<set>/avg@4)."""
        figure = metric.rpartition("/")[2] if metric.startswith("eval/") else ""
        return metric in self.series or figure.startswith(self.evaluations)


@cache
def charts() -> dict[str, list[Chart]]:
    """Return the section of the page -> its charts."""
    text = resources.files(__package__).joinpath("charts.yaml").read_text("utf-8")
    return msgspec.yaml.decode(text, type=dict[str, list[Chart]])


def all_charts() -> list[Chart]:
    """Return the charts of all sections."""
    return [chart for section in charts().values() for chart in section]


def chart_of(metric: str | None) -> Chart | None:
    """Return the first chart that shows a metric or an evaluation metric; None without one."""
    return next((chart for chart in all_charts() if metric and chart.draws(metric)), None)
