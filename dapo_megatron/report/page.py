"""The report's one HTML file. It loads nothing: styles, scripts, charts and data are inside, and
its Content-Security-Policy forbids the rest.

Text of runs is escaped by the template; data for the scripts is base64 of gzip of JSON, so that
nothing in it can end a script element.
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
from dapo_megatron.report.charts import CHARTS, Chart, chart_of, columns_of, recorded
from dapo_megatron.report.curves import Look
from dapo_megatron.report.figures import RunCurves
from dapo_megatron.report.finding import Finding
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.provenance import facts, headline, provenance
from dapo_megatron.report.rollouts import Rollouts, rollouts
from dapo_megatron.report.rollouts_table import COLUMNS, Filter
from dapo_megatron.report.rules import findings
from dapo_megatron.report.wording import number, visible

SCRIPTS = ("viewer.js", "rollouts.js", "app.js")
"""After plotly, in this order."""
STYLES = ("style.css", "rollouts.css")

SMOOTHING, SMOOTHED_STEPS = 0.6, 100
"""Weight of the smoothing at first, and the steps from which runs are smoothed at all."""

LEVELS = {
    "good": ("✓", "good"),
    "note": ("i", "note"),
    "warn": ("!", "warning"),
    "bad": ("✕", "problem"),
}
"""Level of a finding -> sign and word: never colour alone."""

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
    """Parts of the runs that go into the report."""

    completions: int = 2000
    """Rollouts kept, over all runs."""
    tickets: tuple[int, ...] = ()
    """Groups that are kept whatever else is."""
    steps: tuple[int | None, int | None] | None = None
    """First and last step whose rollouts are kept."""
    refresh_seconds: float | None = None
    """The page loads itself again so often; None: never."""


@dataclass(frozen=True)
class View:
    """A run's texts, for page.html.j2."""

    run: RunData
    headline: str
    facts: list[tuple[str, str]]
    findings: list[Finding]
    provenance: list[dict[str, Any]]
    warnings: list[str]
    stride: int
    totals: list[tuple[str, int, float | None]]
    notes: dict[str, str]
    """Notes to read before a section's charts, by section."""
    timelines: list[timeline.Timeline]
    timeline_note: str | None
    rollouts: Rollouts | None
    """None if none are recorded."""


@dataclass(frozen=True)
class Payload:
    data: dict[str, Any]
    """For the scripts: {refresh_seconds, templates, charts, timelines, runs}."""
    blobs: dict[str, bytes]
    """JSON that is opened one by one."""
    views: list[View]
    looks: list[Look]
    charts: list[Chart]
    missing: dict[str, list[str]]
    """Titles of the charts that no run has anything for, by section."""


def make_payload(runs: Sequence[RunData], options: Options) -> Payload:
    """Return the contents of the report of these runs, the first one chosen."""
    runs = _told_apart(runs)
    frames = [columns_of(run).dropna(axis=1, how="all") for run in runs]
    names = {point.figure for run in runs for point in run.evaluations}
    shown = recorded(CHARTS, {name for frame in frames for name in frame}, names)
    missing: dict[str, list[str]] = {}
    for chart in CHARTS:
        if chart.id not in {chart.id for chart in shown}:
            missing.setdefault(chart.section, []).append(chart.title)
    share = -(-options.completions // len(runs))
    blobs: dict[str, bytes] = {}
    views: list[View] = []
    for place, run in enumerate(runs):
        kept = rollouts(run, share, options.tickets, options.steps)
        views.append(_view(run, shown, kept))
        if kept is not None:
            blobs |= {f"{place}-{ticket}": blob for ticket, blob in kept.blobs.items()}
    looks = curves.looks(runs)
    drawn = [
        RunCurves(run.name, curves.thin(frame), curves.evaluation_curves(run.evaluations), look, at)
        for place, (run, frame) in enumerate(zip(runs, frames, strict=True))
        for at, look in enumerate(looks)
        if place in look.runs
    ]
    data = {
        "refresh_seconds": options.refresh_seconds,
        "templates": figures.TEMPLATES,
        "charts": {chart.id: figures.draw(chart, drawn) for chart in shown},
        "timelines": {
            f"timeline-{place}-{one.step}": [one.figure]
            for place, view in enumerate(views)
            for one in view.timelines
        },
        "runs": [{"name": run.name} for run in runs],
    }
    return Payload(data, blobs, views, looks, shown, missing)


def _view(run: RunData, charts: Sequence[Chart], kept: Rollouts | None) -> View:
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
        warnings=[*run.warnings, *(kept.warnings if kept is not None else ())],
        stride=curves.stride_of(len(run.metrics.steps)),
        totals=groups.totals_table(run),
        notes={section: note for section, note in notes.items() if note},
        timelines=timeline.timelines(run),
        timeline_note=timeline.note(run),
        rollouts=kept,
    )


def _told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Name runs of one name also by their folders, and show all characters of a name."""
    names = Counter(run.name for run in runs)
    return [
        replace(run, name=visible(f"{run.name} ({run.path})" if names[run.name] > 1 else run.name))
        for run in runs
    ]


# ---------------------------------------------------------------------------- the file


def render(payload: Payload) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_seen,
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
        looks=payload.looks,
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
    # A lone surrogate, as a tokenizer's broken bytes leave it, is no UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _seen(value: Any) -> Any:
    """Show all characters of what the template writes of a run."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def packed(value: Any) -> str:
    """JSON, gzip, base64."""
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
    """A script as it stands between its tags."""
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a script that ends its own element")
    return Markup(text)
