"""The folder of a run's checkpoints, `checkpoints/step_000012/`: what is there, and changes to it
that a kill at any moment leaves whole.

`step_000012_open/` is of a run that was stopped after it, in the middle of step 13: it has groups
of that step, and maybe weights of some of its updates. It is only there to go on from, until there
is a newer one.

Next to published checkpoints there may be `.partial/` (being written, or being deleted),
`.step_000012.replaced` (until the new one has its name), `step_000012.1` (of a past that is done
again) and `step_000012.damaged`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_megatron.files import read_json, recover, replaced_by
from dapo_megatron.types import CheckpointError

STATE = "state.json"
PARTIAL = ".partial"
DAMAGED = ".damaged"
_OPEN = "_open"
_NAME = re.compile(rf"step_(\d{{6,}})({_OPEN})?")


def name_of(step: int, *, is_open: bool = False) -> str:
    """Of the checkpoint after a step; `is_open`: and within the one that follows."""
    return f"step_{step:06d}{_OPEN if is_open else ''}"


def place_of(name: str) -> tuple[int, bool]:
    """(step, whether within the one that follows) of a checkpoint's name, by which checkpoints are
    in order; what is appended to the name when it is set aside does not count."""
    match = _NAME.match(name)
    return (int(match[1]), match[2] is not None) if match else (0, False)


def published(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what has a checkpoint's name, newest first."""
    if not checkpoints.exists():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name)]
    found.sort(key=lambda path: place_of(path.name), reverse=True)
    return [(place_of(path.name)[0], path) for path in found]


def newest(checkpoints: Path) -> Path | None:
    """The newest published checkpoint of a folder, or None. It is not verified."""
    found = (path for _, path in published(checkpoints) if (path / STATE).exists())
    return next(found, None)


def recover_checkpoints(checkpoints: Path) -> None:
    """Complete what a kill interrupted. Half-written and half-deleted checkpoints are deleted, and
    one that was about to be replaced gets its name back."""
    for replaced in checkpoints.glob("step_*.replaced"):  # as older versions named them
        replaced.rename(replaced_by(replaced.with_suffix("")))
    for replaced in checkpoints.glob(".step_*.replaced"):
        recover(checkpoints / replaced.stem.removeprefix("."))
    # The second: as older versions named them.
    for half in (checkpoints / PARTIAL, *checkpoints.glob("step_*.partial")):
        if half.exists():
            shutil.rmtree(half)


def prune(checkpoints: Path, graveyard: Path, *, keep: int, keep_every: int | None) -> None:
    """Delete all but the newest `keep` and those of steps that are multiples of `keep_every`. One
    within a step does not count; it goes unless it is the newest of all."""
    found = published(checkpoints)
    between = [(step, path) for step, path in found if not _is_open(path)]
    old = [path for step, path in between[keep:] if keep_every is None or step % keep_every]
    for path in (*old, *(path for _, path in found[1:] if _is_open(path))):
        # Renamed first: a half-deleted folder must not look like a checkpoint.
        shutil.rmtree(path.rename(graveyard / f"{path.name}.old"))


def _is_open(path: Path) -> bool:
    return place_of(path.name)[1]


def free_name(path: Path) -> Path:
    """`path`, or the first of PATH.1, PATH.2, ... that is free."""
    free, number = path, 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state saved with a checkpoint. Raises CheckpointError naming the file."""
    return read_json(checkpoint / STATE, "not a checkpoint's state")


@contextmanager
def restoring(checkpoint: Path | None) -> Iterator[None]:
    """Name the file if its state, valid JSON, is not of the form that the caller restores."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if checkpoint is None:
            raise
        raise CheckpointError(
            f"{checkpoint / STATE}: not a state that this version can restore ({error!r:.200}); "
            "resume from another checkpoint, or with the version that wrote it"
        ) from error
