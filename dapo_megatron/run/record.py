"""Build the recorder of a run's steps, and write the files of rank 0 at the start of a run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.cluster.attempt import start_attempt
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.config import Config, FileSource, source_file_name
from dapo_megatron.config.file import dump_config, load_config
from dapo_megatron.data.prompts import report_of
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.files import write_json, write_text
from dapo_megatron.model import read_architecture
from dapo_megatron.model.flops import peak_flops
from dapo_megatron.plan.layout import describe
from dapo_megatron.protocols import Tracker
from dapo_megatron.rollout.record import forget_after
from dapo_megatron.run.context import RunContext
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.run.resume import StartingPoint
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.mlflow_tracker import MlflowTracker, tracking_uri
from dapo_megatron.tracking.policy_files import FOLDER as POLICY_FOLDER
from dapo_megatron.tracking.provenance import cpu_name, flatten, run_tags
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder, Speedometer
from dapo_megatron.tracking.run_report import WAIT_SECONDS, RunReport
from dapo_megatron.tracking.trackers import JsonlTracker
from dapo_megatron.types import ConfigError, DapoError

RISKS = {
    "seed": ". The prompts are shuffled anew, so some repeat in this epoch and others are left out",
    "data.": ". The run continues at its old place in the new prompts",
    "model.path": ". The weights come from the checkpoint, not from this folder",
}
"""Prefix of a key -> what its change means in a resumed run, if that may be a mistake."""


def open_recorder(context: RunContext, start: StartingPoint) -> RankRecorder:
    """Return the recorder of rank 0; other ranks get a RankRecorder. Collective.

    Rank 0 also prints the run's header, and writes its config and provenance. A run that has logged
    metrics continues its own files and MLflow run. Recorded rollouts of steps that the run samples
    again are deleted.
    """
    return on_rank0(context.ranks, _open_on_rank0, context, start) or RankRecorder(
        console=RunConsole(file=sys.stderr), **_rollouts(context.config, context.folder)
    )


def _open_on_rank0(context: RunContext, start: StartingPoint) -> RunRecorder:
    config, folder, num_ranks = context.config, context.folder, context.ranks.world_size
    start_attempt(folder.attempts, max(start.last_logged, 0))
    for path in (folder.samples, folder.path / POLICY_FOLDER):
        forget_after(path, start.last_recorded)
    console = RunConsole(
        num_steps=config.train.rollout_steps,
        num_groups=config.rollout.prompts_per_step,
        file=context.terminal,
        stop_seconds=config.run.stop_seconds,
    )
    changes = changed_keys(config, folder.config) if folder.is_continued else []
    write_text(folder.config, dump_config(config))
    _keep_provenance(config, folder, console, num_ranks, start.source)
    for change in changes:
        console.warn(change)
    # Local files come before servers.
    trackers: list[Tracker] = [JsonlTracker(folder.metrics, console, start.last_logged), console]
    mlflow = None
    if config.tracking.mlflow:
        uri, wait_seconds = tracking_uri(folder.path), config.tracking.wait_seconds
        mlflow = MlflowTracker(folder.path, uri, console, wait_seconds)
        trackers.append(mlflow)
    report = None
    if config.tracking.report:
        # Other ranks wait for it in a barrier without a heartbeat.
        seconds = min(WAIT_SECONDS, config.watchdog.start / 2)
        report = RunReport(folder.path, console, seconds)
    return RunRecorder(
        trackers=trackers,
        console=console,
        num_devices=num_ranks,
        timeline_folder=folder.timeline,
        speedometer=Speedometer(read_architecture(config), num_ranks, _peak_flops()),
        mlflow=mlflow,
        report=report,
        **_rollouts(config, folder),
    )


def _rollouts(config: Config, folder: RunFolder) -> dict[str, Any]:
    """Return where a recorder writes rollouts, and for how many groups in detail."""
    return {
        "run": folder.path if config.tracking.samples else None,
        "inspected_groups": config.tracking.inspected_groups,
    }


def _peak_flops() -> float | None:
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def changed_keys(config: Config, last: Path) -> list[str]:
    """Return a line for each key whose value differs from that of the config file of the run's last
    start."""
    if not last.exists():
        return [f"{last} is missing, so changes since the last start are not shown"]
    try:
        old, new = (dict(flatten(c.model_dump(mode="json"))) for c in (load_config(last), config))
    except ConfigError as error:
        return [f"changes since the last start are not shown: {error}"]
    lines = []
    for key in sorted((old.keys() | new.keys()) - {"resume"}):
        if old.get(key) != new.get(key):
            risk = next((text for prefix, text in RISKS.items() if key.startswith(prefix)), "")
            lines.append(
                f"changed since the last start: {key}: {old.get(key, 'not set')} -> "
                f"{new.get(key, 'not set')}{risk}"
            )
    return lines


def keep_reports(config: Config, folder: RunFolder) -> None:
    """Copy the reports of tools/prepare_data.py about the run's data files to the run folder.
    Called on rank 0."""
    for source in (*config.data.train, *config.evaluation.sets):
        if isinstance(source, FileSource) and (report := report_of(source.path)):
            folder.data.mkdir(exist_ok=True)
            shutil.copyfile(report, folder.data / f"{source_file_name(source.name)}.report.json")


def keep_tokenizer(config: Config, folder: RunFolder, recorder: RankRecorder) -> None:
    """Write the run's tokenizer in the format of the `tokenizers` library. Called on rank 0.

    The tokens in samples/ can then be shown without the model's folder. A tokenizer without this
    format is skipped. A tokenizer that cannot be loaded has already ended the run in
    `load_prompts`.
    """
    try:
        tokenizer = load_tokenizer(Path(config.model.path), "model.path")
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            write_text(folder.tokenizer, backend.to_str())
    except (DapoError, OSError) as error:
        recorder.note(f"  no {folder.tokenizer.name}: {error}")


def _keep_provenance(
    config: Config,
    folder: RunFolder,
    console: RunConsole,
    world_size: int,
    resumed_from: Path | None,
) -> None:
    """Print the header of a start, and write it to provenance.json with the tags for MLflow."""
    chosen = _chosen(config)
    replicas = f"{config.num_replicas(world_size)} replicas"
    facts = {
        "model": config.model.path,
        "policy": describe(config.policy, world_size),
        "computed by": ", ".join(
            value if key == "kernels" else f"{key} {value}" for key, value in chosen.items()
        ),
        "engine": f"tensor {config.engine_tensor_parallel} x {replicas}"
        + ("" if config.engine.colocated else " on other GPUs"),
        "folder": str(folder.path),
    }
    if config.loss.function:
        facts["loss"] = config.loss.function
    if resumed_from is not None:
        facts["resumed from"] = str(resumed_from)
    console.header(f"dapo_megatron {config.run.name}", facts)
    provenance = {
        "facts": facts,
        "tags": run_tags(config, folder.attempt)
        | {f"chosen.{key}": value for key, value in chosen.items()},
        "devices": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "num_processes": world_size,
    }
    try:
        write_json(folder.provenance, provenance)
    except OSError as error:
        console.warn(f"no {folder.provenance.name}: {error}")


def _chosen(config: Config) -> dict[str, str]:
    """Return the kernels that the policy uses, with `auto` resolved. Raises ConfigError."""
    from dapo_megatron.policy import optimizer
    from dapo_megatron.policy.kernels import kernels_chosen

    return {
        **kernels_chosen(config.policy, read_architecture(config)),
        "adamw": optimizer.kernels(config.optimizer),
        "logprob_head": config.policy.logprob_head,
    }
