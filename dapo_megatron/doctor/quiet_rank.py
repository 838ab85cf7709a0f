"""Send the output of a rank of `doctor layouts` or `doctor sync` to a log, errors to the
terminal."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dapo_megatron.run.context import exit_code, redirect_output, report_error
from dapo_megatron.types import DapoError


@dataclass
class QuietRank:
    """A rank, and the terminal that started it."""

    rank: int
    local_rank: int
    terminal: TextIO
    doing: str = ""
    """Current work of this rank, for error messages."""
    is_waiting: bool = False
    """True while this rank waits for others. The others then report an error."""


@contextmanager
def quiet_rank(command: str) -> Iterator[QuietRank]:
    """Redirect the output of this process and its libraries to a log, and report errors on the
    terminal.

    Libraries print while they are imported, so import them inside the block. Rank 0 reports a
    DapoError, which ends the process. The log is kept only after other errors, for the traceback.
    """
    rank = int(os.environ["RANK"])
    logs = Path(tempfile.mkdtemp(prefix=f"doctor_{command}_logs_"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    session = QuietRank(rank, local_rank, redirect_output(logs / f"rank_{rank}.log"))
    try:
        yield session
    except DapoError as error:
        shutil.rmtree(logs)
        report_error(error, rank, session.terminal, logs)
        raise SystemExit(exit_code(error)) from None
    except Exception as error:  # raised again, for its traceback in the log
        if not session.is_waiting:
            report_error(error, rank, session.terminal, logs, doing=session.doing)
        raise
    shutil.rmtree(logs)
