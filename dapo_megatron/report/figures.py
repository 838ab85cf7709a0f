"""Plotly figures of the charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from dapo_megatron.report.chart import Chart
from dapo_megatron.report.curves import PALETTE, RunStyle, ghost
from dapo_megatron.text import visible

Figure = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MANY = 8
"""With more curves than this, the tooltip shows only the nearest curve; a tooltip with all of them
would not fit the screen."""


def _template(text: str, lines: str, ground: str) -> Figure:
    axis = {"gridcolor": lines, "linecolor": lines, "zeroline": False}
    template = go.layout.Template(
        layout={
            "margin": {"l": 68, "r": 14, "t": 30, "b": 42},
            "paper_bgcolor": ground,
            "plot_bgcolor": ground,
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": text},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": ground, "font_color": text, "namelength": -1},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "barmode": "stack",
            "colorway": PALETTE,
            "xaxis": {**axis, "showgrid": False, "ticks": "outside", "tickcolor": lines},
            "yaxis": {**axis, "nticks": 6, "exponentformat": "power"},
        }
    )
    return dict(template.to_plotly_json())


TEMPLATES = {
    "light": _template("#646b73", "#e4e5e2", "#ffffff"),
    "dark": _template("#9aa3ac", "#2c3238", "#1b1f23"),
}
"""Theme of page/style.css -> Plotly template of all figures."""


@dataclass(frozen=True)
class RunCurves:
    """Thinned curves of a run."""

    name: str
    frame: pd.DataFrame
    evaluations: dict[tuple[str, str], pd.DataFrame]
    """See curves.evaluation_curves."""
    style: RunStyle
    look_number: int


def plain(text: str) -> str:
    """Escape text for Plotly, which interprets HTML tags."""
    return escape(visible(text), quote=False)


def values(series: pd.Series) -> list[float | None]:
    """Return values for JSON: None for NaN, rounded to six digits to halve the file size."""
    return [None if value != value else float(f"{value:.6g}") for value in series.tolist()]


def to_json(figure: go.Figure, **more: Any) -> Figure:
    """Return a figure as plain JSON values, with the items of `more`."""
    return {**json.loads(figure.to_json(validate=False, engine="json")), **more}


def draw(chart: Chart, runs: Sequence[RunCurves]) -> list[Figure]:
    """Return one figure with all runs, or one figure per run (Chart.overlay)."""
    return [_draw(chart, group) for group in ([runs] if chart.overlay else [[run] for run in runs])]


def _draw(chart: Chart, runs: Sequence[RunCurves]) -> Figure:
    is_one = len(runs) == 1
    traces = [trace for run in runs for trace in _curves(chart, run, is_one)]
    last = max((run.frame.index[-1] for run in runs if len(run.frame)), default=1)
    paper = [_paper(key, last) for key in chart.ghosts]
    figure = go.Figure([*traces, *paper])
    lows = [value for trace in traces for value in trace.y if value is not None]
    figure.update_xaxes(title_text="rollout step", tickformat=",d")
    figure.update_yaxes(title_text=chart.y, tickformat=chart.tick, hoverformat=_hover(chart.tick))
    if chart.log:
        figure.update_yaxes(type="log", dtick=1)
    else:
        figure.update_yaxes(rangemode="tozero" if min(lows, default=-1) >= 0 else "normal")
    figure.update_layout(showlegend=is_one or bool(paper), template=None)
    if not traces:
        text = {"text": "not recorded by this run", "showarrow": False}
        figure.add_annotation(text, xref="paper", yref="paper", x=0.5, y=0.5)
    if len(traces) > MANY:
        figure.update_layout(hovermode="closest")
    return to_json(figure)


def _curves(chart: Chart, run: RunCurves, is_one: bool) -> list[go.Scatter]:
    curves = [
        _curve(chart, run, metric, index)
        for index, metric in enumerate(chart.series)
        if metric in run.frame
    ]
    curves += [
        _evaluation(f"{name} {figure}", points)
        for (name, figure), points in run.evaluations.items()
        if chart.draws(figure)
    ]
    for index, curve in enumerate(curves):
        curve.update(meta={"look": run.look_number}, name=plain(curve.name), showlegend=is_one)
        if not is_one:
            dash = DASHES[index % len(DASHES)]
            curve.line.update(color=run.style.color, width=run.style.width, dash=dash)
            curve.update(name=f"{plain(run.name)} · {curve.name}", marker_color=run.style.color)
    return curves


def _curve(chart: Chart, run: RunCurves, metric: str, index: int) -> go.Scatter:
    color = PALETTE[chart.colors.get(metric, index) % len(PALETTE)]
    is_stacked = chart.stacked and metric not in chart.lines
    series = run.frame[metric].fillna(0) if is_stacked else run.frame[metric]
    return go.Scatter(
        x=[int(step) for step in series.index],
        y=values(series),
        name=chart.series[metric],
        mode="lines" if len(series) > 1 else "markers",
        line={"color": color, "width": 1.8, "dash": "dash" if "plan" in metric else "solid"},
        marker={"color": color},
        stackgroup="all" if is_stacked else None,
    )


def _evaluation(name: str, points: pd.DataFrame) -> go.Scatter:
    """Return points with error bars for their intervals."""
    value = points["value"]
    above, below = (points["high"] - value).fillna(0), (value - points["low"]).fillna(0)
    return go.Scatter(
        x=[int(step) for step in points.index],
        y=values(value),
        name=name,
        mode="lines+markers",
        line={"width": 2},
        error_y={"symmetric": False, "array": values(above), "arrayminus": values(below)},
    )


def _paper(key: str, last: int) -> go.Scatter:
    """Return a curve of the paper up to step `last`, hidden until the reader enables it."""
    label, points = ghost(key)
    shown = [point for point in points if point[0] <= last]
    return go.Scatter(
        x=[step for step, _ in shown],
        y=[value for _, value in shown],
        name=label,
        mode="lines",
        line={"color": "#808080", "width": 1.6, "dash": "dot"},
        meta={"paper": True},
        visible=False,
    )


def _hover(tick: str) -> str:
    """Return the d3 format of values in tooltips, with more digits than the axis format `tick`."""
    if tick.endswith("%"):
        return ".2~%"
    return ".2e" if tick.endswith("e") else ".4~g"
