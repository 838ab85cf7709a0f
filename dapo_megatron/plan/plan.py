"""The plan of a run: memory by phase and pipeline stage, host memory, disk. No model is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dapo_megatron.bridge.families import Architecture, read_architecture
from dapo_megatron.config import Config
from dapo_megatron.config.kernels import kernels_for
from dapo_megatron.plan.activations import Kernels, micro_of
from dapo_megatron.plan.engine import Engine, engine_of
from dapo_megatron.plan.host import disk_parts, host_parts
from dapo_megatron.plan.parts import GIB, Part, size
from dapo_megatron.plan.phases import PHASES, Phases, phases_of
from dapo_megatron.plan.stage import Stage
from dapo_megatron.types import ConfigError


@dataclass(frozen=True)
class Excess:
    """A phase in which ranks of a kind would need more than there is."""

    phase: str
    kind: str
    num_bytes: int

    @property
    def gib(self) -> float:
        """By how much, in GiB."""
        return self.num_bytes / GIB


@dataclass(frozen=True)
class Plan:
    """Memory of a run. `kinds`: the phases of a rank of each pipeline stage, by its name.
    `gpu_memory_bytes` is None without GPUs, where no limit is known."""

    config: Config
    arch: Architecture
    num_processes: int
    gpus_per_node: int
    gpu_memory_bytes: float | None
    kernels: Kernels
    stages: tuple[Stage, ...]
    kinds: dict[str, Phases]
    engine: Engine
    host: tuple[Part, ...]
    disk: tuple[Part, ...]

    def fullest(self, phase: str) -> tuple[str, tuple[Part, ...]]:
        """The kind of rank that takes most in a phase, and its parts."""
        kind = max(self.kinds, key=lambda name: size(self.kinds[name][phase]))
        return kind, self.kinds[kind][phase]

    def num_bytes(self, phase: str) -> int:
        """That a rank of the fullest kind takes."""
        return size(self.fullest(phase)[1])

    def slack_gib(self, phase: str) -> float | None:
        """What a phase leaves free; negative if it does not fit, None without GPUs."""
        if self.gpu_memory_bytes is None:
            return None
        return (self.gpu_memory_bytes - self.num_bytes(phase)) / GIB

    def excesses(self) -> list[Excess]:
        """Phases that do not fit."""
        room = self.gpu_memory_bytes
        if room is None:
            return []
        return [
            Excess(phase, self.fullest(phase)[0], int(self.num_bytes(phase) - room))
            for phase in PHASES
            if self.num_bytes(phase) > room
        ]

    def fits(self) -> bool:
        """Whether every phase fits, and a sequence of full length into an engine's cache."""
        return not self.excesses() and self.sequences >= 1

    @property
    def sequences(self) -> int:
        """Of full length that an engine's cache holds."""
        return self.engine.sequences(self.config.max_sequence_tokens)

    def problems(self) -> Iterator[str]:
        """What does not fit, and what would free how much."""
        from dapo_megatron.plan.knobs import advice

        for excess in self.excesses():
            yield (
                f"{excess.phase}: {excess.kind} takes {self.num_bytes(excess.phase) / GIB:.1f} "
                f"GiB, {excess.gib:.1f} more than there is\n{advice(self, excess.phase)}"
            )
        if self.sequences < 1:
            length = self.config.max_sequence_tokens
            yield (
                f"generate: the KV cache of {self.engine.cache.gib:.1f} GiB cannot hold one "
                f"sequence of {length:,} tokens\n{advice(self, 'generate')}"
            )


def make_plan(
    config: Config, num_processes: int, *, gpu_memory_gib: float = 80.0, gpus_per_node: int = 8
) -> Plan:
    """What `num_processes` ranks take, one per GPU of `gpu_memory_gib`; `gpus_per_node` 0: ranks
    without GPUs.

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
