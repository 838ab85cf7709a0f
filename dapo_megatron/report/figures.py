"""Figures of the charts, in the JSON format of plotly.js."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd

from dapo_megatron.report.charts import PALETTE, PHASE_COLORS, Chart
from dapo_megatron.report.run_data import Evaluation, RunData
from dapo_megatron.report.wording import significant
from dapo_megatron.text import visible

Figure = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MAX_LEGEND = 8
"""With more curves than this, there is no legend, and the tooltip shows only the nearest curve."""
MAX_POINTS = 2000
"""Maximum number of points of a curve. Longer curves are thinned."""


def _template(text: str, lines: str, ground: str) -> Figure:
    axis = {"gridcolor": lines, "linecolor": lines, "zeroline": False}
    layout = {
        "margin": {"l": 68, "r": 14, "t": 30, "b": 42},
        "paper_bgcolor": ground,
        "plot_bgcolor": ground,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": text},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": ground, "font": {"color": text}, "namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "colorway": PALETTE,
        "xaxis": {**axis, "showgrid": False, "ticks": "outside", "tickcolor": lines},
        "yaxis": {**axis, "nticks": 6, "exponentformat": "power"},
    }
    return {"layout": layout}


TEMPLATES = {
    "light": _template("#646b73", "#e4e5e2", "#ffffff"),
    "dark": _template("#9aa3ac", "#2c3238", "#1b1f23"),
}
"""Theme of page/style.css -> Plotly template of all figures."""


def plain(text: str) -> str:
    """Escape text for Plotly, which interprets HTML tags."""
    return escape(visible(text), quote=False)


def stride_of(num_steps: int) -> int:
    """Return the number of steps per drawn point."""
    return max(1, -(-num_steps // MAX_POINTS))


def thin(frame: pd.DataFrame) -> pd.DataFrame:
    """Aggregate the steps into at most MAX_POINTS buckets, one row per bucket at its last step.
    Values are means, but maxima for metrics that are maxima, so that no peak is lost."""
    stride = stride_of(len(frame))
    if stride == 1:
        return frame
    functions = {name: "max" if name.endswith(("_max", "/max")) else "mean" for name in frame}
    thinned = frame.groupby(np.arange(len(frame)) // stride).agg(functions)
    lasts = frame.index[np.minimum(np.arange(1, len(thinned) + 1) * stride, len(frame)) - 1]
    return thinned.set_axis(lasts)


def draw(chart: Chart, runs: Sequence[RunData]) -> list[Figure]:
    """Return one figure with the curves of all runs or, of a stacked chart, one figure per run. The
    list is empty if no run has data. The metrics of `runs` are thinned."""
    traces = [_traces(chart, run) for run in runs]
    if not any(traces):
        return []
    if len(runs) > 1 and chart.kind != "stacked":
        for index, run in enumerate(runs):
            _mark(traces[index], run.name, PALETTE[index % len(PALETTE)])
        traces = [[trace for of_run in traces for trace in of_run]]
    return [_figure(chart, group) for group in traces]


def _mark(traces: list[Figure], name: str, color: str) -> None:
    """Give the traces of a run its name and color, and each a dash."""
    for trace, dash in zip(traces, cycle(DASHES)):
        trace["name"] = f"{plain(name)} · {trace['name']}"
        trace["line"] |= {"color": color, "dash": dash}


def _figure(chart: Chart, traces: list[Figure]) -> Figure:
    is_share = chart.unit.startswith(("share", "mean accuracy"))
    y_axis: Figure = {
        "title": {"text": chart.unit + (", log scale" if chart.kind == "log" else "")},
        "tickformat": ".3~%" if is_share else "",
        "hoverformat": ".3~%" if is_share else ".4~g",
    }
    if chart.kind == "log":
        y_axis |= {"type": "log", "dtick": 1}
    elif min((value for trace in traces for value in trace["y"] if value), default=0) >= 0:
        y_axis["rangemode"] = "tozero"
    layout: Figure = {
        "xaxis": {"title": {"text": "rollout step"}, "tickformat": ",d"},
        "yaxis": y_axis,
        "showlegend": len(traces) <= MAX_LEGEND,
    }
    if len(traces) > MAX_LEGEND:
        layout["hovermode"] = "closest"
    if not traces:
        text = {"text": "not recorded by this run", "showarrow": False}
        layout["annotations"] = [{**text, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}]
    return {"data": traces, "layout": layout}


def _traces(chart: Chart, run: RunData) -> list[Figure]:
    traces = [
        _curve(chart, run.metrics[metric], label)
        for metric, label in chart.series.items()
        if metric in run.metrics
    ]
    if chart.evaluations:
        curves = evaluation_curves(run.evaluations)
        traces += [
            _evaluation(name, curve)
            for name, curve in curves.items()
            if chart.draws(f"eval/{name}")
        ]
    for trace, color in zip(traces, cycle(PALETTE)):
        trace["line"].setdefault("color", color)
    return traces


def _curve(chart: Chart, series: pd.Series, label: str) -> Figure:
    line: Figure = {"width": 1.8, "dash": "dash" if "planned" in label else "solid"}
    if color := PHASE_COLORS.get(label.partition(",")[0]):
        line["color"] = color
    trace: Figure = {
        "type": "scatter",
        "x": series.index.tolist(),
        "y": _values(series),
        "name": label,
        "mode": "lines" if len(series) > 1 else "markers",
        "line": line,
    }
    if chart.kind == "stacked":
        trace |= {"y": _values(series.fillna(0)), "stackgroup": "all"}
    return trace


def _evaluation(name: str, points: pd.DataFrame) -> Figure:
    """Return points with error bars for their intervals."""
    above = _values((points["high"] - points["value"]).fillna(0))
    below = _values((points["value"] - points["low"]).fillna(0))
    return {
        "type": "scatter",
        "x": points.index.tolist(),
        "y": _values(points["value"]),
        "name": plain(name.replace("/", " ")),
        "mode": "lines+markers",
        "line": {"width": 2},
        "error_y": {"type": "data", "symmetric": False, "array": above, "arrayminus": below},
    }


def evaluation_curves(evaluations: Sequence[Evaluation]) -> dict[str, pd.DataFrame]:
    """Return <set>/<figure> -> table of value, low and high by step. Of pass@1, pass@2, pass@4 only
    the figure with the most samples is returned. Counts (`ungraded`) are omitted."""
    curves: dict[tuple[str, str], dict[int, list[Evaluation]]] = {}
    for point in evaluations:
        if match := re.fullmatch(r"(\w+)@(\d{1,9})", point.metric):
            by_samples = curves.setdefault((point.set, match[1]), {})
            by_samples.setdefault(int(match[2]), []).append(point)
    chosen = {}
    for (name, _), by_samples in curves.items():
        points = by_samples[max(by_samples)]
        table = pd.DataFrame(points).set_index("step")[["value", "low", "high"]]
        chosen[f"{name}/{points[0].metric}"] = table.astype("float64")
    return chosen


def _values(series: pd.Series) -> list[float | None]:
    """Return values for JSON: None for NaN, rounded to six digits to halve the file size."""
    return [significant(value, 6) for value in series.tolist()]
