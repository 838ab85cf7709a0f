"""Estimate the memory of one pipeline stage of the policy: weights, gradients and optimizer state,
counted parameter by parameter, and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.model import Architecture, ChunkPlace, layout_of
from dapo_megatron.plan import MemoryItem
from dapo_megatron.plan import activations as count
from dapo_megatron.plan.activations import FLOAT32, Micro
from dapo_megatron.plan.layout import data_parallel, stage_layers

WEIGHTS, GRADIENTS, OPTIMIZER = "policy weights", "gradients", "optimizer"
ACTIVATIONS, LAYER, HEAD = "activations", "a layer at work", "logits, at the head"
MOMENTS = 2
"""Moments of AdamW per parameter."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a run's policy on `num_processes` ranks."""

    config: Config
    micro: Micro
    num_processes: int
    number: int

    @property
    def policy(self) -> PolicyConfig:
        """Layout of the policy."""
        return self.config.policy

    @property
    def arch(self) -> Architecture:
        """Architecture of the model."""
        return self.micro.arch

    @property
    def is_last(self) -> bool:
        """True if the stage has the output head."""
        return self.number == self.policy.pipeline_parallel - 1

    @property
    def chunks(self) -> list[range]:
        """Global layer indices, one range per chunk; several with the interleaved schedule."""
        return stage_layers(self.policy, self.arch.num_layers)[self.number]

    @cached_property
    def numbers(self) -> ParameterCounts:
        """Parameter counts of a rank."""
        return _count_parameters(self)

    @property
    def name(self) -> str:
        """Display name."""
        if self.policy.pipeline_parallel == 1:
            return "every rank" if self.config.engine.colocated else "every policy rank"
        ends = {0: " (embedding)"} | ({self.number: " (output head)"} if self.is_last else {})
        of = f"{self.number + 1} of {self.policy.pipeline_parallel}"
        return f"pipeline stage {of}{ends.get(self.number, '')}"


# ------------------------------------------------------------------ parameters and their state


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a rank."""

    dense: int
    """All parameters outside of experts."""
    of_experts: int
    untrained: int
    """Biases of routers, which are also counted in `dense`."""
    in_fp8: int
    """Parameters in linear layers that compute in FP8, also counted in `dense` or `of_experts`."""

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.of_experts


def _count_parameters(stage: Stage) -> ParameterCounts:
    """Count the parameters of a rank over all its chunks."""
    policy = stage.policy
    counts = [
        _count_chunk(
            stage.arch,
            ChunkPlace(
                tp_rank=0,
                tp_size=policy.tensor_parallel,
                first_layer=layers.start,
                num_layers=len(layers),
                has_embedding=stage.number == 0 and number == 0,
                has_head=stage.is_last and number == len(stage.chunks) - 1,
                ep_size=policy.expert_parallel,
            ),
        )
        for number, layers in enumerate(stage.chunks)
    ]
    dense, of_experts, untrained, linear = map(sum, zip(*counts, strict=True))
    in_fp8 = 0
    if policy.fp8:
        num_bf16 = policy.fp8.bf16_first_layers + policy.fp8.bf16_last_layers
        in_fp8 = round(linear * max(1 - num_bf16 / stage.arch.num_layers, 0.0))
    return ParameterCounts(dense, of_experts, untrained, in_fp8)


@lru_cache(maxsize=1024)
def _count_chunk(arch: Architecture, place: ChunkPlace) -> tuple[int, int, int, int]:
    """Count the parameters of a chunk: dense, of experts, untrained, in linear layers. Cached
    because many estimates share the result, and experts have tens of thousands of tensors."""
    dense = of_experts = untrained = linear = 0
    for name, local_parameter in layout_of(arch, place).items():
        number = prod(local_parameter.shape)
        if ".mlp.experts." in name:
            of_experts += number
        else:
            dense += number
        if name.endswith(".expert_bias"):
            untrained += number
        if ".linear_" in name and len(local_parameter.shape) == 2:
            linear += number
    return dense, of_experts, untrained, linear


def weights(stage: Stage) -> MemoryItem:
    """Return the weights, in the precision in which the policy computes."""
    counts, width, fp8 = stage.numbers, stage.micro.width, stage.policy.fp8
    experts = f" ({counts.of_experts:,} of experts)" if counts.of_experts else ""
    how = f"{counts.total:,} parameters{experts} of {width} bytes"
    num_bytes = counts.total * width + counts.untrained * (stage.micro.exact_width - width)
    if fp8 and fp8.parameters:
        num_bytes -= counts.in_fp8 * (width - 1)
        how += f", but {counts.in_fp8:,} of 1 byte"
    return MemoryItem(WEIGHTS, num_bytes, how)


def quantized_copies(stage: Stage) -> MemoryItem | None:
    """Return the quantized copies of weights in FP8 layers; None without FP8. Hopper multiplies FP8
    matrices in one memory layout only, so Transformer Engine keeps each weight row-wise and
    column-wise. FP8 parameters are already row-wise and need only the column-wise copy."""
    if stage.policy.fp8 is None:
        return None
    counts, copies = stage.numbers, 1 if stage.policy.fp8.parameters else 2
    how = f"{counts.in_fp8:,} weights, {copies} bytes each"
    return MemoryItem("FP8 copies of weights", counts.in_fp8 * copies, how)


def gradients(stage: Stage) -> MemoryItem:
    """Return Megatron's gradient buffers."""
    wide, counts = stage.micro.exact_width, stage.numbers
    return MemoryItem(GRADIENTS, (counts.total - counts.untrained) * wide, f"{wide} bytes each")


