"""Plotly figures of the charts, as plain dictionaries that the page shows as they are.

A colour is a variable of page/style.css, `var(--series-0)`, or with an opacity in hexadecimal
`var(--series-0, 8c)`: one figure serves the light and the dark theme. `meta` of a trace names the
look it belongs to and, if it can be smoothed, the hover text of the smoothed curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from dapo_megatron.report import curves
from dapo_megatron.report.charts import Chart, Series
from dapo_megatron.report.curves import Look

Figure = dict[str, Any]
Trace = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MANY = 8
"""Curves in a chart from which the pointer names one at a time and the label only their number."""
MANY_BARS = 250
"""Steps from which bars are drawn as an area: nobody could tell a bar from its neighbour."""
PAPER_RATIO = 3.0
"""Ratio of the paper's largest value to the run's, or inverse, from which it has its own axis."""

CLEAR = "rgba(0,0,0,0)"
_AXIS = {
    "gridcolor": "var(--line)",
    "linecolor": "var(--line)",
    "tickcolor": "var(--line)",
    "zeroline": False,
    "title": {"standoff": 10, "font": {"size": 12}},
}
_RIGHT_AXIS = {
    "overlaying": "y",
    "side": "right",
    "showgrid": False,
    "tickmode": "auto",  # not at the ticks of the left axis
    "nticks": 5,
}

TEMPLATE: Figure = {
    "layout": {
        "margin": {"l": 68, "r": 14, "t": 30, "b": 42},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"},
        "hoverlabel": {
            "bgcolor": "var(--panel)",
            "bordercolor": "var(--line)",
            "namelength": 48,
            "font": {"color": "var(--fg)", "size": 12},
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "bargap": 0.15,
        "barmode": "stack",
        "xaxis": {**_AXIS, "showgrid": False, "ticks": "outside", "ticklen": 4},
        "yaxis": {**_AXIS, "nticks": 6, "exponentformat": "power"},
    }
}
"""Style of every figure of the page."""


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run, thinned."""

    name: str
    steps: list[int]
    columns: dict[str, list[float | None]]
    evaluations: list[dict[str, Any]]
    """See curves.evaluation_curves."""
    look: Look
    look_number: int


@dataclass(frozen=True)
class Row:
    """First, last, lowest and highest value of a curve, each with its step, in words."""

    name: str
    look: int
    values: list[tuple[str, int]]


@dataclass
class Drawing:
    """A figure and the same in words."""

    figure: Figure
    rows: list[Row] = field(default_factory=list)


def draw(chart: Chart, runs: Sequence[RunCurves]) -> list[Drawing]:
    """Return one drawing of all runs, or one of each run."""
    steps = [step for run in runs for step in run.steps]
    low, high = min(steps, default=0), max([1, *steps])
    reach = (low if low > 1 else 0, high)
    sets = list(dict.fromkeys(curve["set"] for run in runs for curve in run.evaluations))
    groups = [runs] if chart.overlay else [[run] for run in runs]
    return [_draw(chart, group, sets, reach) for group in groups]


def plain(text: str) -> str:
    """Return text as Plotly shows it, which takes tags for markup."""
    return escape(text, quote=False)


def slot(number: int, opacity: str = "") -> str:
    """Return a series colour of the style sheet."""
    return f"var(--series-{number % curves.COLORS}{opacity and f', {opacity}'})"


def _draw(
    chart: Chart, runs: Sequence[RunCurves], sets: list[str], reach: tuple[int, int]
) -> Drawing:
    is_one = len(runs) == 1
    traces = _evaluations(chart, runs, sets)
    for run in runs:
        for place, series in enumerate(chart.series):
            if series.metric in run.columns:
                traces.append(_curve(chart, run, place, is_one))
    rows = [_row(chart, trace) for trace in traces]
    for trace in traces:
        del trace["measured"]
        trace["name"] = plain(trace["name"])
    layout = _layout(chart, traces, reach)
    legend = [] if is_one else _legend(traces)
    told = legend or [trace for trace in traces if is_one]
    layout["showlegend"] = len(told) > 1 or bool(is_one and chart.evaluations)
    if len(rows) > MANY:
        _name_one_at_a_time(layout, traces)
    figure: Figure = {"data": [*traces, *legend], "layout": layout}
    figure["label"] = f"{chart.title}. {_in_words(rows) or 'Not recorded'}."
    figure["paper"] = {
        mode: _paper(chart, traces, reach, is_whole=mode == "all")
        for mode in ("run", "all")
        if chart.ghosts
    }
    return Drawing(figure, rows)


# ---------------------------------------------------------------------------- traces


def _stroke(run: RunCurves, is_one: bool, place: int, series: Series) -> dict[str, Any]:
    """One run: a colour for each series. Several: colour and width tell the run, dashes the
    series."""
    if is_one:
        color = place if series.color is None else series.color
        return {"color": slot(color), "dash": DASHES[series.dash], "width": 1.8}
    return {
        "color": slot(run.look.color),
        "dash": DASHES[place % len(DASHES)],
        "width": run.look.width,
    }


