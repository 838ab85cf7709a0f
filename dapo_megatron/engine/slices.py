"""Slices of HF tensors: proxies for whole tensors of which only some slices are here.

vLLM's loaders take whole HF tensors and cut out what their rank needs. They are given proxies,
which have the shape of the whole tensor and no elements. Cutting a proxy gives another proxy.
Copying one into a parameter calls a sink with the part of the parameter and the proxy. One sink
records what is copied where (loads.py), another copies the slice that has arrived (receiver.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.types import Piece, Region, SyncError, overlap

Shape = tuple[int, ...]
Sink = Callable[[Tensor, "ProxyTensor"], None]
"""(part of a parameter, proxy of the same shape) -> None."""
Offer = Mapping[str, tuple[Shape, torch.dtype]]
"""HF name -> (shape, dtype) of the whole tensor."""

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}


@dataclass(frozen=True, slots=True)
class BoxView:
    """A view that shows exactly one box of a tensor. `shape` and `strides` are those of the view
    in that box."""

    region: Region
    shape: Shape
    strides: tuple[int, ...]

    def read(self, box: Tensor) -> Tensor:
        """Return the view of `box`, which is contiguous and shaped as the region."""
        return box.as_strided(self.shape, self.strides)

    def unread(self, view: Tensor) -> Tensor:
        """Return the box from the view's elements: the inverse of `read`. No copy if possible."""
        if self.strides == strides_of(self.shape):
            return view.reshape(self.region.shape)
        box = view.new_empty(self.region.shape)
        box.as_strided(self.shape, self.strides).copy_(view)
        return box


def strides_of(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def locate(shape: Shape, view: Tensor) -> BoxView | None:
    """Return where `view` lies in a contiguous tensor of `shape`, or None if it does not show
    exactly one box."""
    strides, rest, start = strides_of(shape), view.storage_offset(), []
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    extent = [1] * len(shape)
    dim_of = {strides[dim]: dim for dim in range(len(shape)) if shape[dim] > 1}
    inner = []  # for each dimension of the view, the innermost one of the tensor that it runs over
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dim = dim_of.get(stride) if size > 1 else None
        inner.append(dim)
        if size > 1 and (dim is None or not _extend(extent, dim, size, shape, start)):
            return None
    region = Region(tuple(start), tuple(extent))
    in_box = strides_of(region.shape)
    own = tuple(1 if dim is None else in_box[dim] for dim in inner)
    return BoxView(region, tuple(view.shape), own)


def _extend(extent: list[int], dim: int, size: int, shape: Shape, start: list[int]) -> bool:
    """Extend the box by `size` elements from `dim` outwards. False if they are not a box."""
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
    """A view of the HF tensor `hf_name`; `shadow`, on the meta device, has its geometry."""

    hf_name: str
    hf_shape: Shape
    shadow: Tensor
    sink: Sink

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def whole(cls, name: str, shape: Shape, dtype: torch.dtype, sink: Sink) -> ProxyTensor:
        """Return a proxy for a whole tensor."""
        return cls._make(name, shape, torch.empty(shape, dtype=dtype, device="meta"), sink)

    @classmethod
    def _make(cls, name: str, shape: Shape, shadow: Tensor, sink: Sink) -> ProxyTensor:
        made = cls._make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=torch.device("meta"),
        )
        made.hf_name, made.hf_shape, made.shadow, made.sink = name, shape, shadow, sink
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ProxyTensor({self.hf_name}, {tuple(self.shape)})"

    def locate(self) -> BoxView:
        """Return where in the HF tensor this view lies. Raises SyncError if it is not one box."""
        view = locate(self.hf_shape, self.shadow)
        if view is None:
            raise SyncError(
                f"{self.hf_name}: its loader takes elements that are no slice of it "
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
                    f"{source.hf_name}: {tuple(source.shape)} of it are copied into "
                    f"{tuple(target.shape)} of a parameter"
                )
            source.sink(target, source)
            return target
        proxy = args[0] if args else None
        if isinstance(proxy, cls):
            if func.is_view:
                made = func(proxy.shadow, *args[1:], **(kwargs or {}))
                if isinstance(made, Tensor):
                    return proxy._child(made, func)
                return [proxy._child(each, func) for each in made]
            if func in _COPIES and (kwargs or {}).get("dtype") in (None, proxy.dtype):
                return proxy._child(proxy.shadow, func)
        raise _refusal(func, (*args, *(kwargs or {}).values()))

    def _child(self, shadow: Tensor, func: Any) -> ProxyTensor:
        if shadow.dtype != self.dtype:
            raise _refusal(func, (self,))
        return ProxyTensor._make(self.hf_name, self.hf_shape, shadow, self.sink)


def _refusal(func: Any, args: tuple[Any, ...]) -> SyncError:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((arg.hf_name for arg in flat if isinstance(arg, ProxyTensor)), "a tensor")
    return SyncError(f"{name}: its loader in vLLM calls {func}, which needs the whole tensor")


def check_used(offered: Offer, taken: Sequence[Sequence[Piece]]) -> None:
    """Check that the ranks of an engine (`taken` by rank) together take all of each offered tensor.

    Loaders narrow without an error, so this is what finds a tensor that is too large. Raises
    SyncError naming a tensor that no rank takes completely.
    """
    regions: dict[str, set[Region]] = {name: set() for name in offered}
    for pieces in taken:
        for piece in pieces:
            regions[piece.name].add(piece.region)
    for name, (shape, _) in offered.items():
        boxes = list(regions[name])
        if not boxes:
            raise SyncError(f"{name}: the engine has no such tensor")
        if overlap(boxes) is not None or sum(box.numel for box in boxes) != prod(shape):
            raise SyncError(
                f"{name}: shape {shape}, of which the engine's ranks take only "
                f"{', '.join(map(str, boxes))}"
            )
