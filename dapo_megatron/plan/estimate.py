"""Estimate the memory of a run: GPUs by phase and kind of rank, host, disk. No model is built.

A phase has several moments with different parts in memory. In a pass these are a layer's
computation and the output head; in a sync first both models, then only the engine. The size of a
phase is the size of its fullest moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from pathlib import Path

from dapo_megatron.bridge.plan import BUCKET_BYTES
from dapo_megatron.config import Config
from dapo_megatron.config.computing import Kernels, kernels_for
from dapo_megatron.files import write_json
from dapo_megatron.model import Architecture, planned_architecture
from dapo_megatron.plan import GIB, MemoryItem, size
from dapo_megatron.plan.activations import kept, passing
from dapo_megatron.plan.engine_memory import EngineMemory, engine_of
from dapo_megatron.plan.layout import data_parallel
from dapo_megatron.plan.stage import Stage
from dapo_megatron.types import STEP_PHASES, ConfigError, DapoError, Phase

PHASES = tuple(
    phase for phase in Phase if phase not in (Phase.CHECKPOINT, Phase.EVALUATE, Phase.OTHER)
)
"""Phases for which memory is estimated."""
GPU_MARGIN, HOST_MARGIN = 0.05, 0.10
"""A free share of the memory below this causes a warning."""
ENGINE_RANKS = "every engine rank"
CONTEXT_GIB = 1.0
"""CUDA context, code of kernels and cuBLAS workspaces (assumed)."""
NCCL_GIB = 0.2
"""Buffers of one communicator (assumed)."""
BUCKETS = MemoryItem("sync buckets", 2 * BUCKET_BYTES, "one to send, one to receive")
PROCESS_GIB = 4.0
"""Host memory of a process with torch, CUDA, Megatron-core or vLLM, without tensors (assumed)."""
GRADER_GIB = 0.25
"""Host memory of a grading process with math_verify and reasoning_gym (docs/rewards.md)."""


@dataclass(frozen=True)
class NodeSpec:
    """GPUs and memory of each node. With `gpus_per_node` 0, memory has no limit."""

    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    host_memory_gib: float = 1024.0
    """The default is a low guess."""


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


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a run with a policy on `num_processes` ranks. `kinds` maps the name of each kind of
    rank (a pipeline stage, or engines on other GPUs) to its phases, `hosts` the title of each kind
    of node to its memory."""

    config: Config
    arch: Architecture
    num_processes: int
    nodes: NodeSpec
    stages: tuple[Stage, ...]
    kinds: dict[str, Phases]
    engine: EngineMemory
    hosts: dict[str, tuple[MemoryItem, ...]]
    disk: tuple[MemoryItem, ...]

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs with an engine."""
        return self.config.num_replicas(self.num_processes) * self.config.engine_tensor_parallel

    @property
    def sequences(self) -> int:
        """Number of full-length sequences that an engine's KV cache holds."""
        return self.engine.sequences(self.config.max_sequence_tokens)

    @property
    def gpu_memory_bytes(self) -> float:
        """Memory of a GPU; infinite without GPUs."""
        return self.nodes.gpu_memory_gib * GIB if self.nodes.gpus_per_node else inf

    @property
    def host_memory_bytes(self) -> float:
        """Memory of a node; infinite without GPUs, where no limit is known."""
        return self.nodes.host_memory_gib * GIB if self.nodes.gpus_per_node else inf

    @property
    def host_bytes(self) -> int:
        """Host memory of the kind of node that needs the most, in bytes."""
        return max(map(size, self.hosts.values()))

    def fullest(self, phase: str) -> tuple[str, Moment]:
        """Return the kind of rank that needs the most memory in a phase, and its fullest moment."""
        sizes = {kind: fullest(phases[phase]).num_bytes for kind, phases in self.kinds.items()}
        kind = max(sizes, key=sizes.__getitem__)
        return kind, fullest(self.kinds[kind][phase])

    def shown_kinds(self) -> list[str]:
        """Return the kinds to show: stages that are the fullest in a phase, and engines."""
        policy = {kind: phases for kind, phases in self.kinds.items() if kind != ENGINE_RANKS}
        stages = (replace(self, kinds=policy).fullest(phase)[0] for phase in PHASES)
        return [*dict.fromkeys(stages), *(self.kinds.keys() - policy.keys())]

    def num_bytes(self, phase: str) -> int:
        """Return the bytes of the fullest rank in a phase."""
        return self.fullest(phase)[1].num_bytes

    def fits(self) -> bool:
        """Return True if GPU and host memory suffice and the KV cache holds one full sequence."""
        return not any(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a text for each thing that does not fit, with the parts that take the most."""
        room, host_room = self.gpu_memory_bytes, self.host_memory_bytes
        too_full: dict[str, list[str]] = {}
        for phase in PHASES:
            kind, moment = self.fullest(phase)
            if moment.num_bytes > room:
                text = f"{kind} takes {_excess(moment.parts, room)} there is"
                too_full.setdefault(text, []).append(phase)
        yield from (f"{', '.join(phases)}: {text}" for text, phases in too_full.items())
        if self.sequences < 1:
            yield (
                f"generate: the KV cache of {self.engine.cache.gib:.1f} GiB cannot hold one "
                f"sequence of {self.config.max_sequence_tokens:,} tokens; raise "
                "engine.memory_fraction (engine.kv_cache_gib without a GPU)"
            )
        if self.host_bytes > host_room:
            parts = max(self.hosts.values(), key=size)
            yield f"host: a node's ranks take {_excess(parts, host_room)} a node has"

    def warnings(self) -> Iterator[str]:
        """Yield a warning for GPU or host memory that fits with little free space."""
        yield from self.gpu_warnings()
        host = self.host_memory_bytes
        if 0 <= host - self.host_bytes < HOST_MARGIN * host:
            yield (
                f"the ranks of a node need {self.host_bytes / GIB:.0f} of its {host / GIB:g} GiB, "
                f"more than {1 - HOST_MARGIN:.0%}. Leave memory for the file cache and grading"
            )

    def gpu_warnings(self) -> Iterator[str]:
        """Yield a warning for each phase that leaves little free GPU memory."""
        room = self.gpu_memory_bytes
        for phase in PHASES:
            free = room - self.num_bytes(phase)
            if 0 <= free < GPU_MARGIN * room:
                yield (
                    f"{phase} leaves {free / GIB:.1f} of {room / GIB:g} GiB free, less than "
                    f"{GPU_MARGIN:.0%}. Fragmentation needs some of it, and a GPU has less memory "
                    "than its nominal size (an H100 of 80 GB: 79.1 to 79.6 GiB)"
                )


def fullest(moments: Sequence[Moment]) -> Moment:
    """Return the moment with the most bytes."""
    return max(moments, key=attrgetter("num_bytes"))


def _excess(parts: Sequence[MemoryItem], room: float) -> str:
    """Format what parts take, by how much it exceeds `room`, and the largest parts."""
    total = size(parts)
    most = sorted(parts, key=attrgetter("gib"), reverse=True)[:4]
    names = ", ".join(f"{part.name} {part.gib:.1f}" for part in most)
    return f"{total / GIB:.1f} GiB ({names}), {(total - room) / GIB:.1f} more than"


def estimate_memory(
    config: Config, num_processes: int, nodes: NodeSpec | None = None
) -> MemoryEstimate:
    """Estimate the memory of a run with a policy on `num_processes` ranks, one per GPU.

    The layout must fit the processes (layout.check_layout). Raises ConfigError for an unsupported
    config.json.
    """
    nodes = nodes or NodeSpec()
    arch = planned_architecture(config)
    has_gpu = nodes.gpus_per_node > 0
    kernels = kernels_of(config, arch, has_gpu=has_gpu)
    stages = tuple(
        Stage(config, arch, kernels, num_processes, number, has_gpu)
        for number in range(config.policy.pipeline_parallel)
    )
    engine = engine_of(config, arch, nodes.gpu_memory_gib * GIB if has_gpu else None)
    colocated = engine if config.engine.colocated else None
    kinds = {stage.name: _policy_phases(stage, colocated) for stage in stages}
    if not colocated:
        kinds[ENGINE_RANKS] = _engine_phases(config, engine, has_gpu=has_gpu)
    return MemoryEstimate(
        config=config,
        arch=arch,
        num_processes=num_processes,
        nodes=nodes,
        stages=stages,
        kinds=kinds,
        engine=engine,
        hosts=dict(_hosts(config, stages, nodes.gpus_per_node)),
        disk=_disk(stages),
    )


def kernels_of(config: Config, arch: Architecture, *, has_gpu: bool) -> Kernels:
    """Resolve policy.kernels for the planned machine, assuming that Transformer Engine is
    installed."""
    chosen = kernels_for(
        config.policy, has_gpu=has_gpu, is_installed=True, only_local=arch.only_local
    )
    if config.policy.fp8 and chosen == "local":
        raise ConfigError("policy.fp8: needs Transformer Engine's layers, on GPUs; set it to null")
    return chosen


# ------------------------------------------------------------------ phases of a device


def _policy_phases(stage: Stage, engine: EngineMemory | None) -> Phases:
    """Return the moments of each phase on a device of this pipeline stage. `engine` is None if
    engines run on other GPUs."""
    config, policy = stage.config, stage.policy
    always = _cuda_of_policy(stage) if stage.on_gpu else ()
    always += _cuda_of_engine(config) if engine and stage.on_gpu else ()
    sleeps = stage.on_gpu and config.engine.sleep
    parts = engine.parts if engine else ()
    awake = () if sleeps else parts
    made = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
    # FP8 copies stay from one micro-batch to the next, and so also during a sync.
    copies = [stage.fp8_copies] if policy.fp8 else []
    buffers = [stage.buffers] if stage.kernels == "transformer_engine" else []
    whole = [*always, *made.values(), *copies, *buffers]
    # Any offloading also drops the FP8 copies.
    left = [part for name, part in made.items() if name not in policy.offload]
    left += [] if policy.offload else copies
    generating = Moment("engine awake" if engine else "waiting", (*always, *left, *buffers, *parts))

    # The engine is built first and sleeps before the policy is built. FP8 copies of bfloat16
    # weights are only made by the first forward pass.
    at_first = copies if policy.fp8 and policy.fp8.parameters else []
    taught = [stage.teacher] if config.loss.distill else []
    start = [Moment("policy made", (*always, *made.values(), *at_first, *taught, *awake))]
    if sleeps:
        start.insert(0, Moment("engine made", (*always, *parts)))
    receiving = (engine.weights, engine.sampler) if engine and sleeps else awake
    moving = Moment("weights move", (*whole, *receiving, BUCKETS))
    return {
        Phase.START: tuple(start),
        Phase.GENERATE: (generating,),
        Phase.SYNC: (moving, generating),
        Phase.LOGPROBS: tuple(
            Moment(name, (*whole, *awake, *taught, part))
            for name, part in passing(stage, backward=False).items()
        ),
        Phase.UPDATE: tuple(
            Moment(name, (*whole, *awake, kept(stage), part))
            for name, part in passing(stage, backward=True).items()
        ),
    }


def _engine_phases(config: Config, engine: EngineMemory, *, has_gpu: bool) -> Phases:
    """Return the moments of each phase on a device with an engine and no policy."""
    parts = (*(_cuda_of_engine(config) if has_gpu else ()), *engine.parts)
    phases: Phases = dict.fromkeys(PHASES, (Moment("engine awake", parts),))
    return phases | {Phase.SYNC: (Moment("weights move", (*parts, BUCKETS)),)}


def _cuda_of_policy(stage: Stage) -> tuple[MemoryItem, ...]:
    """Return the memory of CUDA and NCCL in a rank of the policy. Weights move to engines on other
    GPUs in a communicator of both."""
    layout, world = stage.policy, stage.num_processes
    sync = 1 if stage.config.engine.colocated else world + stage.config.separate_gpus
    data = data_parallel(layout, world) * layout.context_parallel
    split = layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel
    return _cuda("CUDA and NCCL", sync, world, *split, data, layout.expert_parallel)


def _cuda_of_engine(config: Config) -> tuple[MemoryItem, ...]:
    """Return the memory of CUDA and NCCL in an engine's process on a GPU."""
    sync = 1 if config.engine.colocated else 1 + config.separate_gpus
    return _cuda("CUDA and NCCL of the engine", sync, config.engine_tensor_parallel)


def _cuda(name: str, *groups: int) -> tuple[MemoryItem, ...]:
    """Return the memory of CUDA, and of NCCL with communicators of so many ranks."""
    count = sum(number > 1 for number in groups)
    how = f"{CONTEXT_GIB:g} GiB, and {NCCL_GIB:g} for each of {count} communicators: assumed"
    return (MemoryItem(name, int((CONTEXT_GIB + NCCL_GIB * count) * GIB), how),)


# ------------------------------------------------------------------ host and disk


def _hosts(
    config: Config, stages: Sequence[Stage], gpus_per_node: int
) -> Iterator[tuple[str, tuple[MemoryItem, ...]]]:
    """Yield the kinds of nodes with their memory. Without GPUs there is a single node. Engines on
    other GPUs are on other nodes, if the run has several."""
    ranks, separate = stages[0].num_processes, config.separate_gpus
    per_node = gpus_per_node or ranks + separate
    if config.engine.colocated:
        with_engine = config.num_replicas(ranks) * config.engine_tensor_parallel
        here = min(ranks, per_node)
        yield "host memory of a node", _host(config, stages, here, min(here, with_engine))
    elif ranks + separate <= per_node:
        yield "host memory of the node", _host(config, stages, ranks, separate)
    else:
        of_policy = _host(config, stages, min(ranks, per_node), 0)
        yield "host memory of a node of the policy", of_policy
        of_engines = _host(config, stages, 0, min(separate, per_node))
        yield "host memory of a node of engines", of_engines


def _host(
    config: Config, stages: Sequence[Stage], policy: int, engine: int
) -> tuple[MemoryItem, ...]:
    """Return the host memory of a node with so many ranks of the policy and of engines, as if all
    of them were in the fullest pipeline stage."""
    pinned = {
        "offloaded while generating": (max(s.offloaded_bytes for s in stages), "policy.offload"),
        "optimizer for good": (max(s.optimizer_on_host for s in stages), "optimizer.cpu_offload"),
        "reference model": (max(s.reference_bytes for s in stages), "weights for loss.kl"),
        "teacher": (max(s.teacher.num_bytes for s in stages), "weights for loss.distill"),
        "base model": (max(s.base_bytes for s in stages), "weights without policy.lora's delta"),
        "a checkpoint's copy": (max(s.snapshot_bytes for s in stages), "what a rank updates"),
    }
    graders = -(-engine // config.engine_tensor_parallel) * config.rewards.workers
    limit = config.rewards.memory_mib / 1024
    parts = [
        MemoryItem(
            "processes",
            int((policy + engine) * PROCESS_GIB * GIB),
            f"{policy} of the policy, {engine} of engines, {PROCESS_GIB:g} GiB each: assumed",
        ),
        *(
            MemoryItem(name, policy * num_bytes, f"{policy} ranks, pinned: {how}")
            for name, (num_bytes, how) in pinned.items()
        ),
        MemoryItem(
            "grading processes",
            int(graders * GRADER_GIB * GIB),
            f"{graders} of {GRADER_GIB:g} GiB; each may take {limit:g} GiB (rewards.memory_mib)",
        ),
        MemoryItem(
            "the teacher's likely tokens",
            _top_bytes(stages[0], policy) if policy else 0,
            f"{policy} ranks, if every answer has its maximum length: loss.distill.top_k",
        ),
        MemoryItem(
            "routes",
            _route_bytes(stages[0], policy) if policy else 0,
            f"{policy} ranks, and rank 0 for all open groups, if every answer has its maximum "
            "length: policy.router_replay",
        ),
    ]
    return tuple(part for part in parts if part.num_bytes)


def _route_bytes(stage: Stage, num_ranks: int) -> int:
    """Return the bytes of routes on a node: those of each rank for a step (TokenBatch.routes), and
    on rank 0 of all issued groups. Each twice: with the message that brings them."""
    config, rollout = stage.config, stage.config.rollout
    if config.policy.router_replay == "off":
        return 0
    of_step = _most_tokens(config) * stage.arch.route_bytes
    total = num_ranks * (of_step // data_parallel(config.policy, stage.num_processes))
    if config.policy.router_replay == "engine":
        ahead = 1.0 if rollout.on_policy else rollout.lookahead
        total += int(ahead / rollout.expected_keep_rate * of_step)
    return 2 * total


def _top_bytes(stage: Stage, num_ranks: int) -> int:
    """Return the bytes of the teacher's most likely tokens on a node: of each rank for a step
    (TokenBatch), twice with the parts that its passes brought."""
    config, distill = stage.config, stage.config.loss.distill
    if distill is None or distill.top_k is None:
        return 0
    tokens = _most_tokens(config) // data_parallel(config.policy, stage.num_processes)
    return 2 * num_ranks * tokens * distill.top_k * 8  # an int32 and a float32 each


def _most_tokens(config: Config) -> int:
    """Return the tokens of a step if every answer has its maximum length."""
    rollout = config.rollout
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    return rollout.prompts_per_step * rollout.samples_per_prompt * length


def _disk(stages: Sequence[Stage]) -> tuple[MemoryItem, ...]:
    """Return the disk space of a checkpoint and of its largest rank file."""
    files = [stage.snapshot_bytes for stage in stages]
    ranks = stages[0].num_processes
    return (
        MemoryItem("checkpoint, a rank's part", max(files), "what its optimizer updates"),
        MemoryItem("checkpoint", ranks // len(stages) * sum(files), f"{ranks} ranks: values once"),
    )


# ------------------------------------------------------------------ for the report


def save_estimate(config: Config, path: Path, num_processes: int, gpu_bytes: int) -> str | None:
    """Write to `path` the estimated GPU memory of each measured phase in GiB, for GPUs of
    `gpu_bytes`. The report compares the estimates with measurements. Return why it failed, if so.
    """
    gpus_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    try:
        estimate = estimate_memory(config, num_processes, NodeSpec(gpus_per_node, gpu_bytes / GIB))
        estimate.kinds.pop(ENGINE_RANKS, None)  # memory is measured on the policy's GPUs
        phases = {
            phase: estimate.num_bytes(phase) / GIB for phase in PHASES if phase in STEP_PHASES
        }
        text = "of the rank that takes most, CUDA and NCCL included, which are assumed"
        write_json(path, {"device": "gpu", "phases": phases, "note": text})
    # A config.json that policy and engine accept may raise any of these errors here. Only the
    # report needs the file, so the run goes on.
    except (DapoError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return f"no {path.name}: {type(error).__name__}: {error}"
    return None
