"""One rank of `doctor layouts` or `doctor sync`: output to a log, errors to the terminal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dapo_megatron.run.context import exit_code, redirect_output
from dapo_megatron.types import DapoError


@dataclass
class QuietRank:
    """A rank, and the terminal it was started from."""

    rank: int
    local_rank: int
    terminal: TextIO
    doing: str = ""
    """Work of this rank, for an error message."""
    is_waiting: bool = False
    """True while it waits for others, which then report the error."""


@contextmanager
def quiet_rank(command: str) -> Iterator[QuietRank]:
    """Send what this process and its libraries print to a log, and report an error on the terminal.

    Libraries print while they are imported, so import them inside. Rank 0 reports a DapoError,
    which ends the process. The log is kept only after any other error, for its traceback.
    """
    rank = int(os.environ["RANK"])
    handle, name = tempfile.mkstemp(prefix=f"doctor_{command}_rank_{rank}_", suffix=".log")
    os.close(handle)
    log = Path(name)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    session = QuietRank(rank, local_rank, redirect_output(log))
    try:
        yield session
    except DapoError as error:
        log.unlink()
        if rank == 0:
            print(f"error: {error}", file=session.terminal, flush=True)
        raise SystemExit(exit_code(error)) from None
    except Exception as error:  # raised again, for its traceback in the log
        if not session.is_waiting:
            where = f"{session.doing}, " if session.doing else ""
            text = f"{type(error).__name__}: {error}"[:300].strip()
            line = f"{where}rank {rank}: {text} (log: {log})"
            print(line, file=session.terminal, flush=True)
        raise
    log.unlink()
