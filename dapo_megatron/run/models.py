"""Policy and engine of a rank, and the sync between them. This is the only file that connects a run
to Megatron and vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from dapo_megatron.bridge.bounds import canary_bounds
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config, PolicyConfig, TrainConfig
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import check
from dapo_megatron.plan.compatibility.rule import Machine
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.protocols import MicrobatchPlanner, Policy, RolloutEngine
from dapo_megatron.rollout.roles import NoEngine, NoPolicy


@dataclass
class Models:
    """Models of a rank, which it keeps while others come and go."""

    policy: Policy
    engine: RolloutEngine


def planner(policy: PolicyConfig, train: TrainConfig) -> MicrobatchPlanner:
    """Return the function that splits a batch into micro-batches that this layout can run."""
    return partial(
        plan_microbatches,
        # The limit is per rank, and the ranks of a context-parallel group share each row.
        max_tokens=train.max_tokens_per_microbatch * policy.context_parallel,
        packed=train.packing,
        sequence_multiple=sequence_multiple(policy),
        row_multiple=row_multiple(policy),
        num_multiple=policy.pipeline_parallel if policy.virtual_pipeline_parallel else 1,
    )


def build_models(config: Config, ranks: Ranks) -> Models:
    """Build engine and policy. Collective over the ranks of the policy, and those of each engine.

    The engine is built before the policy, because it needs its share of the GPU free. It sees the
    memory of communicators, which are created first. Afterwards it sleeps, and the policy has the
    accelerator until the first sync. Engines on dedicated ranks share no GPU, and join later.
    """
    from dapo_megatron.policy.communicators import connect, connect_bridge

    architecture = read_architecture(config)
    check(config, architecture, Machine.here())
    if ranks.policy is not None:
        connect(config)
    if ranks.by_role is None:
        connect_bridge(ranks.world_size, ranks.device_group)
    engine = _build_engine(config, ranks)
    engine.sleep()
    return Models(build_policy(config, ranks), engine)


def build_sync(config: Config, ranks: Ranks, models: Models) -> WeightSync:
    """Build the sync between the policy and the engines of these ranks. Collective."""
    from dapo_megatron.policy.device import device

    architecture, engine = read_architecture(config), models.engine
    if ranks.by_role is not None:
        engine.num_replicas = len(ranks.by_role.members.replicas)
        engine.replica = ranks.by_role.members.replica
    return WeightSync(
        models.policy,
        engine,
        ranks,
        config.sync,
        bounds=canary_bounds(config, has_experts=bool(architecture.num_experts)),
        vocab=architecture.vocab_size,
        max_tokens=config.rollout.max_prompt_tokens,
        ranks_per_node=_ranks_per_node(ranks),
        device=device(),
        group=ranks.device_group,
        noticing_losses=ranks.noticing_losses,
    )


def _ranks_per_node(ranks: Ranks) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_ranks))


def _build_engine(config: Config, ranks: Ranks) -> RolloutEngine:
    """Build this rank's engine, empty. Collective over the ranks of `ranks.engine`."""
    if ranks.engine is None:
        num_replicas = config.engine_ranks(ranks.num_ranks) // config.engine_tensor_parallel
        return NoEngine(num_replicas, config.engine.max_sequences)
    from dapo_megatron.engine.engine import VllmEngine

    return VllmEngine(
        config,
        rank=ranks.engine.rank,
        world_size=ranks.engine.world_size,
        local_rank=ranks.local_rank,
        ranks_per_node=min(_ranks_per_node(ranks), ranks.engine.world_size),
        is_empty=True,
    )


def build_policy(config: Config, ranks: Ranks) -> Policy:
    """Build this rank's policy. Collective over the ranks with a policy."""
    if ranks.policy is None:
        return NoPolicy()
    from dapo_megatron.policy.policy import MegatronPolicy

    return MegatronPolicy(config, ranks.policy, planner(config.policy, config.train))
