"""Build a policy that splits batches into many micro-batches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.protocols import MicrobatchPlanner
from tests.helpers.configs import tiny_config

if TYPE_CHECKING:
    from dapo_megatron.policy.policy import MegatronPolicy


def named_parameters(policy: MegatronPolicy) -> dict[str, Tensor]:
    """Return this rank's parameters by Megatron name, with the chunk's number if there are
    several."""
    models = policy._models()
    return {
        f"chunk_{number}.{name}" if len(models) > 1 else name: parameter
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def build_policy(
    exchange: Ranks, folder: str, overrides: dict[str, Any]
) -> tuple[MegatronPolicy, MicrobatchPlanner]:
    """Build a float64 policy of the model in `folder`. Return it and its planner, which makes
    micro-batches of at most 64 tokens per rank, or of one row. Collective."""
    from dapo_megatron.policy.policy import MegatronPolicy

    settings = {"policy__tensor_parallel": 1, "policy__precision": "float64", **overrides}
    config = tiny_config(model__path=folder, **settings)
    plan = partial(
        plan_microbatches,
        max_tokens=max(64 * config.policy.context_parallel, row_multiple(config.policy)),
        packed=config.train.packing,
        sequence_multiple=sequence_multiple(config.policy),
        row_multiple=row_multiple(config.policy),
    )
    return MegatronPolicy(config, exchange, plan), plan
