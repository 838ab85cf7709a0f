"""A rank's training state as boxes of whole tensors, under Megatron's own keys.

Megatron's `sharded_state_dict` states where each local parameter is in the whole model: key, shape
and offset. A rank's optimizer owns a flat range of each parameter. A range of a row-major tensor
is at most 2 x dims - 1 boxes, so weights, main weights and moments are written as boxes by the rank
that owns them, each once. The keys follow Megatron's format "fully_reshardable".

Megatron-core's own saving of the optimizer (0.16.1, 0.19.2) gathers each tensor first, and with
several buckets of gradients it saves wrong values (NVIDIA/Megatron-LM issues 5077 and 6342).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, Shape
from dapo_megatron.policy.device import ALIGNMENT_BYTES, has_cuda
from dapo_megatron.policy.fp8 import is_quantized
from dapo_megatron.policy.offload import CHUNK_BYTES
from dapo_megatron.policy.optimizer import MAIN, MOMENTS, Owned

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "non_homogeneous_layers": True,
    "chained_optim_avoid_prefix": True,
}
"""How the keys are made. Megatron reads it from common.pt."""
STATE = "optimizer.state"
BOX_BYTES = 2**26
"""Bytes of a box that is written, at most."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A ShardedTensor of Megatron, and the parameter of which its data are a part."""

    param: Tensor
    entry: Any


@dataclass(frozen=True)
class TrainingState:
    """Parameters of a rank's model chunks, and what its optimizer owns of them.

    vocabulary  rows of the embedding that are no padding
    """

    models: Sequence[Any]
    owned: Sequence[Owned]
    vocabulary: int

    def to_save(self) -> Iterator[Box]:
        """Yield the boxes that this rank writes."""
        parts = self._parts
        trained = {id(p) for model in self.models for p in model.parameters() if p.requires_grad}
        for owned in self.owned:
            # Ranks of the data-parallel group own disjoint ranges. Of other copies one is saved.
            own = [part for part in parts[id(owned.param)] if not any(part.entry.replica_id[:2])]
            yield from self._optimizer_boxes(owned, own)
            flat = _flat(owned.param)[owned.start : owned.stop]
            for part in own:
                yield from self._boxes(part, flat, owned.start, part.entry.key)
        for part in chain.from_iterable(parts.values()):
            if id(part.param) not in trained and not any(part.entry.replica_id):
                yield from self._boxes(part, _flat(part.param), 0, part.entry.key)

    def to_load(self) -> Iterator[Box]:
        """Yield the boxes that this rank reads: its whole parameters, and its optimizer's state."""
        for owned in self.owned:
            yield from self._optimizer_boxes(owned, self._parts[id(owned.param)])
        for part in chain.from_iterable(self._parts.values()):
            if is_quantized(part.param):  # is then set from the main weights
                continue
            flat = _flat(part.param)
            keys = part.entry.key, f"{STATE}.{MAIN}.{part.entry.key}"
            is_rounded = flat.dtype.itemsize < 4
            key, other_key = keys if is_rounded else reversed(keys)
            for box in self._boxes(part, flat, 0, key):
                yield replace(box, other_key=other_key, may_round=is_rounded)

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Set rows that pad the vocabulary to 0, and their state. They are not saved, and never get
        a gradient."""
        first: dict[int, int] = {}
        for part in chain.from_iterable(self._parts.values()):
            if part.entry.allow_shape_mismatch:
                num_rows = max(0, self.vocabulary - part.entry.global_offset[0])
                first[id(part.param)] = num_rows * part.param[0].numel()
                part.param[num_rows:].zero_()
        for owned in self.owned:
            if id(owned.param) in first:
                start = max(0, first[id(owned.param)] - owned.start)
                for values in (*map(owned.state.get, MOMENTS), owned.copy):
                    if values is not None:
                        values.view(-1)[start:].zero_()

    def objects(self) -> dict[str, Any]:
        """Return the extra state of modules that this rank writes for Megatron, by key."""
        objects = {}
        for entry in self._entries:
            if isinstance(entry, ShardedObject):
                replica = entry.replica_id
                if not any(replica if isinstance(replica, tuple) else (replica,)):
                    objects[entry.unique_key] = entry.data
        return objects

    @cached_property
    def _entries(self) -> list[Any]:
        """Megatron's descriptions of the tensors and objects of all chunks."""
        described = [model.sharded_state_dict(metadata=dict(CONTENT)) for model in self.models]
        return list(chain.from_iterable(map(nested_values, described)))

    @cached_property
    def _parts(self) -> dict[int, list[_Part]]:
        """Parts of each parameter, by its id."""
        return _by_param(e for e in self._entries if not isinstance(e, ShardedObject))

    def _optimizer_boxes(self, owned: Owned, parts: Iterable[_Part]) -> Iterator[Box]:
        fields = {field: owned.state[field] for field in MOMENTS}
        if owned.copy is not None:
            fields[MAIN] = owned.copy.data
        for part in parts:
            for field, values in fields.items():
                key = f"{STATE}.{field}.{part.entry.key}"
                # Weights in full precision are their own main weights.
                other_key = part.entry.key if field == MAIN else ""
                for box in self._boxes(part, values.view(-1), owned.start, key):
                    yield replace(box, other_key=other_key)

    def _boxes(self, part: _Part, values: Tensor, start: int, key: str) -> Iterator[Box]:
        """Yield the boxes of `values`, the flat elements of the parameter from `start` on, that are
        inside `part`."""
        entry = part.entry
        first = entry.data.storage_offset() if entry.data.is_meta else 0
        begin = max(start, first)
        end = min(start + values.numel(), first + entry.data.numel())
        num_leading = entry.prepend_axis_num
        leading, inside = entry.global_offset[:num_leading], entry.global_offset[num_leading:]
        is_vocabulary = entry.allow_shape_mismatch
        rows, *columns = entry.global_shape
        shape = (min(self.vocabulary, rows) if is_vocabulary else rows, *columns)
        if begin >= end:
            return
        for offset, sizes, at in split(tuple(entry.data.shape), begin - first, end - first):
            origin = tuple(a + b for a, b in zip(inside, offset, strict=True))
            at += first - start
            box = values[at : at + prod(sizes)].view(*[1] * num_leading, *sizes)
            if is_vocabulary:  # padding is not saved
                box = box[: max(0, self.vocabulary - origin[0])]
            if box.numel():
                yield Box(key, (*leading, *origin), shape, box, may_be_padded=is_vocabulary)


