"""Router replay: the experts of each token, given from outside or recorded for a later pass.

Routes travel with the tokens. Megatron passes one tensor of whole numbers per token through a chunk
of the model (policy/moe.py): the number of the token's sequence, then its experts in each layer of
the chunk. In training the routers read their experts from it. In a pass for log-probs they also
write their choice into it. So no pipeline schedule, recomputation or order of calls can mix up
tokens, micro-batches or layers.

-1 stands for an expert that is not given: the router chooses. It always chooses for the last token
of a sequence: no log-prob depends on that token, and the engine that sampled it never computed it.

Shape letters: T tokens that this rank holds, n tokens of a micro-batch on this rank, B rows, L
tokens of a row on this rank, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.model import Architecture, ChunkPlace
from dapo_megatron.policy.data_parallel import gather_on_host
from dapo_megatron.policy.moe import routers
from dapo_megatron.types import TokenBatch, torch_dtype


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Shape of routes, and the part of them that this rank's routers use.

    layers       number of each layer with experts, in the whole model
    num_experts  experts of a layer
    topk         experts per token
    chunks       for each chunk of this rank, the indices in `layers` of its layers
    dtype        of the number of an expert
    """

    layers: tuple[int, ...]
    num_experts: int
    topk: int
    chunks: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, arch: Architecture, places: Iterable[ChunkPlace]) -> RouteShape:
        """Return the shape for a model, on a rank with chunks in these places."""
        layers = arch.expert_layers
        ends = ((place.first_layer, place.first_layer + place.num_layers) for place in places)
        chunks = tuple(
            tuple(index for index, layer in enumerate(layers) if first <= layer < end)
            for first, end in ends
        )
        dtype = torch_dtype(arch.route_dtype)
        return cls(layers, arch.num_experts, arch.experts_per_token, chunks, dtype)

    @property
    def local(self) -> tuple[int, ...]:
        """Indices in `layers` of this rank's layers, in the order of its chunks."""
        return tuple(chain(*self.chunks))

    @property
    def width(self) -> int:
        """Number of experts of a token, in all layers."""
        return len(self.layers) * self.topk


def local_routes(
    batch: TokenBatch, index_n: Tensor, sequence_n: Tensor, shape: RouteShape
) -> Tensor:
    """Return the routes of a micro-batch in this rank's layers, int16 [n, local layers, k].

    index_n     index of each token in the batch's flat [T] tensors, -1 for padding
    sequence_n  number of each token's sequence in the batch

    Raises ValueError naming sequence, token and layer of an impossible route.
    """
    assert batch.routes is not None
    expected = (len(batch.tokens), shape.width)
    if tuple(batch.routes.shape) != expected:
        raise ValueError(
            f"routes have shape {tuple(batch.routes.shape)}; {len(batch.tokens)} tokens of this "
            f"model, with {len(shape.layers)} layers of experts and {shape.topk} experts per "
            f"token, need {expected}"
        )
    last_S = batch.starts + batch.lengths - 1
    rows = ((index_n >= 0) & (index_n != last_S[sequence_n])).nonzero().squeeze(1)
    given = batch.routes[index_n[rows]].unflatten(1, (len(shape.layers), shape.topk))
    if shape.local != tuple(range(len(shape.layers))):
        given = given[:, list(shape.local)]
    routes = torch.full((len(index_n), *given.shape[1:]), -1, dtype=torch.int16)
    routes.flatten(1).index_copy_(0, rows, given.flatten(1).to(torch.int16))
    impossible = np.argwhere(~_is_possible(given.numpy(), shape.num_experts))
    if len(impossible):
        row, layer = int(rows[impossible[0, 0]]), impossible[0, 1]
        sequence = int(sequence_n[row])
        position = int(index_n[row] - batch.starts[sequence])
        raise ValueError(
            f"{batch.sequence_name(sequence)}, token {position}, layer "
            f"{shape.layers[shape.local[layer]]}: its route {routes[row, layer].tolist()} is not "
            f"{shape.topk} different experts of 0 to {shape.num_experts - 1}"
        )
    return routes


def _is_possible(routes: NDArray[Any], num_experts: int) -> NDArray[np.bool_]:
    """Return a mask [n, layers] of the routes [n, layers, k] that are k different experts."""
    # Contiguous per position, because comparisons of strided values are slow. numpy takes 3 ms for
    # 10,240 tokens of 48 layers, torch 30 to 60.
    experts = np.ascontiguousarray(np.moveaxis(routes, -1, 0))
    is_possible = np.logical_and.reduce((experts >= 0) & (experts < num_experts))
    for expert, other in combinations(experts, 2):
        is_possible &= expert != other
    return is_possible


def router_inputs(sequences: Tensor, routes: Tensor | None) -> Tensor:
    """Return what routers read of each token, [L, B, 1 + layers * k], contiguous.

    sequences  int64 [B, L]             number of the sequence in the micro-batch, -1 on padding
    routes     int16 [B, L, layers, k]  experts in the layers of a chunk; None: nothing is given
    """
    columns = sequences[..., None]
    if routes is not None:
        columns = torch.cat([columns.int(), routes.flatten(2).int()], dim=-1)
    return columns.transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Routes that the routers of a chunk used in one micro-batch, for the tokens of this rank.

    indices  int64 [L, B]                index of each token in the batch's flat tensors, -1 on
                                         padding
    layers                               the chunk's layers, as indices in RouteShape.layers
    experts  integer [L, B, layers * k]  in host memory, complete when the device's stream is
    """

    indices: Tensor
    layers: tuple[int, ...]
    experts: Tensor


def gather(
    records: Sequence[Recorded],
    num_tokens: int,
    shape: RouteShape,
    groups: Iterable[Any],
    device: torch.device,
) -> Tensor:
    """Return the routes [T, layers * k] of a batch that the ranks of `groups` recorded, in host
    memory. Call it when the device has finished the pass. Collective."""
    whole = torch.zeros(num_tokens, len(shape.layers), shape.topk, dtype=shape.dtype)
    for record in records:
        indices = record.indices.flatten()
        is_real = indices >= 0
        experts = record.experts.view(len(indices), len(record.layers), shape.topk)[is_real]
        layers = torch.tensor(record.layers, dtype=torch.int64)
        whole[indices[is_real][:, None], layers] = experts
    gather_on_host(whole, groups, device)
    return whole.flatten(1)


def replay_statistics(
    chunks: Iterable[torch.nn.Module], shape: RouteShape, device: torch.device
) -> dict[str, float]:
    """Return the share of tokens of the last mini-batch, over all layers and in each, for which the
    router would have chosen other experts than the given ones. Collective over all ranks.

    Tensor- and context-parallel ranks have different tokens, so every token is counted once in each
    layer.
    """
    total = torch.zeros(2, len(shape.layers), dtype=torch.int64, device=device)
    for layer, router in zip(shape.local, chain(*map(routers, chunks)), strict=True):
        if router.replayed is not None:
            total[:, layer] = router.replayed
    dist.all_reduce(total)
    num_given, num_changed = total.tolist()
    shares = {
        f"changed/layer_{layer}": changed / max(given, 1)
        for layer, given, changed in zip(shape.layers, num_given, num_changed, strict=True)
    }
    return {"changed": sum(num_changed) / max(sum(num_given), 1), **shares}
