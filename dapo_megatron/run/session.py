"""Train and evaluate on one rank, from joining the other ranks to the summary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dapo_megatron.checkpoints.folder import LAST_READER, check_folder, read_state, restoring
from dapo_megatron.cluster.attempt import end_attempt, is_secondary, start_attempt
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.cluster.launch import started_at
from dapo_megatron.config import Config
from dapo_megatron.files import write_json
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import Machine, check
from dapo_megatron.run.context import RunContext, open_context, report_error
from dapo_megatron.run.libraries import import_libraries
from dapo_megatron.types import CheckpointError, DapoError, Phase, Stopped

if TYPE_CHECKING:
    from dapo_megatron import loop
    from dapo_megatron.cluster.instruments import StepInstruments
    from dapo_megatron.protocols import Parts
    from dapo_megatron.rollout.engines import Engines
    from dapo_megatron.run.build import Prompts
    from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder


def train(config: Config, replay: Path | None = None) -> None:
    """Train on this rank of a launched job. `replay` is the folder of a run whose recorded rollouts
    are trained on."""
    with open_context(config, with_folder=True) as context:
        engines: Engines | None = None
        if replay is None:
            from dapo_megatron.run.models import start_engines

            engines = start_engines(
                config,
                context.ranks,
                logs=context.folder.logs,
                start=str(context.resume_from),
                stop=context.stop,
            )
        import_libraries()
        try:
            _train(context, engines, replay)
        finally:
            if engines is not None:
                engines.close()


def _train(context: RunContext, engines: Engines | None, replay: Path | None) -> None:
    from dapo_megatron import loop
    from dapo_megatron.run import build

    config, ranks, folder = context.config, context.ranks, context.folder
    notes = check(config, read_architecture(config), Machine.here(), has_engine=replay is None)
    source = context.resume_from
    state = read_state(source) if source else None
    progress = _starting_point(context, state, replay)
    repeated: dict[int, Path] = {}
    if engines is not None and ranks.rank == 0:
        from dapo_megatron.run.record import repeated_steps

        repeated, about_records = repeated_steps(config, folder, ranks.world_size, source)
        notes += about_records
    last_recorded = max(progress.step, *repeated, 0)
    logged = progress.step - (progress.not_logged is not None)
    if not logged and not progress.first_evaluation:
        logged = -1  # step 0 is logged again
    recorder, about_layers = _open_recorder(context, logged, last_recorded)
    for note in (*notes, *about_layers):
        recorder.note(f"  {note}")

    def wait_for_all() -> None:
        # Rank 0 comes last, after MLflow, which can be slow, and a launcher kills the last rank
        # soon after the others have ended. Then only a rank that hangs is late.
        with context.watchdog.phase(Phase.START if ranks.rank else Phase.OTHER):
            ranks.barrier()

    summary: dict[str, Any] = {}
    started = started_at() - progress.seconds
    with ExitStack() as at_end, _true_status(context, recorder), ExitStack() as stack:
        stack.enter_context(recorder.live())
        context.watchdog.view = recorder
        instruments = build.build_instruments(config, ranks, recorder, context.watchdog)
        try:
            if engines is not None:
                parts = _parts(context, recorder, instruments, engines, repeated)
            else:
                assert replay is not None
                config, parts = _replay_parts(context, recorder, instruments, replay)
            _resume(context, state, parts)
            context.stop.hold()
            with context.watchdog.phase(Phase.OTHER):
                loop.train(config, parts, progress, started=started)
            at_end.callback(wait_for_all)
            summary |= _conclude(context, progress, instruments.memory.highest_gib())
        except Stopped:
            at_end.callback(wait_for_all)
            raise
    recorder.summary(summary, folder.path)


def _parts(
    context: RunContext,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    engines: Engines,
    repeated: dict[int, Path],
) -> Parts:
    """Build the loop's parts for training with engines. The recorded steps `repeated` are trained
    on again. Collective."""
    from dapo_megatron.run import build
    from dapo_megatron.run.loss import loss_function
    from dapo_megatron.run.models import build_models
    from dapo_megatron.run.other_weights import keep_reference

    config, ranks = context.config, context.ranks
    loss_function(config.loss)  # its errors come before models are built
    prompts = _prompts(context, recorder)
    models = build_models(config, ranks, engines)
    keep_reference(config, ranks, models.policy)
    if engines.pool is not None:
        context.watchdog.engines = engines.pool
        engines.pool.note = recorder.note
    return build.build_parts(
        config,
        ranks,
        context.folder,
        models,
        prompts,
        repeated,
        recorder=recorder,
        instruments=instruments,
        check_stop=context.stop.check,
    )


def _starting_point(
    context: RunContext, state: dict[str, Any] | None, replay: Path | None
) -> loop.Progress:
    """Return what `state`, that of the checkpoint to resume from, says about completed steps.
    Raises CheckpointError if it cannot be continued."""
    from dapo_megatron import loop

    source = context.resume_from
    if state is None:
        return loop.Progress()
    with restoring(source):
        if "open_step" in state:
            raise CheckpointError(
                f"resume: {source} was saved by an earlier version. Continue with commit "
                f"{LAST_READER}, or export it there (tools/convert_checkpoint.py megatron-to-hf) "
                "and set model.path to the result"
            )
        if replay is None and "replay" in state["coordinator"]:
            raise CheckpointError(
                f"resume: {source} was saved by a replay, which has no prompt position and no "
                f"ledger. Continue with --replay {state['coordinator']['replay']}, or use the "
                "checkpoint as model.path"
            )
        progress = loop.Progress(**state["progress"])
        if progress.not_logged is not None:  # its times are those of another start
            progress.not_logged = progress.not_logged[0], 0
        return progress


def _resume(context: RunContext, state: dict[str, Any] | None, parts: Parts) -> None:
    """Load the checkpoint to resume from, which has `state`. Collective."""
    source = context.resume_from
    if source is None or state is None:
        return
    parts.policy.load(source)
    with restoring(source):
        parts.collector.restore(state["coordinator"], source)


def _open_recorder(
    context: RunContext, step: int, last_recorded: int
) -> tuple[RunRecorder | RankRecorder, list[str]]:
    """Start an attempt after `step`. Return the recorder, and notes about layers of the model that
    are not used. Collective."""
    from dapo_megatron.run.other_weights import dropped_layers
    from dapo_megatron.run.record import open_recorder

    config, ranks, folder = context.config, context.ranks, context.folder
    on_rank0(ranks, lambda: start_attempt(folder.attempts, max(step, 0)))
    recorder = open_recorder(
        config,
        ranks,
        folder,
        step=step,
        last_recorded=last_recorded,
        resumed_from=context.resume_from,
        terminal=context.terminal,
    )
    return recorder, on_rank0(ranks, partial(dropped_layers, config)) or []


def _prompts(context: RunContext, recorder: RunRecorder | RankRecorder) -> Prompts:
    """Load the prompts of a run with engines, and keep what its report needs."""
    from dapo_megatron.run import build, record

    config, folder = context.config, context.folder
    prompts = build.load_prompts(config)
    for note in prompts.notes:
        recorder.note(f"  {note}")
    on_rank0(context.ranks, lambda: build.check_graders(config, prompts))
    if context.ranks.rank == 0:
        record.keep_reports(config, folder)
        record.keep_tokenizer(config, folder, recorder)
    return prompts


def _replay_parts(
    context: RunContext,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    replay: Path,
) -> tuple[Config, Parts]:
    """Build the loop's parts for training on the rollouts recorded in `replay`. The weights may
    differ from those that sampled the rollouts, so the gap is measured but has no limit."""
    from dapo_megatron.run import build

    recorder.note(f"  replays {replay}, without an engine")
    config, ranks = context.config, context.ranks
    sync = config.sync.model_copy(update={"max_gap": math.inf, "max_mean_gap": None})
    config = config.model_copy(update={"sync": sync})
    parts = build.build_replay(
        config,
        ranks,
        context.folder,
        replay,
        recorder=recorder,
        instruments=instruments,
        check_stop=context.stop.check,
    )
    return config, parts


@contextmanager
def _true_status(context: RunContext, recorder: RunRecorder | RankRecorder) -> Iterator[None]:
    """Close the recorder with the run's status: FINISHED, FAILED or KILLED. An error is reported
    first, because MLflow may take longer than a launcher waits."""
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except BaseException as error:
        is_stop = isinstance(error, KeyboardInterrupt | Stopped)
        status = "KILLED" if is_stop else "FAILED"
        report_error(error, context.ranks.rank, context.terminal, context.folder.logs)
        # A lost rank is only a consequence of another error. A DapoError occurs on all ranks, so
        # only rank 0 records it.
        is_first = not is_secondary(str(error))
        if is_first and (context.ranks.rank == 0 or not isinstance(error, DapoError)):
            end_attempt(context.folder.attempts, "stopped" if is_stop else "crashed")
        raise
    finally:
        recorder.finish(status)


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
            prompts = build.load_prompts(config)
            on_rank0(ranks, lambda: build.check_graders(config, prompts))
            models = build_models(config, ranks, engines)
            if store is not None:
                models.policy.rewrite(partial(read_into, store))
            models.sync(0)
            metrics = build.build_evaluator(config, prompts, models).run(0)
        finally:
            engines.close()
        return metrics if ranks.rank == 0 else None


def _conclude(context: RunContext, progress: Any, highest_gib: float) -> dict[str, Any]:
    """Write and return the summary. From now on the run counts as finished, and a signal no longer
    limits its time."""
    summary = _summary(context, progress, highest_gib)
    if context.ranks.rank == 0:
        write_json(context.folder.summary, summary)
    context.stop.lift_deadline()
    return summary


def _summary(context: RunContext, progress: Any, highest_gib: float) -> dict[str, Any]:
    """Return the contents of summary.json. `highest_gib` is the largest resident memory of this
    rank, without its child processes: a forked child would count the memory that it shares with its
    parent. (A grading process needs 0.1 GiB.)"""
    from dapo_megatron.cluster.versions import versions
    from dapo_megatron.tracking.provenance import commit

    peaks = context.ranks.all_gather(highest_gib, float)
    return {
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


def _accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the mean of avg@k over the evaluation sets, or None without any."""
    values = [value for name, value in metrics.items() if re.search(r"/avg@\d+$", name)]
    return fmean(values) if values else None
