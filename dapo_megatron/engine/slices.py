"""Proxies for whole HF tensors, for a rank that has only some slices of each.

vLLM's loaders take whole HF tensors and slice them for their rank. Here they get proxies, which
have the shape of the whole tensor and no elements. Slicing a proxy gives another proxy. Copying a
proxy into a parameter calls a sink with the part of the parameter and the proxy. The sink records
the copy (loads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.types import Region, SyncError, TensorSlice, overlap

Shape = tuple[int, ...]
Sink = Callable[[Tensor, "ProxyTensor"], None]
"""Called for each copy with (part of a parameter, proxy of the same shape)."""
Offer = Mapping[str, tuple[Shape, torch.dtype]]
"""HF name -> (shape, dtype) of the whole tensor."""

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}


@dataclass(frozen=True, slots=True)
class BoxView:
    """A view of exactly one box of a tensor.

    `shape` and `strides` (in elements) describe the view relative to the box, stored contiguously.
    """

    region: Region
    shape: Shape
    strides: tuple[int, ...]

    def read(self, box: Tensor) -> Tensor:
        """Return the view, given the `box`, shaped as the region. Copies only if necessary."""
        if self.shape == self.region.shape and self.strides == strides_of(self.shape):
            return box
        return box.contiguous().as_strided(self.shape, self.strides)

    def unread(self, view: Tensor) -> Tensor:
        """Return the box, given the view: the inverse of `read`. Copies only if necessary."""
        if self.strides == strides_of(self.shape):
            return view.reshape(self.region.shape)
        box = view.new_empty(self.region.shape)
        box.as_strided(self.shape, self.strides).copy_(view)
        return box


def strides_of(shape: Shape) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def locate(shape: Shape, view: Tensor) -> BoxView | None:
    """Return the box of a contiguous tensor of `shape` that `view` shows, or None if the view is
    not exactly one box."""
    strides, rest, start = strides_of(shape), view.storage_offset(), []
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    extent = [1] * len(shape)
    dim_of = {strides[dim]: dim for dim in range(len(shape)) if shape[dim] > 1}
    inner = []  # for each dimension of the view, the innermost dimension of the tensor it covers
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dim = dim_of.get(stride) if size > 1 else None
        inner.append(dim)
        if size > 1 and (dim is None or not _extend(extent, dim, size, shape, start)):
            return None
    region = Region(tuple(start), tuple(extent))
    in_box = strides_of(region.shape)
    strides_in_box = tuple(1 if dim is None else in_box[dim] for dim in inner)
    return BoxView(region, tuple(view.shape), strides_in_box)


def _extend(extent: list[int], dim: int, size: int, shape: Shape, start: list[int]) -> bool:
    """Extend the box by `size` elements from dimension `dim` outwards, in place. Return False if
    the result is not a box."""
    while size > 1:
        if dim < 0 or extent[dim] > 1:
            return False
        if size <= shape[dim] - start[dim]:
            extent[dim], size = size, 1
        elif start[dim] == 0 and size % shape[dim] == 0:
            extent[dim], size = shape[dim], size // shape[dim]
        else:
            return False
        dim -= 1
    return True


class ProxyTensor(Tensor):
    """A view of the HF tensor `hf_name`. `shadow` is the same view of a meta tensor."""

    hf_name: str
    hf_shape: Shape
    shadow: Tensor
    sink: Sink

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def whole(cls, name: str, shape: Shape, dtype: torch.dtype, sink: Sink) -> ProxyTensor:
        """Return a proxy for a whole tensor. `sink` is called for each copy of it or its slices."""
        return cls._make(name, shape, torch.empty(shape, dtype=dtype, device="meta"), sink)

    @classmethod
    def _make(cls, name: str, shape: Shape, shadow: Tensor, sink: Sink) -> ProxyTensor:
        proxy_view = cls._make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=torch.device("meta"),
        )
        proxy_view.hf_name, proxy_view.hf_shape, proxy_view.shadow, proxy_view.sink = (
            name,
            shape,
            shadow,
            sink,
        )
        return proxy_view

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ProxyTensor({self.hf_name}, {tuple(self.shape)})"

    def locate(self) -> BoxView:
        """Return the box of the HF tensor that this view shows. Raises SyncError if it is not
        exactly one box."""
        view = locate(self.hf_shape, self.shadow)
        if view is None:
            raise SyncError(
                f"{self.hf_name}: vLLM's loader reads elements that are not one slice of it "
                f"(shape {tuple(self.shape)}, strides {self.shadow.stride()})"
            )
        return view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.copy_.default and not isinstance(args[0], cls):
            target, source = args[:2]
            if target.shape != source.shape:
                raise SyncError(
                    f"{source.hf_name}: vLLM's loader copies a slice of shape "
                    f"{tuple(source.shape)} into {tuple(target.shape)} of a parameter"
                )
            source.sink(target, source)
            return target
        proxy = args[0] if args else None
        if isinstance(proxy, cls):
            if func.is_view:
                proxy_view = func(proxy.shadow, *args[1:], **(kwargs or {}))
                if isinstance(proxy_view, Tensor):
                    return proxy._child(proxy_view, func)
                return [proxy._child(item, func) for item in proxy_view]
            if func in _COPIES and (kwargs or {}).get("dtype") in (None, proxy.dtype):
                return proxy._child(proxy.shadow, func)
        raise _refusal(func, (*args, *(kwargs or {}).values()))

    def _child(self, shadow: Tensor, func: Any) -> ProxyTensor:
        if shadow.dtype != self.dtype:
            raise _refusal(func, (self,))
        return ProxyTensor._make(self.hf_name, self.hf_shape, shadow, self.sink)


def _refusal(func: Any, args: tuple[Any, ...]) -> SyncError:
    """Return the error for an operation that needs the elements of a proxy."""
    flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((arg.hf_name for arg in flat if isinstance(arg, ProxyTensor)), "a tensor")
    return SyncError(f"{name}: vLLM's loader calls {func}, which needs the whole tensor")


def check_used(offered: Offer, taken: Sequence[Sequence[TensorSlice]]) -> None:
    """Check that the ranks of an engine (`taken` by rank) together take all of each offered tensor.

    Raises SyncError naming a tensor that is unknown or partly unused. This check detects tensors
    that are too large, because vLLM's loaders slice them without an error.
    """
    regions: dict[str, set[Region]] = {name: set() for name in offered}
    for tensor_slices in taken:
        for tensor_slice in tensor_slices:
            regions[tensor_slice.name].add(tensor_slice.region)
    for name, (shape, _) in offered.items():
        boxes = list(regions[name])
        if not boxes:
            raise SyncError(f"{name}: the engine has no such tensor")
        if overlap(boxes) is not None or sum(box.numel for box in boxes) != prod(shape):
            raise SyncError(
                f"{name}: shape {shape}, of which the engine's ranks take only "
                f"{', '.join(map(str, boxes))}"
            )
