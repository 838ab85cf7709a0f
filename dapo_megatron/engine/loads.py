"""The slices of HF tensors that a vLLM model loads, and the parts of parameters they go into.

The model itself shows them: its `load_weights` runs over proxies of the offered tensors, on
parameters as they were before vLLM packed them, and every copy it makes is recorded. Nothing is
loaded, and the running engine does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

from dapo_megatron.engine.slices import BoxView, Offer, ProxyTensor, Shape, locate
from dapo_megatron.types import Piece, SyncError, overlap

# Errors of vLLM's loaders when they are given a wrong tensor.
_LOADER_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """One copy that loading makes."""

    piece: Piece
    source: BoxView
    """The view of the HF tensor that is copied. Its region is the piece's."""
    module: str
    parameter: str
    """Name within the module."""
    parameter_shape: Shape
    """Shape that loaders see. The running engine may have packed the parameter."""
    target: BoxView
    """The part of the parameter that it is copied into."""

    @property
    def path(self) -> str:
        """The parameter's name within the model."""
        return f"{self.module}.{self.parameter}"


def trace(model: nn.Module, offered: Offer) -> list[LoadedSlice]:
    """Return every copy of a load of `offered` on this rank, in order.

    Tensors of other ranks' experts are in none. Raises SyncError naming a tensor that does not fit,
    or a parameter that would not be written exactly once.
    """
    loads: list[LoadedSlice] = []
    now = ""

    def proxies() -> Iterator[tuple[str, Tensor]]:
        nonlocal now
        for now, (shape, dtype) in offered.items():
            yield now, ProxyTensor.whole(now, shape, dtype, record)

    def record(target: Tensor, source: ProxyTensor) -> None:
        place = places.get(target.untyped_storage()._cdata)
        if place is None:
            raise SyncError(f"{source.hf_name}: copied into something that is not a parameter")
        module, name, parameter = place
        view, part = source.locate(), locate(tuple(parameter.shape), target)
        if part is None:
            raise SyncError(f"{source.hf_name}: scattered over {module}.{name}")
        piece = Piece(source.hf_name, source.hf_shape, source.dtype, view.region)
        loads.append(LoadedSlice(piece, view, module, name, tuple(parameter.shape), part))

    with as_created(model):
        places = {
            parameter.untyped_storage()._cdata: (path, name, parameter)
            for path, _, name, parameter in parameters_of(model)
        }
        try:
            model.load_weights(proxies())  # type: ignore[operator]
        except _LOADER_ERRORS as error:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise SyncError(
                f"{now}: shape {offered[now][0]} does not fit the engine, or it has no such "
                f"tensor ({said})"
            ) from error
        _check_written_once(model, loads)
    return loads


@contextmanager
def as_created(model: nn.Module) -> Iterator[None]:
    """Make every parameter a meta tensor, shaped as when the model was made and with its loader,
    then restore the model. Tied parameters stay tied."""
    layers = list(model.modules())
    kept = [(dict(layer._parameters), dict(layer._buffers)) for layer in layers]
    transient = [set(layer._non_persistent_buffers_set) for layer in layers]
    created: dict[int, nn.Parameter | None] = {}
    try:
        for layer, (parameters, _) in zip(layers, kept, strict=True):
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, parameter in parameters.items():
                if parameter is not None and name in layer._parameters:
                    made = created.setdefault(id(parameter), layer._parameters[name])
                    # An earlier update left its own loader, which now does nothing.
                    made.weight_loader = _get_original_loader(made)
                    layer._parameters[name] = made
        yield
    finally:
        for layer, (parameters, buffers), names in zip(layers, kept, transient, strict=True):
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set = names


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (module's path, module, name, parameter), tied parameters only where they occur
    first."""
    seen = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, module, name, parameter


def _check_written_once(model: nn.Module, loads: Sequence[LoadedSlice]) -> None:
    """Check that every element of every parameter, except padding, is in exactly one slice."""
    written: dict[str, list[LoadedSlice]] = {}
    for load in loads:
        written.setdefault(load.path, []).append(load)
    for path, module, name, parameter in parameters_of(model):
        full = f"{path}.{name}"
        into = written.get(full, [])
        if (twice := overlap([load.target.region for load in into])) is not None:
            first, second = (into[index].piece.name for index in twice)
            raise SyncError(f"{second}: written where {first} is written, in {full}")
        num_written = sum(load.target.region.numel for load in into)
        if num_written != _num_loaded(module, parameter):
            raise SyncError(_unwritten(full, module, parameter, into))


def _num_loaded(module: nn.Module, parameter: Tensor) -> int:
    """Return how many elements of a parameter loading fills. The others are padding."""
    if isinstance(module, VocabParallelEmbedding):
        return module.shard_indices.num_org_elements * prod(parameter.shape[1:])
    return getattr(parameter, "weight_loader_numel", parameter.numel())


def _unwritten(path: str, module: nn.Module, parameter: Tensor, into: Sequence[LoadedSlice]) -> str:
    left = torch.ones(parameter.shape, dtype=torch.bool)
    if isinstance(module, VocabParallelEmbedding):
        left[module.shard_indices.num_org_elements :] = False
    for load in into:
        left[load.target.region.slices] = False
    where = left.nonzero()
    if not len(where):
        return f"{path}: its padding is written, too, by {into[-1].piece.name}"
    first, last = where.amin(0).tolist(), where.amax(0).tolist()
    box = ", ".join(f"{low}:{high + 1}" for low, high in zip(first, last, strict=True))
    return f"{path}[{box}]: no offered tensor is loaded there; a tensor is missing or too small"
