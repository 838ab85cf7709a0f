"""What a model family's file declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.model.architecture import Architecture
from dapo_megatron.model.sharding import Cut


def _in_all(_arch: Architecture, _layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its name in Megatron's own layers, and in Transformer Engine's if `fused`
    gives another. `{expert}` is numbered from 0 on each rank in these names, over the whole layer
    in HF's. Only those layers have it for which `only` says so, by their number in the model."""

    name: str
    cut: Cut
    fused: str | None = None
    only: Callable[[Architecture, int], bool] = _in_all

    def local_name(self, fused: bool) -> str:
        """Its name without the prefix of its layer."""
        return self.fused if fused and self.fused else self.name


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders: the parameters of its layers and of each expert in them, and the fields
    of its config.json.

    What all families share (decoder.py, hf_config.py) is not repeated. `required`: fields that must
    have this value, or be absent; `harmless`: fields that do not change what the model computes;
    `defaults`: what HF takes for an absent field, where the families differ. `has_window`: all
    layers see the last `sliding_window` tokens alone, unless that is null.
    """

    model_type: str
    layer: tuple[Parameter, ...]
    expert: tuple[Parameter, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: bool = False

    def has(self, name: str) -> bool:
        """Whether its layers have this parameter."""
        return any(parameter.name == name for parameter in self.layer)

    @property
    def has_latent(self) -> bool:
        """Whether its attention is latent."""
        return self.has("self_attention.linear_kv_up_proj.weight")

    @property
    def has_scoring(self) -> bool:
        """Whether its router has a bias instead of an auxiliary loss."""
        return self.has("mlp.router.expert_bias")
