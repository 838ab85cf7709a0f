"""What a run was made with and what it left: code, versions, layout, starts, checkpoints, data,
MLflow. As titled tables of (key, text)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from dapo_megatron.files import read_json
from dapo_megatron.report.folder import RunData, clock
from dapo_megatron.tracking.uri import without_password
from dapo_megatron.types import CheckpointError

Rows = list[tuple[str, str]]

_CHECKPOINT = re.compile(r"step_\d+")
_MAX_TEXT = 400


def provenance(run: RunData) -> list[dict[str, Any]]:
    """[{title, rows: [[key, text], ...], links: {key: address}}]; empty tables are left out."""
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
    tags, summary = _tags(run), run.summary or {}
    commit = str(tags.get("git.commit") or summary.get("commit") or "")
    if commit and tags.get("git.dirty") == "true":
        commit += ", with changes that are not committed"
    versions = {
        key.removeprefix("version."): value
        for key, value in tags.items()
        if key.startswith("version.")
    } or summary.get("versions")
    rows = [("commit", commit)] if commit else []
    rows += _rows(versions if isinstance(versions, dict) else {})
    return rows + [(key, str(tags[key])) for key in ("config.sha256",) if key in tags]


def _machines(run: RunData) -> Rows:
    given = run.provenance or {}
    facts = given.get("facts")
    rows = _rows(facts if isinstance(facts, dict) else {})
    for key in ("devices", "num_processes"):
        if given.get(key) is not None:
            rows.append((key.replace("num_", ""), str(given[key])))
    # "computed by" of the facts says what was chosen.
    shown = ("host", "slurm.") if rows else ("host", "slurm.", "chosen.")
    rows += [(key, str(value)) for key, value in _tags(run).items() if key.startswith(shown)]
    if not rows and run.knob("policy.tensor_parallel") is not None:
        rows = [
            (key, str(run.knob(f"policy.{key}")))
            for key in ("tensor_parallel", "pipeline_parallel", "context_parallel")
        ]
    return rows


def _starts(run: RunData) -> Rows:
    rows = []
    for one in run.attempts:
        end = one.get("end") or (run.state.word if one is run.attempts[-1] else "cut short")
        at = clock(one.get("time")) or "?"
        job = f", Slurm job {one['job']}" if one.get("job") else ""
        what = "ended" if one.get("end") else "began"
        rows.append(
            (str(one["attempt"]), f"from step {one.get('step', '?')}; {what} {at}{job}; {end}")
        )
    return rows


def _checkpoints(folder: Path) -> Rows:
    rows = []
    for path in _listed(folder, "step_*"):
        if not path.is_dir():
            continue
        size = sum(map(_num_bytes, _listed(path, "*")))
        sums = "" if (path / "manifest.json").exists() else ", without sums of its files"
        kind = "" if _CHECKPOINT.fullmatch(path.name) else ", set aside"
        rows.append((path.name, f"{size / 2**20:,.1f} MiB{sums}{kind}"))
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
    """To the run's page on a server; of another address (a file, a script) no link is made."""
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
    """Without a password: a report is passed on, and older versions stored some."""
    return without_password(str(run.get("server", "")))


def _data_reports(folder: Path) -> dict[str, Rows]:
    found = {}
    for path in _listed(folder, "*.report.json"):
        report = _read(path)
        name = path.name.removesuffix(".report.json")
        found[f"Data: {name}"] = _rows(
            {
                key: report[key]
                for key in ("output", "rows", "prompts", "settings", "versions")
                if key in report
            }
        )
    return found


def _tags(run: RunData) -> dict[str, Any]:
    tags = (run.provenance or {}).get("tags")
    return tags if isinstance(tags, dict) else {}


def _rows(values: Mapping[str, Any]) -> Rows:
    return [(key, text) for key, value in values.items() for key, text in _flat(key, value)]


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for inner, one in value.items():
            yield from _flat(f"{key}.{inner}", one)
        return
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    yield key, text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def _listed(folder: Path, pattern: str) -> Iterable[Path]:
    """Sorted; what goes while it is listed is not there."""
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def _num_bytes(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def _read(path: Path) -> dict[str, Any]:
    with suppress(CheckpointError):
        return read_json(path)
    return {}
