"""Offload parts of the policy to host memory while engines generate, and reload them.

Storages are copied to host memory and resized to 0 bytes. Every tensor in such a storage
(parameters, Megatron's views of its buffers, shards of the bridge) stays the same object, and has
the same values, bit by bit, after the storage is resized and copied back. On a CPU the same copies
are made within host memory, so that the tests cover this code.

Megatron-core 0.16.1 has its own functions for this. They do not offload the optimizer's float32
copies of weights, create new tensors for its state each time, and pin host memory again each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from dapo_megatron.policy import fp8
from dapo_megatron.policy.device import ALIGNMENT_BYTES, device, has_cuda
from dapo_megatron.policy.optimizer import device_tensors

CHUNK_BYTES = 2**28
"""Size of a chunk of pinned memory: 256 MiB. torch rounds pinned allocations up to powers of two,
and with chunks of this size at most one chunk is wasted."""


class Offload:
    """The storages of the parts named in policy.offload. Methods are idempotent."""

    def __init__(self, parts: Sequence[str], chunks: Sequence[Any], optimizer: Any) -> None:
        self._parts = parts
        self._chunks = chunks
        self._optimizer = optimizer
        self._host = HostMemory()
        self._copied: list[tuple[UntypedStorage, int]] = []
        self._dropped: list[tuple[UntypedStorage, int]] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether any storage is offloaded."""
        return bool(self._copied or self._dropped)

    @torch.no_grad()
    def offload(self) -> None:
        """Copy weights and optimizer state to host memory, drop gradients, and free the device's
        memory. No kernel may be using it."""
        if self.is_offloaded or not self._parts:
            return
        copied, dropped = self._storages()
        self._host.save(copied)
        self._copied = [(storage, storage.nbytes()) for storage in copied]
        self._dropped = [(storage, storage.nbytes()) for storage in dropped]
        for storage in (*copied, *dropped):
            storage.resize_(0)
        if has_cuda():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def reload(self) -> None:
        """Restore weights and optimizer state bit by bit. Gradients are zero."""
        for storage, num_bytes in (*self._copied, *self._dropped):
            storage.resize_(num_bytes)
        self._host.restore([storage for storage, _ in self._copied])
        for storage, _ in self._dropped:
            _bytes(storage).zero_()
        self._copied, self._dropped = [], []

    def _storages(self) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
        """Return the storages to copy and the storages to drop, each once."""
        weights = distinct_storages(_weights(self._chunks))
        gradients = distinct_storages(_gradients(self._chunks))
        model_storages = weights.keys() | gradients.keys()
        # If the optimizer has no float32 copies, its parameters are views of the model's.
        state = {
            address: storage
            for address, storage in distinct_storages(device_tensors(self._optimizer)).items()
            if address not in model_storages
        }
        copied = [*weights.values()] if "weights" in self._parts else []
        copied += [*state.values()] if "optimizer" in self._parts else []
        return copied, [*gradients.values()] if "gradients" in self._parts else []


class HostMemory:
    """Host memory for the bytes of storages, pinned if there is a GPU. It grows as needed, is
    reused by every `save`, and is never freed."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._reserved = 0

    def reserve(self, num_bytes: int) -> int:
        """Return the position of so many bytes, for `save` and `load` of a storage on its own."""
        position = self._reserved
        self._reserved += num_bytes + -num_bytes % ALIGNMENT_BYTES
        return position

    def load(self, storage: UntypedStorage, position: int) -> None:
        """Copy saved bytes back, before what the current stream does next."""
        for host, device_bytes in self._pairs([storage], position):
            device_bytes.copy_(host, non_blocking=True)

    def save(self, storages: Iterable[UntypedStorage], position: int = 0) -> None:
        """Copy storages to host memory, in this order from `position`."""
        for host, device_bytes in self._pairs(storages, position):
            host.copy_(device_bytes, non_blocking=True)
        _wait_for_copies()

    def restore(self, storages: Iterable[UntypedStorage]) -> None:
        """Copy saved bytes back. `storages` must have the sizes and order of the last `save`."""
        for host, device_bytes in self._pairs(storages):
            device_bytes.copy_(host, non_blocking=True)
        _wait_for_copies()

    def swap(self, storages: Iterable[UntypedStorage]) -> None:
        """Exchange saved bytes with `storages`, which must have the sizes and order of the
        last `save`. The device needs memory for one chunk meanwhile."""
        for host, device_bytes in self._pairs(storages):
            on_device = device_bytes.clone()
            device_bytes.copy_(host, non_blocking=True)
            host.copy_(on_device, non_blocking=True)
        _wait_for_copies()

    def _pairs(
        self, storages: Iterable[UntypedStorage], position: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bytes of host memory, bytes of a storage), uint8 tensors of the same size."""
        for storage in storages:
            position += -position % ALIGNMENT_BYTES
            device_bytes, start = _bytes(storage), 0
            while start < len(device_bytes):
                number, offset = divmod(position, CHUNK_BYTES)
                if number == len(self._chunks):
                    chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=has_cuda())
                    self._chunks.append(chunk)
                size = min(len(device_bytes) - start, CHUNK_BYTES - offset)
                yield (
                    self._chunks[number][offset : offset + size],
                    device_bytes[start : start + size],
                )
                start, position = start + size, position + size


def _wait_for_copies() -> None:
    if has_cuda():
        torch.cuda.synchronize()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def weight_storages(chunks: Sequence[Any]) -> list[UntypedStorage]:
    """Return the storages of a rank's weights, each once, always in the same order."""
    return [*distinct_storages(_weights(chunks)).values()]


def distinct_storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Return the storages of tensors on the policy's device, by address. Tensors that
    optimizer.cpu_offload keeps in host memory are skipped."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == device()]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _weights(chunks: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.param_data
        for parameter in chunk.module.parameters():
            if fp8.is_quantized(parameter):
                yield from fp8.tensors_of(parameter)  # scales are in no buffer
            elif not parameter.requires_grad:
                yield parameter  # frozen parameters are in no buffer


def _gradients(chunks: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data
