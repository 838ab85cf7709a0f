"""Describe a plan with roles: how long each side waits, the best split of the ranks, and the memory
that engine ranks share with no policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import floor

from dapo_megatron.plan import GIB, size
from dapo_megatron.plan.engine_memory import engine_of
from dapo_megatron.plan.estimate import ENGINE_RANKS, GPU_MARGIN, MemoryEstimate
from dapo_megatron.plan.layout import policy_problems
from dapo_megatron.plan.phases import fullest
from dapo_megatron.plan.speed import Speed, estimate_speed
from dapo_megatron.plan.suggestions import NUM_TRIED, estimate_if_valid
from dapo_megatron.types import Phase

MAX_WAITING = 0.5
"""A role that waits for more of a step causes a warning."""
LEAST_GAIN = 0.05
"""A split that saves less of a step is not suggested."""


def describe_roles(estimate: MemoryEstimate, speed: Speed) -> str:
    """Return what takes how long in a step, and what a sync moves, as text."""
    how = (
        "engines sample while the policy trains: the longer of both, and the sync"
        if speed.overlaps
        else "policy and engines one after another (rollout.on_policy, or deterministic)"
    )
    waiting, roles = speed.waiting, estimate.config.roles
    return (
        f"step: {how}. The policy waits for {waiting['policy']:.0%} of it, engines for "
        f"{waiting['engine']:.0%}. A sync sends {speed.sync_bytes / GIB:,.1f} GiB, "
        f"{speed.sync_bytes / GIB / roles.engine:.1f} to each engine rank"
    )


def role_warnings(estimate: MemoryEstimate, speed: Speed | None) -> Iterator[str]:
    """Yield what is wrong with the sizes of the roles, and how to change it."""
    roles, gpus = estimate.config.roles, estimate.nodes.gpus_per_node
    if gpus and estimate.num_processes > gpus and roles.policy % gpus:
        yield (
            f"roles.policy: {roles.policy} is no multiple of the {gpus} GPUs of a node, so one "
            "node has both roles. An engine may extend over two nodes, and the job cannot go on "
            "without a lost engine"
        )
    yield from _cache_warning(estimate)
    if speed is None:
        return
    for role, share in speed.waiting.items():
        if share > MAX_WAITING:
            yield _waiting_warning(estimate, speed, role, share)


def _waiting_warning(estimate: MemoryEstimate, speed: Speed, role: str, share: float) -> str:
    what = "the policy waits" if role == "policy" else "engines wait"
    text = f"roles.{role}: {what} for {share:.0%} of a step"
    split = balanced_split(estimate, speed)
    if split is not None:
        policy, engine, seconds = split
        return (
            f"{text}; roles.policy={policy} roles.engine={engine} is the best split of the ranks: "
            f"{seconds:,.0f} instead of {speed.step_seconds:,.0f} s a step"
        )
    if not speed.overlaps:
        return (
            f"{text}, because the two sides take turns (rollout.on_policy or deterministic), and "
            f"no other split of {estimate.num_processes} ranks helps; without roles no GPU waits"
        )
    return f"{text}, and no other split of {estimate.num_processes} ranks makes it shorter"


def balanced_split(estimate: MemoryEstimate, speed: Speed) -> tuple[int, int, float] | None:
    """Return (roles.policy, roles.engine, seconds of a step) of the same number of ranks with the
    shortest step. Layouts and memory must fit. Return None if no split is shorter by LEAST_GAIN."""
    config, world = estimate.config, estimate.num_processes
    gpus = estimate.nodes.gpus_per_node
    unit = gpus if gpus and world > gpus and world % gpus == 0 else 1
    splits = []
    for policy in range(unit, world, unit):
        engine = world - policy
        if engine % config.engine_tensor_parallel or any(
            policy_problems(config.policy, policy, estimate.arch)
        ):
            continue
        roles = config.roles.model_copy(update={"policy": policy, "engine": engine})
        changed = config.model_copy(update={"roles": roles})
        # Stages and engines are the same, so the estimate need not be made again.
        seconds = estimate_speed(replace(estimate, config=changed), speed.assumptions).step_seconds
        splits.append((seconds, policy, changed))
    for seconds, policy, changed in sorted(splits, key=lambda item: item[0])[:NUM_TRIED]:
        if seconds > (1 - LEAST_GAIN) * speed.step_seconds:
            return None
        other = estimate_if_valid(changed, estimate.arch, world, estimate.nodes)
        if other is not None and other.fits():
            return policy, world - policy, seconds
    return None


def _cache_warning(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield the engine.memory_fraction that would use the memory of engine ranks, if it is larger
    than the configured one."""
    room, config = estimate.gpu_memory_bytes, estimate.config
    if room is None:
        return
    moment = fullest(estimate.kinds[ENGINE_RANKS][Phase.SYNC])
    others = moment.num_bytes - size(estimate.engine.parts)
    best = floor(100 * (1 - GPU_MARGIN - others / room)) / 100
    if best <= config.engine.memory_fraction:
        return
    engine = config.engine.model_copy(update={"memory_fraction": best})
    larger = engine_of(config.model_copy(update={"engine": engine}), estimate.arch, room)
    length = config.max_sequence_tokens
    yield (
        f"engine.memory_fraction: engine ranks have no policy, so {best:g} fits; the KV cache then "
        f"holds {larger.sequences(length):,} sequences of {length:,} tokens instead of "
        f"{estimate.sequences:,}"
    )
