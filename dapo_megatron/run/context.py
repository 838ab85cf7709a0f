"""The context of a run on this rank: process group, run folder, terminal, watchdog and signals."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from dapo_megatron.checkpoints.folder import newest
from dapo_megatron.cluster.attempt import STOPPED, record_reason
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.cluster.interrupt import INTERRUPTED
from dapo_megatron.cluster.output import lossy_text, protect_streams
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.config import Config
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError, DapoError, DataError, Stopped

_REPORTED = "_dapo_megatron_reported"


@dataclass
class RunContext:
    """This rank, the run's folder, and the terminal that started the run."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    terminal: TextIO
    resume_from: Path | None
    watchdog: Watchdog
    stop: Stop


@contextmanager
def open_context(config: Config, *, with_folder: bool) -> Iterator[RunContext]:
    """Join the other ranks. With `with_folder`, also acquire the run's folder and redirect the
    output of libraries to logs/.

    An error is reported in one line on the terminal, and its traceback in this rank's log. A
    DapoError ends the process with its exit code.
    """
    import torch.distributed as dist

    folder = RunFolder(config.folder)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    watchdog = Watchdog(folder.path, rank, world_size, config.watchdog.model_dump())
    stop = Stop(config.run.stop_seconds, watchdog)
    terminal = sys.stdout
    if with_folder:
        stop.listen()
    else:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        if with_folder:
            folder.create()
            watchdog.start()  # before waiting for the other ranks, because one may never come
        ranks = _join(watchdog)
        source = None
        if with_folder:
            source = _open_folder(folder, config.resume, ranks)
            terminal = redirect_output(folder.logs / f"rank_{ranks.rank}.log")
            for note in folder.notes:
                print(note, file=sys.stderr, flush=True)
        yield RunContext(config, ranks, folder, terminal, source, watchdog, stop)
    except BaseException as error:
        watchdog.close()
        report_error(error, rank, terminal, folder.logs if with_folder else None)
        if isinstance(error, DapoError):
            raise SystemExit(exit_code(error)) from None
        if isinstance(error, KeyboardInterrupt):
            _end_interrupted(terminal, folder if with_folder and rank == 0 else None)
        raise
    watchdog.close()
    if dist.is_initialized():  # not after an error: the other ranks may never come
        dist.destroy_process_group()


def _end_interrupted(terminal: TextIO, folder: RunFolder | None) -> NoReturn:
    """End this process after Ctrl-C. With the run's folder, print what a resume continues from."""
    if folder is not None:
        saved = newest(folder.checkpoints)
        text = "interrupted before the first checkpoint was saved"
        if saved:
            text = f"interrupted without saving; resume=auto continues from {saved}"
        print(text, file=terminal, flush=True)
    os._exit(INTERRUPTED)  # Python's exit would abort in a thread of gloo or vLLM


def _join(watchdog: Watchdog) -> Ranks:
    from dapo_megatron.policy.device import backend, claim

    claim(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    return join(backend(), watchdog)


def _open_folder(folder: RunFolder, resume: str, ranks: Ranks) -> Path | None:
    """Acquire and prepare the run's folder. Return the checkpoint to resume from, with every file
    verified. Notes about damaged checkpoints are also printed on the terminal."""
    on_rank0(ranks, folder.acquire)
    try:
        source = folder.find_checkpoint(resume, ranks)
    finally:
        if ranks.rank == 0:
            print(*folder.notes, sep="\n", end="\n" if folder.notes else "", flush=True)
    on_rank0(ranks, folder.prepare, resume, source)
    folder.is_continued = ranks.broadcast(folder.is_continued, bool)
    return source


def report_error(
    error: BaseException, rank: int, terminal: TextIO, logs: Path | None, *, doing: str = ""
) -> None:
    """Print an error in one line on the terminal, and record it as exit reason for the launcher.

    A DapoError usually occurs on all ranks, so only rank 0 prints it there. Any other error is
    printed by each rank, with `doing` (the activity that failed) and the log with the traceback.
    """
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    if isinstance(error, DapoError):
        text = visible(f"error: {error}")
        print(text, file=terminal if rank == 0 else sys.stderr, flush=True)
        record_reason(exit_code(error), f"rank {rank}: {error}")
    elif isinstance(error, Exception):
        where = f" (traceback in {logs}/rank_{rank}.log)" if logs else ""
        message = f"{type(error).__name__}: {error}".strip()
        line = f"rank {rank}: {doing and f'{doing}: '}{message[:300]}{where}"
        print(visible(line), file=terminal, flush=True)
        record_reason(1, f"rank {rank}: {message}", "".join(traceback.format_exception(error)))


def exit_code(error: DapoError) -> int:
    """Return the exit code of an error. slurm/train.sbatch uses it to decide about a restart: an
    error in config or data (2) would occur again, other errors may not."""
    if isinstance(error, ConfigError | DataError):
        return 2
    return STOPPED if isinstance(error, Stopped) else 1


def redirect_output(log: Path) -> TextIO:
    """Redirect stdout and stderr of this process, including those of C libraries, to `log`. Return
    a file that writes to the original stdout."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = lossy_text(os.dup(1), closes=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    protect_streams()
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()}")
    return terminal


def _interrupt(*_: object) -> None:
    """Handle SIGTERM like Ctrl-C, for commands that have nothing to save."""
    raise KeyboardInterrupt
