"""Attempts: the name of this start of a run, its exit codes, and the log of all starts.

A run may be started many times, by hand or by Slurm after a requeue. A requeued job keeps its job
id, and a node that lost its connection may still run an older start. So the files of a start
contain its attempt name.
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

from dapo_megatron.files import parse_json, read_file, read_json
from dapo_megatron.types import CheckpointError, ConfigError, Fenced, FolderLost

STOPPED = 75
"""Exit code: stopped by a signal, and saved if there was anything to save. resume=auto continues
(EX_TEMPFAIL of sysexits)."""
FENCED = 97
"""Exit code: a newer attempt owns the run's folder."""
HUNG = 98
"""Exit code: the watchdog ended this rank, or it missed the deadline after a signal."""

MAX_CRASHES = 3
"""Maximum number of consecutive starts of one Slurm job that crash or hang without a newer
checkpoint."""
MAX_CUT_SHORT = 20
"""Maximum number of consecutive starts of one Slurm job without a newer checkpoint, including those
that were cut short (preempted without time to save)."""

OWNER = ".owner"
"""File in a run's folder that names the attempt that owns the folder."""

_ATTEMPT = "DAPO_MEGATRON_ATTEMPT"
_START_TIME = time.strftime("%Y%m%d-%H%M%S")  # once per process, so that its attempt has one name


def attempt(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this start, the same on all its ranks.

    It is the name from `launch` or slurm/train.sbatch. Without one it is made from torchrun's run
    id and restart count, or from Slurm's job id and restart count, or from the start time.
    """
    if name := environ.get(_ATTEMPT):
        return name
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        address = f"{environ.get('MASTER_ADDR')}-{environ.get('MASTER_PORT')}"
        return f"{run}-{address}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return _START_TIME


def attempt_variable() -> dict[str, str]:
    """Return the environment variable that gives child ranks this process's attempt name."""
    return {_ATTEMPT: attempt()}


def check_owner(folder: Path, attempt: str, inode: int | None = None) -> None:
    """Raise Fenced if another attempt owns the run's folder, which must then not be written to, and
    FolderLost if the owner file is gone or the folder is not the one with this inode.

    Reads one small file. An unreadable file is ignored. A new owner replaces it atomically.
    """
    owner, is_lost = None, False
    try:
        owner = read_json(folder / OWNER).get("attempt")
        is_lost = inode not in (None, folder.stat().st_ino)
    except CheckpointError as error:
        is_missing = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
        is_lost = inode is not None and is_missing
    except OSError:  # such as ESTALE
        return
    if is_lost:
        raise FolderLost(
            f"{folder} was deleted, renamed or replaced while the run used it, so nothing more is "
            "written. If it was renamed, give it its name back; then resume=auto continues from "
            "its newest checkpoint"
        )
    if owner is not None and owner != attempt:
        raise Fenced(
            f"{folder} was taken by attempt {owner}, so this attempt ({attempt}) writes nothing "
            "more and exits"
        )


def start_attempt(attempts_file: Path, step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Record in `attempts_file` that an attempt starts after rollout step `step`.

    Raises ConfigError if a Slurm job was requeued many times without progress, because it would
    otherwise occupy its nodes forever.
    """
    job = environ.get("SLURM_JOB_ID")
    without_progress = takewhile(
        lambda past: past["job"] == job and past["step"] == step,
        reversed(read_attempts(attempts_file)),
    )
    ends = [
        past.get("end", "cut short")
        for past in takewhile(lambda past: past.get("end") != "stopped", without_progress)
    ]
    crashes = ends.count("crashed") + ends.count("hung")
    if job and (crashes >= MAX_CRASHES or len(ends) >= MAX_CUT_SHORT):
        raise ConfigError(
            f"{len(ends)} starts of job {job} ended after step {step} without a newer checkpoint, "
            f"{crashes} of them by a crash or a hang, so this start is refused. Run `doctor run "
            f"{attempts_file.parent}` to find the reason; if the starts were preempted, set "
            "checkpoint.max_minutes to save more often. Then submit a new job"
        )
    with suppress(OSError):  # a full disk is reported later, when a checkpoint is saved
        _append(
            attempts_file,
            {"attempt": attempt(environ), "job": job, "step": step, "time": time.time()},
        )


def end_attempt(attempts_file: Path, end: str, environ: Mapping[str, str] = os.environ) -> None:
    """Record how this attempt ended: stopped, crashed or hung.

    A stopped run may be started again any number of times. An attempt without this record was cut
    short. Never raises OSError, because the run is ending.
    """
    _update(attempts_file, {"end": end, "time": time.time()}, environ)


def close_attempt(
    attempts_file: Path, status: str, environ: Mapping[str, str] = os.environ
) -> None:
    """Record the MLflow status of this attempt. Never raises OSError, because the run is ending."""
    _update(attempts_file, {"status": status, "closed": time.time()}, environ)


def read_attempts(attempts_file: Path) -> list[dict[str, Any]]:
    """Return all attempts, oldest first, each with its latest values and its start time `began`.

    Damaged lines, for example from a full disk or a kill, are skipped.
    """
    attempts: list[dict[str, Any]] = []
    data = read_file(attempts_file) if attempts_file.exists() else b""
    for line in data.splitlines():
        try:
            value = parse_json(line)
            name, began = value["attempt"], float(value["time"])
            is_first = value.keys().isdisjoint(("end", "status"))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if is_first:
            attempts.append({**value, "began": began})
        for recorded in reversed(attempts):
            if recorded["attempt"] == name:
                recorded.update(value)
                break
    return attempts


def _update(attempts_file: Path, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Append a line with the current values of this attempt, updated by `values`."""
    name = attempt(environ)
    with suppress(OSError):
        starts = [past for past in read_attempts(attempts_file) if past["attempt"] == name]
        if starts:
            current = {key: value for key, value in starts[-1].items() if key != "began"}
            _append(attempts_file, current | values)


def _append(attempts_file: Path, value: dict[str, Any]) -> None:
    with attempts_file.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(value))  # a new line, because the last one may be incomplete
