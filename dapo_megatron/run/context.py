"""This rank of a run while it is in it: the others, the folder, the terminal, signals."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dapo_megatron.cluster import exit_reason
from dapo_megatron.cluster.attempt import FENCED, STOPPED, end_attempt
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.safe_output import above_panel, safe_text
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.config import Config
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.types import ConfigError, DapoError, DataError, Fenced, Stopped

_REPORTED = "_dapo_megatron_reported"


@dataclass
class RunContext:
    """This rank, the run's folder, and the terminal that the run was started from."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    terminal: TextIO
    resume_from: Path | None
    watchdog: Watchdog
    stop: Stop


@contextmanager
def open_context(config: Config, *, with_folder: bool) -> Iterator[RunContext]:
    """Join the other ranks and take the run's folder; output of libraries goes to logs/.

    An error is reported in a line on the terminal, its traceback in this rank's log. A DapoError
    ends the process with its exit code.
    """
    import torch.distributed as dist

    from dapo_megatron.policy.device import backend, claim

    folder = RunFolder(config.folder)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop = Stop(config.run.stop_seconds, folder.check_owner)
    watchdog = Watchdog(folder.path, rank, world_size, config.watchdog.model_dump())
    terminal = sys.stdout
    if with_folder:
        stop.listen()
        watchdog.start()  # before the others are waited for: one of them may never come
    else:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        claim(int(os.environ.get("LOCAL_RANK", rank)))
        ranks = join(backend(), watchdog.beat)
        source = None
        if with_folder:
            source = _enter(folder, config.resume, ranks)
            terminal = redirect_output(folder.logs / f"rank_{ranks.rank}.log")
            watchdog.terminal_fd = terminal.fileno()
            watchdog.at_hang = lambda: end_attempt(folder.attempts, "hung")
            for note in folder.notes:
                print(note, file=sys.stderr, flush=True)
        yield RunContext(config, ranks, folder, terminal, source, watchdog, stop)
    except BaseException as error:
        watchdog.close()
        report_error(error, rank, terminal, folder.logs if with_folder else None)
        if isinstance(error, DapoError):
            raise SystemExit(exit_code(error)) from None
        raise
    watchdog.close()
    if dist.is_initialized():  # not after an error: the other ranks may never come
        dist.destroy_process_group()


def _enter(folder: RunFolder, resume: str, ranks: Ranks) -> Path | None:
    """Take the run's folder; the checkpoint to resume from, every file of it verified. What was
    found wrong with others is told on the terminal too."""
    on_rank0(ranks, folder.take)
    try:
        source = folder.find(resume, ranks)
    finally:
        if ranks.rank == 0:
            print(*folder.notes, sep="\n", end="\n" if folder.notes else "", flush=True)
    on_rank0(ranks, lambda: folder.enter(resume, source))
    if folder.aside is not None:
        from dapo_megatron.tracking.mlflow_tracker import deliver_rest

        deliver_rest(folder.aside)
    folder.is_continued = ranks.broadcast(folder.is_continued, bool)
    return source


def report_error(
    error: BaseException, rank: int, terminal: TextIO, logs: Path | None, *, doing: str = ""
) -> None:
    """Print one line on the terminal, and record the exit reason for the launcher.

    A DapoError usually occurs on all ranks, so only rank 0 prints it there. Any other error is
    printed by each rank, with what it was `doing` and the log that has the traceback.
    """
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    if isinstance(error, DapoError):
        print(f"error: {error}", file=terminal if rank == 0 else sys.stderr, flush=True)
        exit_reason.record(exit_code(error), f"rank {rank}: {error}")
    elif isinstance(error, Exception):
        where = f" (traceback in {logs}/rank_{rank}.log)" if logs else ""
        said = f"{type(error).__name__}: {error}".strip()
        line = f"rank {rank}: {doing and f'{doing}: '}{said[:300]}{where}"
        print(above_panel(line) if rank and terminal.isatty() else line, file=terminal, flush=True)
        exit_reason.record(1, f"rank {rank}: {said}", "".join(traceback.format_exception(error)))


def exit_code(error: DapoError) -> int:
    """What the program ends with; slurm/train.sbatch goes by it: a mistake would only be made
    again, anything else may go better in another start."""
    codes: dict[type, int] = {ConfigError: 2, DataError: 2, Stopped: STOPPED, Fenced: FENCED}
    return codes.get(type(error), 1)


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
