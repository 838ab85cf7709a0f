"""Texts about a run: the headline of its report, key facts, and tables of its provenance and output
(code, versions, layout, starts, checkpoints, data, MLflow)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from dapo_megatron.files import read_json
from dapo_megatron.report.models import Provenance, Summary
from dapo_megatron.report.run_data import RunData, clock, size_of
from dapo_megatron.report.wording import span, times
from dapo_megatron.tracking.provenance import flatten
from dapo_megatron.tracking.uri import without_password
from dapo_megatron.types import CheckpointError

Rows = list[tuple[str, str]]

_CHECKPOINT = re.compile(r"step_\d+")
_MAX_TEXT = 400
_MAX_NAMES = 4
_NO_PROVENANCE, _NO_SUMMARY = Provenance(), Summary()


def headline(run: RunData) -> str:
    """Return the headline: "accuracy 0.386 → 0.887 on chain_sum_held_out (40 of 40 steps, 4
    min)"."""
    progress = _progress(run)
    means = [point for point in run.evaluations if point.metric.startswith("avg@")]
    if means:
        sets = list(dict.fromkeys(point.set for point in means))
        first, *others = [point for point in means if point.set == sets[0]]
        step = "" if others else f" at step {first.step}"
        change = " → ".join(f"{point.value:.3f}" for point in (first, *others[-1:]))
        more = f" and {len(sets) - 1} more" if len(sets) > 1 else ""
        return f"accuracy {change}{step} on {sets[0]}{more} ({progress})"
    if raw := run.metrics.values("accuracy/raw"):
        return f"accuracy {raw[0]:.3f} → {raw[-1]:.3f} on its training prompts ({progress})"
    return f"nothing measured yet ({progress})"


def _progress(run: RunData) -> str:
    done = run.metrics.last_step
    planned = run.count("train.rollout_steps")
    steps = f"{done:,} of {planned:,} steps" if planned is not None else f"{done:,} steps"
    seconds = run.summary.seconds if run.summary and run.state.has_ended else None
    return f"{steps}, {span(run.metrics.total('time/step') if seconds is None else seconds)}"


def facts(run: RunData) -> list[tuple[str, str]]:
    """Return the key facts as (label, text). Unknown facts are omitted."""
    return [(label, text) for label, text in _facts(run) if text]


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    yield "model", run.word("model.path") or ""
    names = [str(source["name"]) for source in run.sources() if source.get("name")]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    yield "trained on", ", ".join(names[:_MAX_NAMES]) + more
    keys = ("prompts_per_step", "samples_per_prompt", "max_response_tokens")
    prompts, samples, limit = (run.count(f"rollout.{key}") for key in keys)
    if prompts is not None and samples is not None and limit is not None:
        yield "per step", f"{prompts} prompts, {samples} answers each, of up to {limit} tokens"
    yield "optimizer", _optimizer(run)
    recorded, summary = run.provenance or _NO_PROVENANCE, run.summary or _NO_SUMMARY
    processes = recorded.num_processes or summary.num_processes or run.count("run.processes") or 0
    processes_text = f"{processes} process{'' if processes == 1 else 'es'}" if processes else ""
    yield "on", ", ".join(filter(None, (processes_text, recorded.devices)))
    yield "layout", recorded.facts.get("policy", "")
    started = clock(run.attempts[0].time, "%Y-%m-%d %H:%M") if run.attempts else None
    if started is not None:
        starts = f", {len(run.attempts)} starts" if len(run.attempts) > 1 else ""
        yield "started", started + starts
    speed = run.metrics.last("throughput/tokens_per_second")
    yield "speed", f"{speed:,.0f} tokens/s in the last step" if speed is not None else ""
    peak = summary.peak_memory_gib
    yield "host memory", f"peak {peak:.1f} GiB, all processes" if peak is not None else ""


def _optimizer(run: RunData) -> str:
    lr, updates = run.number("optimizer.lr"), run.count("train.updates_per_step")
    if lr is None or updates is None:
        return ""
    low, high = run.number("loss.clip_low"), run.number("loss.clip_high")
    clip = f", clip {low:g} / {high:g}" if low is not None and high is not None else ""
    return f"learning rate {lr:g}, {times(updates, 'update')} per step{clip}"


