"""The shards of HF tensors that alias this rank's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.model import Architecture, Place, layout_of
from dapo_megatron.types import ConfigError, Piece, Shard


def shards_of(params: Mapping[str, Tensor], arch: Architecture, place: Place) -> list[Shard]:
    """Return the shards of one model chunk, given its parameters by Megatron name.

    Parameters may be on the meta device. Raises ConfigError naming a parameter that has no rule, is
    missing, or has another shape.
    """
    layouts = [layout_of(arch, place, fused=fused) for fused in (False, True)]
    slots = max(layouts, key=lambda layout: len(layout.keys() & params.keys()))
    for name in params:
        if name not in slots:
            raise ConfigError(f"model.path: no rule for the parameter {name} ({arch.family})")
    shards = []
    for name, slot in slots.items():
        if name not in params:
            raise ConfigError(f"model.path: the parameter {name} is missing ({arch.family})")
        param = params[name]
        if tuple(param.shape) != slot.shape:
            raise ConfigError(
                f"model.path: the parameter {name} has shape {list(param.shape)}; "
                f"{arch.family} in this layout has {list(slot.shape)}"
            )
        for part in slot.parts:
            piece = Piece(part.name, part.global_shape, param.dtype, part.region)
            shards.append(shard_of(piece, param, part.rows))
    return shards


@dataclass(frozen=True, slots=True)
class QuantizedShard(Shard):
    """A piece of a quantized parameter: a tensor subclass, FP8 for example, with `dequantize`.

    `view` is the whole parameter, and the piece is its `rows`.
    """

    rows: slice

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a dequantized copy of the region's current values, shaped as in the HF tensor."""
        return self.view.dequantize()[self.rows].reshape(self.piece.region.shape)

    def write(self, value: Tensor) -> None:
        """Raise TypeError. A parameter is quantized as a whole, so writing one piece would round
        the other pieces again. Use protocols.Policy.rewrite."""
        raise TypeError(
            f"{self.piece.name}: a quantized parameter cannot be written piece by piece"
        )


def shard_of(piece: Piece, parameter: Tensor, rows: slice) -> Shard:
    """Return the shard of a parameter's `rows`, quantized or not."""
    if type(parameter) in (Tensor, torch.nn.Parameter):
        return Shard(piece, parameter.detach()[rows])
    # Not detached, because detach of a tensor subclass may return a copy.
    return QuantizedShard(piece, parameter, rows)
