"""Which start of a run this is, and with which code it ends.

A run may be started many times: by hand, by Slurm after a requeue. Slurm gives the same job id
again, and a node that was cut off may still run an older start, so that everything a start writes
for itself is named by its attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

STOPPED = 75
"""Exit code: stopped by a signal, saved; start again with resume=auto (EX_TEMPFAIL of sysexits)."""
FENCED = 97
"""Exit code: a later attempt owns the run's folder."""
HUNG = 98
"""Exit code: the watchdog ended this rank, or the deadline after a signal passed."""

_ATTEMPT = "DAPO_MEGATRON_ATTEMPT"


def attempt(environ: Mapping[str, str] = os.environ) -> str:
    """Name of this start, the same on all its ranks: Slurm's job id and restart count, else what
    `launch` gave its ranks, else the time."""
    if name := environ.get(_ATTEMPT):
        return name
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return time.strftime("%Y%m%d-%H%M%S")


def attempt_variable() -> dict[str, str]:
    """For the environment of ranks that this process starts."""
    return {_ATTEMPT: attempt()}
