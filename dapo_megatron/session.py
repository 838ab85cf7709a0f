"""One rank of one run, from joining the others to the summary."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from dapo_megatron.checkpoints import read_state, restoring
from dapo_megatron.cluster import verdict
from dapo_megatron.cluster.attempt import FENCED, STOPPED, begin_attempt, end_attempt
from dapo_megatron.cluster.launch import started_at
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.safe_output import above_panel, safe_text
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.cluster.watch import Watch
from dapo_megatron.config import Config, read_model_config
from dapo_megatron.files import write_json
from dapo_megatron.run_folder import RunFolder
from dapo_megatron.types import (
    CheckpointError,
    ConfigError,
    DapoError,
    DataError,
    ErrorRecord,
    Fenced,
    Stopped,
)

if TYPE_CHECKING:
    from dapo_megatron.parts import Parts
    from dapo_megatron.tracking import RunRecorder, SilentRecorder

Result = TypeVar("Result")
_TOLD = "_dapo_megatron_told"


@dataclass
class Session:
    """This rank, the run's folder, and the terminal it was started from."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    terminal: TextIO
    resume_from: Path | None
    watch: Watch
    stop: Stop


@contextmanager
def open_session(config: Config, *, with_folder: bool) -> Iterator[Session]:
    """Join the other ranks and take the run's folder; output of libraries goes to logs/.

    An error is told in a line on the terminal, its traceback in this rank's log.
    """
    import torch.distributed as dist

    from dapo_megatron.policy.device import backend, claim

    folder = RunFolder(config.folder)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop = Stop(config.run.stop_seconds, folder.check_owner)
    watch = Watch(folder.path, rank, world_size, config.watchdog.model_dump())
    terminal = sys.stdout
    if with_folder:
        stop.listen()
        watch.start()  # before the others are waited for: one of them may never come
    else:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        claim(int(os.environ.get("LOCAL_RANK", rank)))
        ranks = join(backend(), watch.beat)
        source = None
        if with_folder:
            source = _enter(folder, config.resume, ranks)
            terminal = redirect_output(folder.logs / f"rank_{ranks.rank}.log")
            watch.terminal_fd = terminal.fileno()
            watch.at_hang = lambda: end_attempt(folder.attempts, "hung")
            for note in folder.notes:
                print(note, file=sys.stderr, flush=True)
        yield Session(config, ranks, folder, terminal, source, watch, stop)
    finally:
        watch.close()
        error = sys.exc_info()[1]
        if error is not None:
            _tell(error, rank, terminal, folder.logs if with_folder else None)
        elif dist.is_initialized():
            # Not after an error: the other ranks may never come.
            dist.destroy_process_group()


def _enter(folder: RunFolder, resume: str, ranks: Ranks) -> Path | None:
    """Take the run's folder; the checkpoint to resume from, every file of it verified. What was
    found wrong with others is told on the terminal too."""
    together(ranks, folder.take)
    try:
        source = folder.find(resume, ranks)
    finally:
        if ranks.rank == 0:
            print(*folder.notes, sep="\n", end="\n" if folder.notes else "", flush=True)
    together(ranks, lambda: folder.enter(resume, source))
    if folder.aside is not None:
        from dapo_megatron.tracking import settle

        settle(folder.aside)
    folder.is_continued = ranks.broadcast(folder.is_continued, bool)
    return source


def _tell(error: BaseException, rank: int, terminal: TextIO, logs: Path | None) -> None:
    """One line on the terminal, and the verdict for whoever started the ranks. A DapoError is as a
    rule everybody's, so rank 0 tells it there; the others write it to their logs."""
    if getattr(error, _TOLD, False):
        return
    setattr(error, _TOLD, True)
    if isinstance(error, DapoError):
        print(f"error: {error}", file=terminal if rank == 0 else sys.stderr, flush=True)
        verdict.record(exit_code(error), f"rank {rank}: {error}")
    elif isinstance(error, Exception):
        where = f" (traceback in {logs}/rank_{rank}.log)" if logs else ""
        said = f"{type(error).__name__}: {error}".strip()
        line = f"rank {rank}: {said[:300]}{where}"
        print(above_panel(line) if rank and terminal.isatty() else line, file=terminal, flush=True)
        verdict.record(1, f"rank {rank}: {said}", "".join(traceback.format_exception(error)))


