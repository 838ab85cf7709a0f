"""Which parts are on the device in which phase of a rollout step, given what sleeps and what is
offloaded."""

from __future__ import annotations

from dapo_megatron.bridge.plan import BUCKET_BYTES
from dapo_megatron.layout import data_parallel
from dapo_megatron.plan import stage as policy
from dapo_megatron.plan.engine import Engine
from dapo_megatron.plan.parts import GIB, Part, size
from dapo_megatron.plan.stage import Stage

PHASES = ("start", "generate", "sync", "logprobs", "update")
CONTEXT_GIB = 1.0
"""CUDA's context, code of kernels, cuBLAS's workspaces. Assumed."""
NCCL_GIB = 0.2
"""Buffers of one communicator. Assumed."""
NUM_BUCKETS = 2
"""One sent, one received (bridge/transfer.py)."""

Phases = dict[str, tuple[Part, ...]]


def phases_of(stage: Stage, engine: Engine, *, has_gpu: bool) -> Phases:
    """The parts on a device of this stage, phase by phase."""
    always = (_overhead(stage),) if has_gpu else ()
    trained = (policy.weights(stage), policy.gradients(stage), policy.optimizer(stage))
    left = tuple(
        part
        for name, part in zip(("weights", "gradients", "optimizer"), trained, strict=True)
        if name not in stage.policy.offload
    )
    sleeps = has_gpu and stage.config.engine.sleep
    awake = () if sleeps else engine.parts
    # The engine is built first, alone, then sleeps; then the policy is.
    start = (*trained, *awake)
    if sleeps and size(engine.parts) > size(trained):
        start = engine.parts
    moving = engine.parts if not sleeps else (engine.weights,)
    buckets = Part("sync buckets", NUM_BUCKETS * BUCKET_BYTES, "one to send, one to receive")
    copies = policy.quantised_copies(stage)
    computing = (*trained, *((copies,) if copies else ()), *awake)
    return {
        "start": (*always, *start),
        "generate": (*always, *left, *engine.parts),
        "sync": (*always, *trained, *moving, buckets),
        "logprobs": (*always, *computing, policy.passing(stage, backward=False)),
        "update": (
            *always,
            *computing,
            policy.kept(stage),
            policy.passing(stage, backward=True),
        ),
    }


def _overhead(stage: Stage) -> Part:
    """What CUDA and NCCL take for themselves."""
    layout, world = stage.policy, stage.num_processes
    data = data_parallel(layout, world)
    sizes = {
        "world": world,
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "context": layout.context_parallel,
        "data": data * layout.context_parallel,
        "expert": layout.expert_parallel,
        "engine": stage.config.engine_tensor_parallel,
    }
    count = sum(number > 1 for number in sizes.values())
    return Part(
        "CUDA and NCCL",
        int((CONTEXT_GIB + NCCL_GIB * count) * GIB),
        f"{CONTEXT_GIB:g} GiB, and {NCCL_GIB:g} for each of {count} communicators: assumed",
    )
