"""Extension of vLLM's worker class for weight syncs.

vLLM adds `WorkerExtension` to its worker class (`worker_extension_cls`), and `collective_rpc` calls
its methods on all workers of an engine. loading.py copies weights to where vLLM's loaders would,
and vLLM packs and quantizes as it does when it loads a checkpoint.

A quantized layer cannot be compared bit by bit with the weights sent. A training step changes
weights by less than the rounding, so an engine that kept its old weights would go unnoticed for
long. Therefore every number of quantized layers is set to NaN before each update, and after the
update no NaN may be left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from dapo_megatron.bridge.buckets import received
from dapo_megatron.bridge.group import Meeting, worker_transfer
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.bridge.verify import fingerprints
from dapo_megatron.cluster.collectives import ErrorRecord
from dapo_megatron.engine import device
from dapo_megatron.engine.loading import SliceLoader
from dapo_megatron.engine.loads import LoadedSlice, trace
from dapo_megatron.engine.memory import MemoryTag, check_room
from dapo_megatron.engine.readback import read_back
from dapo_megatron.engine.routes import capture_routes
from dapo_megatron.engine.slices import Offer
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.types import DapoError, Region, SyncError, TensorSlice

# Also in the worker processes, which import this file.
device.adapt_process()
capture_routes()

_UNQUANTIZED = UnquantizedFusedMoEMethod | UnquantizedLinearMethod | UnquantizedEmbeddingMethod
_FP8_NAN = 0xFF
"""NaN in every FP8 format."""


def _reporting(method: Callable[..., Any]) -> Callable[..., tuple[Any, ErrorRecord | None]]:
    """Let a method return its error beside its result, because the workers of an engine must fail
    together."""

    @wraps(method)
    def report(*arguments: Any) -> tuple[Any, ErrorRecord | None]:
        try:
            return method(*arguments), None
        except DapoError as error:
            return None, ErrorRecord.of(error)

    return report


class WorkerExtension:
    """Methods of a vLLM worker that replace and read the weights of its model.

    No name may be one of vLLM's worker. vLLM does not call `__init__` of an extension.
    """

    vllm_config: VllmConfig
    """Set by vLLM."""
    get_model: Any
    """Method of vLLM's worker."""
    model_runner: Any
    """Set by vLLM."""

    rank: int
    """Index among the engine's workers; set by vLLM."""

    device: torch.device
    """Set by vLLM."""

    transfer: Transfer | None
    """Transfer of this worker's slices in the group, if it has joined one."""
    slice_loads: list[LoadedSlice]
    """Slices to load into this worker's model, and where; set by `trace_slices`."""

    @_reporting
    def trace_slices(self, offered: Offer) -> list[TensorSlice]:
        """Return the slices of the `offered` HF tensors that this worker needs."""
        self.slice_loads = trace(self.get_model(), offered)
        self._slice_loader = SliceLoader(self.slice_loads)
        self.wanted_slices = list(dict.fromkeys(load.tensor_slice for load in self.slice_loads))
        return self.wanted_slices

    @_reporting
    def receive_slices(self, addresses: Sequence[str], seconds: float) -> None:
        """Load what the trainer rank on this worker's GPU sends (bridge/buckets.py), or without
        addresses what arrives in the group. Nothing may arrive for `seconds`."""
        weights = (
            received(addresses[self.rank], seconds) if addresses else iter(self.transfer or ())
        )
        try:
            self.load_slices(weights)
        except SyncError:
            for _ in weights:  # other engines get theirs in the same collectives
                pass
            raise
        except RuntimeError as error:  # of the group
            if addresses:
                raise
            raise SyncError(f"the transfer failed: {error}") from error

    @_reporting
    def join_group(self, meeting: Meeting, secret: bytes) -> None:
        """Join the group in which weights arrive (bridge/group.py)."""
        self.transfer = None  # closes the last group
        self.transfer = worker_transfer(meeting, self.rank, secret, self.device)

    @_reporting
    def check_room(self, part: MemoryTag) -> None:
        """Check that this worker's GPU has the memory to wake `part`."""
        check_room(part)

    def load_slices(self, weights: Iterable[ReceivedTensor]) -> None:
        """Load `weights`, each wanted slice once. A layer is packed as soon as it is complete.

        Raises SyncError like `SliceLoader.load`, and for a layer that was not quantized again. The
        model then holds a mixture of old and new weights, and can be loaded again.
        """
        model = self.get_model()
        with set_current_vllm_config(self.vllm_config):
            device.forget_expert_kernels(model)
            poison_with_nan(model)
            initialize_layerwise_reload(model)
            try:
                self._slice_loader.load(model, weights)
                torch.accelerator.synchronize()
            finally:  # packs the remaining layers; an incomplete one gets its old weights back
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                device.pack_tied_head(model)
        check_requantized(model)

    def fingerprint_slices(self) -> list[tuple[int, int]]:
        """Return (index in `trace_slices`, fingerprint) of the slices that can be read back."""
        index = {part: number for number, part in enumerate(self.wanted_slices)}
        indices: list[int] = []

        def values() -> Iterator[tuple[Tensor, Region]]:
            for tensor_slice, value in self.read_slices():
                if value is not None:
                    indices.append(index[tensor_slice])
                    yield value, tensor_slice.region

        prints = fingerprints(values())
        return list(zip(indices, prints, strict=True))

    def read_slices(self) -> Iterator[tuple[TensorSlice, Tensor | None]]:
        """Return each wanted slice, with its value as `read_back` yields it."""
        return read_back(self.get_model(), self.slice_loads)

    def read_routes(self, blocks: Sequence[int], waits: bool) -> NDArray[np.generic] | None:
        """Return the routes in these blocks of the KV cache (routes.py); None except from the first
        worker, because all have the same."""
        if self.rank:
            return None
        rows: NDArray[np.generic] = self.model_runner.dapo_routes.rows(blocks, waits=waits)
        return rows

    def clear_cache(self) -> None:
        """Set the KV cache to zero. Fresh GPU memory may contain NaN. Attention multiplies the
        unused slots of a block by 0, and 0 * NaN is NaN."""
        cleared = set()
        for module in self.get_model().modules():
            cache = getattr(module, "kv_cache", None)
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                if isinstance(tensor, Tensor) and tensor.data_ptr() not in cleared:
                    cleared.add(tensor.data_ptr())
                    tensor.detach().zero_()


@torch.no_grad()
def poison_with_nan(model: nn.Module) -> None:
    """Set every number of quantized layers to NaN."""
    for _, value in _quantized_parameters(model):
        if value.itemsize == 1:
            value.view(torch.uint8).fill_(_FP8_NAN)
        else:
            value.fill_(torch.nan)


@torch.no_grad()
def check_requantized(model: nn.Module) -> None:
    """Raise SyncError naming a parameter in which a NaN of `poison_with_nan` is left."""
    for name, value in _quantized_parameters(model):
        nan = value.view(torch.uint8) == _FP8_NAN if value.itemsize == 1 else value.isnan()
        if bool(nan.any()):
            raise SyncError(
                f"{name}: not quantized again from the weights given to the engine, or these are "
                "NaN"
            )


def _quantized_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) of quantized layers."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, _UNQUANTIZED):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point():
                    yield f"{path}.{name}", parameter.data
