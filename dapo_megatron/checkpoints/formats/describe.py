"""A store in figures."""

from __future__ import annotations

import re
from typing import Any

from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.types import dtype_name


def describe(store: Store) -> dict[str, Any]:
    """Format, family, layout, and each tensor's shape, dtype and files; plain JSON values."""
    return {
        "folder": str(store.folder),
        "format": store.format,
        "family": store.arch.family,
        "layout": dict(store.layout),
        "files": len(store.files),
        "parameters": sum(info.numel for info in store.tensors.values()),
        "bytes": sum(info.nbytes for info in store.tensors.values()),
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": dtype_name(info.dtype),
                "bytes": info.nbytes,
                "files": sorted({extent.file for extent in store.extents[name]}),
            }
            for name, info in store.tensors.items()
        },
    }


def rows(description: dict[str, Any]) -> list[tuple[str, int, str, str, int]]:
    """Tensors that differ in layer or expert alone, as one row: name, how many, shape, dtype,
    bytes of all."""
    found: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for name, info in description["tensors"].items():
        kind = re.sub(r"\.\d+\.", ".*.", name), str(info["shape"]), info["dtype"]
        found.setdefault(kind, []).append((name, info["bytes"]))
    return [
        (pattern if same[1:] else same[0][0], len(same), shape, dtype, sum(n for _, n in same))
        for (pattern, shape, dtype), same in found.items()
    ]
