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
from itertools import groupby
from pathlib import Path
from typing import Any

from dapo_megatron.rollout.recorded import (
    check_complete,
    old_samples,
    recorded_steps,
    step_completions,
    step_folder,
)
from dapo_megatron.types import Collected, ConfigError, DataError, Group, Outcome, SyncReport


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


class Replay:
    """Replaces the coordinator: reads the groups of each step from `run_folder`. Every rank reads
    the files and gets the same groups."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        """Return the recorded groups of step `version` + 1, which started from weights `version`.

        Raises DataError naming the folder or the file if the step was not recorded completely, if a
        file is damaged, or if the step trained on no group.
        """
        ended = self._read(version + 1)
        train = [group for group, outcome in ended if outcome is Outcome.TRAINED]
        decided = [group for group, outcome in ended if outcome is not Outcome.EXPIRED]
        if not train:
            raise DataError(f"{self._folder(version + 1)}: no group was trained on in this step")
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

    def _folder(self, step: int) -> Path:
        return step_folder(self._run_folder / "samples", step)

    def _read(self, step: int) -> list[tuple[Group, Outcome]]:
        """Return the groups that ended in `step`, sorted by ticket."""
        folder = self._folder(step)
        if not folder.exists():
            recorded = [path.name for path in recorded_steps(folder.parent).values()]
            raise DataError(
                f"{folder}: not recorded, so step {step} cannot be replayed. Recorded steps: "
                + (f"{recorded[0]} to {recorded[-1]}" if recorded else "none")
                + ". Set train.rollout_steps to the last recorded step, or resume=PATH to a "
                "checkpoint before a recorded step"
            )
        check_complete(folder)
        rows = list(step_completions(folder))
        rows.sort(key=lambda row: (row.ticket, row.completion.sample))
        ended = []
        for ticket, members in groupby(rows, key=lambda row: row.ticket):
            first, *others = members
            completions = tuple(row.completion for row in (first, *others))
            try:
                outcome = Outcome(first.outcome)
            except ValueError as error:
                raise DataError(f"{folder}: ticket {ticket}: {error}") from error
            ended.append((Group(ticket, first.prompt, completions), outcome))
        return ended


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
