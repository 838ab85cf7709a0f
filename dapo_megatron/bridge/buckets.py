"""Weights from a trainer rank to the engine worker on the same GPU, through two shared buckets.

The rank packs tensors into a bucket and tells the worker where they are. Meanwhile the worker loads
the other bucket. On a CPU a bucket is memory without a name, which the kernel frees with
the last process that uses it. On a GPU it is memory that the rank exports by CUDA IPC. (vLLM's own
transfer sends whole HF tensors to each worker. Here each gets only its slices.)
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.cluster.curve import end_watch, watch_connection
from dapo_megatron.cluster.processes import use_expandable_segments
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.types import Region, SyncError, TensorSlice

BUCKET_BYTES = 64 * 2**20
"""Size of a bucket, unless a tensor needs more."""
ALIGNMENT_BYTES = 64
POLL_MS = 1000

Handle = str | dict[str, Any]
"""Path of a bucket in host memory, or arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice in a bucket, `offset` bytes after its start."""

    region: Region
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True, slots=True)
class _Filled:
    """Message to the worker: a bucket is filled.

    num_bytes  size of the bucket
    tensors    (HF name, slices)
    """

    number: int
    handle: Handle
    num_bytes: int
    tensors: list[tuple[str, list[_Slice]]]
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Freed:
    """Message to the rank: a bucket may be filled again, or why no more can be loaded."""

    number: int
    error: str = ""


class BucketSender:
    """Sender of one trainer rank.

    folder           for sockets; only this user can open it
    silence_seconds  time that a worker may take for a bucket
    """

    def __init__(self, folder: Path, device: torch.device, silence_seconds: float) -> None:
        self._folder, self._device = folder, device
        self._silence_seconds = silence_seconds
        self._buckets: list[_Bucket] = []
        self._num_syncs = 0

    def expect(self, slices: Iterable[TensorSlice]) -> None:
        """Make buckets with room for each tensor of these slices."""
        by_tensor: Counter[str] = Counter()
        for part in slices:
            by_tensor[part.name] += _aligned(part.nbytes)
        needed = max(min(sum(by_tensor.values()), BUCKET_BYTES), *by_tensor.values(), 1)
        if any(len(bucket.memory) < needed for bucket in self._buckets) or not self._buckets:
            self._buckets = [_Bucket(needed, self._device) for _ in range(2)]

    def open(self) -> str:
        """Listen for the worker, for one sync. Return the address."""
        self._num_syncs += 1
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = watch_connection(self._socket, self._silence_seconds)
        self._path = self._folder / f"weights_{os.getpid()}_{self._num_syncs}"
        self._socket.bind(f"ipc://{self._path}")
        return f"ipc://{self._path}"

    def send(self, weights: Iterable[ReceivedTensor]) -> str:
        """Send tensors, and wait until the worker has loaded them. Return why this failed; empty if
        it did not."""
        try:
            self._send(weights)
        except SyncError as error:
            return str(error)
        finally:
            end_watch(self._socket, self._monitor)
            self._socket.close(0)
            self._path.unlink(missing_ok=True)
        return ""

    def _send(self, weights: Iterable[ReceivedTensor]) -> None:
        handles = [bucket.export() for bucket in self._buckets]
        free = [1, 0]
        number, used = free.pop(), 0
        tensors: list[tuple[str, list[_Slice]]] = []

        def flush(*, is_last: bool) -> None:
            memory = self._buckets[number].memory
            _await_copies(memory)
            filled = _Filled(number, handles[number], len(memory), tensors, is_last)
            self._wait(zmq.POLLOUT)  # for the worker to connect
            self._socket.send(encode(filled))

        for name, parts in weights:
            num_bytes = sum(_aligned(value.nbytes) for _, value in parts)
            if used + num_bytes > len(self._buckets[number].memory):
                flush(is_last=False)
                free = free or [self._freed()]
                number, used, tensors = free.pop(), 0, []
            slices = []
            for region, value in parts:
                place = self._buckets[number].memory[used : used + value.nbytes]
                place.view(value.dtype).view(value.shape).copy_(value)
                slices.append(_Slice(region, value.dtype, used))
                used += _aligned(value.nbytes)
            tensors.append((name, slices))
        flush(is_last=True)
        for _ in range(2 - len(free)):
            self._freed()

    def _freed(self) -> int:
        """Wait until the worker has emptied a bucket. Return its number. Raises SyncError."""
        self._wait(zmq.POLLIN)
        return self._read()

    def _read(self) -> int:
        """Return the number of a bucket that the worker reports as empty. Raises SyncError with its
        reason if it loads no more."""
        freed: _Freed = decode(self._socket.recv(), _Freed, "an engine worker")
        if freed.error:
            raise SyncError(freed.error)
        return freed.number

    def _wait(self, event: int) -> None:
        """Wait for the worker. Raises SyncError if it ends or does nothing."""
        end = time.monotonic() + self._silence_seconds
        while not self._socket.poll(POLL_MS, event):
            if self._monitor.poll(0):
                if self._socket.poll(0, event):  # it came between the two polls
                    return
                while self._socket.poll(0):
                    self._read()
                raise SyncError("its worker ended while it loaded weights")
            if time.monotonic() > end:
                raise SyncError(f"its worker loaded nothing for {self._silence_seconds:g} s")


def received(address: str, seconds: float) -> Iterator[ReceivedTensor]:
    """Yield the tensors that a trainer rank sends. Their memory is used again afterwards. Raises
    SyncError if nothing arrives for `seconds`."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    opened: dict[int, Tensor] = {}
    number = 0
    try:
        while True:
            if not socket.poll(int(1000 * seconds)):
                raise SyncError(f"no weights arrived for {seconds:g} s")
            filled: _Filled = decode(socket.recv(), _Filled, "a trainer rank")
            number = filled.number
            if number not in opened:
                opened[number] = _opened(filled.handle, filled.num_bytes)
            for name, slices in filled.tensors:
                yield name, [(part.region, _view(opened[number], part)) for part in slices]
            _await_copies(opened[number])
            socket.send(encode(_Freed(number)))
            if filled.is_last:
                return
    except (GeneratorExit, SyncError) as error:
        socket.send(encode(_Freed(number, str(error) or "the worker refused the weights")))
        raise
    finally:
        socket.close(linger=1000)


