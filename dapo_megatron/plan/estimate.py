"""The plan of a run: memory by phase and pipeline stage, host memory, disk. No model is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dapo_megatron.config import Config
from dapo_megatron.config.kernels import kernels_for
from dapo_megatron.model import Architecture, read_architecture
from dapo_megatron.plan.activations import Kernels, micro_of
from dapo_megatron.plan.engine import Engine, engine_of
from dapo_megatron.plan.host_memory import disk_parts, host_parts
from dapo_megatron.plan.parts import GIB, Part, size
from dapo_megatron.plan.phases import PHASES, Moment, Phases, fullest, phases_of
from dapo_megatron.plan.stage import Stage
from dapo_megatron.types import ConfigError

GPU_MEMORY_GIB, HOST_MEMORY_GIB = 80.0, 1024.0
"""Where nothing is said; of a host a guess at the low end."""
GPU_MARGIN, HOST_MARGIN = 0.05, 0.10
"""What is left free without a warning."""
HOST = "host"
"""The memory of a node, where phases are named."""


@dataclass(frozen=True)
class Excess:
    """Phases in which ranks of a kind would need more than there is, just as much in each."""

    phases: tuple[str, ...]
    kind: str
    num_bytes: int

    @property
    def gib(self) -> float:
        """By how much, in GiB."""
        return self.num_bytes / GIB


@dataclass(frozen=True)
class Plan:
    """Memory of a run. `kinds`: the phases of a rank of each pipeline stage, by its name.
    `gpu_memory_bytes` and `host_memory_bytes` are None without GPUs, where no limit is known."""

    config: Config
    arch: Architecture
    num_processes: int
    gpus_per_node: int
    gpu_memory_bytes: float | None
    host_memory_bytes: float | None
    kernels: Kernels
    stages: tuple[Stage, ...]
    kinds: dict[str, Phases]
    engine: Engine
    host: tuple[Part, ...]
    disk: tuple[Part, ...]

    def fullest(self, phase: str) -> tuple[str, Moment]:
        """The kind of rank that takes most in a phase, and what it holds then."""
        moments = {kind: fullest(phases[phase]) for kind, phases in self.kinds.items()}
        kind = max(moments, key=lambda name: moments[name].num_bytes)
        return kind, moments[kind]

    def num_bytes(self, phase: str) -> int:
        """That a rank of the fullest kind takes in a phase; of HOST, a node of its memory."""
        if phase == HOST:
            return self.host_bytes
        return self.fullest(phase)[1].num_bytes

    @property
    def host_bytes(self) -> int:
        """That the ranks of a node take of its memory."""
        return size(self.host)

    def slack_gib(self, phase: str) -> float | None:
        """What a phase leaves free; negative if it does not fit, None without GPUs."""
        if self.gpu_memory_bytes is None:
            return None
        return (self.gpu_memory_bytes - self.num_bytes(phase)) / GIB

    def excesses(self) -> list[Excess]:
        """Phases that do not fit, those together that are full of the same."""
        room = self.gpu_memory_bytes
        if room is None:
            return []
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        for phase in PHASES:
            if (num_bytes := self.num_bytes(phase)) > room:
                key = self.fullest(phase)[0], num_bytes
                found[key] = (*found.get(key, ()), phase)
        return [
            Excess(phases, kind, int(num_bytes - room))
            for (kind, num_bytes), phases in found.items()
        ]

    def fits(self) -> bool:
        """Whether every phase fits, a sequence of full length into an engine's cache, and what is
        on the host into it."""
        return not self.excesses() and self.sequences >= 1 and self.host_excess_gib <= 0

    @property
    def host_excess_gib(self) -> float:
        """That a node's memory is short of; negative if some is left."""
        if self.host_memory_bytes is None:
            return 0.0
        return (self.host_bytes - self.host_memory_bytes) / GIB

    @property
    def sequences(self) -> int:
        """Of full length that an engine's cache holds."""
        return self.engine.sequences(self.config.max_sequence_tokens)

    def problems(self) -> Iterator[str]:
        """What does not fit, and what would free how much."""
        from dapo_megatron.plan.suggestions import advice

        for excess in self.excesses():
            phase = excess.phases[0]
            yield (
                f"{', '.join(excess.phases)}: {excess.kind} takes "
                f"{self.num_bytes(phase) / GIB:.1f} GiB, {excess.gib:.1f} more than there is\n"
                f"{advice(self, phase)}"
            )
        if self.sequences < 1:
            length = self.config.max_sequence_tokens
            yield (
                f"generate: the KV cache of {self.engine.cache.gib:.1f} GiB cannot hold one "
                f"sequence of {length:,} tokens\n{advice(self, 'generate')}"
            )
        if self.host_excess_gib > 0:
            room = (self.host_memory_bytes or 0.0) / GIB
            yield (
                f"host: the ranks of a node take {self.host_bytes / GIB:.0f} GiB, "
                f"{self.host_excess_gib:.0f} more than the {room:g} that a node is said to have\n"
                f"{advice(self, HOST)}"
            )

    def warnings(self) -> Iterator[str]:
        """What fits, with little to spare."""
        yield from self.gpu_warnings()
        host = self.host_memory_bytes
        if host is not None and 0 <= host - self.host_bytes < HOST_MARGIN * host:
            yield (
                f"the ranks of a node take {self.host_bytes / GIB:.0f} of its {host / GIB:g} GiB: "
                f"over {1 - HOST_MARGIN:.0%}. The file cache and grading need some too"
            )

    def gpu_warnings(self) -> Iterator[str]:
        """Of them, those about GPUs."""
        room = self.gpu_memory_bytes
        if room is None:
            return
        for phase in PHASES:
            free = room - self.num_bytes(phase)
            if 0 <= free < GPU_MARGIN * room:
                yield (
                    f"{phase} leaves {free / GIB:.1f} of {room / GIB:g} GiB: under "
                    f"{GPU_MARGIN:.0%}. Memory is lost to fragments, and a GPU offers less than "
                    "its name says (an H100 of 80 GB 79.1 to 79.6 GiB)"
                )


