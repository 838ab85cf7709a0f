"""The slices of HF tensors that a vLLM model loads, and the parts of parameters they go into.

They are found by tracing: the model's `load_weights` runs over proxies of the offered tensors, with
parameters as they were before vLLM packed them, and every copy is recorded. No weight is loaded,
and the running engine does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

from dapo_megatron.engine.slices import BoxView, Offer, ProxyTensor, Shape, locate
from dapo_megatron.types import SyncError, TensorSlice, overlap

# Errors that vLLM's loaders raise for a wrong tensor.
_LOADER_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """One copy that loading makes, from a slice of an HF tensor into part of a parameter."""

    tensor_slice: TensorSlice
    source: BoxView
    """The view of the HF tensor that is copied. Its region is the slice's."""
    module: str
    parameter: str
    """Name within the module."""
    parameter_shape: Shape
    """Shape when loaders run. The running engine may have packed the parameter."""
    target: BoxView
    """The part of the parameter that is written."""

    @property
    def path(self) -> str:
        """The parameter's name within the model."""
        return f"{self.module}.{self.parameter}"


def trace(model: nn.Module, offered: Offer) -> list[LoadedSlice]:
    """Return every copy that loading the `offered` tensors makes on this rank, in order.

    Experts of other ranks are not copied. Raises SyncError naming a tensor that does not fit, or a
    parameter that would not be written exactly once.
    """
    loads: list[LoadedSlice] = []
    offered_name = ""

    def proxies() -> Iterator[tuple[str, Tensor]]:
        nonlocal offered_name
        for offered_name, (shape, dtype) in offered.items():
            yield offered_name, ProxyTensor.whole(offered_name, shape, dtype, record)

    def record(target: Tensor, source: ProxyTensor) -> None:
        owner = owner_of_storage.get(target.untyped_storage()._cdata)
        if owner is None:
            raise SyncError(
                f"{source.hf_name}: vLLM's loader copies it into a tensor that is not a parameter"
            )
        module, name, parameter = owner
        view, part = source.locate(), locate(tuple(parameter.shape), target)
        if part is None:
            raise SyncError(f"{source.hf_name}: vLLM's loader scatters it over {module}.{name}")
        tensor_slice = TensorSlice(source.hf_name, source.hf_shape, source.dtype, view.region)
        loads.append(LoadedSlice(tensor_slice, view, module, name, tuple(parameter.shape), part))

    with as_created(model):
        owner_of_storage = {
            parameter.untyped_storage()._cdata: (path, name, parameter)
            for path, _, name, parameter in parameters_of(model)
        }
        try:
            model.load_weights(proxies())  # type: ignore[operator]
        except _LOADER_ERRORS as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise SyncError(
                f"{offered_name}: shape {offered[offered_name][0]} does not fit the engine, or it "
                f"has no such tensor ({reason})"
            ) from error
        _check_written_once(model, loads)
    return loads


@contextmanager
def as_created(model: nn.Module) -> Iterator[None]:
    """Replace every parameter by a meta tensor with its original shape and loader inside the
    context, then restore the model. Tied parameters stay tied."""
    layers = list(model.modules())
    saved = [(dict(layer._parameters), dict(layer._buffers)) for layer in layers]
    transient = [set(layer._non_persistent_buffers_set) for layer in layers]
    created: dict[int, nn.Parameter | None] = {}
    try:
        for layer, (parameters, _) in zip(layers, saved, strict=True):
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, parameter in parameters.items():
                if parameter is not None and name in layer._parameters:
                    original = created.setdefault(id(parameter), layer._parameters[name])
                    # An earlier weight update has replaced the loader by one that does nothing now.
                    original.weight_loader = _get_original_loader(original)
                    layer._parameters[name] = original
        yield
    finally:
        for layer, (parameters, buffers), names in zip(layers, saved, transient, strict=True):
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set = names


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (module's path, module, name, parameter). Tied parameters are yielded once, where they
    occur first."""
    known_ids = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known_ids:
                known_ids.add(id(parameter))
                yield path, module, name, parameter


def _check_written_once(model: nn.Module, loads: Sequence[LoadedSlice]) -> None:
    """Check that every element of every parameter, except padding, is in exactly one slice."""
    written: dict[str, list[LoadedSlice]] = {}
    for load in loads:
        written.setdefault(load.path, []).append(load)
    for path, module, name, parameter in parameters_of(model):
        parameter_path = f"{path}.{name}"
        writes = written.get(parameter_path, [])
        if (pair := overlap([load.target.region for load in writes])) is not None:
            first, second = (writes[index].tensor_slice.name for index in pair)
            raise SyncError(f"{second}: overwrites {first} in {parameter_path}")
        num_written = sum(load.target.region.numel for load in writes)
        if num_written != (num_to_load := num_loaded(module, parameter)):
            raise SyncError(
                f"{parameter_path}: the offered tensors fill {num_written} of its {num_to_load} "
                "elements. A tensor is missing, or has another size"
            )


def num_loaded(module: nn.Module, parameter: Tensor) -> int:
    """Return how many elements of a parameter loading must fill. The others are padding."""
    if isinstance(module, VocabParallelEmbedding):
        return module.shard_indices.num_org_elements * prod(parameter.shape[1:])
    return getattr(parameter, "weight_loader_numel", parameter.numel())
