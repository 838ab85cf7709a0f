"""Replay: train on the rollouts that a run recorded, without an engine.

The samples/ folder of a run has the groups that each step trained on, with exact tokens and
log-probs. From the same weights (initial, or of a checkpoint) and with the same layout, a replayed
step gives the same update. Any difference is therefore not caused by sampling.

Samples do not record in which step the last completion of a group was graded. A replay computes
accuracies and lengths over the groups that were closed in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.config import Config
from dapo_megatron.protocols import Exchange
from dapo_megatron.rollout import record
from dapo_megatron.rollout.collector import StepPlan, step_plan, trained_groups
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.record import OpenGroups
from dapo_megatron.types import (
    Collected,
    DataError,
    Group,
    Outcome,
    Rollouts,
    SyncReport,
)


@dataclass(frozen=True)
class Replay:
    """Source of rollouts that a run recorded. Implements protocols.Collector.

    Rank 0 reads what the step trained on.
    """

    config: Config
    run_folder: Path
    exchange: Exchange
    delivery: Delivery

    def collect(self, version: int) -> Rollouts:
        """Return the recorded rollouts of step `version` + 1, which started from weights `version`.

        Raises DataError naming the file if the step was not recorded completely, or trained on no
        group.
        """
        train: list[Group] = []
        plan = on_rank0(self.exchange, self._plan, version, train)
        plan = cast(StepPlan, self.exchange.broadcast(plan, StepPlan | None))
        tokens = self.delivery(plan.sequences, train)
        return Rollouts(version, plan.sequences, tokens, plan.metrics)

    def state(self) -> dict[str, Any]:
        """Return the folder of the recorded run. The step is saved in `Progress`."""
        return {"replay": str(self.run_folder)}

    def snapshot(self) -> OpenGroups:
        """Return no groups: none are carried."""
        return OpenGroups([])

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Do nothing. Only the step number selects the files to read, so a state of the recorded
        run and one of a replay both work."""

    def _plan(self, version: int, train: list[Group]) -> StepPlan:
        """Return the plan of a step, and add the groups to train on to `train`."""
        folder = self._folder(version + 1)
        recorded = list(record.read_groups(folder / record.COMPLETIONS))
        ended = [(item.group, Outcome(item.outcome)) for item in recorded]
        decided = [group for group, outcome in ended if outcome is not Outcome.EXPIRED]
        train += trained_groups(self.config, recorded, folder)
        counts = Counter(outcome.value for _, outcome in ended)
        collected = Collected(
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
        return step_plan(self.config, collected)

    def _folder(self, step: int) -> Path:
        """Return the folder of a step. Raises DataError if it was not recorded completely."""
        samples = self.run_folder / "samples"
        folder = record.step_folder(samples, step)
        if not folder.exists():
            recorded = list(record.recorded_steps(samples).values())
            raise DataError(
                f"{folder}: not recorded, so step {step} cannot be replayed. Recorded steps: "
                + (f"{recorded[0].name} to {recorded[-1].name}" if recorded else "none")
                + ". Set train.rollout_steps to the last recorded step, or resume=PATH to a "
                "checkpoint before a recorded step"
            )
        record.check(folder)
        return folder


class NoEvaluation:
    """Evaluator of a replay, which has no engine to evaluate with."""

    def due(self, step: int, last: int) -> bool:
        """Return False."""
        return False

    def run(self, version: int) -> dict[str, float]:
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
            fingerprinted=False,
            unread_tensors=0,
        )

    def switch_to_policy(self) -> None:
        """Do nothing: the policy always has the accelerator."""
