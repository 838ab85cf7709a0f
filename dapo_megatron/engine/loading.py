"""Loading of slices into a vLLM model, straight to where vLLM's loaders would copy them.

vLLM's loaders find the parameter of a tensor and the part of it by name, and run twice for each
tensor: once to count elements, and once to copy. With thousands of experts this takes longer than
moving the bytes. Here their work is taken from the trace (loads.py) instead. It is prepared once
and repeated at each sync.

A layer is created, in the form in which loaders fill it, when its first slice arrives. When its
last slice has been copied, vLLM packs or quantizes it and copies the result into the memory that
the engine computes with. Parameters are looked up at every sync, so they may have moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from dapo_megatron.engine.loads import LoadedSlice
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.types import Region, SyncError, TensorSlice

Slices = Mapping[str, Mapping[Region, TensorSlice]]
"""HF name -> region -> slice, of all slices that a rank needs."""


def by_name(tensor_slices: Iterable[TensorSlice]) -> Slices:
    """Return the slices by name and region."""
    slices: dict[str, dict[Region, TensorSlice]] = {}
    for tensor_slice in tensor_slices:
        slices.setdefault(tensor_slice.name, {})[tensor_slice.region] = tensor_slice
    return slices


def checked(weights: Iterable[ReceivedTensor], wanted: Slices) -> Iterator[ReceivedTensor]:
    """Yield `weights`, each tensor after checking it.

    Raises SyncError at the first tensor or slice that is extra, repeated or misshapen, before
    yielding it, and at the end for missing tensors.
    """
    missing = dict.fromkeys(wanted)
    for name, parts in weights:
        if name not in wanted:
            raise SyncError(f"{name}: this rank of the engine needs no part of this tensor")
        if name not in missing:
            raise SyncError(f"{name}: given twice")
        del missing[name]
        _check_slices(name, parts, wanted[name])
        yield name, parts
    if missing:
        raise SyncError(f"{', '.join(missing)}: missing from the weights given to the engine")


def _check_slices(
    name: str, parts: Sequence[tuple[Region, Tensor]], tensor_slices: Mapping[Region, TensorSlice]
) -> None:
    """Raise SyncError if the slices of one tensor are not `tensor_slices`."""
    arrived: set[Region] = set()
    for region, part in parts:
        tensor_slice = tensor_slices.get(region)
        if tensor_slice is None:
            raise SyncError(f"{name}: {region} is not a slice that this rank asked for")
        if region in arrived:
            raise SyncError(f"{name}: {region} given twice")
        if part.shape != region.shape or part.dtype != tensor_slice.dtype:
            raise SyncError(
                f"{name}: shape {tuple(part.shape)} of {part.dtype} given for {region} "
                f"of {tensor_slice.dtype}"
            )
        arrived.add(region)
    for region in tensor_slices.keys() - arrived:
        raise SyncError(f"{name}: {region} missing from the weights given to the engine")


class SliceLoader:
    """Copies all slices of an engine's rank into its model, once per call of `load`."""

    def __init__(self, loads: Sequence[LoadedSlice]) -> None:
        self._slices = by_name(load.tensor_slice for load in loads)
        self._loads: dict[str, dict[Region, list[LoadedSlice]]] = {}
        for load in loads:
            slices = self._loads.setdefault(load.tensor_slice.name, {})
            slices.setdefault(load.tensor_slice.region, []).append(load)
        self._num_loads = Counter(load.module for load in loads)
        written: Counter[tuple[str, str]] = Counter()
        for load in loads:
            written[load.module, load.parameter] += load.target.region.numel
        self._padded = {
            (load.module, load.parameter)
            for load in loads
            if written[load.module, load.parameter] < prod(load.parameter_shape)
        }

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Iterable[ReceivedTensor]) -> None:
        """Load `weights`, between `initialize_layerwise_reload` and `finalize_layerwise_reload`.

        The memory of a tensor may be reused when the next one is fetched. Raises SyncError like
        `checked`. Layers that are incomplete then get their old weights back from
        `finalize_layerwise_reload`.
        """
        modules = dict(model.named_modules())
        layers: dict[str, _Layer] = {}
        for name, parts in checked(weights, self._slices):
            loads = self._loads[name]
            for region, value in parts:
                for load in loads[region]:
                    path = load.module
                    layer = layers.get(path)
                    if layer is None:
                        layer = layers[path] = self._create(path, modules[path])
                    parameter = layer.parameters[load.parameter]
                    target = parameter.as_strided(
                        load.target.shape, load.target_strides, load.target_offset
                    )
                    target.copy_(load.source.read(value))
                    layer.num_left -= 1
                    if not layer.num_left:
                        _layerwise_process(layer.module, get_layerwise_info(layer.module))
                        del layers[path]

    def _create(self, path: str, module: nn.Module) -> _Layer:
        """Allocate a layer's parameters in the form in which loaders fill them. Padding is 0."""
        materialize_layer(module, get_layerwise_info(module))
        parameters = dict(module.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            if (path, name) in self._padded:
                parameter.zero_()
        return _Layer(module, parameters, self._num_loads[path])


@dataclass(slots=True)
class _Layer:
    """A layer of which some slices have been copied."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    num_left: int
    """Copies that are still to be made."""
