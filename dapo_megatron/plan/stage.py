"""One pipeline stage of the policy: weights, gradients and optimizer state on a rank.

Parameters are counted with `layout_of`, the table of what a rank holds, which
tests/parity/test_families.py compares with Megatron-core's models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import ceil, prod

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.config.computing import Kernels
from dapo_megatron.model import (
    Architecture,
    ChunkPlace,
    adapters_of,
    layout_of,
    planned_architecture,
    with_teacher,
)
from dapo_megatron.plan import MemoryItem
from dapo_megatron.plan.layout import data_parallel, stage_layers
from dapo_megatron.types import torch_dtype

FLOAT32 = 4
MOMENTS = 2
"""Moments of AdamW per parameter."""
WORKSPACE_BYTES = 32 * 2**20 + 1024
GROUPED_WORKSPACES = 4
"""Workspaces of the grouped matmul of experts."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a run's policy on `num_processes` ranks. Sizes are in bytes of a rank
    and of its device, by default."""

    config: Config
    arch: Architecture
    kernels: Kernels
    num_processes: int
    number: int
    on_gpu: bool

    @property
    def policy(self) -> PolicyConfig:
        """Layout of the policy."""
        return self.config.policy

    @property
    def is_last(self) -> bool:
        """Whether the stage has the output head."""
        return self.number == self.policy.pipeline_parallel - 1

    @property
    def name(self) -> str:
        """Display name."""
        if self.policy.pipeline_parallel == 1:
            return "every rank" if self.config.engine.colocated else "every policy rank"
        ends = {0: " (embedding)"} | ({self.number: " (output head)"} if self.is_last else {})
        of = f"{self.number + 1} of {self.policy.pipeline_parallel}"
        return f"pipeline stage {of}{ends.get(self.number, '')}"

    @cached_property
    def chunks(self) -> list[range]:
        """Global layer indices, one range per chunk; several with the interleaved schedule."""
        return stage_layers(self.policy, self.arch.num_layers)[self.number]

    @cached_property
    def layers(self) -> list[int]:
        """Global indices of all its layers."""
        return [layer for chunk in self.chunks for layer in chunk]

    # -------------------------------------------------------------- sizes of elements

    @property
    def width(self) -> int:
        """Bytes per element in policy.precision."""
        return torch_dtype(self.policy.precision).itemsize

    @property
    def exact_width(self) -> int:
        """Bytes per element of tensors that are at least float32."""
        return max(self.width, FLOAT32)

    @property
    def input_width(self) -> int:
        """Bytes per element of the input that a linear layer saves for its backward pass."""
        return 1 if self.policy.fp8 else self.width

    @property
    def num_tokens(self) -> int:
        """Tokens of a rank in the largest micro-batch."""
        return self.config.train.max_tokens_per_microbatch

    @property
    def by_tokens(self) -> int:
        """Number of ranks over which sequence parallelism splits tokens; 1 without it."""
        return self.policy.tensor_parallel if self.policy.sequence_parallel else 1

    # -------------------------------------------------------------- parameters and their state

    @property
    def is_frozen(self) -> bool:
        """Whether only adapters are trained (policy.lora). Then other weights have no gradients,
        and layers save no inputs for these."""
        return self.policy.lora is not None

    @cached_property
    def parameters(self) -> Counter[str]:
        """Numbers of parameters without adapters: `dense` (all outside of experts), `experts`, and
        of these those that are `untrained` (biases of routers) or in `linear` layers."""
        return self._sum(partial(_count, self.arch))

    @cached_property
    def adapters(self) -> Counter[str]:
        """Numbers of parameters of adapters: `dense` and `experts`; and of the weights that they
        `change`."""
        lora = self.policy.lora
        if lora is None:
            return Counter()
        return self._sum(lambda place: _count_adapters(self.arch, place, lora.rank, lora.targets))

    @property
    def trained(self) -> Counter[str]:
        """Numbers of trained parameters: `dense` and `experts`."""
        if self.policy.lora is not None:
            return self.adapters
        dense = self.parameters["dense"] - self.parameters["untrained"]
        return Counter(dense=dense, experts=self.parameters["experts"])

    def _sum(self, count: Callable[[ChunkPlace], Counter[str]]) -> Counter[str]:
        """Return the sum of `count` over all parts of the stage."""
        total = Counter(count(self._ends))
        for place, number in self._kinds_of_layers:
            for name, value in count(place).items():
                total[name] += number * value
        return total

    @property
    def _ends(self) -> ChunkPlace:
        """The stage without its layers."""
        return ChunkPlace(
            tp_rank=0,
            tp_size=self.policy.tensor_parallel,
            first_layer=0,
            num_layers=0,
            has_embedding=self.number == 0,
            has_head=self.is_last,
            ep_size=self.policy.expert_parallel,
        )

    @property
    def _kinds_of_layers(self) -> list[tuple[ChunkPlace, int]]:
        """One layer of each kind, and their number."""
        ends = replace(self._ends, num_layers=1, has_embedding=False, has_head=False)
        numbers = Counter(map(self._kind, self.layers))
        return [
            (replace(ends, first_layer=layer), numbers[kind])
            for kind, layer in {self._kind(layer): layer for layer in self.layers}.items()
        ]

    def _kind(self, layer: int) -> tuple[bool, bool]:
        """Return whether a layer has experts, and a gated delta net. Others of its kind are like
        it."""
        return self.arch.has_experts(layer), self.arch.has_delta(layer)

    @property
    def different_layers(self) -> list[int]:
        """A layer of each kind."""
        return [place.first_layer for place, _ in self._kinds_of_layers]

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        counts = (self.parameters, self.adapters)
        return sum(count["dense"] + count["experts"] for count in counts)

    @property
    def in_fp8(self) -> int:
        """Number of parameters in layers that compute in FP8."""
        if self.policy.fp8 is None:
            return 0
        num_bf16 = self.policy.fp8.bf16_first_layers + self.policy.fp8.bf16_last_layers
        return round(self.parameters["linear"] * max(1 - num_bf16 / self.arch.num_layers, 0.0))

    @property
    def weights(self) -> MemoryItem:
        """Weights, in the precision in which the policy computes."""
        experts = self.parameters["experts"]
        how = f"{self.num_parameters:,} parameters" + (
            f" ({experts:,} of experts)" if experts else ""
        )
        if self.policy.lora:
            how += f", {self.adapters['dense'] + self.adapters['experts']:,} of adapters"
        num_bytes = self.num_parameters * self.width
        num_bytes += self.parameters["untrained"] * (self.exact_width - self.width)
        if self.policy.fp8 and self.policy.fp8.parameters:
            num_bytes -= self.in_fp8 * (self.width - 1)
            how += f", {self.in_fp8:,} in FP8"
        return MemoryItem("policy weights", num_bytes, how)

    @property
    def fp8_copies(self) -> MemoryItem:
        """Quantized copies of weights in FP8 layers.

        Hopper multiplies FP8 matrices in one memory layout only, so Transformer Engine keeps each
        weight row-wise and column-wise. FP8 parameters are row-wise, and need only the other.
        """
        copies = 1 if self.policy.fp8 and self.policy.fp8.parameters else 2
        how = f"{self.in_fp8:,} weights, {copies} bytes each"
        return MemoryItem("FP8 copies of weights", self.in_fp8 * copies, how)

    @property
    def buffers(self) -> MemoryItem:
        """Tensors that Transformer Engine keeps from the first update on: a gradient of each shape
        of weight, which it returns in place of gradients that it has added to Megatron's buffers,
        and workspaces of cuBLAS on Hopper."""
        shapes = {
            parameter.shape
            for place, _ in self._kinds_of_layers
            for name, parameter in layout_of(self.arch, place).items()
            if ".linear_" in name and len(parameter.shape) == 2 and not self.is_frozen
        }
        has_experts = any(map(self.arch.has_experts, self.layers))
        workspaces = 1 + GROUPED_WORKSPACES * has_experts
        num_bytes = self.width * sum(map(prod, shapes)) + workspaces * WORKSPACE_BYTES
        how = f"{len(shapes)} shapes of weights, {workspaces} workspaces"
        return MemoryItem("Transformer Engine's buffers", num_bytes, how)

    @property
    def gradients(self) -> MemoryItem:
        """Megatron's gradient buffers."""
        trained = self.trained["dense"] + self.trained["experts"]
        how = f"{self.exact_width} bytes each"
        return MemoryItem("gradients", trained * self.exact_width, how)

    @property
    def optimizer(self) -> MemoryItem:
        """Optimizer state on the device."""
        share = self.config.optimizer.cpu_offload
        how = f"{self._state_bytes} bytes each, over the ranks that hold a copy"
        how += f"; {share:.0%} of it in host memory" if share else ""
        return MemoryItem("optimizer", ceil(self._optimizer_bytes * (1 - share)), how)

    @property
    def optimizer_on_host(self) -> int:
        """Optimizer state in host memory (optimizer.cpu_offload), with its gradients."""
        share = self.config.optimizer.cpu_offload
        return ceil((self._optimizer_bytes + ceil(self._optimized * FLOAT32)) * share)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that move to host memory while engines generate. Gradients are discarded."""
        moved = {"weights": self.weights, "optimizer": self.optimizer}
        return sum(part.num_bytes for name, part in moved.items() if name in self.policy.offload)

    @property
    def reference_bytes(self) -> int:
        """Reference model of loss.kl, in host memory."""
        kl = self.config.loss.kl
        is_base = self.policy.lora is not None and kl.reference is None
        return self.weights.num_bytes if kl.is_on and not is_base else 0

    @cached_property
    def teacher(self) -> MemoryItem:
        """Weights of loss.distill's teacher: in host memory, and on the device in its pass."""
        if self.config.loss.distill is None:
            return MemoryItem("teacher", 0, "")
        config = with_teacher(self.config)
        weights = replace(self, config=config, arch=planned_architecture(config)).weights
        return replace(weights, name="teacher")

    @property
    def base_bytes(self) -> int:
        """Weights without their adapters, in host memory."""
        return self.adapters["change"] * self.width

    @property
    def snapshot_bytes(self) -> int:
        """Part of a checkpoint: weights and optimizer state of what the rank updates, and its share
        of what is not trained."""
        untrained = self.parameters["untrained"] * self.exact_width / self._dense_copies
        frozen = self._share(self.parameters) * self.width if self.policy.lora else untrained
        return ceil(self._optimized * self.width + frozen) + self._optimizer_bytes

    @property
    def _optimized(self) -> float:
        """Number of parameters whose optimizer state the rank holds. Megatron shards it over the
        ranks that hold a copy."""
        return self._share(self.trained)

    def _share(self, counts: Counter[str]) -> float:
        """Return the number of these parameters by the ranks that hold a copy. Tensor parallelism
        does not shard experts."""
        policy = self.policy
        of_experts = self.num_processes // (policy.pipeline_parallel * policy.expert_parallel)
        return counts["dense"] / self._dense_copies + counts["experts"] / of_experts

    @property
    def _dense_copies(self) -> int:
        """Number of ranks that hold a copy of a parameter outside of experts."""
        return data_parallel(self.policy, self.num_processes) * self.policy.context_parallel

    @property
    def _state_bytes(self) -> int:
        """Bytes of optimizer state per parameter: moments, and main weights if the model's are
        narrower."""
        moment = self.exact_width if self.config.optimizer.moments == "float32" else 2
        return MOMENTS * moment + (self.exact_width if self.width < self.exact_width else 0)

    @property
    def _optimizer_bytes(self) -> int:
        return ceil(self._optimized * self._state_bytes)


@lru_cache(maxsize=4096)
def _count(arch: Architecture, place: ChunkPlace) -> Counter[str]:
    """Count the parameters of a chunk. Cached, because many estimates share the result."""
    counts = Counter[str]()
    for name, local_parameter in layout_of(arch, place).items():
        number = prod(local_parameter.shape)
        counts["experts" if ".mlp.experts." in name else "dense"] += number
        if name.endswith(".expert_bias"):
            counts["untrained"] += number
        if ".linear_" in name and len(local_parameter.shape) == 2:
            counts["linear"] += number
    return counts


@lru_cache(maxsize=4096)
def _count_adapters(
    arch: Architecture, place: ChunkPlace, rank: int, targets: tuple[str, ...]
) -> Counter[str]:
    """Count the parameters of a chunk's adapters, and of the weights that they `change`."""
    counts = Counter[str]()
    for parts in adapters_of(arch, place, rank, targets).values():
        kind = "experts" if parts.is_expert else "dense"
        counts[kind] += prod(parts.lora_a.shape) + prod(parts.lora_b.shape)
        counts["change"] += parts.lora_b.shape[0] * parts.lora_a.shape[1]
    return counts
