"""Everything that differs between CPU and CUDA for Megatron-core, and only that.

Megatron-core 0.16 names the CUDA device literally in its optimizer, gradient clipping, schedules
and buffers. Where there is no GPU, `megatron_device()` answers for it: a context entered around
calls into Megatron, never left on while the engine runs. With a GPU the context does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def has_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return bool(torch.cuda.is_available())


def device() -> torch.device:
    """Where the policy's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of this machine."""
    return "nccl" if has_cuda() else "gloo"


def claim(local_rank: int) -> None:
    """Make this process use the GPU of its local rank; before joining the process group."""
    if has_cuda():
        torch.cuda.set_device(local_rank)


def megatron_device() -> contextlib.AbstractContextManager[None]:
    """Enter around every call into Megatron-core."""
    return contextlib.nullcontext() if has_cuda() else _cpu_answers_for_cuda()


class _CudaMeansCpu(TorchFunctionMode):
    """Maps the literal device "cuda" to the CPU and names CPU dtypes as CUDA types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers compare param.type() with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **(kwargs or {}))


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


_PATCHES: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda *_: None,
    "set_device": lambda *_: None,
    "is_current_stream_capturing": lambda: False,
    "empty_cache": lambda: None,
}


@contextlib.contextmanager
def _cpu_answers_for_cuda() -> Iterator[None]:
    kept = {name: getattr(torch.cuda, name) for name in _PATCHES}
    for name, answer in _PATCHES.items():
        setattr(torch.cuda, name, answer)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for name, original in kept.items():
            setattr(torch.cuda, name, original)
