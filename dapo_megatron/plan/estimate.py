"""Estimate the memory of a run: GPUs by phase and pipeline stage, host, disk. No model is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.config.computing import kernels_for
from dapo_megatron.files import write_json
from dapo_megatron.model import Architecture, planned_architecture
from dapo_megatron.plan import GIB, MemoryItem, size
from dapo_megatron.plan import stage as policy
from dapo_megatron.plan.activations import Kernels, micro_of
from dapo_megatron.plan.engine_memory import EngineMemory, engine_of
from dapo_megatron.plan.layout import data_parallel
from dapo_megatron.plan.phases import PHASES, Moment, Phases, engine_phases, fullest, phases_of
from dapo_megatron.plan.stage import Stage
from dapo_megatron.types import STEP_PHASES, ConfigError, DapoError

GPU_MARGIN, HOST_MARGIN = 0.05, 0.10
"""A free share of the memory below this causes a warning."""
ENGINE_RANKS = "every engine rank"
HOST = "host"
"""Name for a node's host memory, used in place of a phase."""
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
class Excess:
    """Phases in which one kind of rank exceeds the GPU's memory by the same amount, in GiB."""

    phases: tuple[str, ...]
    kind: str
    gib: float


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a run with a policy on `num_processes` ranks. `kinds` maps the name of each kind of
    rank (a pipeline stage, or engines on other GPUs) to its phases, `hosts` the title of each kind
    of node to its memory."""

    config: Config
    arch: Architecture
    num_processes: int
    nodes: NodeSpec
    kernels: Kernels
    stages: tuple[Stage, ...]
    kinds: dict[str, Phases]
    engine: EngineMemory
    hosts: dict[str, tuple[MemoryItem, ...]]
    disk: tuple[MemoryItem, ...]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of policy and engines."""
        return self.num_processes + self.config.separate_gpus

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs with an engine."""
        return self.config.num_replicas(self.num_processes) * self.config.engine_tensor_parallel

    @property
    def gpu_memory_bytes(self) -> float | None:
        """Memory of a GPU; None without GPUs."""
        return self.nodes.gpu_memory_gib * GIB if self.nodes.gpus_per_node else None

    @property
    def host_memory_bytes(self) -> float | None:
        """Memory of a node; None without GPUs, where no limit is known."""
        return self.nodes.host_memory_gib * GIB if self.nodes.gpus_per_node else None

    def fullest(self, phase: str) -> tuple[str, Moment]:
        """Return the kind of rank that needs the most memory in a phase, and its fullest moment."""
        moments = {
            kind: fullest(phases[phase]) for kind, phases in self.kinds.items() if phase in phases
        }
        kind = max(moments, key=lambda name: moments[name].num_bytes)
        return kind, moments[kind]

    def num_bytes(self, phase: str) -> int:
        """Return the bytes of the fullest rank in a phase. For HOST, return those of a node."""
        if phase == HOST:
            return self.host_bytes
        return self.fullest(phase)[1].num_bytes

    @property
    def host(self) -> tuple[MemoryItem, ...]:
        """Host memory of the kind of node that needs the most."""
        return max(self.hosts.values(), key=size)

    @property
    def host_bytes(self) -> int:
        """Host memory that the ranks of this node need, in bytes."""
        return size(self.host)

    def excesses(self) -> list[Excess]:
        """Return the phases that do not fit, grouped where kind of rank and size are the same."""
        room = self.gpu_memory_bytes
        if room is None:
            return []
        groups: dict[tuple[str, int], tuple[str, ...]] = {}
        for phase in PHASES:
            if (num_bytes := self.num_bytes(phase)) > room:
                key = self.fullest(phase)[0], num_bytes
                groups[key] = (*groups.get(key, ()), phase)
        return [
            Excess(phases, kind, (num_bytes - room) / GIB)
            for (kind, num_bytes), phases in groups.items()
        ]

    def fits(self) -> bool:
        """Return True if GPU and host memory suffice and the KV cache holds one full sequence."""
        return not self.excesses() and self.sequences >= 1 and self.host_excess_gib <= 0

    @property
    def host_excess_gib(self) -> float:
        """Host memory shortfall per node in GiB; negative means headroom."""
        if self.host_memory_bytes is None:
            return 0.0
        return (self.host_bytes - self.host_memory_bytes) / GIB

    @property
    def sequences(self) -> int:
        """Number of full-length sequences that an engine's KV cache holds."""
        return self.engine.sequences(self.config.max_sequence_tokens)

    def warnings(self) -> Iterator[str]:
        """Yield a warning for GPU or host memory that fits with little free space."""
        yield from self.gpu_warnings()
        host = self.host_memory_bytes
        if host is not None and 0 <= host - self.host_bytes < HOST_MARGIN * host:
            yield (
                f"the ranks of a node need {self.host_bytes / GIB:.0f} of its {host / GIB:g} GiB, "
                f"more than {1 - HOST_MARGIN:.0%}. Leave memory for the file cache and grading"
            )

    def gpu_warnings(self) -> Iterator[str]:
        """Yield a warning for each phase that leaves little free GPU memory."""
        room = self.gpu_memory_bytes
        if room is None:
            return
        for phase in PHASES:
            free = room - self.num_bytes(phase)
            if 0 <= free < GPU_MARGIN * room:
                yield (
                    f"{phase} leaves {free / GIB:.1f} of {room / GIB:g} GiB free, less than "
                    f"{GPU_MARGIN:.0%}. Fragmentation needs some of it, and a GPU has less memory "
                    "than its nominal size (an H100 of 80 GB: 79.1 to 79.6 GiB)"
                )


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
    micro = micro_of(config, arch, kernels, on_gpu=has_gpu)
    stages = tuple(
        Stage(config, micro, num_processes, number)
        for number in range(config.policy.pipeline_parallel)
    )
    engine = engine_of(config, arch, nodes.gpu_memory_gib * GIB if has_gpu else None)
    colocated = engine if config.engine.colocated else None
    kinds = {stage.name: phases_of(stage, colocated, has_gpu=has_gpu) for stage in stages}
    if not colocated:
        kinds[ENGINE_RANKS] = engine_phases(config, engine, has_gpu=has_gpu)
    return MemoryEstimate(
        config=config,
        arch=arch,
        num_processes=num_processes,
        nodes=nodes,
        kernels=kernels,
        stages=stages,
        kinds=kinds,
        engine=engine,
        hosts={
            title: _host_parts(config, stages, node)
            for title, node in _nodes(config, num_processes, nodes.gpus_per_node)
        },
        disk=_disk_parts(stages, num_processes),
    )


