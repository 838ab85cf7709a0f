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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from dapo_megatron.engine.loads import LoadedSlice, num_loaded
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.types import Region, SyncError


class SliceLoader:
    """Copies all slices of an engine's rank into its model, once per call of `load`."""

    def __init__(self, loads: Sequence[LoadedSlice]) -> None:
        self._loads: dict[tuple[str, Region], list[LoadedSlice]] = {}
        """Copies of each slice, by HF name and region."""
        for load in loads:
            key = load.tensor_slice.name, load.tensor_slice.region
            self._loads.setdefault(key, []).append(load)
        self._num_loads = Counter(load.module for load in loads)

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Iterable[ReceivedTensor]) -> None:
        """Load `weights`, between `initialize_layerwise_reload` and `finalize_layerwise_reload`.

        The memory of a tensor may be reused when the next one is fetched. Raises SyncError naming
        a slice that is extra, repeated or missing. Layers that are incomplete then get their old
        weights back from `finalize_layerwise_reload`.
        """
        modules = dict(model.named_modules())
        layers: dict[str, _Layer] = {}
        missing = dict.fromkeys(self._loads)
        for name, parts in weights:
            for region, value in parts:
                if (name, region) not in missing:
                    raise SyncError(f"{name}: {region} given twice, or not asked for")
                del missing[name, region]
                for load in self._loads[name, region]:
                    path = load.module
                    layer = layers.get(path)
                    if layer is None:
                        layer = layers[path] = self._create(path, modules[path])
                    box = layer.parameters[load.parameter][load.target.region.slices]
                    box.copy_(load.target.unread(load.source.read(value)))
                    layer.num_left -= 1
                    if not layer.num_left:
                        _layerwise_process(layer.module, get_layerwise_info(layer.module))
                        del layers[path]
        for name, region in missing:
            raise SyncError(f"{name}: {region} missing from the weights given to the engine")

    def _create(self, path: str, module: nn.Module) -> _Layer:
        """Allocate a layer's parameters in the form in which loaders fill them. Padding is 0."""
        materialize_layer(module, get_layerwise_info(module))
        parameters = dict(module.named_parameters(recurse=False))
        for parameter in parameters.values():
            if num_loaded(module, parameter) < parameter.numel():
                parameter.zero_()
        return _Layer(module, parameters, self._num_loads[path])


@dataclass(slots=True)
class _Layer:
    """A layer of which some slices have been copied."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    num_left: int
    """Copies that are still to be made."""
