"""Ranks of `doctor layouts` and `doctor sync`: where their output goes, and worlds of fewer ranks.

Megatron builds its groups over the whole world. For a case of n ranks, the first n ranks therefore
form a new world, and destroy it before the next case.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dapo_megatron.cluster.ranks import Ranks, form_world
from dapo_megatron.cluster.store import open_store
from dapo_megatron.policy.device import backend
from dapo_megatron.run.context import exit_code, redirect_output, report_error
from dapo_megatron.types import DapoError

PATIENCE = timedelta(hours=4)
"""Timeout of ranks that wait while others run a case."""
CASE_TIMEOUT = timedelta(minutes=5)
"""Timeout of collectives within a case."""


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


class Worlds:
    """Forms a world of ranks for each case, within a launched job."""

    def __init__(self, session: QuietRank) -> None:
        self.rank, self.num_ranks = session.rank, int(os.environ["WORLD_SIZE"])
        self._session = session
        self._store = open_store(self.rank, self.num_ranks, PATIENCE)
        self._number = 0
        session.is_waiting = self.rank > 0

    def tell(self, key: str, text: str) -> str:
        """Return rank 0's text on every rank."""
        if self.rank == 0:
            self._store.set(key, text)
        return self._store.get(key).decode()

    @contextmanager
    def world(self, num_ranks: int, doing: str) -> Iterator[Ranks | None]:
        """Form a world of the first `num_ranks` ranks. Yield None on other ranks at once."""
        self._number += 1
        if self.rank >= num_ranks:
            yield None
            return
        self.tell(f"start/{self._number}", "go")
        self._session.doing, self._session.is_waiting = doing, False
        excepthook = sys.excepthook
        store = PrefixStore(f"case/{self._number}", self._store)
        ranks = form_world(backend(), store, self.rank, num_ranks, timeout=CASE_TIMEOUT)
        sys.excepthook = excepthook  # each form_world adds one more "[rank0]" to every line
        yield ranks
        # Not after an error, because the other ranks may never come.
        dist.destroy_process_group()
        # Reference cycles keep process groups alive, and each group holds threads and sockets.
        gc.collect()
        self._session.is_waiting = self.rank > 0
