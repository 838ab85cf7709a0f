"""New weights for a running engine, slice by slice, through vLLM's own weight-update phases.

`StreamTransferEngine` is a back end of vLLM's weight transfer (`vllm.distributed.weight_transfer`)
that takes weights from the same process instead of a network. loading.py copies them to where
vLLM's loaders would, and vLLM packs and quantizes as it does when it loads a checkpoint.

A quantized layer cannot be compared bit by bit with the weights sent. A training step changes
weights by less than the rounding, so an engine that kept its old weights would go unnoticed for
long. Therefore every number of quantized layers is set to NaN before each update, and after the
update no NaN may be left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
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

from dapo_megatron.cluster import collectives
from dapo_megatron.engine import device
from dapo_megatron.engine.loading import SliceLoader
from dapo_megatron.engine.loads import LoadedSlice, trace
from dapo_megatron.engine.slices import Offer, check_used
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.types import DapoError, SyncError, TensorSlice

if TYPE_CHECKING:
    from vllm import LLM

_UNQUANTIZED = UnquantizedFusedMoEMethod | UnquantizedLinearMethod | UnquantizedEmbeddingMethod
_FP8_NAN = 0xFF
"""NaN in every FP8 format."""


@dataclass
class StreamInitInfo(WeightTransferInitInfo):
    """No settings."""


@dataclass
class StreamUpdateInfo(WeightTransferUpdateInfo):
    """Argument of `WeightTransferEngine.update_weights`."""

    load: Callable[[nn.Module], None]
    """Loads all weights into this rank's model."""


class StreamTransferEngine(WeightTransferEngine[StreamInitInfo, StreamUpdateInfo]):
    """Loads weights into this rank's model. See vLLM's base class."""

    init_info_cls = StreamInitInfo
    update_info_cls = StreamUpdateInfo

    def init_transfer_engine(self, init_info: StreamInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Set quantized parameters to NaN, and give all parameters the shape of loading."""
        device.forget_expert_kernels(self.model)
        poison_with_nan(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        """Load the weights. A layer is packed as soon as it is complete.

        Errors of loading are raised again. The engine then holds a mixture of old and new weights,
        and vLLM is ready for another update.
        """
        try:
            update_info.load(self.model)
        except DapoError:
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Pack the remaining layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        device.pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


class WeightReceiver:
    """Replaces all weights of this rank of an engine."""

    def __init__(self, llm: LLM, offered: Offer) -> None:
        """Find the slices of the `offered` HF tensors that the model needs on this rank.

        Collective over the ranks of the engine. Raises SyncError on all of them, naming a tensor or
        parameter.
        """
        self._llm = llm
        self.loads, error = _try_trace(llm, offered)
        self.tensor_slices = list(dict.fromkeys(load.tensor_slice for load in self.loads))
        group = get_tp_group()
        gathered = collectives.all_gather(
            (self.tensor_slices, error),
            tuple[list[TensorSlice], str],
            group.cpu_group,
            group.ranks,
        )
        for _, error in gathered:
            if error:
                raise SyncError(error)
        check_used(offered, [tensor_slices for tensor_slices, _ in gathered])
        self._loader = SliceLoader(self.loads)

    def receive(self, weights: Iterable[ReceivedTensor]) -> None:
        """Load `weights`, each wanted slice once, and drop the cached prefixes.

        Raises SyncError like `loading.checked`, and for a layer that was not quantized again. The
        engine then holds a mixture of old and new weights and must not be used.
        """
        update = {"load": partial(self._loader.load, weights=weights)}
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": update})
        self._llm.finish_weight_update()
        self._llm.apply_model(check_requantized)
        if not self._llm.reset_prefix_cache():
            raise SyncError("prefix cache: not dropped. Requests with old weights are in flight")


def _try_trace(llm: LLM, offered: Offer) -> tuple[list[LoadedSlice], str]:
    """Return the loads of this rank, and an error message or an empty string."""
    try:
        (loads,) = llm.apply_model(lambda model: trace(model, offered))
    except SyncError as error:
        return [], str(error)
    return loads, ""


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
