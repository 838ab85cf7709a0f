"""Comparison of two stores: names, shapes, dtypes, every bit of the values, every config field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.store import Store, blocks
from dapo_megatron.types import Region, dtype_name, whole

Progress = Callable[[int], object]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = "absent"
_BLOCK_BYTES = 8 * 2**20
"""Size of a block that is compared at once. Differing blocks need several float64 copies."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two stores. `name` is a tensor or `config.<field>`. `kind` is config,
    name, shape, dtype or value. `text` describes the difference."""

    kind: str
    name: str
    text: str


def compare(
    left: Store, right: Store, progress: Progress, *, same_dtype: bool = True
) -> Iterator[Difference]:
    """Yield every difference: config fields first, then tensors in the order of the left store.

    Reads block by block. `progress` is called with the number of bytes read from the left store.
    With `same_dtype=False`, the left store's elements are converted to the dtypes of the right
    store before comparing, and the dtype in the config may differ.
    """
    ignored = () if same_dtype else ("dtype", "torch_dtype")
    yield from _config_differences(left.config, right.config, ignored)
    for name in left.tensors.keys() | right.tensors.keys():
        if name not in left.tensors or name not in right.tensors:
            side = "second" if name in left.tensors else "first"
            yield Difference("name", name, f"not in the {side}")
    for name, info in left.tensors.items():
        other = right.tensors.get(name)
        if other is None:
            continue
        if info.shape != other.shape:
            yield Difference("shape", name, f"{list(info.shape)} and {list(other.shape)}")
        elif same_dtype and info.dtype != other.dtype:
            yield Difference(
                "dtype", name, f"{dtype_name(info.dtype)} and {dtype_name(other.dtype)}"
            )
        else:
            boxes = _blocks_with_progress(whole(info.shape), info.dtype, progress)
            pairs = (
                (box, left.read(name, box).to(other.dtype), right.read(name, box)) for box in boxes
            )
            if text := _value_difference(pairs):
                yield Difference("value", name, text)


def _config_differences(left: Any, right: Any, ignored: tuple[str, ...]) -> Iterator[Difference]:
    for field in sorted(left.keys() | right.keys()):
        values = left.get(field, _ABSENT), right.get(field, _ABSENT)
        if field not in ignored and values[0] != values[1]:
            yield Difference("config", f"config.{field}", f"{values[0]!r} and {values[1]!r}")


def _blocks_with_progress(
    region: Region, dtype: torch.dtype, progress: Progress
) -> Iterator[Region]:
    for box in blocks(region, dtype.itemsize, _BLOCK_BYTES):
        yield box
        progress(box.numel * dtype.itemsize)


def _value_difference(pairs: Iterator[tuple[Region, Tensor, Tensor]]) -> str | None:
    """Return how two tensors differ, or None if all bits are equal. `pairs` yields (box, block of
    the first, block of the second)."""
    count, first, largest = 0, "", 0.0
    for box, a, b in pairs:
        if torch.equal(_bits(a), _bits(b)):
            continue
        differs = _bits(a) != _bits(b)
        count += int(differs.sum())
        if not first:
            flat = differs.view(torch.uint8).argmax()
            index = tuple(int(i) for i in torch.unravel_index(flat, differs.shape))
            at = [i + start for i, start in zip(index, box.start, strict=True)]
            first = f"first at {at}: {a[index].item():.9g} and {b[index].item():.9g}"
        gap = (a[differs].double() - b[differs].double()).abs()
        largest = max(largest, float(gap.nan_to_num(nan=0.0).max()))
    return f"{count:,} elements, {first}, largest difference {largest:.3g}" if count else None


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers, so that a NaN equals itself and 0.0 differs from -0.0."""
    return tensor.view(_BITS[tensor.dtype.itemsize])
