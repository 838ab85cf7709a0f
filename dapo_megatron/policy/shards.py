"""The shards of HF tensors that alias this rank's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.model import Architecture, Place, layout_of
from dapo_megatron.types import ConfigError, Piece, Shard


def shards_of(params: Mapping[str, Tensor], arch: Architecture, place: Place) -> list[Shard]:
    """The shards of one model chunk's parameters, real or meta, by their Megatron names.

    Raises ConfigError naming a parameter that has no rule, is missing, or has another shape."""
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
    """A piece of a parameter that keeps its values in another form, FP8 say, as a tensor class of
    its own: `dequantize` gives them, as they are computed with. `view` is the whole parameter, of
    which the piece is some `rows`."""

    rows: slice

    @torch.no_grad()
    def read(self) -> Tensor:
        """The region, shaped as in the HF tensor: a copy, of the parameter as it is now."""
        return self.view.dequantize()[self.rows].reshape(self.piece.region.shape)

    def write(self, value: Tensor) -> None:
        """Refused: a parameter is quantised as one, and piece by piece would round what is there
        again and again. Its owner has another place to write into (protocols.Policy.rewrite)."""
        raise TypeError(
            f"{self.piece.name}: a quantised parameter cannot be written piece by piece"
        )


def shard_of(piece: Piece, parameter: Tensor, rows: slice) -> Shard:
    """The shard of a parameter's `rows`, whatever form it keeps its values in."""
    if type(parameter) in (Tensor, torch.nn.Parameter):
        return Shard(piece, parameter.detach()[rows])
    # Not detached: that could be a copy of what it is at the moment.
    return QuantizedShard(piece, parameter, rows)
