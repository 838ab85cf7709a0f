"""What the ranks of a node take of its memory, and a checkpoint of the disk."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_megatron.config import Config
from dapo_megatron.plan import stage as policy
from dapo_megatron.plan.parts import GIB, Part
from dapo_megatron.plan.stage import Stage

PROCESS_GIB = 4.0
"""A rank with torch, CUDA, Megatron-core and vLLM, before any tensor. Assumed."""
GRADER_GIB = 0.25
"""A grading process with math_verify and reasoning_gym (docs/rewards.md: 240 MiB)."""


def host_parts(config: Config, stages: Sequence[Stage], ranks_per_node: int) -> tuple[Part, ...]:
    """Host memory of a node whose ranks are all of the fullest pipeline stage."""
    away = max(offloaded(stage) for stage in stages)
    optimizer = max(policy.optimizer_on_host(stage) for stage in stages)
    snapshot = max(snapshot_bytes(stage) for stage in stages)
    engines = max(ranks_per_node // config.engine_tensor_parallel, 1)
    graders = engines * config.rewards.workers
    of = f"{ranks_per_node} ranks"
    limit = config.rewards.memory_mib / 1024
    parts = (
        Part(
            "processes",
            int(ranks_per_node * PROCESS_GIB * GIB),
            f"{of}, {PROCESS_GIB:g} GiB each: assumed",
        ),
        Part("offloaded while generating", ranks_per_node * away, f"{of}, pinned: policy.offload"),
        Part("optimizer for good", ranks_per_node * optimizer, f"{of}: optimizer.cpu_offload"),
        Part(
            "a checkpoint's copy",
            ranks_per_node * snapshot,
            f"{of}: weights and optimizer, until written",
        ),
        Part(
            "grading processes",
            int(graders * GRADER_GIB * GIB),
            f"{graders} of {GRADER_GIB:g} GiB; each may take {limit:g} GiB (rewards.memory_mib)",
        ),
    )
    return tuple(part for part in parts if part.num_bytes)


def offloaded(stage: Stage) -> int:
    """Bytes of a rank that go to host memory while engines generate; gradients are given up."""
    parts = stage.policy.offload
    weights = policy.weights(stage).num_bytes if "weights" in parts else 0
    return weights + (policy.optimizer(stage).num_bytes if "optimizer" in parts else 0)


def snapshot_bytes(stage: Stage) -> int:
    """What a rank saves: weights and its part of the optimizer."""
    return policy.weights(stage).num_bytes + policy.optimizer_state(stage)


def disk_parts(stages: Sequence[Stage], num_processes: int) -> tuple[Part, ...]:
    """Files of a checkpoint."""
    files = [snapshot_bytes(stage) for stage in stages]
    whole = num_processes // len(stages) * sum(files)
    return (
        Part("checkpoint, a rank's part", max(files), "its weights and optimizer"),
        Part("checkpoint", whole, f"{num_processes} ranks, each what it holds"),
    )
