"""Measure the peak memory of new tensors, exactly and reproducibly.

Scratch memory inside a single operation is not counted.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Count the bytes of storages that operations inside `with` allocate, until any thread frees
    them. `peak_bytes` is the maximum of `live_bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.live_bytes = 0
        self._storages: dict[int, tuple[Any, int]] = {}
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and count the storages of its results that none of its inputs has."""
        input_addresses = {
            _address(leaf) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        result = func(*args, **kwargs)
        for leaf in tree_leaves((result, args[:1] if "resize_" in str(func) else ())):
            if torch.is_tensor(leaf):
                self._record(leaf.untyped_storage(), existed=_address(leaf) in input_addresses)
        return result

    def _record(self, storage: torch.UntypedStorage, *, existed: bool) -> None:
        address = storage._cdata
        with self._lock:
            reference, known_bytes = self._storages.get(address, (None, 0))
            is_new = reference is None
            if is_new and existed:
                return
            if is_new:
                reference = weakref.ref(storage, lambda _: self._forget(address))
            self._storages[address] = (reference, storage.nbytes())
            self.live_bytes += storage.nbytes() - known_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, address: int) -> None:
        with self._lock:
            _, num_bytes = self._storages.pop(address, (None, 0))
            self.live_bytes -= num_bytes


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
