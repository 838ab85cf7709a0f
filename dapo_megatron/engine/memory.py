"""GPU memory that an engine needs to wake up.

vLLM (0.32) keeps weights and KV cache in separate memory pools, next to torch's caching allocator
(`vllm.device_allocator.cumem`). Asleep, they have addresses but no physical memory.
plan/compatibility refuses settings of torch's allocator that do not work with these pools.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch

from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from vllm.device_allocator import AllocationData

MemoryTag = Literal["weights", "kv_cache"]
"""vLLM's tags of memory that can be woken separately. Memory with another tag wakes with either."""
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
_NAMES = {"weights": "weights", "kv_cache": "KV cache"}


def check_room(part: MemoryTag) -> None:
    """Raise ConfigError if a GPU has too little free memory to wake `part`.

    First frees the memory that torch caches, because the pools cannot use it.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    needed = bytes_asleep(CuMemAllocator.get_instance().pointer_to_data.values(), part)
    if (problem := shortage(part, needed, free, total)) is not None:
        raise ConfigError(problem)


def bytes_asleep(allocations: Iterable[AllocationData], part: MemoryTag) -> int:
    """Return the bytes that waking `part` allocates: those of `part`, and those that are neither
    weights nor KV cache."""
    return sum(
        data.handle[1]
        for data in allocations
        if data.is_asleep and (data.tag == part or data.tag not in MEMORY_TAGS)
    )


def shortage(part: MemoryTag, needed: int, free: int, total: int) -> str | None:
    """Return an error message if `needed` exceeds `free` of a device's `total` bytes, else None."""
    if needed <= free:
        return None
    gib = 2**30
    return (
        f"engine.memory_fraction: the engine's {_NAMES[part]} take {needed / gib:.2f} GiB, but "
        f"only {free / gib:.2f} GiB of {total / gib:.2f} GiB are free when it wakes up. The policy "
        "has the rest. Lower engine.memory_fraction, or offload more of the policy by "
        "policy.offload (weights, gradients, optimizer)"
    )
