"""Which start of a run this is, and with which code it ends.

A run may be started many times: by hand, by Slurm after a requeue. Slurm gives the same job id
again, and a node that was cut off may still run an older start, so that everything a start writes
for itself is named by its attempt.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from dapo_megatron.types import ConfigError

STOPPED = 75
"""Exit code: stopped by a signal, saved; start again with resume=auto (EX_TEMPFAIL of sysexits)."""
FENCED = 97
"""Exit code: a later attempt owns the run's folder."""
HUNG = 98
"""Exit code: the watchdog ended this rank, or the deadline after a signal passed."""

MAX_FRUITLESS = 3
"""Starts of one Slurm job in a row that may end without a newer checkpoint."""

_ATTEMPT = "DAPO_MEGATRON_ATTEMPT"


def attempt(environ: Mapping[str, str] = os.environ) -> str:
    """Name of this start, the same on all its ranks: what `launch` or slurm/train.sbatch gave them,
    else by Slurm's job id and restart count, or torchrun's, else the time."""
    if name := environ.get(_ATTEMPT):
        return name
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        address = f"{environ.get('MASTER_ADDR')}-{environ.get('MASTER_PORT')}"
        return f"{run}-{address}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return time.strftime("%Y%m%d-%H%M%S")


def attempt_variable() -> dict[str, str]:
    """For the environment of ranks that this process starts."""
    return {_ATTEMPT: attempt()}


def begin_attempt(book: Path, step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Note in the file `book` that an attempt begins after rollout step `step`.

    Raises ConfigError where a job that Slurm requeues again and again gets no further: it would
    take its nodes for ever.
    """
    job = environ.get("SLURM_JOB_ID")
    earlier = _read(book)
    alike = takewhile(lambda one: one["job"] == job and one["step"] == step, reversed(earlier))
    fruitless = list(takewhile(lambda one: not one.get("stopped"), alike))
    if job and len(fruitless) >= MAX_FRUITLESS:
        raise ConfigError(
            f"{len(fruitless)} starts of job {job} ended after step {step} without a newer "
            f"checkpoint, so it is not tried again; `doctor run {book.parent}` says what happened. "
            "Submit it anew once that is mended"
        )
    _append(book, {"attempt": attempt(environ), "job": job, "step": step, "time": time.time()})


def end_attempt(book: Path) -> None:
    """Note that this attempt stopped as it was asked to: it may be started any number of times."""
    earlier = _read(book)
    if earlier:
        _append(book, {**earlier[-1], "stopped": True, "time": time.time()})


def _read(book: Path) -> list[dict[str, Any]]:
    """The attempts, oldest first; of one that is noted twice the later note."""
    attempts: dict[str, dict[str, Any]] = {}
    for line in book.read_text(encoding="utf-8").splitlines() if book.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:  # half a line, of a full disk or a kill
            continue
        attempts[one["attempt"]] = one
    return list(attempts.values())


def _append(book: Path, value: dict[str, Any]) -> None:
    with book.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(value))  # whatever half line there is before
