"""Make Transformer Engine importable without a GPU, CUDA and Triton.

`install` must run before Megatron-core is imported, in a process that is used for nothing else. Its
Python is the published one; `extension` takes the place of its compiled module, `permutation` of
its Triton kernels. All tensors say that they are on a GPU.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.te_cpu import extension, float8, permutation

FOLDER = Path(__file__).resolve().parents[2] / "build" / "te_cpu"
"""Folder with the unpacked wheel of transformer-engine: `make build/te_cpu/.ready`."""
_NAME = "transformer_engine"
_WITH_TRITON = ("pad", "grouped_dbias_dscales", "mhc", "cross_entropy", "permutation")


class _Nothing(ModuleType):
    """A module of which nothing is used."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Wide(ModuleType):
    """torch, with float32 under the name of float16."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install() -> None:
    """Put Transformer Engine into `sys.modules`."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # delayed scales: in Python, not by a kernel
    torch.version.cuda = "13.0"  # FP8 asks for 12.1, blockwise for 12.9
    assert float8.__name__  # its functions are in the module
    sys.path.append(str(FOLDER))
    _gather_as_nccl()
    sources = (path.read_text() for path in (FOLDER / _NAME / "pytorch").rglob("*.py"))
    names = {name for source in sources for name in re.findall(r"\btex\.([A-Za-z_]\w*)", source)}
    sys.modules["transformer_engine_torch"] = extension.module(names)
    # Its own __init__ would load the CUDA libraries.
    package = ModuleType(_NAME)
    package.__path__ = [str(FOLDER / _NAME)]
    package.__spec__ = ModuleSpec(_NAME, None, is_package=True)
    package.__version__ = importlib.import_module("importlib.metadata").version(_NAME)  # type: ignore[attr-defined]
    sys.modules[_NAME] = package
    for name in ("onnx_extensions", "triton", *(f"triton.{each}" for each in _WITH_TRITON)):
        full = f"{_NAME}.pytorch.{name}"
        sys.modules[full] = _Nothing(full)
    sys.modules[f"{_NAME}.pytorch.triton.permutation"] = permutation
    sys.modules[f"{_NAME}.pytorch.triton"].permutation = permutation  # type: ignore[attr-defined]
    common: Any = importlib.import_module(f"{_NAME}.common")
    common.load_framework_extension = lambda *_: None
    package.common = common  # type: ignore[attr-defined]
    _pretend()
    card = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100"
    )
    torch.cuda.get_device_properties = lambda *_: card  # type: ignore[assignment,misc]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment,misc]
    package.pytorch = importlib.import_module(f"{_NAME}.pytorch")  # type: ignore[attr-defined]
    # Fused attention has 16 bits only. Here it computes in float32, where it looks for float16.
    wide = _Wide("torch")
    attention = f"{_NAME}.pytorch.attention.dot_product_attention"
    for name in ("utils", "backends"):
        importlib.import_module(f"{attention}.{name}").torch = wide  # type: ignore[attr-defined]
    context_parallel: Any = importlib.import_module(f"{attention}.context_parallel")
    communicate = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *args: [
        _WaitsOnce(work) for work in communicate(*args)
    ]
    base: Any = importlib.import_module(f"{_NAME}.pytorch.module.base").TransformerEngineBaseModule
    build = base.__init__

    def with_gpu(module: Any, *args: Any, **kwargs: Any) -> None:
        is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            build(module, *args, **kwargs)
        finally:
            torch.cuda.is_available = is_available

    base.__init__ = with_gpu


def _gather_as_nccl() -> None:
    """Let all-gathers of several dtypes be coalesced. gloo copies their values, not their bytes,
    into one tensor, and does not take a device."""
    distributed: Any = torch.distributed
    gather, manager = distributed.all_gather_into_tensor, distributed._coalescing_manager

    def gather_bytes(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output.view(torch.uint8), tensor.view(torch.uint8), *args, **kwargs)

    def without_device(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return manager(group, async_ops=async_ops)

    distributed.all_gather_into_tensor = gather_bytes
    distributed._coalescing_manager = without_device


class _WaitsOnce:
    """A transfer that may be waited for twice. gloo would wait forever."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def _pretend() -> None:
    """Let tensors say that they are on a GPU, and make those for a GPU on the CPU.

    A TorchFunctionMode, as policy/device.py has, is not active in the backward pass.
    """
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    tensor.cuda = lambda self, *_, **__: self
    for name in ("empty", "zeros", "ones", "arange", "tensor", "full"):
        setattr(torch, name, _OnCpu(getattr(torch, name)))


class _OnCpu:
    """A function that makes a tensor, always on the CPU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]) != "meta":
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return self._function(*args, **kwargs)


class _WithDtype(ModuleType):
    """torch, with products that have another dtype than their factors, as on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def mm(*factors: Tensor, out_dtype: torch.dtype | None = None, out: Tensor) -> Tensor:
        """Multiply, in the wide dtype."""
        return torch.mm(*(each.to(out_dtype or each.dtype) for each in factors), out=out)

    @staticmethod
    def addmm(total: Tensor, *factors: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        """Add a product, in the wide dtype."""
        return torch.addmm(total, *(each.to(out_dtype) for each in factors), out=out)


def complete_device() -> None:
    """Add to the project's stand-ins for CUDA what only Transformer Engine's layers call, and what
    the log-prob head calls on a GPU only."""
    from dapo_megatron.policy import device, vocab_parallel

    distributed: Any = importlib.import_module(f"{_NAME}.pytorch.distributed")  # recomputation
    distributed._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    distributed._set_cuda_rng_state = lambda *_, **__: None
    random: Any = device._NoRandomness
    random.is_initialized = lambda self: False
    stream: Any = device._SynchronousStream
    torch.cuda.Event = stream  # type: ignore[misc]
    stream.__init__ = lambda self, *_, **__: None
    stream.record_event = lambda self, *_: self
    stream.wait_event = lambda self, *_: None
    stream.record = lambda self, *_: self
    stream.cuda_stream = 0
    vocab_parallel.torch = _WithDtype("torch")  # type: ignore[attr-defined]
