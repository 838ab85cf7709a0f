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
from dapo_megatron.report import figures
from dapo_megatron.report.charts import PALETTE, Chart, chart_of, charts
from dapo_megatron.report.derived import OUTCOMES, totals
from dapo_megatron.report.figures import Figure
from dapo_megatron.report.findings import Finding, findings
from dapo_megatron.report.headline import facts, headline
from dapo_megatron.report.rollouts import COLUMNS, MAX_BYTES, Rollouts, Steps, rollouts
from dapo_megatron.report.run_data import RunData
from dapo_megatron.report.timeline import Timeline, timelines
from dapo_megatron.report.wording import encodable, number
from dapo_megatron.text import visible

SCRIPTS = ("viewer.js", "rollouts.js", "app.js")
"""Scripts in page/, in loading order, after plotly."""

SMOOTHING, SMOOTHED_STEPS = 0.6, 100
"""Initial weight of the smoothing, and the number of steps from which it is on initially."""


@dataclass(frozen=True)
class Options:
    """Options of a report."""

    completions: int = 2000
    """Number of completions in the report, over all runs."""
    tickets: tuple[int, ...] = ()
    """Groups that are always included."""
    steps: Steps = (None, None)
    """First and last step whose rollouts are included."""


@dataclass(frozen=True)
class View:
    """Contents of a run for page.html.j2."""

    run: RunData
    color: str
    headline: str
    facts: list[tuple[str, str]]
    findings: list[tuple[Finding, Chart | None]]
    warnings: list[str]
    totals: list[tuple[str, int, float]]
    """(Outcome in words, number of groups, share of the issued groups)."""
    timelines: list[Timeline]
    timeline_note: str
    rollouts: Rollouts | None
    """None if none are recorded."""


@dataclass(frozen=True)
class Contents:
    """Contents of a page."""

    views: list[View]
    charts: dict[str, list[Chart]]
    """Section -> charts for which some run has data."""
    figures: dict[str, list[Figure]]
    """Id of a chart or timeline -> its figure, or one figure per run."""


def contents(runs: Sequence[RunData], options: Options) -> Contents:
    """Return the contents of the report of these runs. The first run is selected initially."""
    names = Counter(run.name for run in runs)
    runs = [
        replace(run, name=visible(f"{run.name} ({run.path})" if names[run.name] > 1 else run.name))
        for run in runs
    ]
    thinned = [replace(run, metrics=figures.thin(run.metrics)) for run in runs]
    drawn = {
        chart.id: figures.draw(chart, thinned) for section in charts().values() for chart in section
    }
    views = [_view(run, index, len(runs), options) for index, run in enumerate(runs)]
    for index, view in enumerate(views):
        for timeline in view.timelines:
            drawn[f"timeline-{index}-{timeline.step}"] = [timeline.figure]
    shown = {
        name: [chart for chart in section if drawn[chart.id]] for name, section in charts().items()
    }
    return Contents(views, shown, {name: made for name, made in drawn.items() if made})


def _view(run: RunData, index: int, num_runs: int, options: Options) -> View:
    share = -(-options.completions // num_runs)
    selected = rollouts(run, share, options.tickets, options.steps, MAX_BYTES // num_runs)
    sums = totals(run)
    words = {"issued": "issued", **OUTCOMES, "open": "carried on, open", "unaccounted": "missing"}
    drawn, note = timelines(run)
    return View(
        run=run,
        color=PALETTE[index % len(PALETTE)],
        headline=headline(run),
        facts=facts(run),
        findings=[(finding, chart_of(finding.metric)) for finding in findings(run)],
        warnings=[*run.warnings, *(selected.warnings if selected is not None else ())],
        totals=[
            (word, sums[name], sums[name] / (sums["issued"] or 1))
            for name, word in words.items()
            if sums.get(name)
        ],
        timelines=drawn,
        timeline_note=note,
        rollouts=selected,
    )


# ---------------------------------------------------------------------------- the file


def render(page: Contents) -> str:
    """Return the HTML of the page."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [view.run.name for view in page.views]
    longest = max(len(view.run.steps) for view in page.views)
    groups = {
        f"{index}-{ticket}": Markup(base64.b64encode(data).decode())
        for index, view in enumerate(page.views)
        if view.rollouts is not None
        for ticket, data in view.rollouts.groups.items()
    }
    text = environment.get_template("page.html.j2").render(
        title=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        views=page.views,
        charts=page.charts,
        missing={
            name: [chart.title for chart in section if chart not in page.charts[name]]
            for name, section in charts().items()
        },
        stride=figures.stride_of(longest),
        columns=COLUMNS,
        smoothing=SMOOTHING if longest >= SMOOTHED_STEPS else 0,
        number=number,
        nonce=secrets.token_urlsafe(16),
        style=Markup(_part("style.css")),
        scripts=[_script(_plotly()), *(_script(_part(name)) for name in SCRIPTS)],
        data=Markup(packed({"templates": figures.TEMPLATES, "figures": page.figures})),
        groups=groups,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        version=dapo_megatron.__version__,
    )
    return encodable(text)


def _finalize(value: Any) -> Any:
    """Make hidden characters visible in texts that the template writes."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def packed(value: Any) -> str:
    """Return a value as base64 of gzipped JSON."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


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