def kernels_of(config: Config, arch: Architecture, *, has_gpu: bool) -> Kernels:
    """Resolve policy.kernels for the planned machine, assuming that Transformer Engine is
    installed."""
    is_latent = arch.latent is not None
    chosen = kernels_for(config.policy, has_gpu=has_gpu, is_installed=True, is_latent=is_latent)
    if config.policy.fp8 and chosen == "local":
        raise ConfigError("policy.fp8: needs Transformer Engine's layers, on GPUs; set it to null")
    return chosen


@dataclass(frozen=True)
class NodeRanks:
    """Numbers of processes of the policy and of engines on a node."""

    policy: int
    engine: int


def _nodes(config: Config, num_processes: int, gpus_per_node: int) -> list[tuple[str, NodeRanks]]:
    """Return the kinds of nodes, with a title for each. Without GPUs there is a single node."""
    num_gpus = num_processes + config.separate_gpus
    per_node = min(num_gpus, gpus_per_node or num_gpus)
    if config.engine.colocated:
        num_shared = config.num_replicas(num_processes) * config.engine_tensor_parallel
        return [("host memory of a node", NodeRanks(per_node, min(per_node, num_shared)))]
    nodes: dict[str, NodeRanks] = {}
    for first in range(0, num_gpus, per_node):
        num = min(per_node, num_gpus - first)
        policy = min(max(num_processes - first, 0), num)
        ranks = {"policy": policy, "engine": num - policy}
        title = " and ".join(f"{count} {side} ranks" for side, count in ranks.items() if count)
        nodes[f"host memory of a node with {title}"] = NodeRanks(policy, num - policy)
    return list(nodes.items())


