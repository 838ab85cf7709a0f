"""Shard specs: how a parameter is made of HF tensors, and how tensor parallelism shards it.

Given an `Architecture`, a shard spec returns the HF tensors (`tensors`), Megatron-core's parameter
on one rank (`local_parameter`), and vLLM's part of the HF tensors on one rank (`engine`). Linear
weights are [output rows, input columns] in HF, Megatron-core and vLLM.

Names of HF tensors are without the prefix of their layer here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Protocol

from dapo_megatron.model.architecture import Architecture
from dapo_megatron.types import ConfigError, Region, whole

Shape = tuple[int, ...]
Size = int | str
"""A number, or the name of a field of the architecture; `latent.kv_lora_rank` is a nested one."""
Boxes = Sequence[tuple[str, Region]]
"""Boxes of HF tensors, by the tensor's name."""

ENGINE_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before sharding (vocab_parallel_embedding.py)."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The box `region` of the HF tensor `name`, stored in full rows of a local parameter, starting
    at row `first_row`."""

    name: str
    global_shape: Shape
    region: Region
    first_row: int = 0

    @property
    def rows(self) -> slice:
        """Rows of the local parameter that contain the box."""
        return slice(self.first_row, self.first_row + self.region.shape[0])


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """Shape and HF parts of a local parameter. Rows that belong to no part are padding."""

    shape: Shape
    parts: tuple[ParameterPart, ...]


class ShardSpec(Protocol):
    """How one parameter is sharded. Raises ConfigError if it cannot be sharded equally."""

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        """Return names and shapes of the HF tensors."""

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Boxes:
        """Return vLLM's local parts of the HF tensors."""

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        """Return Megatron-core's local parameter. Most have the same boxes as in vLLM, one after
        the other."""
        shapes, parts, rows = self.tensors(arch), [], 0
        for name, region in self.engine(arch, tp_rank, tp_size):
            parts.append(ParameterPart(name, shapes[name], region, rows))
            rows += region.shape[0]
        return LocalParameter((rows, *region.shape[1:]), tuple(parts))


@dataclass(frozen=True, slots=True)
class Replicated(ShardSpec):
    """Parameter that is the same on every rank, such as norms and routers."""

    name: str
    sizes: tuple[Size, ...]

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        return {self.name: _sizes(arch, self.sizes)}

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Boxes:
        return [(name, whole(shape)) for name, shape in self.tensors(arch).items()]


@dataclass(frozen=True, slots=True)
class RowParallel(ShardSpec):
    """Weight [hidden, `inputs`]; each rank has an equal share of the columns."""

    name: str
    inputs: str

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        return {self.name: (arch.hidden_size, *_sizes(arch, (self.inputs,)))}

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Boxes:
        [(name, (rows, columns))] = self.tensors(arch).items()
        size = _share(columns, tp_size, name)
        return [(name, Region((0, tp_rank * size), (rows, size)))]


