"""Everything that differs between CPU and CUDA for Megatron-core, and only that.

Megatron-core 0.16 names the CUDA device literally in its optimizer, gradient clipping, schedules
and buffers. Where there is no GPU, `megatron_device()` answers for it: a context entered around
calls into Megatron, never left on while the engine runs. With a GPU the context does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
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
        # Partial sums of a matmul stay float32. torch would let cuBLAS round them to bfloat16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def megatron_device() -> contextlib.AbstractContextManager[None]:
    """Enter around every call into Megatron-core."""
    return contextlib.nullcontext() if has_cuda() else _cpu_answers_for_cuda()


class _CudaMeansCpu(TorchFunctionMode):
    """Maps the literal device "cuda" to the CPU and names CPU dtypes as CUDA types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers compare param.type() with "torch.cuda.FloatTensor", and treat what is not
            # half precision alike: float64 passes as float32 does.
            name = func(*args).replace("Double", "Float")
            return name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]  # the optimizer's "in full precision"
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **(kwargs or {}))


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _InOrder:
    """A stream, and an event on it, where every call has ended when it returns."""

    def wait_stream(self, _: Any) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _InOrder:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, _: Any) -> None:
        """Nothing to wait for."""


class _NoRandomness:
    """Megatron's tracker of random states by region. Nothing of ours draws numbers (no dropout),
    and recomputed layers need no state restored."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        """A region of its own; the same as outside."""
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        """No states."""
        return {}

    def set_states(self, _: dict[str, Any]) -> None:
        """No states."""


def _as_sizes(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron brings split sizes to the CPU, and in passing into a type collectives accept."""
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


_STREAM = _InOrder()


@cache
def _patches() -> tuple[tuple[Any, str, Any], ...]:
    """(module, name, what answers instead)."""
    # Imported here: a run asks this file for its backend before its output goes to a log, and
    # Megatron has a lot to say when it is imported.
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    return (
        # Where Transformer Engine is installed, Megatron takes its CUDA kernels for the norm of the
        # gradients, GPU or not.
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
        # The all-to-all of expert parallelism copies its counts on a stream of its own.
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
    kept = [getattr(where, name) for where, name, _ in _patches()]
    for where, name, answer in _patches():
        setattr(where, name, answer)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for (where, name, _), original in zip(_patches(), kept, strict=True):
            setattr(where, name, original)
