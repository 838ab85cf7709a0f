"""The plan of a step, made from the groups collected for it, live or replayed."""

from __future__ import annotations

from dapo_megatron.config import Config
from dapo_megatron.data.batch import describe
from dapo_megatron.rollout.messages import StepPlan
from dapo_megatron.rollout.metrics import rollout_metrics
from dapo_megatron.types import Collected


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
