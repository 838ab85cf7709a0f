"""Compare tensors in nested containers bitwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Return whether nested dicts, lists and tuples hold equal tensors and values."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