class _Bucket:
    """Memory that another process of this node can open."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        if device.type == "cuda":
            # To open an expandable segment, the worker needs the right to trace this process.
            use_expandable_segments(False)
            try:
                self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            finally:
                use_expandable_segments(True)
            return
        self._file = os.memfd_create("weights")
        os.ftruncate(self._file, num_bytes)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.memory = _opened(self._path, num_bytes)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._file)

    def export(self) -> Handle:
        """Return how another process opens the bucket. On a GPU each export is for one process,
        which opens it once."""
        if not self.memory.is_cuda:
            return self._path
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(self.memory)
        return {
            name: list(value) if isinstance(value, torch.Size) else value
            for name, value in zip(_CUDA_ARGUMENTS, arguments, strict=True)
            if name not in _KNOWN
        }


_CUDA_ARGUMENTS = (
    *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"),
    *("storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes"),
    *("requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle"),
    "event_sync_required",
)
"""Parameters of torch's `rebuild_cuda_tensor` (torch 2.13), in their order."""
_KNOWN = ("tensor_cls", "storage_cls", "dtype", "storage_device")


def _opened(handle: Handle, num_bytes: int) -> Tensor:
    """Return the memory of a bucket."""
    if isinstance(handle, str):
        return torch.from_file(handle, shared=True, size=num_bytes, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    memory: Tensor = rebuild_cuda_tensor(
        **handle,
        tensor_cls=Tensor,
        storage_cls=torch.storage.UntypedStorage,
        dtype=torch.uint8,
        storage_device=torch.cuda.current_device(),
    )
    return memory


def _await_copies(memory: Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.current_stream().synchronize()


def _view(memory: Tensor, part: _Slice) -> Tensor:
    """Return a slice as it is in a bucket."""
    stop = part.offset + part.region.numel * part.dtype.itemsize
    return memory[part.offset : stop].view(part.dtype).view(part.region.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
