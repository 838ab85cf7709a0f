"""The most memory that tensors held at once beyond what was there before: exact, and the same on
every run. Scratch memory inside a single operation is not seen."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations inside `with` make, until they are freed, in
    whatever thread that is."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, tuple[Any, int]] = {}
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(one) for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves((found, args[:1] if "resize_" in str(func) else ())):
            if torch.is_tensor(one):
                self._see(one.untyped_storage(), was_there=_address(one) in given)
        return found

    def _see(self, storage: torch.UntypedStorage, *, was_there: bool) -> None:
        where = storage._cdata
        with self._lock:
            reference, known_bytes = self._storages.get(where, (None, 0))
            is_new = reference is None
            if is_new and was_there:
                return
            if is_new:
                reference = weakref.ref(storage, lambda _: self._forget(where))
            self._storages[where] = (reference, storage.nbytes())
            self._live_bytes += storage.nbytes() - known_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _forget(self, where: int) -> None:
        with self._lock:
            _, num_bytes = self._storages.pop(where, (None, 0))
            self._live_bytes -= num_bytes


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
