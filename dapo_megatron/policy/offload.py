"""Parts of the policy leave the accelerator's memory while engines generate, and come back.

What leaves are storages: they are copied to host memory and resized to nothing. Every tensor that
lies in one (parameters, Megatron's views of its buffers, shards of the bridge) stays the object it
was, and is valid again, bit by bit, once the storage has its size and its bytes back. On a CPU the
same is done, host memory to host memory, so that it is tested.

Megatron-core 0.16.1 has functions of its own for this. They leave the optimizer's float32 copies of
weights where they are, make new tensors of its state each time, and pin host memory anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from dapo_megatron.policy import fp8
from dapo_megatron.policy.device import device, has_cuda
from dapo_megatron.policy.optimizer import device_tensors

CHUNK_BYTES = 2**28
"""Pinned memory comes in powers of two; in chunks of one, no more than one is wasted."""
ALIGNMENT_BYTES = 512


class Offload:
    """The storages of the parts named in policy.offload, here or away. Methods are idempotent."""

    def __init__(self, parts: Sequence[str], chunks: Sequence[Any], optimizer: Any) -> None:
        self._parts = parts
        self._chunks = chunks
        self._optimizer = optimizer
        self._host = HostMemory()
        self._kept: list[tuple[UntypedStorage, int]] = []
        self._given_up: list[tuple[UntypedStorage, int]] = []

    @property
    def is_away(self) -> bool:
        """Whether something is."""
        return bool(self._kept or self._given_up)

    @torch.no_grad()
    def leave(self) -> None:
        """Free the device's memory. Nothing may be computing with it."""
        if self.is_away or not self._parts:
            return
        kept, given_up = self._storages()
        self._host.keep(kept)
        self._kept = [(storage, storage.nbytes()) for storage in kept]
        self._given_up = [(storage, storage.nbytes()) for storage in given_up]
        for storage in (*kept, *given_up):
            storage.resize_(0)
        if has_cuda():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def come_back(self) -> None:
        """As it was, to the last bit; gradients are zero."""
        for storage, num_bytes in (*self._kept, *self._given_up):
            storage.resize_(num_bytes)
        self._host.give_back([storage for storage, _ in self._kept])
        for storage, _ in self._given_up:
            _bytes(storage).zero_()
        self._kept, self._given_up = [], []

    def _storages(self) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
        """Those to be kept and those to be given up, each once."""
        weights = _distinct(_weights(self._chunks))
        gradients = _distinct(_gradients(self._chunks))
        known = weights.keys() | gradients.keys()
        # Without copies of its own, the optimizer's parameters are parts of the model's.
        state = {
            where: storage
            for where, storage in _distinct(device_tensors(self._optimizer)).items()
            if where not in known
        }
        kept = [*weights.values()] if "weights" in self._parts else []
        kept += [*state.values()] if "optimizer" in self._parts else []
        return kept, [*gradients.values()] if "gradients" in self._parts else []


class HostMemory:
    """Memory of the host for the bytes of storages, pinned where there is a GPU; it grows to what
    is needed at once, is used again each time, and is never given back."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """So far."""
        return len(self._chunks) * CHUNK_BYTES

    def keep(self, storages: Iterable[UntypedStorage]) -> None:
        """Copy them here, in this order from the start of the memory."""
        for ours, theirs in self._pairs(storages):
            ours.copy_(theirs, non_blocking=True)
        _wait_for_copies()

    def give_back(self, storages: Iterable[UntypedStorage]) -> None:
        """Copy what is here into storages of the sizes and in the order in which it came."""
        for ours, theirs in self._pairs(storages):
            theirs.copy_(ours, non_blocking=True)
        _wait_for_copies()

    def _pairs(self, storages: Iterable[UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """(bytes of this memory, bytes of a storage), of the same size."""
        position = 0
        for storage in storages:
            position += -position % ALIGNMENT_BYTES
            theirs, start = _bytes(storage), 0
            while start < len(theirs):
                number, offset = divmod(position, CHUNK_BYTES)
                if number == len(self._chunks):
                    chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=has_cuda())
                    self._chunks.append(chunk)
                size = min(len(theirs) - start, CHUNK_BYTES - offset)
                yield (
                    self._chunks[number][offset : offset + size],
                    theirs[start : start + size],
                )
                start, position = start + size, position + size


def _wait_for_copies() -> None:
    if has_cuda():
        torch.cuda.synchronize()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _distinct(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The storages that tensors on the device lie in, by address; what is already elsewhere for
    good (optimizer.cpu_offload) is left there."""
    storages = [one.untyped_storage() for one in tensors if one.device == device()]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _weights(chunks: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.param_data
        for parameter in chunk.module.parameters():
            if fp8.is_quantized(parameter):
                yield from fp8.tensors_of(parameter)  # its scales are in no buffer
            elif not parameter.requires_grad:
                yield parameter  # nor is what is not trained


def _gradients(chunks: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data
