"""Memory of one pipeline stage of the policy: weights, gradients and optimizer, counted parameter
by parameter, and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.model import Architecture, Place, layout_of
from dapo_megatron.plan import Part
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
        """Layers, counted over the model; several ranges where the schedule is interleaved."""
        return stage_layers(self.policy, self.arch.num_layers)[self.number]

    @cached_property
    def numbers(self) -> Numbers:
        """Counts of a rank's parameters."""
        return _numbers(self)

    @property
    def name(self) -> str:
        """Name for the user."""
        if self.policy.pipeline_parallel == 1:
            return "every rank"
        ends = {0: " (embedding)"} | ({self.number: " (output head)"} if self.is_last else {})
        of = f"{self.number + 1} of {self.policy.pipeline_parallel}"
        return f"pipeline stage {of}{ends.get(self.number, '')}"


# ------------------------------------------------------------------ what belongs to parameters


@dataclass(frozen=True)
class Numbers:
    """Parameters of a rank: those of experts, and the rest; among these, biases of routers, which
    are not trained, and among all, those in linear layers of FP8."""

    dense: int
    of_experts: int
    untrained: int
    in_fp8: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.of_experts


def _numbers(stage: Stage) -> Numbers:
    """Count over the tensors of the rank."""
    policy = stage.policy
    counted = [
        _count(
            stage.arch,
            Place(
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
    dense, of_experts, untrained, linear = map(sum, zip(*counted, strict=True))
    in_fp8 = 0
    if policy.fp8:
        kept = policy.fp8.bf16_first_layers + policy.fp8.bf16_last_layers
        in_fp8 = round(linear * max(1 - kept / stage.arch.num_layers, 0.0))
    return Numbers(dense, of_experts, untrained, in_fp8)


@lru_cache(maxsize=1024)
def _count(arch: Architecture, place: Place) -> tuple[int, int, int, int]:
    """Count the parameters of a chunk: dense, of experts, untrained, in linear layers. Cached
    because other estimates share it, and experts have tens of thousands of tensors."""
    dense = of_experts = untrained = linear = 0
    for name, slot in layout_of(arch, place).items():
        number = prod(slot.shape)
        if ".mlp.experts." in name:
            of_experts += number
        else:
            dense += number
        if name.endswith(".expert_bias"):
            untrained += number
        if ".linear_" in name and len(slot.shape) == 2:
            linear += number
    return dense, of_experts, untrained, linear


def weights(stage: Stage) -> Part:
    """Weights, as the policy computes with them."""
    counts, width, fp8 = stage.numbers, stage.micro.width, stage.policy.fp8
    experts = f" ({counts.of_experts:,} of experts)" if counts.of_experts else ""
    how = f"{counts.total:,} parameters{experts} of {width} bytes"
    num_bytes = counts.total * width + counts.untrained * (stage.micro.exact_width - width)
    if fp8 and fp8.parameters:
        num_bytes -= counts.in_fp8 * (width - 1)
        how += f", but {counts.in_fp8:,} of 1 byte"
    return Part(WEIGHTS, num_bytes, how)


def quantised_copies(stage: Stage) -> Part | None:
    """Quantized copies of FP8 layers. Hopper multiplies FP8 in one arrangement only, so each
    weight exists along its rows and along its columns, made from bfloat16, or the columns from the
    rows."""
    if stage.policy.fp8 is None:
        return None
    counts, copies = stage.numbers, 1 if stage.policy.fp8.parameters else 2
    how = f"{counts.in_fp8:,} weights, {copies} bytes each"
    return Part("FP8 copies of weights", counts.in_fp8 * copies, how)


def gradients(stage: Stage) -> Part:
    """Gradient buffers of Megatron."""
    wide, counts = stage.micro.exact_width, stage.numbers
    return Part(GRADIENTS, (counts.total - counts.untrained) * wide, f"{wide} bytes each")


def optimizer(stage: Stage) -> Part:
    """Optimizer state on the device. Megatron divides it over the ranks that hold a copy."""
    whole, how = _optimizer_bytes(stage)
    share = stage.config.optimizer.cpu_offload
    on_host = f"; {share:.0%} of it in host memory" if share else ""
    return Part(OPTIMIZER, ceil(whole * (1 - share)), how + on_host)


def optimizer_on_host(stage: Stage) -> int:
    """Return the bytes of the share that lives in host memory, with its gradients."""
    share = stage.config.optimizer.cpu_offload
    whole, _ = _optimizer_bytes(stage)
    gradient = ceil(_shared_out(stage) * FLOAT32)
    return ceil((whole + gradient) * share)


def offloaded_bytes(stage: Stage) -> int:
    """Return a rank's bytes that move to host memory while engines generate; gradients do not."""
    parts = stage.policy.offload
    num_bytes = weights(stage).num_bytes if "weights" in parts else 0
    return num_bytes + (optimizer(stage).num_bytes if "optimizer" in parts else 0)


def snapshot_bytes(stage: Stage) -> int:
    """Return the bytes that a rank saves: weights and its part of the optimizer."""
    return weights(stage).num_bytes + _optimizer_bytes(stage)[0]


def _optimizer_bytes(stage: Stage) -> tuple[int, str]:
    width, wide = stage.micro.width, stage.micro.exact_width
    moment = wide if stage.config.optimizer.moments == "float32" else 2
    # In float32 the policy's own weights are the main ones.
    main = wide if width < wide else 0
    each = main + MOMENTS * moment
    copies, of_experts = _copies(stage)
    shares = f"{copies}" + (f" ranks, experts' over {of_experts}" if stage.arch.num_experts else "")
    what = "main weights and moments" if main else "moments"
    return ceil(_shared_out(stage) * each), f"{what}, {each} bytes each over {shares}"


def _copies(stage: Stage) -> tuple[int, int]:
    """Return the ranks that hold a copy of a parameter, and of an expert's, which tensor
    parallelism does not shard."""
    policy, world = stage.policy, stage.num_processes
    dense = data_parallel(policy, world) * policy.context_parallel
    return dense, world // (policy.pipeline_parallel * policy.expert_parallel)


def _shared_out(stage: Stage) -> float:
    """Return the number of parameters whose optimizer state this rank holds."""
    counts, (copies, of_experts) = stage.numbers, _copies(stage)
    return (counts.dense - counts.untrained) / copies + counts.of_experts / of_experts


# ------------------------------------------------------------------ activations


def kept(stage: Stage) -> Part:
    """Activations that forward passes keep, at their maximum."""
    micro, policy = stage.micro, stage.policy
    waiting = waiting_layers(policy, stage.number, len(stage.chunks[0]))
    layers = list(_latest(stage.chunks, waiting))
    per_layer = [count.kept_by_layer(micro, layer) for layer in layers]
    if policy.recompute == "full":
        per_token = len(layers) * count.layer_input(micro)
        how = f"inputs of {len(layers)} layers"
    else:
        per_token = sum(per_layer)
        how = f"{len(layers)} layers x {per_token / len(layers):,.0f} bytes"
    if stage.is_last:
        per_token += count.kept_by_end(micro)
    return Part(
        ACTIVATIONS, ceil(micro.num_tokens * per_token), f"{micro.num_tokens:,} tokens: {how}"
    )


def _latest(chunks: list[range], waiting: int) -> Iterator[int]:
    """Yield the layers whose activations are kept: all of each micro-batch, chunk after chunk."""
    layers = [layer for chunk in chunks for layer in chunk]
    for index in range(waiting):
        yield layers[index % len(layers)]


def waiting_layers(policy: PolicyConfig, stage: int, layers_of_chunk: int) -> int:
    """Count the layers whose activations a stage holds at once: those of the micro-batches between
    forward and backward (Megatron's schedules.py: the warm-up of 1F1B, and of interleaving)."""
    behind = policy.pipeline_parallel - stage - 1
    num_chunks = policy.virtual_pipeline_parallel or 1
    if num_chunks == 1:
        return (behind + 1) * layers_of_chunk
    return (2 * behind + (num_chunks - 1) * policy.pipeline_parallel + 1) * layers_of_chunk


def passing(stage: Stage, *, backward: bool) -> tuple[Part, ...]:
    """Temporary memory of a layer, and on the last stage of the head; never both at once."""
    micro = stage.micro
    layers = [layer for chunk in stage.chunks for layer in chunk]

    def most(per_token: Callable[[Micro, int], float]) -> float:
        return micro.num_tokens * max(per_token(micro, layer) for layer in layers)

    if not backward:
        parts = [Part(LAYER, ceil(most(count.forward_of_layer)), "going forward")]
    else:
        again = 0.0
        if stage.policy.recompute == "full":
            again = most(count.kept_by_layer) - micro.num_tokens * count.layer_input(micro)
        gradient = max(count.largest_gradient(micro, layer) for layer in layers)
        of_layer = again + most(count.backward_of_layer) + gradient
        parts = [Part(LAYER, ceil(of_layer), "going backward")]
    if stage.is_last:
        parts.append(_head(micro, backward=backward))
    return tuple(parts)


def _head(micro: Micro, *, backward: bool) -> Part:
    """Temporary memory of the output head, with its tiles of logits."""
    forward = count.forward_of_head(micro, backward=backward)
    if not backward:
        forward += count.hidden_states_of_head(micro)
    sizes = {"forward": forward}
    if backward:
        sizes["backward"] = count.backward_of_head(micro)
    where = max(sizes, key=lambda name: sizes[name])
    as_torch = ", counted as torch's" if micro.policy.logprob_head == "triton" else ""
    return Part(HEAD, ceil(sizes[where]), f"the output head going {where}{as_torch}")