def _host_parts(config: Config, stages: Sequence[Stage], node: NodeRanks) -> tuple[MemoryItem, ...]:
    """Return the host memory of a node, as if all its ranks were in the fullest pipeline stage."""
    processes = node.policy + node.engine
    offloaded = max(policy.offloaded_bytes(stage) for stage in stages)
    optimizer = max(policy.optimizer_on_host(stage) for stage in stages)
    reference = max(policy.reference_bytes(stage) for stage in stages)
    snapshot = max(policy.snapshot_bytes(stage) for stage in stages)
    engines = max(node.engine // config.engine_tensor_parallel, 1) if node.engine else 0
    graders = engines * config.rewards.workers
    ranks = f"{node.policy} ranks"
    limit = config.rewards.memory_mib / 1024
    parts = (
        MemoryItem(
            "processes",
            int(processes * PROCESS_GIB * GIB),
            f"{node.policy} of the policy, {node.engine} of engines, {PROCESS_GIB:g} GiB each: "
            "assumed",
        ),
        MemoryItem(
            "offloaded while generating",
            node.policy * offloaded,
            f"{ranks}, pinned: policy.offload",
        ),
        MemoryItem(
            "optimizer for good", node.policy * optimizer, f"{ranks}: optimizer.cpu_offload"
        ),
        MemoryItem(
            "reference model", node.policy * reference, f"{ranks}, pinned: weights for loss.kl"
        ),
        MemoryItem(
            "a checkpoint's copy",
            node.policy * snapshot,
            f"{ranks}, pinned: weights and optimizer of what each updates",
        ),
        MemoryItem(
            "grading processes",
            int(graders * GRADER_GIB * GIB),
            f"{graders} of {GRADER_GIB:g} GiB; each may take {limit:g} GiB (rewards.memory_mib)",
        ),
        MemoryItem(
            "routes",
            # Twice: with the message in which they leave or arrive.
            2 * node.policy * _route_bytes(config, stages[0])
            + (2 * _held_route_bytes(config, stages[0].arch) if node.policy else 0),
            f"{ranks}, and rank 0 for all open groups, if every answer has its maximum length: "
            "policy.router_replay",
        ),
    )
    return tuple(part for part in parts if part.num_bytes)


def _route_bytes(config: Config, stage: Stage) -> int:
    """Return the bytes of the routes of a step that a rank holds (TokenBatch.routes)."""
    if config.policy.router_replay == "off":
        return 0
    return _step_route_bytes(config, stage.arch) // data_parallel(
        config.policy, stage.num_processes
    )


def _held_route_bytes(config: Config, arch: Architecture) -> int:
    """Return the bytes of the routes that rank 0 holds until a step is trained, those of groups
    that are filtered or carried included."""
    if config.policy.router_replay != "engine":
        return 0
    rollout = config.rollout
    issued = (1.0 if rollout.on_policy else rollout.lookahead) / rollout.expected_keep_rate
    return int(issued * _step_route_bytes(config, arch))


def _step_route_bytes(config: Config, arch: Architecture) -> int:
    rollout = config.rollout
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens = sequences * (rollout.max_prompt_tokens + rollout.max_response_tokens)
    return tokens * arch.route_bytes


def _disk_parts(stages: Sequence[Stage], num_processes: int) -> tuple[MemoryItem, ...]:
    """Return the disk space of a checkpoint and of its largest rank file."""
    files = [policy.snapshot_bytes(stage) for stage in stages]
    total = num_processes // len(stages) * sum(files)
    return (
        MemoryItem("checkpoint, a rank's part", max(files), "what its optimizer updates"),
        MemoryItem("checkpoint", total, f"{num_processes} ranks: each value once"),
    )


def save_estimate(
    config: Config, path: Path, note: Callable[[str], None], num_processes: int, gpu_bytes: int
) -> None:
    """Write to `path` the estimated GPU memory of each measured phase in GiB, for GPUs of
    `gpu_bytes`.

    The report compares the estimates with measurements. If this fails, `note` is called with the
    reason.
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
        note(f"  no {path.name}: {type(error).__name__}: {error}")
