"""Shard specs: how a parameter is made of HF tensors, and how tensor parallelism shards it.

Given an `Architecture`, a shard spec returns the HF tensors (`tensors`), Megatron-core's parameter
on one rank (`local_parameter`), and vLLM's part of the HF tensors on one rank (`engine`). Linear
weights are [output rows, input columns] in HF, Megatron-core and vLLM.

Names of HF tensors are without the prefix of their layer here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from dapo_megatron.model.architecture import Architecture
from dapo_megatron.types import ConfigError, Region, whole

Shape = tuple[int, ...]

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

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        """Return Megatron-core's local parameter."""

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        """Return vLLM's local part of each HF tensor, without tensors that it has no part of."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Parameter that is the same on every rank, such as norms and routers. `sizes` are names of
    fields of the architecture; `latent.kv_lora_rank` names a nested field."""

    name: str
    sizes: tuple[str, ...]

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        return {self.name: tuple(attrgetter(size)(arch) for size in self.sizes)}

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        [shape] = self.tensors(arch).values()
        return LocalParameter(shape, (ParameterPart(self.name, shape, whole(shape)),))

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        return {name: whole(shape) for name, shape in self.tensors(arch).items()}


@dataclass(frozen=True, slots=True)
class RowParallel:
    """Weight [hidden, `inputs`]; each rank has an equal share of the columns."""

    name: str
    inputs: str

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        return {self.name: (arch.hidden_size, getattr(arch, self.inputs))}

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        return _one_tensor(self, arch, tp_rank, tp_size)

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        [(name, (rows, columns))] = self.tensors(arch).items()
        size = _share(columns, tp_size, name)
        return {name: Region((0, tp_rank * size), (rows, size))}


@dataclass(frozen=True, slots=True)
class MergedColumnParallel:
    """Gate and up projection, [`rows`, hidden] each. Each rank has an equal share of the rows of
    both, its gate rows followed by its up rows."""

    gate: str
    up: str
    rows: str

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        shape = (getattr(arch, self.rows), arch.hidden_size)
        return {self.gate: shape, self.up: shape}

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        shapes, regions = self.tensors(arch), self.engine(arch, tp_rank, tp_size)
        rows, hidden = regions[self.gate].shape
        return LocalParameter(
            (2 * rows, hidden),
            (
                ParameterPart(self.gate, shapes[self.gate], regions[self.gate], 0),
                ParameterPart(self.up, shapes[self.up], regions[self.up], rows),
            ),
        )

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        return {
            name: _rows(shape, tp_rank * size, size)
            for name, shape in self.tensors(arch).items()
            for size in [_share(shape[0], tp_size, name)]
        }


@dataclass(frozen=True, slots=True)
class ColumnParallel:
    """Weight [heads x `head_rows`, `inputs`]; each rank has an equal number of complete heads."""

    name: str
    head_rows: str
    inputs: str

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        rows, inputs = attrgetter(self.head_rows, self.inputs)(arch)
        return {self.name: (arch.num_heads * rows, inputs)}

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        return _one_tensor(self, arch, tp_rank, tp_size)

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        [(name, shape)] = self.tensors(arch).items()
        heads = _share(arch.num_heads, tp_size, "attention heads")
        rows = heads * shape[0] // arch.num_heads
        return {name: _rows(shape, tp_rank * rows, rows)}


@dataclass(frozen=True, slots=True)
class QKVParallel:
    """Query, key and value projections: weights [rows, hidden] or biases [rows].

    Megatron's fused parameter has, for each key-value head, its query heads, its key and its value.
    Each rank has an equal interval of these rows. With more ranks than key-value heads, an interval
    can end inside a group; attention then gathers the fused activations (transformer/attention.py,
    get_query_key_value_tensors). vLLM shards by heads and replicates key-value heads if there are
    more ranks.
    """

    query: str
    key: str
    value: str
    is_bias: bool = False

    def tensors(self, arch: Architecture) -> Mapping[str, Shape]:
        width = () if self.is_bias else (arch.hidden_size,)
        return {
            self.query: (arch.query_rows, *width),
            self.key: (arch.group_rows, *width),
            self.value: (arch.group_rows, *width),
        }

    def local_parameter(self, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
        shapes = self.tensors(arch)
        size = _share(arch.query_rows + 2 * arch.group_rows, tp_size, "the fused query-key-value")
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
        head, queries = arch.head_dim, arch.query_rows // arch.num_kv_heads
        for group in range(arch.num_kv_heads):
            yield self.query, group * queries, queries
            yield self.key, group * head, head
            yield self.value, group * head, head

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        shapes = self.tensors(arch)
        queries = _share(arch.num_heads, tp_size, "attention heads") * arch.head_dim
        if tp_size > arch.num_kv_heads:
            num_copies = _share(tp_size, arch.num_kv_heads, "key-value heads on engine ranks")
            first, groups = tp_rank // num_copies, 1
        else:
            groups = _share(arch.num_kv_heads, tp_size, "key-value heads")
            first = tp_rank * groups
        regions = {self.query: _rows(shapes[self.query], tp_rank * queries, queries)}
        for name in (self.key, self.value):
            regions[name] = _rows(shapes[name], first * arch.head_dim, groups * arch.head_dim)
        return regions


@dataclass(frozen=True, slots=True)
class VocabParallel:
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

    def engine(self, arch: Architecture, tp_rank: int, tp_size: int) -> Mapping[str, Region]:
        [(name, shape)] = self.tensors(arch).items()
        padded = -(-arch.vocab_size // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
        rows = _share(padded, tp_size, "the padded vocabulary")
        region = _without_padding(shape, tp_rank * rows, rows)
        return {name: region} if region else {}


def _rows(shape: Shape, first: int, rows: int) -> Region:
    """Return the box of rows [first, first + rows) of a tensor of `shape`."""
    return Region((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _without_padding(shape: Shape, first: int, rows: int) -> Region | None:
    """Return the rows of [first, first + rows) that a tensor of `shape` has, or None."""
    return _rows(shape, first, rows).intersect(whole(shape))


def _one_tensor(spec: ShardSpec, arch: Architecture, tp_rank: int, tp_size: int) -> LocalParameter:
    [(name, shape)] = spec.tensors(arch).items()
    region = spec.engine(arch, tp_rank, tp_size)[name]
    return LocalParameter(region.shape, (ParameterPart(name, shape, region),))


def _share(total: int, ranks: int, what: str) -> int:
    if total % ranks:
        raise ConfigError(f"tensor_parallel: {total} ({what}) cannot be divided equally by {ranks}")
    return total // ranks
