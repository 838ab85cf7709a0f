"""All differences between CPU and CUDA for Megatron-core.

Megatron-core 0.16 hard-codes the CUDA device in its optimizer, gradient clipping, schedules and
buffers. Without a GPU, `megatron_device()` redirects these calls to the CPU. It is a context
manager for calls into Megatron, and must not be active while the engine runs. With a GPU it does
nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dapo_megatron.cluster.processes import bind_near, use_expandable_segments, visible_gpus

ALIGNMENT_BYTES = 512
"""Alignment of tensors that share a transfer, as torch allocates them on a GPU."""


def has_cuda() -> bool:
    """Return whether this process computes on a CUDA device."""
    return bool(torch.cuda.is_available())


def device() -> torch.device:
    """Return the device of the policy's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """Return the torch.distributed backend of this machine: nccl or gloo."""
    return "nccl" if has_cuda() else "gloo"


def claim(local_rank: int) -> None:
    """Select the GPU of this process's local rank. Call before the process group is initialized."""
    # CUDA reads it when it is first used, perhaps already to count devices. With more connections,
    # the order in which Megatron's communication and computation are launched is lost, and they do
    # not overlap.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Transformer Engine reads it when it is imported. It would compile small operations of context
    # parallelism on half of the ranks, again for new shapes, while the others wait.
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    if has_cuda():
        gpus = visible_gpus()
        bind_near([gpus[local_rank] if gpus else str(local_rank)])
        torch.cuda.set_device(local_rank)
        use_expandable_segments(True)
        # Partial sums of a matmul stay float32. torch would let cuBLAS round them to bfloat16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def to_device(tensors: Sequence[Tensor], target: torch.device) -> list[Tensor]:
    """Return copies of host tensors on a device. They travel in one pinned transfer, which the host
    does not wait for."""
    sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors]
    *starts, num_bytes = accumulate(sizes, initial=0)
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=target.type == "cuda")

    def part(whole: Tensor, start: int, like: Tensor) -> Tensor:
        return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)

    for start, tensor in zip(starts, tensors, strict=True):
        part(packed, start, tensor).copy_(tensor)
    moved = packed.to(target, non_blocking=True)
    return [part(moved, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory. From a GPU it is complete when the GPU's stream is: the host
    does not wait for it."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return pinned.copy_(tensor, non_blocking=True)


def megatron_device() -> contextlib.AbstractContextManager[None]:
    """Return the context manager in which to call Megatron-core."""
    return contextlib.nullcontext() if has_cuda() else _cpu_answers_for_cuda()


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces device "cuda" by "cpu" in torch calls, and reports CPU tensor types as CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers compare param.type() with "torch.cuda.FloatTensor". float64 tensors are
            # reported as float32 ones, because optimizers treat both in the same way.
            name = func(*args).replace("Double", "Float")
            return name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]  # the optimizer asks for full precision; float64 must stay float64
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **(kwargs or {}))


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _SynchronousStream:
    """Stands for CUDA streams and events on a CPU, where every call has finished on return."""

    def wait_stream(self, _: Any) -> None:
        """Do nothing."""

    def record_event(self) -> _SynchronousStream:
        """Return an event that has happened already."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""

    def wait(self, _: Any) -> None:
        """Do nothing."""


class _NoRandomness:
    """Stands for Megatron's tracker of RNG states per region. The model has no dropout and draws no
    random numbers, so recomputed layers need no restored state."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        """Return no states."""
        return {}

    def set_states(self, _: dict[str, Any]) -> None:
        """Do nothing."""


def _as_sizes(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return split sizes as numpy if asked, which collectives accept. Megatron's
    maybe_move_tensor_to_cpu does so only for tensors on a GPU."""
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


_STREAM = _SynchronousStream()


@cache
def _patches() -> tuple[tuple[Any, str, Any], ...]:
    """Return (module, name, replacement) of every function that is replaced."""
    # Imported here because a run calls `backend` before its output goes to a log, and Megatron
    # prints warnings when it is imported.
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    return (
        # If Transformer Engine is installed, Megatron uses its CUDA kernels for the norm of the
        # gradients, even without a GPU.
        (clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier),
        (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
        (optimizer, "multi_tensor_applier", utils.local_multi_tensor_applier),
        (optimizer, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "empty_cache", lambda: None),
        # The all-to-all of expert parallelism copies its counts on a side stream.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_sizes),
        (torch.cuda, "Stream", lambda *_, **__: _STREAM),
        (torch.cuda, "current_stream", lambda *_: _STREAM),
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        # Sequence parallelism and recomputation fork and restore the states of CUDA generators.
        (random, "_CUDA_RNG_STATE_TRACKER", _NoRandomness()),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
    )


@contextlib.contextmanager
def _cpu_answers_for_cuda() -> Iterator[None]:
    kept = [getattr(module, name) for module, name, _ in _patches()]
    for module, name, replacement in _patches():
        setattr(module, name, replacement)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for (module, name, _), original in zip(_patches(), kept, strict=True):
            setattr(module, name, original)
