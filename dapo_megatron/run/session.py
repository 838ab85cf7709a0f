"""Train and evaluate on one rank, from joining the other ranks to the summary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dapo_megatron.checkpoints.folder import check_folder
from dapo_megatron.cluster.attempt import end_attempt, is_secondary
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.cluster.imports import disable_compiler, quick_imports
from dapo_megatron.cluster.launch import started_at
from dapo_megatron.config import Config
from dapo_megatron.files import write_json
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import Machine, check
from dapo_megatron.run.context import RunContext, open_context, report_error
from dapo_megatron.types import DapoError, Phase, Stopped

if TYPE_CHECKING:
    from dapo_megatron.cluster.instruments import StepInstruments
    from dapo_megatron.loop import Parts, Progress
    from dapo_megatron.rollout.engines import Engines
    from dapo_megatron.tracking.recorder import RankRecorder


def train(config: Config, replay: Path | None = None) -> None:
    """Train on this rank of a launched job. `replay` is the folder of a run whose recorded rollouts
    are trained on."""
    with open_context(config, with_folder=True) as context, ExitStack() as at_end:
        engines = None
        if replay is None:
            from dapo_megatron.run.models import start_engines

            engines = start_engines(
                config,
                context.ranks,
                logs=context.folder.logs,
                start=str(context.resume_from),
                stop=context.stop,
            )
            at_end.callback(engines.close)
        import_libraries()
        from dapo_megatron import loop
        from dapo_megatron.run import build, record, resume
        from dapo_megatron.run.loss import loss_notes
        from dapo_megatron.run.other_weights import dropped_layers

        notes = check(config, read_architecture(config), Machine.here(), has_engine=replay is None)
        start = resume.starting_point(context, replay)
        recorder = record.open_recorder(context, start)
        dropped = on_rank0(context.ranks, dropped_layers, config) or []
        for note in (*notes, *start.notes, *dropped, *loss_notes(config)):
            recorder.note(f"  {note}")
        with _ending(context, recorder), recorder.live():
            context.watchdog.view = recorder
            instruments = build.build_instruments(context, recorder)
            if replay is not None:
                context = replace(context, config=_without_gap_limits(config))
                parts = build.build_replay(context, replay, recorder, instruments)
            elif engines is not None:
                parts = _parts(context, engines, start.repeated, recorder, instruments)
            start.restore(parts)
            context.stop.hold(context.ranks)
            with context.watchdog.phase(Phase.OTHER):
                since = started_at() - start.progress.seconds
                loop.train(context.config, parts, start.progress, started=since)
            summary = _conclude(context, start.progress, instruments.memory.highest_gib())
        recorder.summary(summary, context.folder.path)


def import_libraries() -> None:
    """Import Megatron and transformers, on all ranks at the same time.

    Otherwise each library is imported at its first use, sometimes on rank 0 while other ranks wait.
    """
    import torch

    if not torch.cuda.is_available():
        disable_compiler()
    with quick_imports():
        import_module("dapo_megatron.policy.policy")
        import_module("transformers.models.auto.auto_factory")


def _without_gap_limits(config: Config) -> Config:
    """Return the config of a replay. The weights may differ from those that sampled the rollouts,
    so the gap is measured but has no limit."""
    sync = config.sync.model_copy(update={"max_gap": math.inf, "max_mean_gap": None})
    return config.model_copy(update={"sync": sync})


def _parts(
    context: RunContext,
    engines: Engines,
    repeated: dict[int, Path],
    recorder: RankRecorder,
    instruments: StepInstruments,
) -> Parts:
    """Load the prompts, and build models and the loop's parts. Collective."""
    from dapo_megatron.run import build, record
    from dapo_megatron.run.loss import loss_function
    from dapo_megatron.run.models import build_models
    from dapo_megatron.run.other_weights import keep_reference, keep_teacher

    config, ranks = context.config, context.ranks
    loss_function(config.loss)  # its errors come before models are built
    prompts = build.load_all_prompts(config, ranks)
    for note in prompts.notes:
        recorder.note(f"  {note}")
    on_rank0(ranks, build.check_graders, config, prompts)
    if ranks.rank == 0:
        record.keep_reports(config, context.folder)
        record.keep_tokenizer(config, context.folder, recorder)
    models = build_models(config, ranks, engines)
    keep_reference(config, ranks, models.policy)
    keep_teacher(config, ranks, models.policy)
    return build.build_parts(context, models, prompts, repeated, recorder, instruments)