@dataclass(frozen=True, slots=True)
class QKVParallel(ShardSpec):
    """Query, key and value projections: weights [rows, hidden] or biases [rows].

    Megatron's fused parameter has, for each key-value head, its query heads, its key and its value.
    With `is_gated`, each query head also has an output gate: in HF after the head's query, in
    Megatron's parameter after the queries of the key-value head.

    Each rank has an equal interval of these rows. With more ranks than key-value heads, an interval
    can end inside a group; attention then gathers the fused activations (transformer/attention.py,
    get_query_key_value_tensors). vLLM shards by heads and replicates key-value heads if there are
    more ranks.
    """

    query: str
    key: str
    value: str
    is_bias: bool = False
    is_gated: bool = False

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        width = () if self.is_bias else (arch.hidden_size,)
        return {
            self.query: (arch.query_rows * (2 if self.is_gated else 1), *width),
            self.key: (arch.group_rows, *width),
            self.value: (arch.group_rows, *width),
        }

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        shapes = self.tensors(arch)
        total = sum(shape[0] for shape in shapes.values())
        size = _share(total, tp_size, "the fused query-key-value")
        local_rows = range(tp_rank * size, (tp_rank + 1) * size)
        parts, row = [], 0
        for name, first, rows in self._segments(arch):
            start, stop = max(row, local_rows.start), min(row + rows, local_rows.stop)
            if start < stop:
                region = _rows(shapes[name], first + start - row, stop - start)
                parts.append(ParameterPart(name, shapes[name], region, start - local_rows.start))
            row += rows
        return LocalParameter((size, *shapes[self.query][1:]), tuple(parts))

    def _segments(self, arch: Architecture) -> Iterator[tuple[str, int, int]]:
        """Yield (HF name, first row there, number of rows) in the order of the fused rows."""
        head, queries = arch.head_dim, arch.num_heads // arch.num_kv_heads
        for group in range(arch.num_kv_heads):
            first = group * queries
            if self.is_gated:
                for half in (0, head):
                    for query in range(first, first + queries):
                        yield self.query, 2 * query * head + half, head
            else:
                yield self.query, first * head, queries * head
            yield self.key, group * head, head
            yield self.value, group * head, head

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Boxes:
        shapes = self.tensors(arch)
        _share(arch.num_heads, tp_size, "attention heads")
        queries = shapes[self.query][0] // tp_size
        if tp_size > arch.num_kv_heads:
            num_copies = _share(tp_size, arch.num_kv_heads, "key-value heads on engine ranks")
            first, groups = tp_rank // num_copies, 1
        else:
            groups = _share(arch.num_kv_heads, tp_size, "key-value heads")
            first = tp_rank * groups
        start, rows = first * arch.head_dim, groups * arch.head_dim
        return [
            (self.query, _rows(shapes[self.query], tp_rank * queries, queries)),
            *((name, _rows(shapes[name], start, rows)) for name in (self.key, self.value)),
        ]


@dataclass(frozen=True, slots=True)
class ColumnParallel(ShardSpec):
    """Parameter of segments of HF tensors, in order: (tensor, its heads, rows of a head), such as
    the gate and up projections. Segments of one tensor follow each other there. Each rank has an
    equal number of complete heads of every segment. `width` are the sizes of a row."""

    segments: tuple[tuple[str, str, Size], ...]
    width: tuple[Size, ...] = ()

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        rows: dict[str, int] = {}
        for name, *sizes in self.segments:
            rows[name] = rows.get(name, 0) + prod(_sizes(arch, sizes))
        width = _sizes(arch, self.width)
        return {name: (number, *width) for name, number in rows.items()}

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Boxes:
        shapes, first, boxes = self.tensors(arch), Counter[str](), []
        for name, *sizes in self.segments:
            heads, rows = _sizes(arch, sizes)
            share = _share(heads, tp_size, f"heads of {name}") * rows
            boxes.append((name, _rows(shapes[name], first[name] + tp_rank * share, share)))
            first[name] += heads * rows
        return boxes


@dataclass(frozen=True, slots=True)
class VocabParallel(ShardSpec):
    """Weight [vocabulary, hidden]; each rank has an equal share of the padded vocabulary's rows."""

    name: str

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        return {self.name: (arch.vocab_size, arch.hidden_size)}

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        [(name, shape)] = self.tensors(arch).items()
        rows = -(-arch.vocab_size // tp_size)
        region = _without_padding(shape, tp_rank * rows, rows)
        parts = (ParameterPart(name, shape, region),) if region else ()
        return LocalParameter((rows, arch.hidden_size), parts)

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Boxes:
        [(name, shape)] = self.tensors(arch).items()
        padded = -(-arch.vocab_size // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
        rows = _share(padded, tp_size, "the padded vocabulary")
        region = _without_padding(shape, tp_rank * rows, rows)
        return [(name, region)] if region else []


def _rows(shape: Shape, first: int, rows: int) -> Region:
    """Return the box of rows [first, first + rows) of a tensor of `shape`."""
    return Region((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _without_padding(shape: Shape, first: int, rows: int) -> Region | None:
    """Return the rows of [first, first + rows) that a tensor of `shape` has, or None."""
    return _rows(shape, first, rows).intersect(whole(shape))


def _sizes(arch: Architecture, sizes: Iterable[Size]) -> Shape:
    return tuple(size if isinstance(size, int) else attrgetter(size)(arch) for size in sizes)


def _share(total: int, ranks: int, what: str) -> int:
    if total % ranks:
        raise ConfigError(f"tensor_parallel: {total} ({what}) cannot be divided equally by {ranks}")
    return total // ranks
