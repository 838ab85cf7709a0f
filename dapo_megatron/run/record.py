"""What rank 0 writes down of a run: what it is made with, at its start, and the recorder of its
steps. The only file that names MLflow to the rest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dapo_megatron.checkpoints import newest, read_state
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.config import Config, FileSource, source_file_name
from dapo_megatron.config.file import dump_config
from dapo_megatron.data.preparing.report import report_of
from dapo_megatron.files import write_json, write_text
from dapo_megatron.model import read_architecture
from dapo_megatron.model.flops import model_flops, peak_flops
from dapo_megatron.plan.layout import describe
from dapo_megatron.protocols import Tracker
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.tracking import (
    CompositeTracker,
    JsonlTracker,
    MlflowSpool,
    RunConsole,
    RunRecorder,
    RunReport,
    SilentRecorder,
    Speedometer,
    cpu_name,
    run_tags,
)
from dapo_megatron.tracking.run_report import WAIT_SECONDS

if TYPE_CHECKING:
    from dapo_megatron.run.context import Session


def open_recorder(session: Session, step: int) -> RunRecorder | SilentRecorder:
    """Rank 0's recorder, its header printed and what it says written down; elsewhere the silent
    one. A run continued after `step` goes on in its own files and MLflow run. Collective."""
    config, folder = session.config, session.folder

    def make() -> RunRecorder:
        write_text(folder.config, dump_config(config))
        console = RunConsole(num_steps=config.train.rollout_steps, file=session.terminal)
        chosen = _chosen(config)
        facts = _facts(session, chosen)
        console.header(f"dapo_megatron {config.run.name}", facts)
        tags = run_tags(config, folder.attempt)
        tags |= {f"chosen.{key}": value for key, value in chosen.items()}
        _keep_provenance(session, console, facts, tags)
        return _recorder(session, console, step, tags)

    return on_rank0(session.ranks, make) or SilentRecorder()


def keep_reports(session: Session, recorder: RunRecorder | SilentRecorder) -> None:
    """What tools/prepare_data.py told of the run's data files goes with the run."""
    if session.ranks.rank:
        return
    for source in (*session.config.data.train, *session.config.evaluation.sets):
        if isinstance(source, FileSource) and (report := report_of(source.path)):
            session.folder.data.mkdir(exist_ok=True)
            kept = session.folder.data / f"{source_file_name(source.name)}.report.json"
            shutil.copyfile(report, kept)
            recorder.keep(kept)


def keep_tokenizer(session: Session, recorder: RunRecorder | SilentRecorder) -> None:
    """The run's tokenizer in the format of the `tokenizers` library: tokens in samples/ can then be
    shown without the model's folder. Nothing for a tokenizer that does not have it. For a run that
    has loaded this tokenizer for its prompts: one that does not load has ended it."""
    from transformers import AutoTokenizer

    if session.ranks.rank:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(session.config.model.path)
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            write_text(session.folder.tokenizer, backend.to_str())
    except (OSError, ValueError) as error:
        recorder.note(f"  no {session.folder.tokenizer.name}: {error}")


def _recorder(
    session: Session, console: RunConsole, step: int, tags: Mapping[str, str]
) -> RunRecorder:
    config, folder = session.config, session.folder
    # From the start, step 0 is evaluated anew.
    jsonl = JsonlTracker(folder.metrics, step or -1, console.warn)
    # Local files before servers.
    trackers: list[Tracker] = [jsonl, console]
    mlflow = None
    if config.tracking.mlflow:
        mlflow = MlflowSpool(config, folder.attempt, _mlflow_run(folder), console.warn, tags=tags)
        trackers.append(mlflow)
    return RunRecorder(
        tracker=CompositeTracker(*trackers),
        console=console,
        samples_folder=folder.samples if config.tracking.samples else None,
        num_devices=session.ranks.world_size,
        inspected_groups=config.tracking.inspected_groups,
        timeline_folder=folder.timeline,
        speedometer=_speedometer(config, session.ranks.world_size),
        mlflow=mlflow,
        report=_report(session, console) if config.tracking.report else None,
    )


def _report(session: Session, console: RunConsole) -> RunReport:
    """Other ranks wait for it in a barrier, silently: for half of what the watchdog allows."""
    return RunReport(
        session.folder.path,
        console.warn,
        wait_seconds=min(WAIT_SECONDS, session.config.watchdog.start / 2),
        attempt=session.folder.attempt,
        is_asked=lambda: session.stop.signal is not None,
    )


def _keep_provenance(
    session: Session, console: RunConsole, facts: Mapping[str, str], tags: Mapping[str, str]
) -> None:
    """What is known of a start before it trains, for whoever reads the folder without MLflow."""
    has_gpu = torch.cuda.is_available()
    provenance = {
        "facts": facts,
        "tags": tags,
        "devices": torch.cuda.get_device_name() if has_gpu else cpu_name(),
        "num_processes": session.ranks.world_size,
    }
    try:
        write_json(session.folder.provenance, provenance)
    except OSError as error:
        console.warn(f"no {session.folder.provenance.name}: {error}")


def _facts(session: Session, chosen: Mapping[str, str]) -> dict[str, str]:
    config = session.config
    world = session.ranks.world_size
    facts = {
        "model": config.model.path,
        "policy": describe(config.policy, world),
        "computed by": ", ".join(
            value if key == "kernels" else f"{key} {value}" for key, value in chosen.items()
        ),
        "engine": f"tensor {config.engine_tensor_parallel} x "
        f"{world // config.engine_tensor_parallel} replicas",
        "folder": str(session.folder.path),
    }
    if session.resume_from is not None:
        facts["resumed from"] = str(session.resume_from)
    return facts


def _chosen(config: Config) -> dict[str, str]:
    """What the policy computes with here: what `auto` was made of. Raises ConfigError."""
    from dapo_megatron.policy import optimizer
    from dapo_megatron.policy.kernels import kernels_chosen

    adamw, head = optimizer.kernels(config.optimizer), config.policy.logprob_head
    return {
        **kernels_chosen(config.policy, read_architecture(config)),
        "adamw": adamw,
        "logprob_head": head,
    }


def _speedometer(config: Config, num_devices: int) -> Speedometer:
    """For the model of a config, on devices like this rank's."""
    arch = read_architecture(config)
    has_gpu = torch.cuda.is_available()
    return Speedometer(
        num_devices,
        lambda lengths, scored: model_flops(arch, lengths, backward=True, num_scored=scored),
        peak_flops(torch.cuda.get_device_name()) if has_gpu else None,
    )


def _mlflow_run(folder: RunFolder) -> str | None:
    """The MLflow run to go on with, as the newest checkpoint knows it: its spool is in the folder
    as a rule, and then counts."""
    checkpoint = newest(folder.checkpoints) if folder.is_continued else None
    return read_state(checkpoint).get("mlflow_run") if checkpoint else None