def provenance(run: RunData) -> list[dict[str, Any]]:
    """Return the tables as [{title, rows: [(key, text), ...], links: {key: URL}}]. Empty tables are
    omitted."""
    mlflow = _read(run.path / "mlflow_run.json")
    tables = {
        "Code and versions": _code(run),
        "Machines and layout": _machines(run),
        "Starts": _starts(run),
        "Checkpoints": _checkpoints(run.path / "checkpoints"),
        "MLflow": _mlflow(mlflow),
        **_data_reports(run.path / "data"),
        "Files": [("folder", str(run.path)), ("logs", str(run.path / "logs"))],
    }
    links = {"MLflow": _mlflow_links(mlflow)}
    return [
        {"title": title, "rows": rows, "links": links.get(title, {})}
        for title, rows in tables.items()
        if rows
    ]


def _code(run: RunData) -> Rows:
    tags = (run.provenance or _NO_PROVENANCE).tags
    summary = run.summary or _NO_SUMMARY
    commit = tags.get("git.commit") or summary.commit or ""
    if commit and tags.get("git.dirty") == "true":
        commit += ", with uncommitted changes"
    versions = {key: value for key, value in tags.items() if key.startswith("version.")}
    rows = {
        "commit": commit,
        **{key.removeprefix("version."): text for key, text in versions.items()},
        **({} if versions else summary.versions),
        "config.sha256": tags.get("config.sha256", ""),
    }
    return [(key, text) for key, text in rows.items() if text]


def _machines(run: RunData) -> Rows:
    recorded = run.provenance or _NO_PROVENANCE
    rows = [*recorded.facts.items()]
    rows += [("devices", recorded.devices)] if recorded.devices else []
    rows += [("processes", str(recorded.num_processes))] if recorded.num_processes else []
    # The fact "computed by" already contains the chosen.* tags.
    shown = ("host", "slurm.") if rows else ("host", "slurm.", "chosen.")
    rows += [(key, value) for key, value in recorded.tags.items() if key.startswith(shown)]
    if not rows and run.setting("policy.tensor_parallel") is not None:
        parallel = [f"{kind}_parallel" for kind in ("tensor", "pipeline", "context")]
        rows = [(key, str(run.setting(f"policy.{key}"))) for key in parallel]
    return [(key, _shortened(text)) for key, text in rows]


def _starts(run: RunData) -> Rows:
    rows = []
    for start in run.attempts:
        end = start.end or (run.state.word if start is run.attempts[-1] else "cut short")
        when = clock(start.time) or "?"
        job = f", Slurm job {start.job}" if start.job else ""
        step = "?" if start.step is None else start.step
        text = f"from step {step}; {'ended' if start.end else 'started'} {when}{job}; {end}"
        rows.append((start.attempt, text))
    return rows


def _checkpoints(folder: Path) -> Rows:
    rows = []
    for path in _listed(folder, "step_*"):
        if not path.is_dir():
            continue
        size = sum(size_of(file) for file in _listed(path, "*") if file.is_file())
        kind = "" if _CHECKPOINT.fullmatch(path.name) else ", set aside"
        rows.append((path.name, f"{size / 2**20:,.1f} MiB{kind}"))
    return rows


def _mlflow(run: Mapping[str, Any]) -> Rows:
    if not run:
        return []
    server = _server(run)
    rows = [("run", str(run.get("run_id", ""))), ("server", server)]
    if server.startswith("sqlite:"):
        rows.append(("look at it", f"mlflow ui --backend-store-uri {server}"))
    return rows


def _mlflow_links(run: Mapping[str, Any]) -> dict[str, str]:
    """Return links to the run and its server. An address that is not http(s) gets no link."""
    server = _server(run)
    try:
        parts = urlsplit(server)
    except ValueError:
        return {}
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return {}
    experiment, name = (
        quote(str(run.get(key, "")), safe="") for key in ("experiment_id", "run_id")
    )
    return {"run": f"{server.rstrip('/')}/#/experiments/{experiment}/runs/{name}", "server": server}


def _server(run: Mapping[str, Any]) -> str:
    """Return the server without a password. Older versions stored passwords, and reports are
    shared."""
    return without_password(str(run.get("server", "")))


def _data_reports(folder: Path) -> dict[str, Rows]:
    keys = ("output", "rows", "prompts", "settings", "versions")
    tables = {}
    for path in _listed(folder, "*.report.json"):
        report = _read(path)
        shown = {key: report[key] for key in keys if key in report}
        name = path.name.removesuffix(".report.json")
        tables[f"Data: {name}"] = [(key, _shortened(text)) for key, text in flatten(shown)]
    return tables


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def _listed(folder: Path, pattern: str) -> list[Path]:
    """Return the matching paths, sorted; none if the folder is missing or deleted meanwhile."""
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def _read(path: Path) -> dict[str, Any]:
    with suppress(CheckpointError):
        return read_json(path)
    return {}
