"""Replay: training on the rollouts that a run recorded, without an engine.

What a run wrote to samples/ says which groups each of its steps trained on, with every token and
log-prob to the last bit. From the same weights (its start, or one of its checkpoints) and with the
same layout, a replayed step gives the same update: whatever then differs is not the sampling.

What a step decided is not recorded as such: accuracies and lengths of a replay are over the groups
that ended in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.files import parse_json
from dapo_megatron.rollout.serialization import group_from_json
from dapo_megatron.types import Collected, ConfigError, DataError, Fate, Group, SyncReport


def check_recorded(recorded: Path, own: Path) -> None:
    """Refuse to replay a run folder without rollouts, or the folder of the replay itself."""
    if recorded.resolve() == own.resolve():
        raise ConfigError(f"run.name: {own} is the run to be replayed; choose another name")
    if not any((recorded / "samples").glob("step_*.jsonl")):
        raise ConfigError(
            f"--replay: {recorded}/samples has no step_*.jsonl; name the folder of a run that was "
            "made with tracking.samples=true"
        )


class Replay:
    """Stands in for the coordinator: the groups of a step come from `run_folder`. The same on every
    rank, which all read the files."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        """What the recorded run trained on in the step that weights `version` went into.

        Raises DataError naming the file if the step was not recorded, or the line that is no group.
        """
        ended = self._read(version + 1)
        train = [group for group, fate in ended if fate is Fate.TRAINED]
        decided = [group for group, fate in ended if fate is not Fate.EXPIRED]
        if not train:
            raise DataError(f"{self._path(version + 1)}: no group was trained on in this step")
        on_progress(len(train))
        fates = Counter(fate.value for _, fate in ended)
        return Collected(
            train=train,
            ended=ended,
            decided=decided,
            version=version,
            counts={"issued": 0, **{fate.value: fates[fate.value] for fate in Fate}},
            outcomes=Counter(),
            keep_rate=len(train) / len(decided),
            interrupted=0,
            grade_seconds=0.0,
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a replay has no state but its step."""
        return {"replay": str(self._run_folder)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing: be it of the recorded run or of a replay, the next step says what to read."""

    def _path(self, step: int) -> Path:
        return self._run_folder / "samples" / f"step_{step:06d}.jsonl"

    def _read(self, step: int) -> list[tuple[Group, Fate]]:
        """The groups that ended in `step`, in the order in which they were written."""
        path = self._path(step)
        if not path.exists():
            recorded = sorted(path.parent.glob("step_*.jsonl"))
            raise DataError(
                f"{path}: not recorded, so step {step} cannot be replayed; there is "
                + (f"{recorded[0].name} to {recorded[-1].name}" if recorded else "nothing else")
                + " (train.rollout_steps says how far to go, resume=PATH from which checkpoint)"
            )
        with path.open(encoding="utf-8") as file:
            return [_group(line, f"{path}, line {number}") for number, line in enumerate(file, 1)]


class NoEvaluation:
    """Without an engine nothing can be evaluated."""

    def due(self, step: int, last: int) -> bool:
        """Never."""
        return False

    def run(self) -> dict[str, float]:
        """No figures."""
        return {}


class NoSync:
    """The sync of a replay: no engine takes the weights, and the policy keeps the accelerator."""

    def __call__(self, version: int) -> SyncReport:
        """Report that nothing was moved."""
        return SyncReport(
            version=version,
            num_tensors=0,
            num_bytes=0,
            seconds=0.0,
            verify_seconds=0.0,
            turn_seconds=0.0,
            fingerprinted=False,
            unread_tensors=0,
            canary_gap=0.0,
        )

    def switch_to_policy(self) -> None:
        """Nothing."""


def _group(line: str, where: str) -> tuple[Group, Fate]:
    try:
        value = parse_json(line)
        return group_from_json(value), Fate(value["fate"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where}: not a recorded group ({error!r})") from error
