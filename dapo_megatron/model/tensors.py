"""The table of which parameter of which rank holds which box of which HF tensor. Checkpoints, the
policy, the engine and the coverage check all use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dapo_megatron.model.architecture import Architecture, ChunkPlace
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import EMBEDDING, FINAL_NORM, HEAD, TIED_HEAD, Parameter
from dapo_megatron.model.sharding import LocalParameter, Shape, ShardSpec
from dapo_megatron.types import ConfigError, TensorSlice

if TYPE_CHECKING:
    import torch

_MEGATRON_LAYER = "decoder.layers.{}."
_HF_LAYER = "model.layers.{}."


def hf_tensors(arch: Architecture) -> dict[str, Shape]:
    """Return the name and shape of every tensor of the HF checkpoint, without a tied head."""
    return {
        _full_name(name, prefix, expert): shape
        for prefix, expert, spec in _specs(arch)
        for name, shape in spec.tensors(arch).items()
    }


def layout_of(
    arch: Architecture, place: ChunkPlace, *, fused: bool = False
) -> dict[str, LocalParameter]:
    """Return the shape and HF parts of a model chunk's parameters, by the names of its
    `named_parameters()`. `fused` means that it is built of Transformer Engine's layers.

    Raises ConfigError if the sizes cannot be sharded equally."""
    tp = (place.tp_rank, place.tp_size)
    local_parameters: dict[str, LocalParameter] = {}
    if place.has_embedding:
        local_parameters[EMBEDDING.name] = EMBEDDING.spec.local_parameter(arch, *tp)
    for layer in range(place.num_layers):
        megatron_prefix = _MEGATRON_LAYER.format(layer)
        hf_prefix = _HF_LAYER.format(place.first_layer + layer)
        of_layer, of_experts = _parameters(arch, place.first_layer + layer)
        for parameter in of_layer:
            name = megatron_prefix + parameter.local_name(fused)
            local_parameters[name] = _with_full_names(
                parameter.spec.local_parameter(arch, *tp), hf_prefix
            )
        for local, expert in enumerate(_experts_of(arch, place.ep_rank, place.ep_size)):
            for parameter in of_experts:
                name = _full_name(parameter.local_name(fused), megatron_prefix, local)
                local_parameters[name] = _with_full_names(
                    parameter.spec.local_parameter(arch, 0, 1), hf_prefix, expert
                )
    if place.has_head:
        local_parameters[FINAL_NORM.name] = FINAL_NORM.spec.local_parameter(arch, *tp)
        if not arch.tie_word_embeddings:
            local_parameters[HEAD.name] = HEAD.spec.local_parameter(arch, *tp)
        elif not place.has_embedding:
            local_parameters[TIED_HEAD.name] = TIED_HEAD.spec.local_parameter(arch, *tp)
    return local_parameters


def engine_slices(
    arch: Architecture,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    *,
    expert_parallel: bool = False,
) -> list[TensorSlice]:
    """Return the slices that one rank of a vLLM engine holds, in the order of `hf_tensors`.

    Experts are sharded like other linear layers. With `expert_parallel`, each rank has the same
    number of complete experts instead. Raises ConfigError if the sizes cannot be sharded equally.
    """
    local_experts = set(_experts_of(arch, tp_rank, tp_size)) if expert_parallel else set()
    tensor_slices = []
    for prefix, expert, spec in _specs(arch):
        is_whole = expert is not None and expert_parallel
        if is_whole and expert not in local_experts:
            continue
        shapes = spec.tensors(arch)
        for name, region in spec.engine(arch, *((0, 1) if is_whole else (tp_rank, tp_size))):
            full_name = _full_name(name, prefix, expert)
            tensor_slices.append(TensorSlice(full_name, shapes[name], dtype, region))
    return tensor_slices


def _specs(arch: Architecture) -> Iterator[tuple[str, int | None, ShardSpec]]:
    """Yield (prefix of the HF names, expert or None, shard spec) of all the model's parameters."""
    yield "", None, EMBEDDING.spec
    for layer in range(arch.num_layers):
        prefix = _HF_LAYER.format(layer)
        of_layer, of_experts = _parameters(arch, layer)
        for parameter in of_layer:
            yield prefix, None, parameter.spec
        for expert in range(arch.num_experts):
            for parameter in of_experts:
                yield prefix, expert, parameter.spec
    yield "", None, FINAL_NORM.spec
    if not arch.tie_word_embeddings:
        yield "", None, HEAD.spec


def _parameters(
    arch: Architecture, layer: int
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Return the parameters of a layer, and of each of its routed experts."""
    family = FAMILIES[arch.family]
    of_layer = tuple(parameter for parameter in family.layer if parameter.only(arch, layer))
    return of_layer, family.expert if arch.has_experts(layer) else ()


def _experts_of(arch: Architecture, rank: int, size: int) -> range:
    if arch.num_experts % size:
        raise ConfigError(
            f"expert_parallel: {arch.num_experts} experts cannot be divided equally by {size} ranks"
        )
    count = arch.num_experts // size
    return range(rank * count, (rank + 1) * count)


def _with_full_names(
    local_parameter: LocalParameter, prefix: str, expert: int | None = None
) -> LocalParameter:
    parts = (
        replace(part, name=_full_name(part.name, prefix, expert)) for part in local_parameter.parts
    )
    return LocalParameter(local_parameter.shape, tuple(parts))


def _full_name(name: str, prefix: str, expert: int | None = None) -> str:
    return prefix + (name if expert is None else name.replace("{expert}", str(expert)))
