"""Low-rank adapters of linear layers (policy.lora), over a frozen base.

The weight in a layer is always the merged one, base + alpha / rank * lora_b @ lora_a, in the
policy's precision. So forward passes, log-probs, the sync to the engines, fingerprints and exports
are those of any other model, and engine and policy compute with the same bits. The base's values
stay in host memory. After each update every rank computes its part of the merged weights again.

The backward pass has no gradient of a whole weight. For a layer y = x W^T with the gradient g of y

    gradient of lora_b = scale * g^T (x lora_a^T),    gradient of lora_a = scale * (g lora_b)^T x

and that of x is the frozen layer's own. Only matrices of `rank` columns travel between
tensor-parallel ranks. With sequence parallelism a rank's gradient of the half that all ranks share
covers its own tokens, and Megatron sums it as it does for norms.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from dapo_megatron.config import LoraConfig, PolicyConfig
from dapo_megatron.model import AdapterParts, Architecture, LocalParameter, adapters_of
from dapo_megatron.policy.attention import widened
from dapo_megatron.policy.kernels import kernels
from dapo_megatron.policy.model import Decoder, place
from dapo_megatron.policy.offload import HostMemory
from dapo_megatron.policy.shards import shard_of, slice_of
from dapo_megatron.types import CheckpointError, Shard

PREFIX = "adapters."
"""Prefix of the adapters' parameters in a chunk."""
SAME_MERGE = 0.02
"""Allowed difference of two merges of one base and adapter, as a share of the adapter's changes."""