@contextmanager
def _ending(context: RunContext, recorder: RankRecorder) -> Iterator[None]:
    """Close the recorder with the run's status: FINISHED, FAILED or KILLED. An error is reported
    first, because MLflow may take longer than a launcher waits."""
    status, is_together = "FAILED", False
    try:
        yield
        status, is_together = "FINISHED", True
    except BaseException as error:
        is_stop = isinstance(error, KeyboardInterrupt | Stopped)
        is_together = isinstance(error, Stopped)
        status = "KILLED" if is_stop else "FAILED"
        report_error(error, context.ranks.rank, context.terminal, context.folder.logs)
        # A lost rank is only a consequence of another error. A DapoError occurs on all ranks, so
        # only rank 0 records it.
        is_first = not is_secondary(str(error))
        if is_first and (context.ranks.rank == 0 or not isinstance(error, DapoError)):
            end_attempt(context.folder.attempts, end="stopped" if is_stop else "crashed")
        raise
    finally:
        with ExitStack() as at_end:
            if is_together:
                at_end.callback(_wait_for_all, context)
            recorder.finish(status)


def _wait_for_all(context: RunContext) -> None:
    # Rank 0 comes last, after MLflow, which can be slow, and a launcher kills the last rank soon
    # after the others have ended. Then only a rank that hangs is late.
    with context.watchdog.phase(Phase.START if context.ranks.rank else Phase.OTHER):
        context.ranks.barrier()


def evaluate(config: Config, checkpoint: str | None) -> dict[str, float] | None:
    """Evaluate the model, or the weights of a checkpoint of any layout. Return the metrics on rank
    0, None on other ranks."""
    from dapo_megatron.checkpoints.formats.store import read_into
    from dapo_megatron.run import build
    from dapo_megatron.run.models import build_models, start_engines
    from dapo_megatron.run.other_weights import open_checkpoint

    with open_context(config, with_folder=False) as context:
        ranks = context.ranks
        engines = start_engines(config, ranks, start=str(checkpoint))
        try:
            import_libraries()
            if checkpoint:
                check_folder(Path(checkpoint), ranks)
            store = open_checkpoint(config, Path(checkpoint)) if checkpoint else None
            prompts = build.load_all_prompts(config, ranks)
            on_rank0(ranks, build.check_graders, config, prompts)
            models = build_models(config, ranks, engines)
            if store is not None:
                models.policy.rewrite(partial(read_into, store))
            models.sync(0)
            metrics = build.build_evaluator(config, prompts, models).run(0)
        finally:
            engines.close()
        return metrics if ranks.rank == 0 else None


def _conclude(context: RunContext, progress: Progress, highest_gib: float) -> dict[str, Any]:
    """Write and return the summary. From now on the run counts as finished, and a signal no longer
    limits its time.

    `highest_gib` is the largest resident memory of this rank, without its child processes: a forked
    child would count the memory that it shares with its parent. (A grading process needs 0.1 GiB.)
    """
    from dapo_megatron.cluster.versions import versions
    from dapo_megatron.tracking.provenance import commit

    peaks = context.ranks.all_gather(highest_gib, float)
    summary = {
        "accuracy_before": _accuracy(progress.first_evaluation),
        "accuracy_after": _accuracy(progress.last_evaluation),
        "steps": progress.step,
        "seconds": progress.seconds,
        "max_gap": progress.max_gap,
        "peak_memory_gib": sum(peaks),
        "evaluation_before": progress.first_evaluation,
        "evaluation_after": progress.last_evaluation,
        "seed": context.config.seed,
        "num_processes": context.ranks.world_size,
        "versions": versions(),
        "commit": commit(),
    }
    if context.ranks.rank == 0:
        write_json(context.folder.summary, summary)
    context.stop.lift_deadline()
    return summary


def _accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the mean of avg@k over the evaluation sets, or None without any."""
    values = [value for name, value in metrics.items() if re.search(r"/avg@\d+$", name)]
    return fmean(values) if values else None
