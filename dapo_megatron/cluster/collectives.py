"""Collectives for typed values, and work that fails on all ranks together.

Values are sent as MessagePack and checked against a type by the receiver. A rank never unpickles a
message of another rank, because unpickling can run code. Unlike JSON, MessagePack keeps NaN,
infinity and every bit of a float.

Supported types: numbers, str, bytes, None, list, tuple, dict, enums, dataclasses, named tuples,
Path, torch.dtype, and array.array, which is sent as bytes. An int that is sent as a float arrives
as a float.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import msgspec

from dapo_megatron import types
from dapo_megatron.cluster.groups import TIMEOUT, group_or_world
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import DapoError, RankError, dtype_name, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_SURROGATE = re.compile("[\ud800-\udfff]")
_making_decoder = threading.Lock()


_KINDS: tuple[type[DapoError], ...] = (DapoError, *DapoError.__subclasses__())
_ERRORS = {kind.__name__: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Serializable form of a DapoError, which lets every rank raise the error of one rank."""

    kind: str
    """Name of a class in types.py."""
    text: str

    @staticmethod
    def of(error: DapoError | None) -> ErrorRecord | None:
        """Return the record of an error. Any other class is recorded as its base class."""
        if error is None:
            return None
        kinds = (kind.__name__ for kind in type(error).__mro__)
        return ErrorRecord(next(kind for kind in kinds if kind in _ERRORS), str(error))

    def error(self) -> DapoError:
        """Return the error; a plain DapoError if `kind` is unknown."""
        return _ERRORS.get(self.kind, DapoError)(self.text)


NAMED = 5
"""Maximum number of ranks whose reasons an error lists."""