class Adapter(torch.nn.Module):
    """The adapter of one weight on this rank, lora_a [rank, inputs] and lora_b [outputs, rank]."""

    def __init__(
        self,
        weight: Tensor,
        parts: AdapterParts,
        scale: float,
        host: HostMemory,
        *,
        sequence_parallel: bool,
    ) -> None:
        """`host`: where the base is kept, with those of other adapters."""
        super().__init__()
        self._weight = [weight]  # in a list, so that it is no parameter of this module
        self.parts, self._scale = parts, scale
        self._splits_tokens = sequence_parallel and not parts.is_expert
        self._host, self._position = host, host.reserve(weight.nbytes)
        self.lora_a = self._half(weight, parts.lora_a, is_split=parts.splits_inputs, dim=1)
        self.lora_b = self._half(weight, parts.lora_b, is_split=not parts.splits_inputs, dim=0)
        self.keep_base()

    def _half(
        self, weight: Tensor, part: LocalParameter, *, is_split: bool, dim: int
    ) -> torch.nn.Parameter:
        half: Any = torch.nn.Parameter(weight.new_empty(part.shape))
        if self.parts.is_expert:
            half.allreduce = False  # as ExpertLayer in moe.py
        if is_split or self.parts.is_expert:
            set_tensor_model_parallel_attributes(half, True, dim, 1)
        else:
            half.sequence_parallel = self._splits_tokens
        return half

    @property
    def weight(self) -> Tensor:
        """The merged weight."""
        return self._weight[0].detach()

    def halves(self, prefix: str = "") -> Iterator[tuple[str, torch.nn.Parameter, LocalParameter]]:
        """Yield name, parameter and HF parts of lora_a and lora_b."""
        yield f"{prefix}lora_a", self.lora_a, self.parts.lora_a
        yield f"{prefix}lora_b", self.lora_b, self.parts.lora_b

    @torch.no_grad()
    def keep_base(self) -> None:
        """Take the layer's current weight as the base."""
        self._host.save([self.weight.clone().untyped_storage()], self._position)

    def _base(self) -> Tensor:
        """Return the base on the weight's device."""
        base = torch.empty_like(self.weight)
        self._host.load(base.untyped_storage(), self._position)
        return base

    @torch.no_grad()
    def reset(self, seed: int, spread: float) -> None:
        """Set lora_a as PEFT does, and lora_b to random values of this standard deviation (0 in
        training). Values depend on the seed and the name, not on the layout."""
        for _, half, local in self.halves():
            for part in local.parts:
                generator = torch.Generator().manual_seed(seed ^ zlib.crc32(part.name.encode()))
                values = torch.empty(part.global_shape)
                if half is self.lora_a:
                    bound = part.global_shape[1] ** -0.5
                    values.uniform_(-bound, bound, generator=generator)
                else:
                    values.normal_(0.0, spread, generator=generator)
                half[part.rows].copy_(values[part.region.slices])

    @torch.no_grad()
    def merge(self, *, with_delta: bool = True) -> None:
        """Set the layer's weight to base + delta, or to the base. It is rounded once."""
        base = self._base()
        self.weight.copy_(self._merged(base) if with_delta else base)

    def _merged(self, base: Tensor) -> Tensor:
        """Return base + delta, in float32 or more."""
        delta = widened(self.lora_b) @ widened(self.lora_a)
        return torch.add(widened(base), delta, alpha=self._scale)

    @torch.no_grad()
    def check_base(self, folder: Path) -> None:
        """Merge, and check that this gives the weight as it was loaded from a checkpoint, up to
        rounding. Raises CheckpointError.

        In another layout the last float32 bits of the delta may differ, so that a few weights are
        rounded the other way. Such differences sum up to far less than the adapter's changes, even
        if rounding drops most of these. Two weights are always allowed, for adapters that change
        almost none.
        """
        saved, base = self.weight.clone(), self._base()
        self.weight.copy_(self._merged(base))
        changes = self.weight - base
        allowed = SAME_MERGE * _sum_of(changes) + 2 * changes.abs().max()
        if _sum_of(self.weight - saved) > allowed:
            raise CheckpointError(
                f"{folder}: {self.parts.lora_b.parts[0].name}: its merged weight is not that of "
                "model.path with this adapter; set model.path to the model with which the run "
                "began, and policy.lora.alpha and policy.precision to their values"
            )

    def forward(self, output: Tensor, inputs: Tensor, rows: slice, layer: Any) -> Tensor:
        """Return the output of `layer`, whose backward pass then also gives the halves' gradients.
        Only `rows` of its tokens use the weight."""
        halves = self.lora_a, self.lora_b
        result: Tensor = _Gradients.apply(output, inputs, rows, layer, self, *halves)  # type: ignore[no-untyped-call]
        return result

    def gradients(self, inputs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of lora_a and lora_b, from the layer's inputs and the gradient of
        its outputs."""
        down, up = inputs @ self.lora_a.T, grad @ self.lora_b
        if not self.parts.is_expert:
            if self.parts.splits_inputs:
                down, up = self._summed(down), self._whole(up)
            else:
                down, up = self._whole(down), self._summed(up)
        inputs, grad, down, up = (value.flatten(0, -2) for value in (inputs, grad, down, up))
        return self._scale * (up.T @ inputs), self._scale * (grad.T @ down)

    def _whole(self, value: Tensor) -> Tensor:
        """Return `value` [length, rows, rank] of all tokens, if this rank has a part of them."""
        return gather_from_sequence_parallel_region(value) if self._splits_tokens else value

    def _summed(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over ranks, of this rank's tokens if these are split."""
        if self._splits_tokens:
            return reduce_scatter_to_sequence_parallel_region(value)
        return reduce_from_tensor_model_parallel_region(value)


def _sum_of(values: Tensor) -> Tensor:
    """Return the sum of absolute values, not rounded to less than float32."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, 1, dtype=wide)


class _Gradients(torch.autograd.Function):
    """The output of a frozen layer, with gradients for its adapter."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        rows: slice,
        layer: Any,
        adapter: Adapter,
        *_: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.rows, ctx.layer, ctx.adapter = rows, layer, adapter
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [inputs], norm = ctx.saved_tensors, getattr(ctx.layer, "layer_norm_weight", None)
        inputs = inputs[ctx.rows]
        if norm is not None:  # Transformer Engine's layer normalizes its inputs
            inputs = torch.nn.functional.rms_norm(inputs, norm.shape, norm, ctx.layer.eps)
        return grad, None, None, None, None, *ctx.adapter.gradients(inputs, grad[ctx.rows])


class Adapters(torch.nn.ModuleList):
    """The adapters of a chunk."""

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """Describe both halves of each adapter as Megatron describes parameters, under HF names. So
        a checkpoint does not depend on the layout, and has what PEFT needs."""
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        return {
            name: ShardedTensorFactory(
                key=name,
                data=half,
                build_fn=partial(_describe, local, tp_rank if _is_copied(half) else 0),
                merge_fn=dict,
            )
            for number, adapter in enumerate(self)
            for name, half, local in cast("Adapter", adapter).halves(f"{prefix}{number}.")
        }


def _is_copied(half: Tensor) -> bool:
    """Return whether tensor-parallel ranks hold copies."""
    return not getattr(half, "tensor_model_parallel", False)


def _describe(
    local: LocalParameter, copy: int, _: str, data: Tensor, *__: Any
) -> dict[str, ShardedTensor]:
    return {
        str(part.first_row): ShardedTensor(
            key=part.name,
            data=data[part.rows],
            dtype=data.dtype,
            local_shape=part.region.shape,
            global_shape=part.global_shape,
            global_offset=part.region.start,
            axis_fragmentations=None,
            replica_id=(0, copy, 0),
        )
        for part in local.parts
    }


class Lora:
    """The adapters of a rank's model chunks."""

    def __init__(
        self, config: PolicyConfig, arch: Architecture, models: Sequence[Decoder], seed: int
    ) -> None:
        """Freeze the models, whose weights are the base, and add adapters that change nothing
        yet."""
        assert config.lora is not None
        self._adapters: list[Adapter] = []
        host = HostMemory()
        fused = kernels(config, arch) == "transformer_engine"
        for model in models:
            model.requires_grad_(False)
            parts = adapters_of(
                arch, place(model), config.lora.rank, config.lora.targets, fused=fused
            )
            own = [_attach(model, name, part, config.lora, host) for name, part in parts.items()]
            model.adapters = Adapters(own)
            self._adapters += own
        self.reset(seed)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters)

    def reset(self, seed: int, spread: float = 0.0) -> None:
        """Set all adapters to their values before training; see `Adapter.reset`."""
        for adapter in self:
            adapter.reset(seed, spread)
        self.merge()

    def merge(self, *, with_delta: bool = True) -> None:
        """Set the weights of all layers with an adapter. Not collective."""
        for adapter in self:
            adapter.merge(with_delta=with_delta)

    def check_base(self, folder: Path) -> None:
        """Check that the adapters and merged weights of a checkpoint, which were just loaded,
        belong to this base. Raises CheckpointError."""
        for adapter in self:
            adapter.check_base(folder)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute with the base in this block. The merged weights are restored bit by bit."""
        self.merge(with_delta=False)
        try:
            yield
        finally:
            self.merge()

    def shards(self, value: Callable[[Any], Tensor] = lambda parameter: parameter) -> list[Shard]:
        """Return the shards of the adapters' halves, or of the tensor that `value` returns for
        each."""
        return [
            shard_of(slice_of(part, values), values, part.rows)
            for adapter in self
            for _, half, local in adapter.halves()
            for values in [value(half)]
            for part in local.parts
        ]


def _attach(
    model: Decoder, name: str, parts: AdapterParts, config: LoraConfig, host: HostMemory
) -> Adapter:
    """Return the adapter of the parameter `name`, whose layer uses it from now on."""
    owner, _, attribute = name.rpartition(".")
    layer: Any = model.get_submodule(owner)
    adapter = Adapter(
        getattr(layer, attribute),
        parts,
        config.alpha / config.rank,
        host,
        sequence_parallel=model.config.sequence_parallel,
    )

    def hook(_: Any, given: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        output, bias = outputs
        inputs, *splits = given
        rows = slice(None)
        if splits:  # a grouped layer of experts: the tokens of each, one after the other
            [counts], expert = splits, int(attribute.removeprefix("weight"))
            rows = slice(sum(counts[:expert]), sum(counts[: expert + 1]))
        return adapter(output, inputs, rows, layer), bias

    layer.register_forward_hook(hook)
    return adapter