def optimizer(stage: Stage) -> MemoryItem:
    """Return the optimizer state on the device. Megatron shards it over the ranks that hold a copy
    of the same parameters."""
    whole, how = _optimizer_bytes(stage)
    share = stage.config.optimizer.cpu_offload
    on_host = f"; {share:.0%} of it in host memory" if share else ""
    return MemoryItem(OPTIMIZER, ceil(whole * (1 - share)), how + on_host)


def optimizer_on_host(stage: Stage) -> int:
    """Return the bytes of optimizer state in host memory (optimizer.cpu_offload), with its
    gradients."""
    share = stage.config.optimizer.cpu_offload
    whole, _ = _optimizer_bytes(stage)
    gradient = ceil(_optimized_parameters(stage) * FLOAT32)
    return ceil((whole + gradient) * share)


def offloaded_bytes(stage: Stage) -> int:
    """Return the bytes that a rank moves to host memory while engines generate. Gradients are
    discarded instead."""
    parts = stage.policy.offload
    num_bytes = weights(stage).num_bytes if "weights" in parts else 0
    return num_bytes + (optimizer(stage).num_bytes if "optimizer" in parts else 0)


def reference_bytes(stage: Stage) -> int:
    """Return the bytes of the reference of loss.kl in host memory."""
    return weights(stage).num_bytes if stage.config.loss.kl.is_on else 0


def snapshot_bytes(stage: Stage) -> int:
    """Return the bytes of a rank's part of a checkpoint: weights and optimizer state of the
    parameters that its optimizer updates."""
    return ceil(_optimized_parameters(stage) * stage.micro.width) + _optimizer_bytes(stage)[0]


def _optimizer_bytes(stage: Stage) -> tuple[int, str]:
    width, wide = stage.micro.width, stage.micro.exact_width
    moment = wide if stage.config.optimizer.moments == "float32" else 2
    # With float32 or wider weights there are no separate main weights.
    main = wide if width < wide else 0
    each = main + MOMENTS * moment
    copies, of_experts = _copies(stage)
    shares = f"{copies}" + (f" ranks, experts' over {of_experts}" if stage.arch.num_experts else "")
    what = "main weights and moments" if main else "moments"
    return ceil(_optimized_parameters(stage) * each), f"{what}, {each} bytes each over {shares}"


def _copies(stage: Stage) -> tuple[int, int]:
    """Return the number of ranks that hold a copy of a dense parameter, and of an expert's
    parameter. Tensor parallelism does not shard experts."""
    policy, world = stage.policy, stage.num_processes
    dense = data_parallel(policy, world) * policy.context_parallel
    return dense, world // (policy.pipeline_parallel * policy.expert_parallel)


