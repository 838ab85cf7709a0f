"""Attempts: the name of this start of a run, why it ended, and the log of all starts.

A run may be started many times, by hand or by Slurm after a requeue. A requeued job keeps its job
id, so the files of a start contain its attempt name.

The exit code and reason of an attempt are in one file, which the first failing rank writes. When
one rank dies, all others fail within seconds because they lose their connection to it. The first
rank's error is the reason to report, so ranks with a lost connection wait before they write.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dapo_megatron.files import parse_json, read_file
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError

STOPPED = 75
"""Exit code: stopped by a signal, and saved if there was anything to save. resume=auto continues
(EX_TEMPFAIL of sysexits)."""
ATTEMPTS = "attempts.jsonl"
"""File in a run's folder with all its starts."""
MAX_CRASHES = 3
"""Maximum number of consecutive starts of one Slurm job that crash or hang without a newer
checkpoint."""
MAX_CUT_SHORT = 20
"""Maximum number of consecutive starts of one Slurm job without a newer checkpoint, including those
that were cut short (preempted without time to save)."""
REASON_FILE = "DAPO_MEGATRON_VERDICT"
"""Environment variable with the path of the exit reason; if it is not set, nothing is written."""
SECONDARY_SECONDS = 3.0
"""How long a rank that lost a connection waits for the failed rank to write its reason first."""

_ATTEMPT = "DAPO_MEGATRON_ATTEMPT"
_START_TIME = time.strftime("%Y%m%d-%H%M%S")  # once per process, so that its attempt has one name
_LOST = re.compile(
    r"gloo/transport/|Connection (closed|reset) by peer|Broken pipe"
    r"|ncclRemoteError|NCCL.*(abort|timeout)|collective operation timeout"
    r"|DistStoreError|DistNetworkError|wait timeout after",
    re.IGNORECASE,
)
"""Error messages of gloo, NCCL and torch's store for a lost or missing rank (torch 2.13)."""


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


def attempt_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables with which child ranks get this process's attempt name, and
    the path of the exit reason: in `folder`, unless there is one already."""
    return {_ATTEMPT: attempt(), REASON_FILE: os.environ.get(REASON_FILE, str(folder / "verdict"))}


# ------------------------------------------------------------------ the exit reason


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Exit code and reason of an attempt."""

    code: int
    reason: str
    """Reason in one line."""
    text: str = ""
    """Details, such as a traceback."""


def is_secondary(reason: str) -> bool:
    """Return whether `reason` only reports a lost connection to another rank."""
    return bool(_LOST.search(reason))


def has_reason() -> bool:
    """Return whether a rank has written how this attempt ended."""
    return bool(os.environ.get(REASON_FILE)) and Path(os.environ[REASON_FILE]).exists()


def record_reason(code: int, reason: str, text: str = "") -> None:
    """Write how this attempt ended, unless another rank has written it.

    Never raises OSError: it is called by ranks that are about to exit, on disks that may be full.
    """
    if not os.environ.get(REASON_FILE):
        return
    line = " ".join(reason.split())
    if is_secondary(line):
        end = time.monotonic() + SECONDARY_SECONDS
        while not has_reason() and time.monotonic() < end:
            time.sleep(0.05)
        line = (
            "lost its connection to another rank, which reported no error and may have been "
            f"killed ({line[:300]})"
        )
    path = Path(os.environ[REASON_FILE])
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(visible(f"{code} {line}\n{text}"))


def read_reason(path: Path) -> ExitReason | None:
    """Return how the attempt ended, or None if there is no readable file.

    There is no file if every rank was killed or exited without an error.
    """
    try:
        first, _, text = read_file(path).decode().partition("\n")
        code, _, reason = first.partition(" ")
        return ExitReason(int(code), reason, text)
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------ the log of all starts


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


def end_attempt(attempts_file: Path, environ: Mapping[str, str] = os.environ, **how: str) -> None:
    """Record how this attempt ended: `end` is stopped, crashed or hung, `status` is MLflow's.

    A stopped run may be started again any number of times. An attempt without `end` was cut short.
    Never raises OSError, because the run is ending.
    """
    name = attempt(environ)
    with suppress(OSError):
        starts = [past for past in read_attempts(attempts_file) if past["attempt"] == name]
        if starts:
            current = {key: value for key, value in starts[-1].items() if key != "began"}
            _append(attempts_file, {**current, **how, "time": time.time()})


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


def _append(attempts_file: Path, value: dict[str, Any]) -> None:
    with attempts_file.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(value))  # a new line, because the last one may be incomplete
