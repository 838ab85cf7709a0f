"""Renders the report as one HTML file. Styles, scripts, charts and data are embedded, and its
Content-Security-Policy forbids loading anything else.

The template escapes all text of runs. Data for the scripts is base64 of gzipped JSON, so that it
cannot end a script element.
"""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

import dapo_megatron
from dapo_megatron.report import curves, figures, groups, phases, timeline
from dapo_megatron.report.chart import Chart, chart_of, charts_with_data
from dapo_megatron.report.charts import CHARTS, columns_of
from dapo_megatron.report.curves import RunStyle
from dapo_megatron.report.figures import RunCurves
from dapo_megatron.report.finding import Finding
from dapo_megatron.report.health_rules import findings
from dapo_megatron.report.provenance import facts, headline, provenance
from dapo_megatron.report.rollouts import Rollouts, rollouts
from dapo_megatron.report.rollouts_table import COLUMNS, Filter
from dapo_megatron.report.run_data import RunData
from dapo_megatron.report.wording import number
from dapo_megatron.text import visible

SCRIPTS = ("viewer.js", "rollouts.js", "app.js")
"""Scripts in page/, in loading order, after plotly."""
STYLES = ("style.css", "rollouts.css")

SMOOTHING, SMOOTHED_STEPS = 0.6, 100
"""Initial weight of the smoothing, and the number of steps from which it is on initially."""

LEVELS = {
    "good": ("✓", "good"),
    "note": ("i", "note"),
    "warn": ("!", "warning"),
    "bad": ("✕", "problem"),
}
"""Level of a finding -> symbol and word, so that the level is not shown by color only."""

STATES = {
    "finished": "✓",
    "running": "▶",
    "stopped": "❚❚",
    "crashed": "✕",
    "hung": "✕",
    "unknown": "?",
}


@dataclass(frozen=True)
class Options:
    """Options of a report."""

    completions: int = 2000
    """Number of completions in the report, over all runs."""
    tickets: tuple[int, ...] = ()
    """Groups that are always included."""
    steps: tuple[int | None, int | None] | None = None
    """First and last step whose rollouts are included."""
    refresh_seconds: float | None = None
    """Interval at which the page reloads itself; None: never."""


@dataclass(frozen=True)
class View:
    """Contents of a run for page.html.j2."""

    run: RunData
    headline: str
    facts: list[tuple[str, str]]
    findings: list[Finding]
    provenance: list[dict[str, Any]]
    warnings: list[str]
    stride: int
    totals: list[tuple[str, int, float | None]]
    notes: dict[str, str]
    """Section -> note to show above its charts."""
    timelines: list[timeline.Timeline]
    timeline_note: str | None
    rollouts: Rollouts | None
    """None if none are recorded."""


@dataclass(frozen=True)
class Payload:
    data: dict[str, Any]
    """Data for the scripts: {refresh_seconds, templates, charts, timelines, runs}."""
    blobs: dict[str, bytes]
    """Name (run number-ticket) -> JSON of a group, which the page unpacks on demand."""
    views: list[View]
    styles: list[RunStyle]
    charts: list[Chart]
    missing: dict[str, list[str]]
    """Section -> titles of the charts that no run has data for."""


def make_payload(runs: Sequence[RunData], options: Options) -> Payload:
    """Return the contents of the report of these runs. The first run is selected initially."""
    runs = _with_unique_names(runs)
    frames = [columns_of(run).dropna(axis=1, how="all") for run in runs]
    names = {point.metric for run in runs for point in run.evaluations}
    shown = charts_with_data(CHARTS, {name for frame in frames for name in frame}, names)
    missing: dict[str, list[str]] = {}
    for chart in CHARTS:
        if chart.id not in {chart.id for chart in shown}:
            missing.setdefault(chart.section, []).append(chart.title)
    share = -(-options.completions // len(runs))
    blobs: dict[str, bytes] = {}
    views: list[View] = []
    for index, run in enumerate(runs):
        selected = rollouts(run, share, options.tickets, options.steps)
        views.append(_view(run, shown, selected))
        if selected is not None:
            blobs |= {f"{index}-{ticket}": blob for ticket, blob in selected.blobs.items()}
    styles = curves.run_styles(runs)
    run_curves = [
        RunCurves(
            run.name,
            curves.thin(frame),
            curves.evaluation_curves(run.evaluations),
            style,
            look_number,
        )
        for index, (run, frame) in enumerate(zip(runs, frames, strict=True))
        for look_number, style in enumerate(styles)
        if index in style.runs
    ]
    data = {
        "refresh_seconds": options.refresh_seconds,
        "templates": figures.TEMPLATES,
        "charts": {chart.id: figures.draw(chart, run_curves) for chart in shown},
        "timelines": {
            f"timeline-{index}-{step.step}": [step.figure]
            for index, view in enumerate(views)
            for step in view.timelines
        },
        "runs": [{"name": run.name} for run in runs],
    }
    return Payload(data, blobs, views, styles, shown, missing)


def _view(run: RunData, charts: Sequence[Chart], selected: Rollouts | None) -> View:
    notes = {"groups": groups.note(run), "time": phases.note(run)}
    return View(
        run=run,
        headline=headline(run),
        facts=facts(run),
        findings=[
            replace(finding, chart=finding.chart or chart_of(finding.metric, charts))
            for finding in findings(run)
        ],
        provenance=provenance(run),
        warnings=[*run.warnings, *(selected.warnings if selected is not None else ())],
        stride=curves.stride_of(len(run.metrics.steps)),
        totals=groups.totals_table(run),
        notes={section: note for section, note in notes.items() if note},
        timelines=timeline.timelines(run),
        timeline_note=timeline.note(run),
        rollouts=selected,
    )


def _with_unique_names(runs: Sequence[RunData]) -> list[RunData]:
    """Add the folder to names that several runs share, and make hidden characters visible."""
    names = Counter(run.name for run in runs)
    return [
        replace(run, name=visible(f"{run.name} ({run.path})" if names[run.name] > 1 else run.name))
        for run in runs
    ]


# ---------------------------------------------------------------------------- the file


def render(payload: Payload) -> str:
    """Return the HTML of the page."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [view.run.name for view in payload.views]
    longest = max(len(view.run.metrics.steps) for view in payload.views)
    text = environment.get_template("page.html.j2").render(
        title=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        views=payload.views,
        charts=payload.charts,
        missing=payload.missing,
        columns=COLUMNS,
        Filter=Filter,
        styles=payload.styles,
        smoothing=SMOOTHING if longest >= SMOOTHED_STEPS else 0,
        number=number,
        levels=LEVELS,
        states=STATES,
        nonce=secrets.token_urlsafe(16),
        style=Markup("\n".join(_part(name) for name in STYLES)),
        scripts=[_script(_plotly()), *(_script(_part(name)) for name in SCRIPTS)],
        data=Markup(packed(payload.data)),
        blobs={name: Markup(_packed(blob)) for name, blob in payload.blobs.items()},
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        version=dapo_megatron.__version__,
    )
    # UTF-8 cannot encode lone surrogates, which invalid bytes of a tokenizer may leave.
    return text.encode("utf-8", "replace").decode("utf-8")


def _finalize(value: Any) -> Any:
    """Make hidden characters visible in texts that the template writes."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def packed(value: Any) -> str:
    """Return a value as base64 of gzipped JSON."""
    return _packed(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def _part(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _script(text: str) -> Markup:
    """Mark a script as safe to embed. Raises ValueError if it would end its own element."""
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a script must not end its own element: it contains </script or <!--")
    return Markup(text)