def split(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield (offset, sizes, first element) of boxes of a row-major tensor that cover the flat
    elements [start, stop), in order."""
    if not shape:
        yield (), (), start
        return
    width = prod(shape[1:])
    head, tail = -(-start // width), stop // width
    if start % width:
        row = start // width
        end = min(stop, head * width) - row * width
        for offset, sizes, first in split(shape[1:], start - row * width, end):
            yield (row, *offset), (1, *sizes), first + row * width
    if head < tail:
        yield (head, *[0] * (len(shape) - 1)), (tail - head, *shape[1:]), head * width
    if stop % width and tail >= head:
        for offset, sizes, first in split(shape[1:], 0, stop - tail * width):
            yield (tail, *offset), (1, *sizes), first + tail * width


class HostCopies:
    """Copies of boxes in host memory, which is used again for every snapshot.

    Boxes that follow each other along the first dimension, such as the experts of a layer, become
    one box of up to BOX_BYTES: a model with many experts would have 86,000 boxes otherwise. Larger
    boxes are cut, so that they fill chunks of pinned memory (policy/offload.py).
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, Shape, Shape, torch.dtype], Tensor] = {}
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, boxes: Iterable[Box]) -> list[Box]:
        """Return copies of boxes. They are valid until the next call."""
        by_column: dict[tuple[Any, ...], list[Box]] = {}
        for box in chain.from_iterable(map(_pieces, boxes)):
            column = box.key, box.values.dtype, box.offset[1:], tuple(box.values.shape[1:])
            by_column.setdefault(column, []).append(box)
        runs: list[list[Box]] = []
        for column_boxes in by_column.values():
            end, num_bytes = -1, 0
            for box in sorted(column_boxes, key=lambda box: box.offset):
                num_bytes += box.values.nbytes
                if not box.offset or box.offset[0] != end or num_bytes > BOX_BYTES:
                    runs.append([])
                    num_bytes = box.values.nbytes
                runs[-1].append(box)
                end = box.offset[0] + box.values.shape[0] if box.offset else -1
        copies = [self._copy(run) for run in runs]
        if has_cuda():
            torch.cuda.synchronize()
        return copies

    def _copy(self, run: Sequence[Box]) -> Box:
        first = run[0]
        shape = tuple(first.values.shape)
        if len(run) > 1:
            shape = (sum(len(box.values) for box in run), *shape[1:])
        key = first.key, first.offset, shape, first.values.dtype
        if key not in self._memory:
            self._memory[key] = self._allocate(prod(shape) * key[-1].itemsize).view(key[-1])
            self._memory[key] = self._memory[key].view(shape)
        memory, start = self._memory[key], 0
        for box in run:
            place = memory if len(run) == 1 else memory[start : start + len(box.values)]
            place.copy_(box.values, non_blocking=True)
            start += len(box.values) if len(run) > 1 else 0
        return replace(first, values=memory)

    def _allocate(self, num_bytes: int) -> Tensor:
        aligned = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if aligned > len(self._free):
            size = max(aligned, CHUNK_BYTES)
            self._free = torch.empty(size, dtype=torch.uint8, pin_memory=has_cuda())
        memory, self._free = self._free[:num_bytes], self._free[aligned:]
        return memory


def _pieces(box: Box) -> Iterator[Box]:
    """Cut a box along its first dimension into pieces of up to BOX_BYTES, or of one row."""
    if box.values.nbytes <= BOX_BYTES or not box.offset:
        yield box
        return
    num_rows = max(1, BOX_BYTES // box.values[0].nbytes)
    for start in range(0, len(box.values), num_rows):
        offset = (box.offset[0] + start, *box.offset[1:])
        yield replace(box, offset=offset, values=box.values[start : start + num_rows])


def _flat(param: Any) -> Tensor:
    """Return the elements of a parameter: a view, or a copy in host memory if it is quantized."""
    values: Tensor = param.dequantize().cpu() if is_quantized(param) else param.detach()
    return values.view(-1)


def _by_param(entries: Iterable[Any]) -> dict[int, list[_Part]]:
    """Return the parts of each parameter, by its id."""
    parts: dict[int, list[_Part]] = {}
    for entry in entries:
        own = [entry]
        if isinstance(entry, ShardedTensorFactory):  # gate and up
            # Parts of a tensor without memory state where they are in it.
            data = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
            meta = replace(entry, data=data)
            own = list(nested_values(meta.build()))
        parts.setdefault(id(entry.data), []).extend(_Part(entry.data, part) for part in own)
    return parts