def make_plan(
    config: Config,
    num_processes: int,
    *,
    gpu_memory_gib: float = GPU_MEMORY_GIB,
    gpus_per_node: int = 8,
    host_memory_gib: float = HOST_MEMORY_GIB,
) -> Plan:
    """What `num_processes` ranks take, one per GPU of `gpu_memory_gib`, on nodes of
    `host_memory_gib`; `gpus_per_node` 0: ranks without GPUs, whose memory is not judged.

    The layout must fit the processes (layout.check_layout). Raises ConfigError on a config.json
    that is not understood.
    """
    arch = read_architecture(config)
    has_gpu = gpus_per_node > 0
    memory = gpu_memory_gib * GIB if has_gpu else None
    kernels = kernels_of(config, arch, has_gpu=has_gpu)
    micro = micro_of(config, arch, kernels, on_gpu=has_gpu)
    stages = tuple(
        Stage(config, micro, num_processes, number)
        for number in range(config.policy.pipeline_parallel)
    )
    engine = engine_of(config, arch, memory)
    per_node = min(num_processes, gpus_per_node) if has_gpu else num_processes
    return Plan(
        config=config,
        arch=arch,
        num_processes=num_processes,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=memory,
        host_memory_bytes=host_memory_gib * GIB if has_gpu else None,
        kernels=kernels,
        stages=stages,
        kinds={stage.name: phases_of(stage, engine, has_gpu=has_gpu) for stage in stages},
        engine=engine,
        host=host_parts(config, stages, per_node),
        disk=disk_parts(stages, num_processes),
    )


def kernels_of(config: Config, arch: Architecture, *, has_gpu: bool) -> Kernels:
    """What policy.kernels comes to on the machine that is planned for, with the package there."""
    is_latent = arch.latent is not None
    chosen = kernels_for(config.policy, has_gpu=has_gpu, is_installed=True, is_latent=is_latent)
    if config.policy.fp8 and chosen == "local":
        raise ConfigError("policy.fp8: needs Transformer Engine's layers, on GPUs; use null")
    return chosen
