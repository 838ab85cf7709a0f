"""Count where the host would wait for a GPU, on a machine without one.

Marked tensors, and all derived from them, count as GPU tensors. All others are host memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense,  # item(), int(), float(), bool()
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten.unique_consecutive,
    aten._unique2,
}
"""Operations whose result, or the size of it, the host must read."""
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations that read the number of True values of a mask."""
ROOMS = ("dapo_megatron", "megatron", "tests")
"""Packages whose functions are named as the place that waits."""


class Synchronizations:
    """Counts of places where the host waits, by `file.py:function operation`."""

    def __init__(self, marked: Iterable[Tensor]) -> None:
        self.places: Counter[str] = Counter()
        # The storages are kept, so that no other tensor gets the address of a freed one.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.mark(marked)

    def mark(self, values: Any) -> None:
        """Treat these tensors, and all derived from them, as tensors on a GPU."""
        for tensor in tensors_in(values):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def is_marked(self, tensor: Any) -> bool:
        """Return whether the tensor counts as one on the GPU."""
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._storages

    def add(self, operation: str) -> None:
        """Count a wait of the function that is running."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            parts = PurePath(frame.f_code.co_filename).parts
            is_mode = frame.f_code.co_name.startswith("__torch_")
            if set(parts) & set(ROOMS) and parts[-1] != "synchronizations.py" and not is_mode:
                break
            frame = frame.f_back
        self.places[f"{parts[-1]}:{frame.f_code.co_name} {operation}"] += 1

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Count until the block ends."""
        self.places.clear()
        with _Functions(self), _Operations(self):
            yield self.places


class _Functions(TorchFunctionMode):
    """Methods that do nothing if source and target are both on the CPU, or read memory directly."""

    def __init__(self, synchronizations: Synchronizations) -> None:
        super().__init__()
        self._synchronizations = synchronizations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_marked = bool(args) and self._synchronizations.is_marked(args[0])
        if is_marked and func in (Tensor.cpu, Tensor.tolist, Tensor.numpy):
            self._synchronizations.add(func.__name__)
            return func(*args, **kwargs).clone() if func is Tensor.cpu else func(*args, **kwargs)
        result = func(*args, **kwargs)
        # The policy and Megatron name its device by an object here, torch the host by a string.
        target = [*args[1:], kwargs.get("device")] if func is Tensor.to else [kwargs.get("device")]
        if any(isinstance(value, torch.device | Tensor) for value in target):
            if not is_marked and args and result is args[0]:
                result = result.clone()
            self._synchronizations.mark(result)
        return result


class _Operations(TorchDispatchMode):
    """Every operation, also those of the backward pass."""

    def __init__(self, synchronizations: Synchronizations) -> None:
        super().__init__()
        self._synchronizations = synchronizations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, synchronizations, packet = kwargs or {}, self._synchronizations, func.overloadpacket
        inputs = tensors_in((args, kwargs))
        if not any(map(synchronizations.is_marked, inputs)):
            return func(*args, **kwargs)
        if packet in WAITING and (packet is not aten.repeat_interleave or len(args) < 3):
            synchronizations.add(packet.__name__)
        masks = [mask for mask in tensors_in(args[1:2]) if mask.dtype in (torch.bool, torch.uint8)]
        if packet in INDEXING and any(map(synchronizations.is_marked, masks)):
            synchronizations.add("mask")
        if packet is aten.copy_ and not synchronizations.is_marked(args[0]):
            synchronizations.add("copy_")
        result = func(*args, **kwargs)
        synchronizations.mark(inputs if func.namespace == "c10d" else result)
        return result


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


def policy_tensors(policy: Any) -> list[Tensor]:
    """Return the tensors that a MegatronPolicy keeps on its device: parameters, buffers of
    parameters and gradients, and the optimizer's copies."""
    tensors: list[Tensor] = []
    for chunk in policy._chunks:
        tensors += [*chunk.parameters(), chunk.module.rope_frequencies]
        tensors += [p.main_grad for p in chunk.parameters() if p.requires_grad]
    for group in policy._optimizer.param_groups:
        tensors += group["params"]
    return tensors
