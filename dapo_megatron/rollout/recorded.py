"""Recorded rollouts of a run, a folder per step:

samples/step_000012/completions_00000.parquet   completions (earlier versions: a file per engine)
samples/step_000012/policy_00001.parquet        policy values of the sequences that data-parallel
                                                rank 1 trained on (tracking/policy_files.py)
samples/step_000012/index.json                  columns for display

Files are written independently of each other. The index lists all completions, so a reader notices
a step whose recording was interrupted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from dapo_megatron.files import read_json
from dapo_megatron.rollout.completion_files import num_rows, read_completions, read_summaries
from dapo_megatron.rollout.completion_rows import CompletionRow, SummaryRow
from dapo_megatron.rollout.parquet import part_path, parts_among
from dapo_megatron.types import ConfigError, DataError

_STEP = re.compile(r"step_(\d{6,18})")
_COMPLETIONS, _POLICY = "completions", "policy"
_OLD = "step_*.jsonl"


def step_folder(samples: Path, step: int) -> Path:
    """Return the folder of a step; `samples` is the run's samples/."""
    return samples / f"step_{step:06d}"


def completions_path(folder: Path) -> Path:
    """Return the file of completions; `folder` is a step's."""
    return part_path(folder, _COMPLETIONS, 0)


def policy_path(folder: Path, index: int) -> Path:
    """Return the file of the policy values of a data-parallel index."""
    return part_path(folder, _POLICY, index)


def index_path(folder: Path) -> Path:
    """Return the file of a step's index."""
    return folder / "index.json"


def recorded_steps(samples: Path) -> dict[int, Path]:
    """Return step -> folder, in step order; empty without a folder."""
    steps = (
        (int(match[1]), path)
        for path in _entries(samples)
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    )
    return dict(sorted(steps))


def completion_files(folder: Path) -> list[Path]:
    """Return the files of completions of a step, in order."""
    return list(parts_among(_entries(folder), _COMPLETIONS).values())


def policy_files(folder: Path) -> list[Path]:
    """Return the files of policy values of a step, in order."""
    return list(parts_among(_entries(folder), _POLICY).values())


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def forget_after(samples: Path, step: int) -> None:
    """Delete what was recorded of steps after `step`, because a run that resumes there repeats
    them. Raises OSError."""
    for later, folder in reversed(recorded_steps(samples).items()):
        if later > step:
            shutil.rmtree(folder)


def old_samples(samples: Path) -> str | None:
    """Return a message if the folder has rollouts only in the form of earlier versions, which are
    not read; None otherwise."""
    old = sorted(samples.glob(_OLD))
    if not old or recorded_steps(samples):
        return None
    return (
        f"{old[0]}: rollouts as JSON lines, which this version does not read. Read them with the "
        "version of dapo_megatron that recorded them, or run again to record Parquet files"
    )


def require_steps(run_folder: Path) -> dict[int, Path]:
    """Return step -> folder of a run's recorded steps. Raises ConfigError if there are none."""
    samples = run_folder / "samples"
    if message := old_samples(samples):
        raise ConfigError(message)
    if steps := recorded_steps(samples):
        return steps
    raise ConfigError(
        f"{samples} has no recorded steps; name the folder of a run that had tracking.samples=true"
    )


def check_complete(folder: Path) -> None:
    """Raise DataError if a file of the step's completions is missing or has not all rows."""
    path = index_path(folder)
    if not path.exists():
        raise DataError(
            f"{folder}: no {path.name}, because the run was killed while it recorded this step"
        )
    try:
        columns = dict(read_json(path, error=DataError).get("completions") or {})
        # In earlier versions, -1 is the engine of completions whose tokens were lost.
        listed = len(columns["sample"]) - list(columns.get("replica", ())).count(-1)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: `completions` is damaged ({error})") from error
    recorded = sum(map(num_rows, completion_files(folder)))
    if recorded != listed:
        raise DataError(
            f"{folder}: {recorded} completions in {completions_path(folder).name}, but {path.name} "
            f"lists {listed}; the step was not recorded completely, or in different attempts"
        )


def step_summaries(folder: Path) -> list[SummaryRow]:
    """Return all completions of a step without their tokens, sorted by ticket and sample. Raises
    DataError for a damaged file."""
    rows = [row for path in completion_files(folder) for row in read_summaries(path)]
    return sorted(rows, key=lambda row: (row.ticket, row.sample))


def step_completions(
    folder: Path, tickets: Collection[int] | None = None
) -> Iterator[CompletionRow]:
    """Yield the completions of a step, of one file after the other; see `read_completions`."""
    for path in completion_files(folder):
        yield from read_completions(path, tickets)


def check_recorded(recorded: Path, own: Path) -> None:
    """Raise ConfigError if `recorded` has no rollouts, or is the folder of the replay itself."""
    if recorded.resolve() == own.resolve():
        raise ConfigError(f"run.name: {own} is the run to replay; choose another name")
    if message := old_samples(recorded / "samples"):
        raise ConfigError(f"--replay: {message}")
    if not recorded_steps(recorded / "samples"):
        raise ConfigError(
            f"--replay: {recorded}/samples has no recorded steps; pass the folder of a run that "
            "had tracking.samples=true"
        )
