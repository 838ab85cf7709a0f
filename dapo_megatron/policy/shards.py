"""The shards of HF tensors that alias this rank's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.model import Architecture, ChunkPlace, ParameterPart, layout_of
from dapo_megatron.types import ConfigError, Shard, TensorSlice


def shards_of(params: Mapping[str, Tensor], arch: Architecture, place: ChunkPlace) -> list[Shard]:
    """Return the shards of one model chunk, given its parameters by Megatron name.

    Parameters may be on the meta device. Raises ConfigError naming a parameter that has no rule, is
    missing, or has another shape.
    """
    layouts = [layout_of(arch, place, fused=fused) for fused in (False, True)]
    layout = max(layouts, key=lambda layout: len(layout.keys() & params.keys()))
    wanted = {name: local.shape for name, local in layout.items()}
    actual = {name: tuple(param.shape) for name, param in params.items()}
    for name in wanted | actual:
        if wanted.get(name) != actual.get(name):
            raise ConfigError(
                f"model.path: the parameter {name} of {arch.family} is "
                f"{actual.get(name, 'missing')}, by the rules of this layout it is "
                f"{wanted.get(name, 'not there')}"
            )
    return [
        shard_of(slice_of(part, params[name]), params[name], part.rows)
        for name, local in layout.items()
        for part in local.parts
    ]


def slice_of(part: ParameterPart, parameter: Tensor) -> TensorSlice:
    """Return the slice of an HF tensor that is `part` of a parameter."""
    return TensorSlice(part.name, part.global_shape, parameter.dtype, part.region)


@dataclass(frozen=True, slots=True)
class QuantizedShard(Shard):
    """A slice of a quantized parameter: a tensor subclass, FP8 for example, with `dequantize`.

    `view` is the whole parameter, and the slice is its `rows`.
    """

    rows: slice

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a dequantized copy of the region's current values, shaped as in the HF tensor."""
        return self.view.dequantize()[self.rows].reshape(self.tensor_slice.region.shape)

    def write(self, value: Tensor) -> None:
        """Raise TypeError. A parameter is quantized as a whole, so writing one slice would round
        the other slices again. Use protocols.Policy.rewrite."""
        raise TypeError(
            f"{self.tensor_slice.name}: a quantized parameter cannot be written slice by slice"
        )


def shard_of(tensor_slice: TensorSlice, parameter: Tensor, rows: slice) -> Shard:
    """Return the shard of a parameter's `rows`, quantized or not."""
    if type(parameter) in (Tensor, torch.nn.Parameter):
        return Shard(tensor_slice, parameter.detach()[rows])
    # Not detached, because detach of a tensor subclass may return a copy.
    return QuantizedShard(tensor_slice, parameter, rows)
