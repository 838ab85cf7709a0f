"""The plan of a step, made from the groups collected for it, live or replayed."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_megatron.config import Config
from dapo_megatron.data.batch import describe
from dapo_megatron.rollout.metrics import rollout_metrics
from dapo_megatron.types import Collected, TrainingSequence


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Result of a collection, which rank 0 sends to all ranks."""

    sequences: list[TrainingSequence]
    """The sequences that the step trains on."""
    metrics: dict[str, float]


def step_plan(config: Config, collected: Collected) -> StepPlan:
    """Return the plan of a step that trains on `collected.train`."""
    return StepPlan(
        sequences=describe(
            collected.train,
            overlong=config.overlong,
            eps=config.loss.advantage_eps,
            divide_by_std=config.loss.advantage_std,
        ),
        metrics=rollout_metrics(collected, config.overlong),
    )