def _curve(chart: Chart, run: RunCurves, place: int, is_one: bool) -> Trace:
    series, values = chart.series[place], run.columns[chart.series[place].metric]
    label = series.label if is_one or len(chart.series) > 1 else ""
    trace: Trace = {
        "type": "scatter",
        "mode": "lines" if len(run.steps) > 1 else "markers",
        "x": run.steps,
        "y": values,
        "name": label if is_one else " · ".join(filter(None, (run.name, label))),
        "yaxis": series.axis,
        "meta": {"look": run.look_number},
        "measured": values,
    }
    if not chart.stacked:
        line = _stroke(run, is_one, place, series)
        trace |= {"line": line, "legendgroup": series.label}
        trace["marker"] = {"color": line["color"], "size": 6}
        if chart.smooth:
            shown = _hover_format(chart.y_tick_format)
            trace["meta"]["smooth"] = f"%{{customdata:{shown}}} (smoothed %{{y}})"
        return trace
    color = slot(place if series.color is None else series.color)
    if series.line:
        return trace | {"mode": "lines", "line": {"color": color, "width": 2}}
    trace["y"] = [value or 0 for value in values]
    if chart.stacked == "bars" and len(run.steps) <= MANY_BARS:
        del trace["mode"]
        return trace | {"type": "bar", "marker": {"color": color}}
    line = {"color": color, "width": 0.8}
    trace |= {"mode": "lines", "stackgroup": "all", "line": line}  # the fill is half transparent
    if chart.stacked == "bars":
        trace |= {"line": {"color": color, "width": 0, "shape": "hvh"}, "fillcolor": color}
    return trace


def _evaluations(chart: Chart, runs: Sequence[RunCurves], sets: list[str]) -> list[Trace]:
    return [
        _evaluation(chart, run, curve, kind, sets.index(curve["set"]), len(runs))
        for run in runs
        for curve in run.evaluations
        for kind, prefix in enumerate(chart.evaluations)
        if curve["figure"].startswith(prefix)
    ]


def _evaluation(
    chart: Chart, run: RunCurves, curve: dict[str, Any], kind: int, place: int, num_runs: int
) -> Trace:
    """Points of a figure on a set, with their intervals. `kind` and `place` number the two."""
    is_one, is_many = num_runs == 1, num_runs > MANY
    label, shown = f"{curve['set']} {curve['figure']}", _hover_format(chart.y_tick_format)
    line: dict[str, Any] = {"color": slot(place), "dash": DASHES[kind], "width": 2}
    if not is_one:
        line = _stroke(run, False, kind + len(chart.evaluations) * place, Series("", ""))
    values = [value for _, value, _, _ in curve["points"]]
    ends = [
        (value if low is None else low, value if high is None else high)
        for _, value, low, high in curve["points"]
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [step for step, *_ in curve["points"]],
        "y": values,
        "name": label if is_one else f"{run.name} · {label}",
        "legendgroup": plain(label),
        "line": line,
        "marker": {"color": line["color"], "size": 4 + line["width"]},
        "error_y": {
            "symmetric": False,
            "array": [high - value for value, (_, high) in zip(values, ends)],
            "arrayminus": [value - low for value, (low, _) in zip(values, ends)],
            "color": line["color"].replace(")", ", 33)" if is_many else ", 8c)"),
            "thickness": 1.5,
            "width": 0 if is_many else 4,
        },
        "customdata": ends,
        "hovertemplate": f"%{{y}} (%{{customdata[0]:{shown}}} to %{{customdata[1]:{shown}}})",
        "meta": {"look": run.look_number},
        "measured": values,
    }


def _legend(traces: Sequence[Trace]) -> list[Trace]:
    """Return an entry for each dash. Colours are explained once for the page, by its buttons."""
    dashes = {trace["legendgroup"]: trace["line"]["dash"] for trace in reversed(traces)}
    for trace in traces:
        trace["showlegend"] = False
    entries = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [None],
            "y": [None],
            "name": label,
            "legendgroup": label,
            "line": {"color": "var(--fg)", "dash": dash, "width": 1.8},
        }
        for label, dash in reversed(dashes.items())
    ]
    return entries if len(entries) > 1 else []


def _paper(chart: Chart, traces: Sequence[Trace], reach: tuple[int, int], is_whole: bool) -> Figure:
    """Return the paper's curves, over the steps of the runs or whole, and what they change of the
    layout. They have an axis of their own where one of the two would lie flat on a common one."""
    drawn = []
    for place, curve in enumerate(curves.ghosts(chart.ghosts).values()):
        points = [point for point in curve["points"] if is_whole or point[0] <= reach[1]]
        drawn.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [step for step, _ in points],
                "y": [value for _, value in points],
                "name": f"{curve['label']} ({curve['source']})",
                "line": {"color": "var(--muted)", "width": 1.6, "dash": DASHES[(2 + place) % 4]},
            }
        )
    theirs, own = _values(drawn), _values(traces)
    end = max([reach[1], *(step for trace in drawn for step in trace["x"])])
    layout: Figure = {"xaxis": {"range": _padded(reach[0], end)}, "showlegend": True}
    ratio = max(map(abs, theirs), default=0) / (max(map(abs, own), default=0) or math.inf)
    if theirs and own and not 1 / PAPER_RATIO <= ratio <= PAPER_RATIO:
        for trace in drawn:
            trace["yaxis"] = "y2"
        axis = {"title": {"text": f"paper: {chart.y}"}, "tickformat": chart.y_tick_format}
        layout["yaxis2"] = {**axis, **_RIGHT_AXIS, **_fit(chart, theirs)}
        layout["margin"] = {"r": 68}
    else:
        layout["yaxis"] = _fit(chart, [*own, *theirs])
    return {"data": drawn, "layout": layout}


