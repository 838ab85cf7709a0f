"""An engine's GPU memory: what it must find when it wakes up.

vLLM (0.32) keeps weights and KV cache in pools of their own, next to torch's caching allocator
(`vllm.device_allocator.cumem`): asleep they have addresses and no memory behind them. Settings of
torch's allocator that these pools cannot live with are refused by plan/compatibility.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM
    from vllm.device_allocator import AllocationData

Part = Literal["weights", "kv_cache"]
"""vLLM's tags of what can be woken by itself; anything else comes with either."""
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
_NAMES = {"weights": "weights", "kv_cache": "KV cache"}


def check_room(part: Part) -> None:
    """Before waking `part` on a GPU. What torch keeps for the policy without using it is given back
    first: no pool can have it otherwise. Raises ConfigError if there is too little memory."""
    from vllm.device_allocator.cumem import CuMemAllocator

    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    needed = bytes_asleep(CuMemAllocator.get_instance().pointer_to_data.values(), part)
    if (problem := shortage(part, needed, free, total)) is not None:
        raise ConfigError(problem)


def clear_cache(llm: LLM) -> None:
    """Zeros into the KV cache. What a GPU maps for it may hold numbers that are none, and attention
    multiplies by those of a block's unused places: by 0, which leaves them what they are."""

    @torch.no_grad()
    def clear(model: nn.Module) -> None:
        seen = set()
        for module in model.modules():
            cache = getattr(module, "kv_cache", None)
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                if isinstance(tensor, Tensor) and tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    tensor.zero_()

    llm.apply_model(clear)


def bytes_asleep(allocations: Iterable[AllocationData], part: Part) -> int:
    """That waking `part` allocates: itself, and what is neither weights nor KV cache."""
    return sum(
        data.handle[1]
        for data in allocations
        if data.is_asleep and (data.tag == part or data.tag not in PARTS)
    )


def shortage(part: Part, needed: int, free: int, total: int) -> str | None:
    """What to say if `needed` bytes are more than are `free` of a device's `total`."""
    if needed <= free:
        return None
    gib = 2**30
    return (
        f"engine.memory_fraction: the engine's {_NAMES[part]} take {needed / gib:.2f} GiB and "
        f"{free / gib:.2f} GiB of {total / gib:.2f} GiB are free when it wakes up; the policy has "
        "the rest. Lower engine.memory_fraction, or let the policy leave more by policy.offload "
        "(weights, gradients, optimizer)"
    )
