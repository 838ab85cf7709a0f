"""The plan of a step, made from the groups collected for it, live or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.config import Config
from dapo_megatron.data.batch import describe
from dapo_megatron.rollout.metrics import rollout_metrics
from dapo_megatron.types import Collected, Group, TrainingSequence


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Result of a collection, which rank 0 sends to all ranks."""

    sequences: list[TrainingSequence]
    """The sequences that the step trains on."""
    metrics: dict[str, float]


def step_plan(config: Config, collected: Collected) -> StepPlan:
    """Return the plan of a step that trains on `collected.train`."""
    metrics = rollout_metrics(collected, config.overlong)
    return StepPlan(training_sequences(config, collected.train), metrics)


def training_sequences(config: Config, groups: Sequence[Group]) -> list[TrainingSequence]:
    """Return the sequences of a step that trains on `groups`."""
    return describe(
        groups,
        overlong=config.overlong,
        eps=config.loss.advantage_eps,
        divide_by_std=config.loss.advantage_std,
    )