# ---------------------------------------------------------------------------- layout


def _layout(chart: Chart, traces: Sequence[Trace], reach: tuple[int, int]) -> Figure:
    layout: Figure = {
        "hovermode": "x unified",
        "xaxis": {
            "range": _padded(*reach),
            "tickformat": ",d",
            "title": {"text": "rollout step"},
            "unifiedhovertitle": {"text": "step %{x}"},
        },
        "yaxis": {
            "title": {"text": chart.y},
            "tickformat": chart.y_tick_format,
            "hoverformat": _hover_format(chart.y_tick_format),
            **({"range": chart.y_range} if chart.y_range else {}),
            **_fit(chart, _values(traces)),
        },
    }
    if chart.y2:
        layout["margin"] = {"r": 68}
        layout["yaxis2"] = {
            "title": {"text": chart.y2},
            "tickformat": chart.y2_tick_format,
            "hoverformat": _hover_format(chart.y2_tick_format),
            **_RIGHT_AXIS,
            **_fit(None, _values(traces, "y2")),
        }
    if not traces:
        text = {"text": "not recorded by this run", "showarrow": False}
        layout["annotations"] = [{**text, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}]
    return layout


def _padded(low: float, high: float) -> list[float]:
    pad = max(0.5, 0.015 * (high - low))
    return [low - pad, high + pad]


def _values(traces: Iterable[Trace], axis: str = "y") -> list[float]:
    on_axis = (trace["y"] for trace in traces if trace.get("yaxis", "y") == axis)
    return [value for values in on_axis for value in values if value is not None]


def _fit(chart: Chart | None, values: Sequence[float]) -> dict[str, Any]:
    """An axis of what is never negative does not go below 0, and that of a constant begins there.
    A log axis has a few labels."""
    if chart and chart.log_y:
        positive = [math.log10(value) for value in values if value > 0] or [0.0]
        return {"type": "log", "dtick": max(1, math.ceil((max(positive) - min(positive)) / 5))}
    if min(values, default=-1) < 0:
        return {}
    from_zero = (chart is not None and chart.from_zero) or min(values) == max(values)
    return {"rangemode": "tozero" if from_zero else "nonnegative"}


def _hover_format(tick_format: str) -> str:
    """Return a format of d3 for one value, finer than that of its axis."""
    if tick_format.endswith("%"):
        return ".2~%"
    return ".2e" if tick_format.endswith("e") else ".4~g"


def _name_one_at_a_time(layout: Figure, traces: Sequence[Trace]) -> None:
    """Give each curve its own box under the pointer: one for all would not fit a screen."""
    layout |= {"hovermode": "closest", "hoverlabel": {"namelength": -1}}
    for trace in traces:
        trace["hovertemplate"] = f"step %{{x}}: {trace.get('hovertemplate', '%{y}')}"
        if "smooth" in trace["meta"]:
            trace["meta"]["smooth"] = f"step %{{x}}: {trace['meta']['smooth']}"


# ---------------------------------------------------------------------------- in words


def _row(chart: Chart, trace: Trace) -> Row:
    points = [point for point in zip(trace["measured"], trace["x"]) if point[0] is not None]
    shown = chart.y2_tick_format if trace.get("yaxis") == "y2" else chart.y_tick_format
    ends = (
        [points[0], points[-1], min(points, key=_value), max(points, key=_value)] if points else []
    )
    values = [(_in_digits(value, shown), step) for value, step in ends]
    return Row(trace["name"], trace["meta"]["look"], values)


def _value(point: tuple[float, int]) -> float:
    return point[0]


def _in_digits(value: float, tick_format: str) -> str:
    if tick_format.endswith("%"):
        return f"{float(f'{100 * value:.3g}'):g}%"
    return f"{round(value):,}" if abs(value) >= 1e4 else f"{float(f'{value:.4g}'):g}"


def _in_words(rows: Sequence[Row]) -> str:
    """Return what a screen reader says of a chart."""
    said = [
        f"{row.name}: {first} at step {start}, {last} at step {end}, lowest {low}, highest {high}"
        for row in rows
        if row.values
        for (first, start), (last, end), (low, _), (high, _) in [row.values]
    ]
    return f"{len(said)} curves; see its values below" if len(said) > MANY else "; ".join(said)
