"""Low-rank adapters of linear layers (arXiv 2106.09685): the place of each in HF's and in
Megatron's layers.

The delta of a weight is scale * lora_b @ lora_a. Megatron's fused layers (query, key and value;
gate and up) have one adapter each. Their HF weights share its lora_a, and each has its own rows of
lora_b. Experts have one adapter each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dapo_megatron.model.architecture import Architecture, ChunkPlace
from dapo_megatron.model.sharding import LocalParameter, ParameterPart
from dapo_megatron.model.tensors import layout_of
from dapo_megatron.types import Region

ADAPTER = "adapter."
"""Prefix of the names of adapters, and of their keys in checkpoints."""
_ATTENTION = ("linear_qkv", "linear_proj", "in_proj", "out_proj")
"""Layers of attention and of gated delta nets."""
_SPLIT_INPUTS = ("linear_proj", "out_proj", "linear_fc2")
"""Layers of which tensor-parallel ranks have columns."""


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """HF parts of an adapter on one rank. `splits_inputs`: tensor-parallel ranks share the columns
    of lora_a instead of the rows of lora_b. `is_expert`: they share neither."""

    lora_a: LocalParameter
    lora_b: LocalParameter
    splits_inputs: bool
    is_expert: bool


def adapter_name(weight: str, half: str) -> str:
    """Return the name of `lora_A` or `lora_B` of an HF weight."""
    return f"{ADAPTER}{weight.removesuffix('.weight')}.{half}"


def adapters_of(
    arch: Architecture,
    place: ChunkPlace,
    rank: int,
    targets: Collection[str | None],
    *,
    fused: bool = False,
) -> dict[str, AdapterParts]:
    """Return the adapters of a model chunk by the Megatron name of their weight. `fused` as in
    `layout_of`, targets as in policy.lora. A shared lora_a has the name of its first HF weight."""
    whole = layout_of(arch, replace(place, tp_rank=0, tp_size=1), fused=fused)
    adapters = {}
    for name, local in layout_of(arch, place, fused=fused).items():
        if target_of(name) not in targets:
            continue
        first, (_, inputs) = whole[name].parts[0].name, whole[name].shape
        columns = local.parts[0].region.start[1], local.shape[1]
        lora_a = ParameterPart(
            adapter_name(first, "lora_A"),
            (rank, inputs),
            Region((0, columns[0]), (rank, columns[1])),
        )
        lora_b = (
            ParameterPart(
                adapter_name(part.name, "lora_B"),
                (part.global_shape[0], rank),
                Region((part.region.start[0], 0), (part.region.shape[0], rank)),
                part.first_row,
            )
            for part in local.parts
        )
        adapters[name] = AdapterParts(
            LocalParameter((rank, columns[1]), (lora_a,)),
            LocalParameter((local.shape[0], rank), tuple(lora_b)),
            splits_inputs=_layer_of(name) in _SPLIT_INPUTS,
            is_expert=".mlp.experts." in name,
        )
    return adapters


def target_of(name: str) -> str | None:
    """Return the target of policy.lora to which a parameter belongs, by its Megatron name; None if
    it gets no adapter."""
    if not name.rpartition(".")[2].startswith("weight"):
        return None
    if ".mlp.experts." in name:
        return "experts"
    if ".linear_fc" in name:
        return "mlp"
    return "attention" if _layer_of(name) in _ATTENTION else None


def _layer_of(name: str) -> str:
    return name.split(".")[-2]


def shared_inputs(arch: Architecture, targets: Collection[str | None]) -> dict[str, str]:
    """Return HF weight -> HF weight whose lora_A it uses, for all weights with an adapter."""
    place = ChunkPlace(0, 1, 0, arch.num_layers, has_embedding=False, has_head=False)
    return {
        part.name: parameter.parts[0].name
        for name, parameter in layout_of(arch, place).items()
        if target_of(name) in targets
        for part in parameter.parts
    }