def _optimized_parameters(stage: Stage) -> float:
    """Return the number of parameters whose optimizer state a rank holds."""
    counts, (copies, of_experts) = stage.numbers, _copies(stage)
    return (counts.dense - counts.untrained) / copies + counts.of_experts / of_experts


# ------------------------------------------------------------------ activations


def kept(stage: Stage) -> MemoryItem:
    """Return the activations that forward passes save for backward, at their maximum."""
    micro, policy = stage.micro, stage.policy
    waiting = waiting_layers(policy, stage.number, len(stage.chunks[0]))
    layers = list(_saved_layers(stage.chunks, waiting))
    per_layer = [count.kept_by_layer(micro, layer) for layer in layers]
    if policy.recompute == "full":
        per_token = len(layers) * count.layer_input(micro)
        how = f"inputs of {len(layers)} layers"
    else:
        per_token = sum(per_layer)
        how = f"{len(layers)} layers x {per_token / len(layers):,.0f} bytes"
    num_waiting = ceil(waiting / sum(map(len, stage.chunks)))  # micro-batches
    per_token += num_waiting * count.rotation(micro)
    if stage.is_last:
        per_token += count.kept_by_end(micro)
    return MemoryItem(
        ACTIVATIONS, ceil(micro.num_tokens * per_token), f"{micro.num_tokens:,} tokens: {how}"
    )


def _saved_layers(chunks: list[range], waiting: int) -> Iterator[int]:
    """Yield the `waiting` layers whose activations are saved, cycling through the chunks."""
    layers = [layer for chunk in chunks for layer in chunk]
    for index in range(waiting):
        yield layers[index % len(layers)]


def waiting_layers(policy: PolicyConfig, stage: int, layers_of_chunk: int) -> int:
    """Return the number of layers whose activations a stage holds at the same time, over all
    micro-batches between forward and backward (Megatron's schedules.py: warm-up of 1F1B, and of the
    interleaved schedule)."""
    behind = policy.pipeline_parallel - stage - 1
    num_chunks = policy.virtual_pipeline_parallel or 1
    if num_chunks == 1:
        return (behind + 1) * layers_of_chunk
    return (2 * behind + (num_chunks - 1) * policy.pipeline_parallel + 1) * layers_of_chunk


def passing(stage: Stage, *, backward: bool) -> tuple[MemoryItem, ...]:
    """Return the temporary memory of a layer and, on the last stage, that of the output head. The
    two never occur at the same time."""
    micro = stage.micro
    layers = [layer for chunk in stage.chunks for layer in chunk]

    def most(per_token: Callable[[Micro, int], float]) -> float:
        return micro.num_tokens * max(per_token(micro, layer) for layer in layers)

    if not backward:
        parts = [MemoryItem(LAYER, ceil(most(count.forward_of_layer)), "forward pass")]
    else:
        recomputed = 0.0
        if stage.policy.recompute == "full":
            recomputed = most(count.kept_by_layer) - micro.num_tokens * count.layer_input(micro)
        gradient = max(count.largest_gradient(micro, layer) for layer in layers)
        of_layer = recomputed + most(count.backward_of_layer) + gradient
        parts = [MemoryItem(LAYER, ceil(of_layer), "backward pass")]
    if stage.is_last:
        parts.append(_head(micro, backward=backward))
    return tuple(parts)


def _head(micro: Micro, *, backward: bool) -> MemoryItem:
    """Return the temporary memory of the output head, with its tiles of logits."""
    forward = count.forward_of_head(micro, backward=backward)
    if not backward:
        forward += count.hidden_states_of_head(micro)
    sizes = {"forward": forward}
    if backward:
        sizes["backward"] = count.backward_of_head(micro)
    largest = max(sizes, key=lambda name: sizes[name])
    as_torch = ", counted as torch's" if micro.policy.logprob_head == "triton" else ""
    return MemoryItem(HEAD, ceil(sizes[largest]), f"{largest} pass of the output head{as_torch}")
