"""Which parameter of which rank holds which box of which HF tensor: the one table for reading and
writing checkpoints, for the policy, for the engine, and for the check that nothing is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dapo_megatron.model.architecture import Architecture, Place
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import EMBEDDING, FINAL_NORM, HEAD, TIED_HEAD, Parameter
from dapo_megatron.model.sharding import Shape, ShardSpec, Slot
from dapo_megatron.types import ConfigError, Piece

if TYPE_CHECKING:
    import torch

_MEGATRON_LAYER = "decoder.layers.{}."
_HF_LAYER = "model.layers.{}."


def hf_tensors(arch: Architecture) -> dict[str, Shape]:
    """Every tensor of the HF checkpoint and its shape. A tied head has no name of its own."""
    return {
        _full_name(name, prefix, expert): shape
        for prefix, expert, cut in _cuts(arch)
        for name, shape in cut.tensors(arch).items()
    }


def layout_of(arch: Architecture, place: Place, *, fused: bool = False) -> dict[str, Slot]:
    """A model chunk's parameters, by the names of its `named_parameters()`, with their shapes and
    what of the HF checkpoint fills them. `fused`: built of Transformer Engine's layers.

    Raises ConfigError where the sizes cannot be cut so."""
    tp = (place.tp_rank, place.tp_size)
    slots: dict[str, Slot] = {}
    if place.has_embedding:
        slots[EMBEDDING.name] = EMBEDDING.cut.slot(arch, *tp)
    for layer in range(place.num_layers):
        ours = _MEGATRON_LAYER.format(layer)
        theirs = _HF_LAYER.format(place.first_layer + layer)
        shared, of_experts = _parameters(arch, place.first_layer + layer)
        for parameter in shared:
            name = ours + parameter.local_name(fused)
            slots[name] = _named(parameter.cut.slot(arch, *tp), theirs)
        for local, expert in enumerate(_experts_of(arch, place.ep_rank, place.ep_size)):
            for parameter in of_experts:
                name = _full_name(parameter.local_name(fused), ours, local)
                slots[name] = _named(parameter.cut.slot(arch, 0, 1), theirs, expert)
    if place.has_head:
        slots[FINAL_NORM.name] = FINAL_NORM.cut.slot(arch, *tp)
        if not arch.tie_word_embeddings:
            slots[HEAD.name] = HEAD.cut.slot(arch, *tp)
        elif not place.has_embedding:
            slots[TIED_HEAD.name] = TIED_HEAD.cut.slot(arch, *tp)
    return slots


def engine_pieces(
    arch: Architecture,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    *,
    expert_parallel: bool = False,
) -> list[Piece]:
    """What one rank of a vLLM engine holds, in the order of `hf_tensors`.

    Experts are cut as other linear layers are; with `expert_parallel` each rank has equally many
    whole ones instead. Raises ConfigError where the sizes cannot be cut so."""
    mine = set(_experts_of(arch, tp_rank, tp_size)) if expert_parallel else set()
    pieces = []
    for prefix, expert, cut in _cuts(arch):
        is_whole = expert is not None and expert_parallel
        if is_whole and expert not in mine:
            continue
        regions = cut.engine(arch, *((0, 1) if is_whole else (tp_rank, tp_size)))
        for name, shape in cut.tensors(arch).items():
            if name in regions:
                full_name = _full_name(name, prefix, expert)
                pieces.append(Piece(full_name, shape, dtype, regions[name]))
    return pieces


def _cuts(arch: Architecture) -> Iterator[tuple[str, int | None, ShardSpec]]:
    """Prefix of the HF names, number of the expert, and cut, for all parameters of the model."""
    yield "", None, EMBEDDING.cut
    for layer in range(arch.num_layers):
        prefix = _HF_LAYER.format(layer)
        shared, of_experts = _parameters(arch, layer)
        for parameter in shared:
            yield prefix, None, parameter.cut
        for expert in range(arch.num_experts):
            for parameter in of_experts:
                yield prefix, expert, parameter.cut
    yield "", None, FINAL_NORM.cut
    if not arch.tie_word_embeddings:
        yield "", None, HEAD.cut


def _parameters(
    arch: Architecture, layer: int
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """The parameters of a layer of the model, and those of each expert in it."""
    family = FAMILIES[arch.family]
    shared = tuple(parameter for parameter in family.layer if parameter.only(arch, layer))
    return shared, family.expert if arch.has_experts(layer) else ()


def _experts_of(arch: Architecture, rank: int, size: int) -> range:
    if arch.num_experts % size:
        raise ConfigError(
            f"expert_parallel: {arch.num_experts} experts cannot be shared equally by {size}"
        )
    count = arch.num_experts // size
    return range(rank * count, (rank + 1) * count)


def _named(slot: Slot, prefix: str, expert: int | None = None) -> Slot:
    parts = (replace(part, name=_full_name(part.name, prefix, expert)) for part in slot.parts)
    return Slot(slot.shape, tuple(parts))


def _full_name(name: str, prefix: str, expert: int | None = None) -> str:
    return prefix + (name if expert is None else name.replace("{expert}", str(expert)))
