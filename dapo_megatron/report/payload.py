"""All that a report holds, before it is a page: the JSON that charts are drawn from, the blobs of
rollouts, and for each run the texts that are there without any script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dapo_megatron.report import groups, memory, phases, timeline
from dapo_megatron.report.charts import CHARTS, Chart, chart_of, names_in, recorded
from dapo_megatron.report.escape import visible
from dapo_megatron.report.facts import facts, headline
from dapo_megatron.report.findings import Finding, findings
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.paper import ghosts
from dapo_megatron.report.provenance import provenance
from dapo_megatron.report.rollouts import Rollouts, rollouts
from dapo_megatron.report.run_colors import Look, looks
from dapo_megatron.report.series import Column, evaluation_curves, stride_of, thin, thin_steps


@dataclass(frozen=True)
class Options:
    """What of the runs goes into the report."""

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
    """What is to be known of this run before a section's charts are read, by section."""
    has_rollouts: bool


@dataclass(frozen=True)
class Payload:
    data: dict[str, Any]
    """For the scripts: {refresh_seconds, charts, paper, looks, runs}."""
    blobs: dict[str, bytes]
    """JSON that is opened one by one."""
    views: list[View]
    looks: list[Look]
    """How the runs are told apart in one chart."""
    missing: dict[str, list[str]]
    """Titles of the charts that no run has anything for, by section."""


def make_payload(runs: Sequence[RunData], options: Options) -> Payload:
    """What the report of these runs holds, the first one chosen."""
    runs = _told_apart(runs)
    columns = [_columns(run) for run in runs]
    defined = _defined(runs)
    shown = recorded(
        defined,
        {name for of_run in columns for name, column in of_run.items() if _has_values(column)},
        {one.figure for run in runs for one in run.evaluations},
    )
    ids = {chart["id"] for chart in shown}
    missing: dict[str, list[str]] = {}
    for chart in defined:
        if chart["id"] not in ids:
            missing.setdefault(chart["section"], []).append(chart["title"])
    share = -(-options.completions // len(runs))
    kept = [rollouts(run, share, options.tickets, options.steps) for run in runs]
    blobs: dict[str, bytes] = {}
    views, bodies = [], []
    for number, (run, found, of_run) in enumerate(zip(runs, kept, columns, strict=True)):
        view = _view(run, shown, found)
        views.append(view)
        bodies.append({**_body(view, of_run, names_in(shown)), "rollouts": None})
        if found is not None:
            bodies[-1]["rollouts"] = _renamed(found.table, number)
            blobs |= {f"{number}-{name}": blob for name, blob in found.blobs.items()}
    drawn_as = looks(runs)
    keys = dict.fromkeys(key for chart in shown for key in chart.get("ghosts", ()))
    data = {
        "refresh_seconds": options.refresh_seconds,
        "charts": shown,
        "paper": ghosts(keys),
        "looks": [asdict(look) for look in drawn_as],
        "runs": bodies,
    }
    return Payload(data, blobs, views, drawn_as, missing)


def _defined(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart there could be."""
    return [*CHARTS, *groups.CHARTS, *phases.CHARTS, *memory.charts(runs)]


def _columns(run: RunData) -> dict[str, Column]:
    made = {**groups.derived(run), **phases.derived(run), **memory.derived(run)}
    return {**run.metrics.columns, **made}


def _has_values(column: Column) -> bool:
    return any(value is not None for value in column)


def _view(run: RunData, charts: Sequence[Chart], found: Rollouts | None) -> View:
    return View(
        run=run,
        headline=headline(run),
        facts=facts(run),
        findings=[
            one if one.chart else replace(one, chart=chart_of(one.metric, charts))
            for one in findings(run)
        ],
        provenance=provenance(run),
        warnings=[*run.warnings, *(found.warnings if found is not None else ())],
        stride=stride_of(len(run.metrics.steps)),
        totals=groups.totals_table(run),
        notes={
            section: said
            for section, said in (("groups", groups.note(run)), ("time", memory.note(run)))
            if said
        },
        has_rollouts=found is not None,
    )


def _body(view: View, columns: dict[str, Column], names: set[str]) -> dict[str, Any]:
    run, stride = view.run, view.stride
    return {
        "name": run.name,
        "findings": [{"steps": one.steps, "chart": one.chart} for one in view.findings],
        "steps": thin_steps(run.metrics.steps, stride),
        "metrics": {
            name: thin(name, column, stride)
            for name, column in columns.items()
            if name in names and _has_values(column)
        },
        "evaluations": [
            {**curve, "set": visible(curve["set"])} for curve in evaluation_curves(run.evaluations)
        ],
        "timelines": timeline.timelines(run),
        "timeline_note": timeline.note(run),
    }


def _renamed(table: dict[str, Any], number: int) -> dict[str, Any]:
    """Ids of blobs are of one run; on the page they are of all."""
    return {**table, "blobs": [f"{number}-{name}" for name in table["blobs"]]}


def _told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Runs of one name also go by their folders; and a name shows all its characters."""
    names = Counter(run.name for run in runs)
    return [
        replace(run, name=visible(f"{run.name} ({run.path})" if names[run.name] > 1 else run.name))
        for run in runs
    ]
