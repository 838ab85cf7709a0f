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
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from dapo_megatron.files import parse_json, read_json
from dapo_megatron.types import CheckpointError, ConfigError, Fenced

STOPPED = 75
"""Exit code: stopped by a signal, saved; start again with resume=auto (EX_TEMPFAIL of sysexits)."""
FENCED = 97
"""Exit code: a later attempt owns the run's folder."""
HUNG = 98
"""Exit code: the watchdog ended this rank, or the deadline after a signal passed."""

MAX_CRASHES = 3
"""Starts of one Slurm job in a row that may crash or hang without a newer checkpoint."""
MAX_CUT_SHORT = 20
"""Starts in a row that may be cut short (preempted without time to save) without one."""

OWNER = ".owner"
"""File in a run's folder that names the attempt which owns it."""

_ATTEMPT = "DAPO_MEGATRON_ATTEMPT"
_BEGAN = time.strftime("%Y%m%d-%H%M%S")  # of this process: its start has one name


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
    return _BEGAN


def attempt_variable() -> dict[str, str]:
    """For the environment of ranks that this process starts."""
    return {_ATTEMPT: attempt()}


def check_owner(folder: Path, attempt: str) -> None:
    """Raise Fenced if another attempt has taken the run's folder: nothing may be written into it
    any more.

    Reads one small file. One that is missing or cannot be read proves nothing: who takes the folder
    replaces it as a whole.
    """
    try:
        owner = read_json(folder / OWNER).get("attempt")
    except CheckpointError:
        return
    if owner is not None and owner != attempt:
        raise Fenced(
            f"{folder} was taken by attempt {owner}; this is attempt {attempt}, cut off meanwhile: "
            "it publishes nothing and ends"
        )


def begin_attempt(book: Path, step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Note in the file `book` that an attempt begins after rollout step `step`.

    Raises ConfigError where a job that Slurm requeues again and again gets no further: it would
    take its nodes for ever.
    """
    job = environ.get("SLURM_JOB_ID")
    alike = takewhile(
        lambda one: one["job"] == job and one["step"] == step, reversed(read_attempts(book))
    )
    ends = [
        one.get("end", "cut short")
        for one in takewhile(lambda one: one.get("end") != "stopped", alike)
    ]
    crashes = ends.count("crashed") + ends.count("hung")
    if job and (crashes >= MAX_CRASHES or len(ends) >= MAX_CUT_SHORT):
        raise ConfigError(
            f"{len(ends)} starts of job {job} ended after step {step} without a newer checkpoint, "
            f"{crashes} of them by a crash or a hang, so it is not tried again. `doctor run "
            f"{book.parent}` says what happened; if they were preempted, checkpoint.max_minutes "
            "makes it save more often. Submit it anew once that is mended"
        )
    with suppress(OSError):  # of a full disk more will be heard
        _append(book, {"attempt": attempt(environ), "job": job, "step": step, "time": time.time()})


def end_attempt(book: Path, end: str, environ: Mapping[str, str] = os.environ) -> None:
    """Note how this attempt ended: stopped (it may be started again any number of times), crashed
    or hung. Without a note it was cut short. Never raises: the run is ending."""
    _note(book, {"end": end, "time": time.time()}, environ)


def close_attempt(book: Path, status: str, environ: Mapping[str, str] = os.environ) -> None:
    """Note the status that MLflow is to show for this attempt. Never raises: the run is ending."""
    _note(book, {"status": status, "closed": time.time()}, environ)


def read_attempts(book: Path) -> list[dict[str, Any]]:
    """Return all attempts, oldest first, each with its latest note and `began`, the time of its
    first one. A line that is damaged, as by a full disk or a kill, is skipped."""
    attempts: list[dict[str, Any]] = []
    for line in book.read_text(encoding="utf-8").splitlines() if book.exists() else ():
        try:
            value = parse_json(line)
            name, began = value["attempt"], float(value["time"])
            is_first = value.keys().isdisjoint(("end", "status"))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if is_first:
            attempts.append({**value, "began": began})
        for one in reversed(attempts):
            if one["attempt"] == name:
                one.update(value)
                break
    return attempts


def _note(book: Path, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    with suppress(OSError):
        mine = [one for one in read_attempts(book) if one["attempt"] == attempt(environ)]
        if mine:
            _append(book, {name: mine[-1][name] for name in mine[-1] if name != "began"} | values)


def _append(book: Path, value: dict[str, Any]) -> None:
    with book.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(value))  # whatever half line there is before
