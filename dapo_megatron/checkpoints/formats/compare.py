"""Whether two stores hold the same model: names, shapes, dtypes, every bit, every config field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.store import FileSlice, Store, blocks
from dapo_megatron.types import Region, dtype_name, whole

Progress = Callable[[int], object]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = "absent"
_BLOCK_BYTES = 8 * 2**20
"""Compared at once; where blocks differ, some copies of them are made, in float64."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`name` is a tensor, or `config.<field>`; `kind` is config, name, shape, dtype, value or
    replica; `text` says what differs."""

    kind: str
    name: str
    text: str


def compare(
    left: Store, right: Store, progress: Progress, *, same_dtype: bool = True
) -> Iterator[Difference]:
    """Every difference, config fields first, then tensors in the order of the left store.

    Streams. `progress` is told the bytes read of the left store. Without `same_dtype` the right
    store is to hold the left one's elements converted to its own dtypes, and the config's dtype may
    differ.
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
            boxes = _told(whole(info.shape), info.dtype, progress)
            pairs = (
                (box, left.read(name, box).to(other.dtype), right.read(name, box)) for box in boxes
            )
            if text := _value_difference(pairs):
                yield Difference("value", name, text)


def compare_replicas(store: Store, progress: Progress) -> Iterator[Difference]:
    """Boxes that a store holds more than once, and not alike."""
    for first, second in store.replicas:
        boxes = _told(first.region, store.tensors[first.name].dtype, progress)
        pairs = (
            (box, store.read_slice(first, box), store.read_slice(second, box)) for box in boxes
        )
        if text := _value_difference(pairs):
            where = f"{_where(store, first)} and {_where(store, second)}"
            yield Difference("replica", first.name, f"{where} differ: {text}")


def replica_bytes(store: Store) -> int:
    """What `compare_replicas` goes through."""
    return sum(store.slice_bytes(first) for first, _ in store.replicas)


def _config_differences(left: Any, right: Any, ignored: tuple[str, ...]) -> Iterator[Difference]:
    for field in sorted(left.keys() | right.keys()):
        values = left.get(field, _ABSENT), right.get(field, _ABSENT)
        if field not in ignored and values[0] != values[1]:
            yield Difference("config", f"config.{field}", f"{values[0]!r} and {values[1]!r}")


def _told(region: Region, dtype: torch.dtype, progress: Progress) -> Iterator[Region]:
    for box in blocks(region, dtype.itemsize, _BLOCK_BYTES):
        yield box
        progress(box.numel * dtype.itemsize)


def _value_difference(pairs: Iterator[tuple[Region, Tensor, Tensor]]) -> str | None:
    """What differs between two tensors given block by block; None if no bit does."""
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
    """Not the numbers: a NaN equals itself, and 0.0 is not -0.0."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _where(store: Store, file_slice: FileSlice) -> str:
    return f"{file_slice.file}:{file_slice.key}"
