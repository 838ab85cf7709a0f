"""Memory on the device in each phase of a rollout step, with engine sleep and policy offload, or
with engines on other GPUs than the policy.

A phase has several moments with different parts in memory. In a pass these are a layer's
computation and the output head; in a sync first both models, then only the engine. The size of a
phase is that of its fullest moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dapo_megatron.bridge.plan import BUCKET_BYTES
from dapo_megatron.config import Config
from dapo_megatron.plan import GIB, MemoryItem, size
from dapo_megatron.plan import stage as policy
from dapo_megatron.plan.engine_memory import EngineMemory
from dapo_megatron.plan.layout import data_parallel
from dapo_megatron.plan.stage import Stage
from dapo_megatron.types import Phase

PHASES = tuple(
    phase for phase in Phase if phase not in (Phase.CHECKPOINT, Phase.EVALUATE, Phase.OTHER)
)
"""Phases for which memory is estimated."""
CONTEXT_GIB = 1.0
"""CUDA context, code of kernels and cuBLAS workspaces (assumed)."""
NCCL_GIB = 0.2
"""Buffers of one communicator (assumed)."""
NUM_BUCKETS = 2
"""Transfer buffers: one to send, one to receive (bridge/transfer.py)."""
BUCKETS = MemoryItem("sync buckets", NUM_BUCKETS * BUCKET_BYTES, "one to send, one to receive")


@dataclass(frozen=True)
class Moment:
    """The parts in a device's memory at one time of a phase."""

    name: str
    parts: tuple[MemoryItem, ...]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the parts."""
        return size(self.parts)


Phases = dict[str, tuple[Moment, ...]]


def fullest(moments: tuple[Moment, ...]) -> Moment:
    """Return the moment with the most bytes."""
    return max(moments, key=lambda moment: moment.num_bytes)


def engine_phases(config: Config, engine: EngineMemory, *, has_gpu: bool) -> Phases:
    """Return the moments of each phase on a device with an engine and no policy."""
    parts = (*((_engine_overhead(config),) if has_gpu else ()), *engine.parts)
    awake = (Moment("engine awake", parts),)
    return {
        Phase.START: (Moment("engine made", parts),),
        Phase.GENERATE: awake,
        Phase.SYNC: (Moment("weights move", (*parts, BUCKETS)),),
        Phase.LOGPROBS: awake,
        Phase.UPDATE: awake,
    }


def phases_of(stage: Stage, engine: EngineMemory | None, *, has_gpu: bool) -> Phases:
    """Return the moments of each phase on a device of this pipeline stage. `engine` is None if
    engines run on other GPUs."""
    of_engine = (_engine_overhead(stage.config),) if engine else ()
    always = (_overhead(stage), *of_engine) if has_gpu else ()
    sleeps = has_gpu and stage.config.engine.sleep
    parts = engine.parts if engine else ()
    awake = () if sleeps else parts
    pool = engine.weight_pool if engine else ()
    made = (policy.weights(stage), policy.gradients(stage), policy.optimizer(stage))
    copies = tuple(filter(None, (policy.quantized_copies(stage),)))
    # FP8 copies stay from one micro-batch to the next, and so also during a sync.
    whole = (*always, *made, *copies)
    name = "engine awake" if engine else "waiting"
    generating = Moment(name, (*always, *_left(stage, made, copies), *parts))

    # The engine is built first and sleeps before the policy is built. FP8 copies of bfloat16
    # weights are only made by the first forward pass.
    at_first = copies if stage.policy.fp8 and stage.policy.fp8.parameters else ()
    start = [Moment("policy made", (*always, *made, *at_first, *awake))]
    if sleeps:
        start.insert(0, Moment("engine made", (*always, *parts)))
    return {
        Phase.START: tuple(start),
        Phase.GENERATE: (generating,),
        Phase.SYNC: (Moment("weights move", (*whole, *(awake or pool), BUCKETS)), generating),
        Phase.LOGPROBS: tuple(
            Moment(_moment_name(part), (*whole, *awake, part))
            for part in policy.passing(stage, backward=False)
        ),
        Phase.UPDATE: tuple(
            Moment(_moment_name(part), (*whole, *awake, policy.kept(stage), part))
            for part in policy.passing(stage, backward=True)
        ),
    }


def _left(
    stage: Stage, made: tuple[MemoryItem, ...], copies: tuple[MemoryItem, ...]
) -> tuple[MemoryItem, ...]:
    """Return the policy's parts that stay while engines generate. Any offloading also drops the FP8
    copies."""
    if not stage.policy.offload:
        return (*made, *copies)
    names = ("weights", "gradients", "optimizer")
    return tuple(
        part for name, part in zip(names, made, strict=True) if name not in stage.policy.offload
    )


def _moment_name(part: MemoryItem) -> str:
    return "head" if part.name == policy.HEAD else "layer"


def _overhead(stage: Stage) -> MemoryItem:
    """Return the memory of CUDA and NCCL in a rank of the policy. Weights move to engines on other
    GPUs in a communicator of both."""
    layout, world = stage.policy, stage.num_processes
    data = data_parallel(layout, world)
    sizes = {
        "sync": 1 if stage.config.engine.colocated else world + stage.config.separate_gpus,
        "world": world,
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "context": layout.context_parallel,
        "data": data * layout.context_parallel,
        "expert": layout.expert_parallel,
    }
    return _communicators("CUDA and NCCL", sizes)


def _engine_overhead(config: Config) -> MemoryItem:
    """Return the memory of CUDA and NCCL in an engine's process on a GPU."""
    sizes = {
        "sync": 1 if config.engine.colocated else 1 + config.separate_gpus,
        "engine": config.engine_tensor_parallel,
    }
    return _communicators("CUDA and NCCL of the engine", sizes)


def _communicators(name: str, sizes: Mapping[str, int]) -> MemoryItem:
    """Return the memory of CUDA, and of NCCL with communicators of these sizes."""
    count = sum(number > 1 for number in sizes.values())
    return MemoryItem(
        name,
        int((CONTEXT_GIB + NCCL_GIB * count) * GIB),
        f"{CONTEXT_GIB:g} GiB, and {NCCL_GIB:g} for each of {count} communicators: assumed",
    )