def exit_code(error: DapoError) -> int:
    """What the program ends with; slurm/train.sbatch goes by it: a mistake would only be made
    again, anything else may go better in another start."""
    codes: dict[type, int] = {ConfigError: 2, DataError: 2, Stopped: STOPPED, Fenced: FENCED}
    return codes.get(type(error), 1)


def train(config: Config, replay: Path | None = None) -> None:
    """Train, on this rank of a launched job; with `replay`, on what that run's folder recorded."""
    with open_session(config, with_folder=True) as session:
        _train(session, replay)


def _train(session: Session, replay: Path | None) -> None:
    from dapo_megatron import loop, recording
    from dapo_megatron.rollout.open_step import OpenStep

    config, ranks, folder = session.config, session.ranks, session.folder
    notes = _compatibility(config, has_engine=replay is None)
    state = read_state(session.resume_from) if session.resume_from else None
    with restoring(session.resume_from):
        progress = loop.Progress(**state["progress"]) if state is not None else loop.Progress()
        if state is not None and replay is None and "replay" in state["coordinator"]:
            raise CheckpointError(
                f"resume: {session.resume_from} is of a replay, which keeps no prompts and no "
                f"books; go on with --replay {state['coordinator']['replay']}, or use it as "
                "model.path"
            )
        open_step = OpenStep.from_state(state and state.get("open_step"), config)
    together(ranks, lambda: begin_attempt(folder.attempts, progress.step))
    recorder = recording.open_recorder(session, progress.step)
    for note in notes:
        recorder.note(f"  {note}")
    with ExitStack() as at_end, _true_status(session, recorder), ExitStack() as stack:
        stack.enter_context(recorder.live(session.watch))
        if replay is None:
            parts = _live_parts(session, recorder, stack)
        else:
            config, parts = _replay_parts(session, recorder, replay)
        if state is not None and session.resume_from is not None:
            parts.policy.load(session.resume_from)
            with restoring(session.resume_from):
                parts.coordinator.restore(state["coordinator"])
        started = started_at() - progress.seconds
        session.stop.hold()
        try:
            progress = loop.train(config, parts, progress, open_step, started=started)
        except Stopped:
            at_end.callback(ranks.barrier)
            raise
        # MLflow may take its time, and a launcher gives the last rank little after the others.
        at_end.callback(ranks.barrier)
        summary = _conclude(session, progress, parts.memory.highest_gib())
        recorder.keep(folder.summary)
    recorder.summary(summary, folder.path)


def _compatibility(config: Config, *, has_engine: bool) -> list[str]:
    """What this config has to be told on this machine. Raises ConfigError."""
    import torch

    from dapo_megatron.compatibility import Machine, check

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    machine = Machine.here(capability, torch.version.cuda)
    return check(config, read_model_config(config), machine, has_engine=has_engine)


def _live_parts(
    session: Session, recorder: RunRecorder | SilentRecorder, stack: ExitStack
) -> Parts:
    """Engine, graders and prompts; what must be closed goes on `stack`."""
    from dapo_megatron import build, recording

    prompts = build.load_prompts(session.config)
    for note in prompts.notes:
        recorder.note(f"  {note}")
    recording.keep_reports(session, recorder)
    recording.keep_tokenizer(session, recorder)
    core = build.build_core(session.config, session.ranks, session.stop)
    stack.callback(core.close)
    session.watch.tell("in flight", core.driver.in_flight)
    return build.build_parts(session, core, prompts, recorder)


def _replay_parts(
    session: Session, recorder: RunRecorder | SilentRecorder, replay: Path
) -> tuple[Config, Parts]:
    """For the rollouts recorded in `replay`. Other weights than sampled them may be trained on
    them: the gap is measured, and never ends the run."""
    from dapo_megatron import build

    recorder.note(f"  replays {replay}, without an engine")
    config = session.config
    sync = config.sync.model_copy(update={"max_gap": math.inf, "max_mean_gap": None})
    parts = build.build_replay(session, recorder, replay)
    return config.model_copy(update={"sync": sync}), parts


