"""Replay: train on the rollouts that a run recorded, without an engine.

The samples/ folder of a run has the groups that each step trained on, with exact tokens and
log-probs. From the same weights (initial, or of a checkpoint) and with the same layout, a replayed
step gives the same update. Any difference is therefore not caused by sampling.

Samples do not record in which step the last completion of a group was graded. A replay computes
accuracies and lengths over the groups that were closed in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.files import parse_json
from dapo_megatron.rollout.serialization import group_from_json
from dapo_megatron.types import Collected, ConfigError, DataError, Group, Outcome, SyncReport


def check_recorded(recorded: Path, own: Path) -> None:
    """Raise ConfigError if `recorded` has no rollouts, or is the folder of the replay itself."""
    if recorded.resolve() == own.resolve():
        raise ConfigError(f"run.name: {own} is the run to replay; choose another name")
    if not any((recorded / "samples").glob("step_*.jsonl")):
        raise ConfigError(
            f"--replay: {recorded}/samples has no step_*.jsonl; pass the folder of a run that had "
            "tracking.samples=true"
        )


class Replay:
    """Replaces the coordinator: reads the groups of each step from `run_folder`. Every rank reads
    the files and gets the same groups."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        """Return the recorded groups of step `version` + 1, which started from weights `version`.

        Raises DataError naming the file if the step was not recorded or trained on no group, or
        naming the line that is not a group.
        """
        ended = self._read(version + 1)
        train = [group for group, outcome in ended if outcome is Outcome.TRAINED]
        decided = [group for group, outcome in ended if outcome is not Outcome.EXPIRED]
        if not train:
            raise DataError(f"{self._path(version + 1)}: no group was trained on in this step")
        on_progress(len(train))
        counts = Counter(outcome.value for _, outcome in ended)
        return Collected(
            train=train,
            ended=ended,
            decided=decided,
            version=version,
            counts={"issued": 0, **{outcome.value: counts[outcome.value] for outcome in Outcome}},
            gradings=Counter(),
            keep_rate=len(train) / len(decided),
            interrupted=0,
            grade_seconds=0.0,
        )

    def state(self) -> dict[str, Any]:
        """Return the folder of the recorded run. The step is saved in `Progress`."""
        return {"replay": str(self._run_folder)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing. Only the step number selects the file to read, so a state of the recorded run
        and one of a replay both work."""

    def _path(self, step: int) -> Path:
        return self._run_folder / "samples" / f"step_{step:06d}.jsonl"

    def _read(self, step: int) -> list[tuple[Group, Outcome]]:
        """Return the groups that ended in `step`, in file order."""
        path = self._path(step)
        if not path.exists():
            recorded = sorted(path.parent.glob("step_*.jsonl"))
            raise DataError(
                f"{path}: not recorded, so step {step} cannot be replayed. Recorded files: "
                + (f"{recorded[0].name} to {recorded[-1].name}" if recorded else "none")
                + ". Set train.rollout_steps to the last recorded step, or resume=PATH to a "
                "checkpoint before a recorded step"
            )
        with path.open(encoding="utf-8") as file:
            return [_group(line, f"{path}, line {number}") for number, line in enumerate(file, 1)]


class NoEvaluation:
    """Evaluator of a replay, which has no engine to evaluate with."""

    def due(self, step: int, last: int) -> bool:
        """Return False."""
        return False

    def run(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class NoSync:
    """Sync of a replay: there is no engine, and the policy keeps the accelerator."""

    def __call__(self, version: int) -> SyncReport:
        """Return a report of a sync that moved nothing."""
        return SyncReport(
            version=version,
            num_tensors=0,
            num_bytes=0,
            seconds=0.0,
            verify_seconds=0.0,
            turn_seconds=0.0,
            fingerprinted=0.0,
            unread_tensors=0,
            canary_gap=0.0,
        )

    def switch_to_policy(self) -> None:
        """Do nothing: the policy always has the accelerator."""


def _group(line: str, where: str) -> tuple[Group, Outcome]:
    try:
        value = parse_json(line)
        return group_from_json(value), Outcome(value["fate"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where}: not a recorded group ({error!r})") from error
