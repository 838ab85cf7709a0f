"""Describe a plan with engines on other GPUs than the policy: how long each side waits, the best
split of the GPUs, and the memory that engines share with no policy."""

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
"""A side that waits for more of a step causes a warning."""
LEAST_GAIN = 0.05
"""A split that saves less of a step is not suggested."""


def describe_sides(estimate: MemoryEstimate, speed: Speed) -> str:
    """Return what takes how long in a step, and what a sync moves, as text."""
    how = (
        "engines sample while the policy trains: the longer of both, and the sync"
        if speed.overlaps
        else "policy and engines one after another (rollout.on_policy, or deterministic)"
    )
    waiting = speed.waiting
    return (
        f"step: {how}. The policy waits for {waiting['policy']:.0%} of it, engines for "
        f"{waiting['engine']:.0%}. A sync sends {speed.sync_bytes / GIB:,.1f} GiB, "
        f"{speed.sync_bytes / GIB / estimate.engine_gpus:.1f} to each GPU of an engine"
    )


def side_warnings(estimate: MemoryEstimate, speed: Speed | None) -> Iterator[str]:
    """Yield what is wrong with the sizes of both sides, and how to change it."""
    ranks, gpus = estimate.num_processes, estimate.nodes.gpus_per_node
    if gpus and estimate.num_gpus > gpus and ranks % gpus:
        yield (
            f"engine.replicas: the policy's {ranks} ranks are no multiple of the {gpus} GPUs of a "
            "node, so a node has both policy and engines, which slurm/submit.py refuses"
        )
    yield from _cache_warning(estimate)
    if speed is None:
        return
    for side, share in speed.waiting.items():
        if share > MAX_WAITING:
            yield _waiting_warning(estimate, speed, side, share)


def _waiting_warning(estimate: MemoryEstimate, speed: Speed, side: str, share: float) -> str:
    who = "the policy waits" if side == "policy" else "engines wait"
    text = f"engine.replicas: {who} for {share:.0%} of a step"
    split = balanced_split(estimate, speed)
    if split is not None:
        replicas, policy, seconds = split
        return (
            f"{text}; engine.replicas={replicas} is the best split of the {estimate.num_gpus} GPUs "
            f"({policy} for the policy): {seconds:,.0f} instead of {speed.step_seconds:,.0f} s a "
            "step"
        )
    if not speed.overlaps:
        return (
            f"{text}, because the two sides take turns (rollout.on_policy or deterministic), and "
            f"no other split of {estimate.num_gpus} GPUs helps; with engine.colocated=true no GPU "
            "waits"
        )
    return f"{text}, and no other split of {estimate.num_gpus} GPUs makes it shorter"


def balanced_split(estimate: MemoryEstimate, speed: Speed) -> tuple[int, int, float] | None:
    """Return (engine.replicas, ranks of the policy, seconds of a step) of the same number of GPUs
    with the shortest step. Layouts and memory must fit. Return None if no split is shorter by
    LEAST_GAIN."""
    config, num_gpus = estimate.config, estimate.num_gpus
    gpus = estimate.nodes.gpus_per_node
    unit = gpus if gpus and num_gpus > gpus and num_gpus % gpus == 0 else 1
    splits = []
    for policy in range(unit, num_gpus, unit):
        replicas, rest = divmod(num_gpus - policy, config.engine_tensor_parallel)
        if rest or any(policy_problems(config.policy, policy, estimate.arch)):
            continue
        engine = config.engine.model_copy(update={"replicas": replicas})
        # Stages and engines are the same, so the estimate need not be made again.
        changed = replace(
            estimate, config=config.model_copy(update={"engine": engine}), num_processes=policy
        )
        splits.append((estimate_speed(changed, speed.assumptions).step_seconds, changed))
    for seconds, changed in sorted(splits, key=lambda item: item[0])[:NUM_TRIED]:
        if seconds > (1 - LEAST_GAIN) * speed.step_seconds:
            return None
        policy = changed.num_processes
        other = estimate_if_valid(changed.config, estimate.arch, policy, estimate.nodes)
        if other is not None and other.fits():
            return changed.config.num_replicas(policy), policy, seconds
    return None


def _cache_warning(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield the engine.memory_fraction that would use the memory of the engines' GPUs, if it is
    larger than the configured one."""
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
        f"engine.memory_fraction: engines share no GPU with the policy, so {best:g} fits; the KV "
        f"cache then holds {larger.sequences(length):,} sequences of {length:,} tokens instead of "
        f"{estimate.sequences:,}"
    )
