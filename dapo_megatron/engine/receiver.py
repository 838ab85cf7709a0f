"""New weights for a running engine, slice by slice, through vLLM's own weight-update phases.

`StreamTransferEngine` is a back end of vLLM's weight transfer (`vllm.distributed.weight_transfer`)
for a giver in the same process: what other back ends take from a wire, it takes from an iterator.
vLLM packs and quantises as it does when it loads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from dapo_megatron.cluster import collectives
from dapo_megatron.engine import device, quantised
from dapo_megatron.engine.coverage import Offer, check_used
from dapo_megatron.engine.loads import Load, trace
from dapo_megatron.engine.slices import Sink, StandIn
from dapo_megatron.protocols import Arrival
from dapo_megatron.types import Piece, Region, SyncError

if TYPE_CHECKING:
    from vllm import LLM


@dataclass
class StreamInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class StreamUpdateInfo(WeightTransferUpdateInfo):
    """What `WeightTransferEngine.update_weights` is given."""

    weights: Iterable[tuple[str, Tensor]]


class StreamTransferEngine(WeightTransferEngine[StreamInitInfo, StreamUpdateInfo]):
    """Loads what an iterator yields into this rank's model; see vLLM's base class."""

    init_info_cls = StreamInitInfo
    update_info_cls = StreamUpdateInfo

    def init_transfer_engine(self, init_info: StreamInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Put the parameters into the shape that loaders expect."""
        device.forget_expert_kernels(self.model)
        quantised.spoil(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        """Load; a layer is packed as soon as it is complete. Raises what the iterator raises; the
        weights are then a mixture, and vLLM ready for another update."""
        try:
            self.model.load_weights(update_info.weights)
        except SyncError:
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Pack what is left."""
        finalize_layerwise_reload(self.model, self.model_config)
        device.pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


class WeightReceiver:
    """Replaces all weights of one rank of an engine."""

    def __init__(self, llm: LLM, offered: Offer) -> None:
        """Ask the model what it takes of `offered`, the whole HF tensors. Collective over the ranks
        of the engine. Raises SyncError, on all of them, naming a tensor or parameter."""
        self._llm = llm
        self.loads, error = _traced(llm, offered)
        self.pieces = list(dict.fromkeys(load.piece for load in self.loads))
        gathered = collectives.all_gather(
            (self.pieces, error), tuple[list[Piece], str], get_tp_group().cpu_group
        )
        for _, error in gathered:
            if error:
                raise SyncError(error)
        check_used(offered, [pieces for pieces, _ in gathered])

    def receive(self, weights: Iterable[Arrival]) -> None:
        """Load `weights`, each wanted slice once, and drop the cached prefixes.

        Raises SyncError as `stand_ins` does, and naming a layer that was not quantised anew; the
        engine then holds a mixture of old and new weights and must not be used.
        """
        update = {"weights": stand_ins(weights, self.pieces)}
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": update})
        self._llm.finish_weight_update()
        self._llm.apply_model(quantised.check_none_left)
        if not self._llm.reset_prefix_cache():
            raise SyncError("prefix cache: not dropped; requests with old weights are in flight")


def _traced(llm: LLM, offered: Offer) -> tuple[list[Load], str]:
    try:
        (loads,) = llm.apply_model(lambda model: trace(model, offered))
    except SyncError as error:
        return [], str(error)
    return loads, ""


def stand_ins(weights: Iterable[Arrival], wanted: Iterable[Piece]) -> Iterator[tuple[str, StandIn]]:
    """Whole tensors for vLLM's loaders, behind which are copies of the slices that arrive.

    Copies, because vLLM keeps a tensor until its layer is complete, and the giver may reuse it at
    once. Raises SyncError at the first tensor or slice that is extra, repeated or misshapen,
    without passing it on, and at the end for missing ones.
    """
    pieces: dict[str, dict[Region, Piece]] = {}
    for piece in wanted:
        pieces.setdefault(piece.name, {})[piece.region] = piece
    missing = dict(pieces)
    for name, parts in weights:
        if name not in pieces:
            raise SyncError(f"{name}: this rank of the engine takes no part of such a tensor")
        if missing.pop(name, None) is None:
            raise SyncError(f"{name}: given twice")
        slices = _checked(name, parts, pieces[name])
        any_piece = next(iter(pieces[name].values()))
        yield name, StandIn.whole(name, any_piece.global_shape, any_piece.dtype, _server(slices))
    if missing:
        raise SyncError(f"{', '.join(missing)}: missing from the weights given to the engine")


def _checked(
    name: str, parts: Sequence[tuple[Region, Tensor]], pieces: Mapping[Region, Piece]
) -> dict[Region, Tensor]:
    """Copies of the slices of one tensor, once they are known to be those of `pieces`."""
    slices: dict[Region, Tensor] = {}
    for region, part in parts:
        piece = pieces.get(region)
        if piece is None:
            raise SyncError(f"{name}: {region} is no slice that this rank asked for")
        if region in slices:
            raise SyncError(f"{name}: {region} given twice")
        if tuple(part.shape) != region.shape or part.dtype != piece.dtype:
            raise SyncError(
                f"{name}: shape {tuple(part.shape)} of {part.dtype} given for {region} "
                f"of {piece.dtype}"
            )
        slices[region] = part.detach().clone(memory_format=torch.contiguous_format)
    for region in pieces.keys() - slices.keys():
        raise SyncError(f"{name}: {region} missing from the weights given to the engine")
    return slices


def _server(slices: Mapping[Region, Tensor]) -> Sink:
    def serve(target: Tensor, source: StandIn) -> None:
        # vLLM first counts what a loader copies, on parameters that have no memory yet.
        if not target.is_meta:
            view = source.locate()
            target.copy_(view.read(slices[view.region]))

    return serve