@contextmanager
def _true_status(session: Session, recorder: RunRecorder | SilentRecorder) -> Iterator[None]:
    """Close the run as what it was: FINISHED, FAILED or KILLED. What ended it is told first:
    MLflow may take longer than a launcher waits."""
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | Stopped)
        status = "KILLED" if stopped else "FAILED"
        _tell(error, session.ranks.rank, session.terminal, session.folder.logs)
        # A node that was lost is nobody's fault; a DapoError is everybody's, and rank 0 notes it.
        if not verdict.is_secondary(str(error)) and (
            session.ranks.rank == 0 or not isinstance(error, DapoError)
        ):
            end_attempt(session.folder.attempts, "stopped" if stopped else "crashed")
        raise
    finally:
        if not isinstance(sys.exc_info()[1], Fenced):  # else the MLflow run is another attempt's
            recorder.finish(status)


def evaluate(config: Config, checkpoint: str | None) -> dict[str, float] | None:
    """Evaluate the model, or the weights of a checkpoint, of any layout; the figures on rank 0."""
    from dapo_megatron import build
    from dapo_megatron.bridge.stores import read_into

    with open_session(config, with_folder=False) as session:
        ranks = session.ranks
        store = build.open_checkpoint(config, Path(checkpoint)) if checkpoint else None
        prompts = build.load_prompts(config)
        core = build.build_core(config, ranks)
        try:
            if store is not None:
                core.policy.rewrite(partial(read_into, store))
            core.sync(0)
            figures = build.build_evaluator(config, prompts, core).run()
        finally:
            core.close()
        return figures if ranks.rank == 0 else None


def together(ranks: Ranks, work: Callable[[], Result]) -> Result | None:
    """Do `work` on rank 0 only and return its result there. Its DapoError is raised on every rank,
    so that no rank waits for one that has given up."""
    result, error = None, None
    if ranks.rank == 0:
        try:
            result = work()
        except DapoError as raised:
            error = raised
    if record := ranks.broadcast(ErrorRecord.of(error), ErrorRecord | None):
        raise error or record.error()
    return result


def _conclude(session: Session, progress: Any, highest_gib: float) -> dict[str, Any]:
    """Write the summary: from now on the run is a finished one, whatever signal comes. See
    `_summary`."""
    summary = _summary(session, progress, highest_gib)
    if session.ranks.rank == 0:
        write_json(session.folder.summary, summary)
    session.stop.lift_deadline()
    return summary


def _summary(session: Session, progress: Any, highest_gib: float) -> dict[str, Any]:
    """`highest_gib`: largest resident memory of this rank. (Its children are left out: one that was
    forked counts all it shares with its parent. A grading process takes 0.1 GiB.)"""
    from dapo_megatron.tracking import commit, versions

    peaks = session.ranks.all_gather(highest_gib, float)
    return {
        "accuracy_before": _accuracy(progress.first_evaluation),
        "accuracy_after": _accuracy(progress.last_evaluation),
        "steps": progress.step,
        "seconds": progress.seconds,
        "max_gap": progress.max_gap,
        "peak_memory_gib": sum(peaks),
        "evaluation_before": progress.first_evaluation,
        "evaluation_after": progress.last_evaluation,
        "seed": session.config.seed,
        "num_processes": session.ranks.world_size,
        "versions": versions(),
        "commit": commit(),
    }


def _accuracy(figures: Mapping[str, float]) -> float | None:
    """Mean over the evaluation sets of avg@k."""
    values = [value for name, value in figures.items() if re.search(r"/avg@\d+$", name)]
    return fmean(values) if values else None


def redirect_output(log: Path) -> TextIO:
    """Send what this process and its libraries print to `log`; a file on the terminal it had."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # A disk that is full must not end a run by a line of a log.
    terminal = safe_text(os.dup(1), closes=True)
    with log.open("ab", buffering=0) as file:
        with suppress(OSError):
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()}\n".encode())
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = safe_text(1), safe_text(2)
    return terminal


def _interrupt(*_: object) -> None:
    """SIGTERM ends a command that has nothing to save as Ctrl-C does."""
    raise KeyboardInterrupt