def on_rank0(exchange: Exchange, action: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
    """Run `action` with these arguments on rank 0 only. Return its result there, and None on other
    ranks. Collective.

    A DapoError of `action` is raised on every rank, so that no rank waits for a failed rank 0.
    """
    result, error = None, None
    if exchange.rank == 0:
        try:
            result = action(*arguments)
        except DapoError as raised:
            error = raised
    record = exchange.broadcast(ErrorRecord.of(error), ErrorRecord | None)
    if record:
        raise error or record.error()
    return result


def on_all_ranks(exchange: Exchange, action: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Run `action` with these arguments on every rank and return this rank's result. Collective.

    If it raises a DapoError on some ranks, all ranks raise an error with these ranks and their
    reasons. An exception other than DapoError ends this rank; the launcher then ends the others.
    """
    result, error = None, None
    try:
        result = action(*arguments)
    except DapoError as raised:
        error = raised
    records = exchange.all_gather(ErrorRecord.of(error), ErrorRecord | None)
    if any(records):
        named = zip(exchange.names, records, strict=True)
        errors = [(rank, record) for rank, record in named if record is not None]
        lines = [f"rank {rank}: {record.text}" for rank, record in errors]
        first = errors[0][1]
        raise ErrorRecord(first.kind, "\n".join(lines[:NAMED])).error()
    return cast(T, result)


def gather_distinct(exchange: Exchange, value: T, of: object) -> tuple[list[T], list[int]]:
    """Return the distinct values of all ranks, and the index of each rank's value. Collective.

    Each distinct value travels once. An all-gather would send a value that a thousand ranks have in
    common a thousand times.
    """
    digest = hashlib.sha256(encode(value)).hexdigest()
    digests = exchange.all_gather(digest, str)
    index = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    values = [exchange.broadcast(value, of, digests.index(digest)) for digest in index]
    return values, [index[digest] for digest in digests]


def encode(value: object) -> bytes:
    """Return `value` as a message. Raises TypeError for an unsupported type."""
    try:
        return _encoder().encode(value)
    except UnicodeEncodeError:
        # UTF-8 cannot encode lone surrogates. A grader's text or a file name may contain one, and
        # this must not end the run.
        plain = msgspec.to_builtins(value, enc_hook=_plain, builtin_types=(bytes,))
        return _encoder().encode(_without_surrogates(plain))


def decode(message: bytes | memoryview, of: Any, sender: str) -> Any:
    """Return the value of type `of` in a message. Raises RankError naming the sender, such as
    "rank 3"."""
    try:
        return _decoder(of).decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RankError(
            f"{sender}: sent a message that cannot be read ({error}). Do all ranks run the same "
            "version of dapo_megatron?"
        ) from None


def all_gather(value: T, of: object, group: Any, names: Sequence[int]) -> list[T]:
    """Return the value of each rank of a gloo group, in rank order. Collective.

    `of` is the type of the values, `names` the numbers of the group's ranks in the run. Raises
    RankError on every rank if a message does not have the type.
    """
    import torch

    group = group_or_world(group)
    message = _tensor(encode(value))
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather(sizes, torch.tensor([message.numel()])).wait()
    longest = max(int(size) for size in sizes)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    padding = torch.zeros(longest - message.numel(), dtype=torch.uint8)
    group.allgather(received, torch.cat([message, padding])).wait()
    return [
        decode(_view(tensor, int(size)), of, f"rank {rank}")
        for rank, tensor, size in zip(names, received, sizes, strict=True)
    ]


def broadcast(value: T, of: object, group: Any, names: Sequence[int], source: int = 0) -> T:
    """Return the value of rank `source` of a gloo group on each of its ranks. Collective. See
    `all_gather`."""
    import torch

    group = group_or_world(group)
    is_sender = group.rank() == source
    message = _tensor(encode(value)) if is_sender else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([message.numel()])
    group.broadcast(size, source).wait()
    if not is_sender:
        message = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(message, source).wait()
    if is_sender:
        return value
    return cast(T, decode(_view(message, int(size)), of, f"rank {names[source]}"))


def scatter(
    parts: Sequence[bytearray] | None, size: int, group: Any, names: Sequence[int]
) -> memoryview:
    """Send `parts[r]` from rank 0 of a gloo group to rank r. Return this rank's part. Collective.

    `parts` counts on rank 0; its own part is returned without a copy. Raises RankError if the part
    does not have `size` bytes.
    """
    import torch

    group = group_or_world(group)
    own = group.rank()
    # gloo ends the process if a message is too long, and accepts one that is too short.
    sizes = torch.tensor([len(part) for part in parts] if parts else [0] * group.size())
    group.broadcast(sizes, 0).wait()
    if sizes[own] != size:
        sent = int(sizes[own])
        raise RankError(f"rank {names[0]}: sends {sent} bytes where {size} are expected")
    if own == 0 and parts is not None:
        works = [
            group.send([torch.frombuffer(part, dtype=torch.uint8)], rank, 0)
            for rank, part in enumerate(parts)
            if rank and part
        ]
        for work in works:
            work.wait(TIMEOUT)  # explicit: gloo's own is for connecting
        return memoryview(parts[0])
    received = torch.empty(size, dtype=torch.uint8)
    if size:
        group.recv([received], 0, 0).wait(TIMEOUT)
    return _view(received, size)


def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    """All-reduce `tensor` over `group`, in place. Does nothing for None or a group of one rank."""
    import torch.distributed as dist

    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


@cache
def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_plain)


@cache
def _decoder(of: Any) -> msgspec.msgpack.Decoder[Any]:
    import torch

    # msgspec evaluates a class's annotations in the namespace of its module, and types.py imports
    # torch for the type checker only.
    vars(types)["torch"] = torch
    # Two threads that make decoders of the same class at once crash the process (msgspec 0.22): the
    # second one uses the description of the class that the first has not finished.
    with _making_decoder:
        return msgspec.msgpack.Decoder(of, dec_hook=_special)


def _plain(value: Any) -> str | bytes:
    """Return a string or bytes for a value of a type that msgspec does not support."""
    import torch

    if isinstance(value, array):
        return b"".join((value.typecode.encode(), value))  # one copy
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    raise TypeError(f"{type(value).__name__}: ranks cannot send each other values of this type")


def _special(kind: type, value: Any) -> Any:
    """Return the value that `_plain` converted."""
    import torch

    if kind is array and isinstance(value, bytes):
        values = array(value[:1].decode("ascii"))
        values.frombytes(memoryview(value)[1:])  # one copy
        return values
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is torch.dtype and isinstance(value, str):
        return torch_dtype(value)
    raise ValueError(f"no {kind.__name__}")


def _without_surrogates(value: Any) -> Any:
    """Return `value` with lone surrogates in all strings replaced by U+FFFD."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def _tensor(message: bytes) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _view(tensor: Tensor, size: int) -> memoryview:
    return tensor.numpy().data[:size]
