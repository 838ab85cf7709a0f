"""Attention for the local layer spec: torch's scaled-dot-product attention over packed sequences,
and multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Megatron's own local core attention builds the whole score matrix. It rejects packed rows and
context parallelism, which only Transformer Engine supports. This one runs wherever torch does.

Sequences lie end to end, each of a padded length. Each attends only to itself, causally. Padding
comes last, so no real token attends to it. With context parallelism of C ranks a sequence is cut
into 2 C equal chunks, and rank r holds chunks r and 2 C - 1 - r, so that all ranks have the same
work. Keys and values are gathered from all ranks.

Latent attention is Megatron's, except that every tensor-parallel rank has the complete down
projections. Megatron's own layers shard them by rows and gather their outputs. In the backward pass
a gather gives each rank its rows of the gradient, and for the rotary part of the key each rank has
only the gradient of its heads. Megatron does not sum these (megatron-core 0.16.1,
multi_latent_attention.py, get_query_key_value_tensors), so on two ranks the gradient of that
projection is off by 22 %. Transformer Engine's layers and vLLM also keep the projections complete.

Shape letters: T query tokens and U key tokens of a micro-batch on this rank, N query heads and
G key-value heads of this rank, D size of a head; S sequences of one block, padded to Q queries and
K keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from dapo_megatron.cluster.collectives import all_reduce
from dapo_megatron.policy.rope import GivenRotation


class CausalAttention(MegatronModule):
    """Core attention with the signature Megatron's SelfAttention expects."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Return the attention output.

        Packed: `query` [T, N, D], `key` and `value` [T, G, D], output [T, N*D]. Padded: `query`
        [length, rows, N, D], `key` and `value` [length, rows, G, D], output [length, rows, N*D].
        """
        if packed_seq_params is not None:
            return self._attend(query, key, value, packed_seq_params.bounds)
        length, rows = query.shape[:2]
        bounds = bounds_of(None, length, rows)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        output = self._attend(query, key, value, bounds)
        return output.view(rows, length, -1).transpose(0, 1)

    def _attend(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, bounds: tuple[int, ...]
    ) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        plan = attention_plan(bounds, group.rank(), group.size(), query_TND.device)
        if group.size() > 1:
            key_TGD, value_TGD = (
                gather_from_sequence_parallel_region(x.contiguous(), group=group)
                for x in (key_TGD, value_TGD)
            )
        return attend(plan, query_TND, key_TGD, value_TGD, self.softmax_scale)


@dataclass
class PackedRow(PackedSeqParams):
    """Sequences of a packed row. Megatron and Transformer Engine read their lengths on the device,
    this attention on the host."""

    bounds: tuple[int, ...] = ()
    """The numbers in `cu_seqlens_q`."""


def bounds_of(packed: PackedRow | None, length: int, rows: int) -> tuple[int, ...]:
    """Return the cumulative padded lengths of a micro-batch's sequences over all context-parallel
    ranks. Unless they are packed, each is one of `rows` rows with `length` tokens of this rank."""
    if packed is not None:
        return packed.bounds
    whole = length * parallel_state.get_context_parallel_world_size()
    return tuple(range(0, (rows + 1) * whole, whole))


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length, computed in one call.

    queries_SQ    int64  indices of the queries among the rank's tokens, 0 on padding
    keys_SK       int64  indices of the keys among the tokens of all ranks, 0 on padding
    places_2      int64  rows and columns of `queries_SQ` without padding
    own_2         int64  rows and columns of the same tokens in `keys_SK`
    visible       bool   [S, 1, Q, K], the keys that a query sees; None if the mask is causal
    """

    queries_SQ: Tensor
    keys_SK: Tensor
    places_2: tuple[Tensor, Tensor]
    own_2: tuple[Tensor, Tensor]
    visible: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The blocks of a micro-batch. Indexing their concatenated outputs by `order_T` restores the
    order of the rank's tokens."""

    blocks: tuple[Block, ...]
    order_T: Tensor


@lru_cache(maxsize=4)  # all layers and recomputation share a plan; few are kept, masks are large
def attention_plan(
    bounds: tuple[int, ...], cp_rank: int, cp_size: int, device: torch.device
) -> AttentionPlan:
    """Return which queries of this rank attend to which keys.

    `bounds` are the cumulative padded lengths of the sequences over all context-parallel ranks.
    Keys come from all ranks, rank after rank. Indices are computed on the host: a GPU would have
    to report how many there are.
    """
    blocks, sources = [], []
    for members in _by_length([end - start for start, end in pairwise(bounds)]):
        starts = torch.tensor([bounds[i] for i in members])
        lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in members])
        key_position_SK, is_key_SK = _ragged(lengths)
        keys_SK = _gathered_index(starts, lengths, key_position_SK, bounds[-1], cp_size)
        index_SQ, is_query_SQ = _ragged(lengths // cp_size)
        query_position_SQ = _position(lengths, index_SQ, cp_rank, cp_size)
        queries_SQ = (starts // cp_size)[:, None] + index_SQ
        visible = None
        if cp_size > 1:
            causal = key_position_SK[:, None, :] <= query_position_SQ[:, :, None]
            visible = causal[:, None].to(device)
        sequence, place = is_query_SQ.nonzero(as_tuple=True)
        position = query_position_SQ[sequence, place]
        blocks.append(
            Block(
                torch.where(is_query_SQ, queries_SQ, 0).to(device),
                torch.where(is_key_SK, keys_SK, 0).to(device),
                (sequence.to(device), place.to(device)),
                (sequence.to(device), position.to(device)),
                visible,
            )
        )
        sources.append(queries_SQ[is_query_SQ])
    return AttentionPlan(tuple(blocks), torch.cat(sources).argsort().to(device))


def attend(
    plan: AttentionPlan,
    query_TND: Tensor,
    key_UGD: Tensor,
    value_UGD: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attend from each query to the keys of its sequence up to its position; return [T, N*D].

    Keys and values come from all context-parallel ranks, rank after rank. `scale` defaults to
    D^-0.5.
    """
    repeats = query_TND.shape[1] // key_UGD.shape[1]
    outputs = []
    for block in plan.blocks:
        query = query_TND[block.queries_SQ].transpose(1, 2)
        key, value = (x[block.keys_SK].transpose(1, 2) for x in (key_UGD, value_UGD))
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        out_SNQD = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=block.visible,
            is_causal=block.visible is None,
            scale=scale,
        )
        outputs.append(out_SNQD.transpose(1, 2)[block.places_2])
    return torch.cat(outputs)[plan.order_T].flatten(1)


def _by_length(lengths: list[int]) -> Iterator[list[int]]:
    """Yield groups of sequence indices whose lengths lie between the same powers of two."""
    by_size: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_size.setdefault((length - 1).bit_length(), []).append(index)
    yield from by_size.values()


def _ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return 0, 1, 2, ... up to the longest length as a row per sequence, and a mask that is False
    beyond the sequence's own length; both [S, longest]."""
    index = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    return index, index < lengths[:, None]


def _position(lengths: Tensor, index_SQ: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Return the position in its sequence of the rank's `index`-th token of that sequence. The
    rank's tokens of a sequence are its two chunks."""
    if cp_size == 1:
        return index_SQ
    chunk = (lengths // (2 * cp_size))[:, None]
    last = 2 * cp_size - 1 - cp_rank
    return torch.where(
        index_SQ < chunk, cp_rank * chunk + index_SQ, last * chunk + index_SQ - chunk
    )


def _gathered_index(
    starts: Tensor, lengths: Tensor, position_SK: Tensor, total: int, cp_size: int
) -> Tensor:
    """Return the index, among the gathered tokens of all ranks, of the token at `position_SK`."""
    if cp_size == 1:
        return starts[:, None] + position_SK
    chunk_size = (lengths // (2 * cp_size))[:, None]
    chunk = position_SK // chunk_size
    owner = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
    within = position_SK % chunk_size + torch.where(chunk >= cp_size, chunk_size, 0)
    return owner * (total // cp_size) + (starts // cp_size)[:, None] + within


def widened(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it is so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GatedAttention(SelfAttention):
    """Megatron's attention with an output gate, in float64 too: Megatron rounds gates to float32.
    If ranks share a key-value head, Megatron-core 0.16 returns the gates of all query heads that
    share it."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return query, key, value and gate of this rank's heads."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        heads = query.shape[2]
        if (sharing := gate.shape[2] // heads) > 1:
            first = parallel_state.get_tensor_model_parallel_rank() % sharing * heads
            gate = gate.narrow(2, first, heads)
        return query, key, value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * widened(gate).contiguous().view(x.shape).sigmoid()).to(x.dtype)


# ------------------------------------------------------------------ latent attention


class DownProjection(MegatronModule):
    """A linear layer whose weight is complete on every tensor-parallel rank.

    Every head reads the last `shared` columns of the output directly, so their gradients are summed
    over tensor-parallel ranks here. The layers that read the other columns sum theirs themselves.
    """

    def __init__(
        self, inputs: int, outputs: int, *, config: MLATransformerConfig, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.shared = 0
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees only some tokens. The mark makes Megatron sum
        # the weight's gradients over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Map [length, rows, hidden] to ([length, rows, outputs], no bias)."""
        out = torch.nn.functional.linear(hidden, self.weight)
        # Under sequence parallelism, the gather of tokens sums the gradients in its backward.
        if self.shared and not self.config.sequence_parallel:
            latent, shared = out.split([out.shape[-1] - self.shared, self.shared], dim=-1)
            out = torch.cat([latent, _AddGradients.apply(shared)], dim=-1)  # type: ignore[no-untyped-call]
        return out, None


# As a down projection Megatron accepts only its own sharded layers and the class of this name.
multi_latent_attention.Linear = DownProjection
if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine its layer names are placeholders, and `isinstance` raises on them.
    multi_latent_attention.HAVE_TE = False


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with `DownProjection`, and with the decoder's rotation."""

    def __init__(
        self, config: MLATransformerConfig, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        submodules.linear_q_down_proj = submodules.linear_kv_down_proj = DownProjection
        super().__init__(config, submodules, *args, **kwargs)
        self.linear_kv_down_proj.shared = config.qk_pos_emb_head_dim
        self.rotary_pos_emb = GivenRotation()

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the layers of the spec. Megatron-core 0.19 calls this, and for queries without a
        latent it would add a norm that no checkpoint has."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        norms = ("q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in (*names, *norms)}

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Run MLASelfAttention.forward, which takes no rotation. `rotary_pos_emb`: see
        rope.rotation."""
        self.rotary_pos_emb.rotation = rotary_pos_emb
        output = super().forward(*args, **kwargs)
        self.rotary_pos_emb.rotation = None
        return output


class _AddGradients(torch.autograd.Function):
    """Identity that sums gradients over tensor-parallel ranks in the backward pass.

    Megatron's own function drops the sum if the gradient is not contiguous, such as that of a range
    of columns.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(total, dist.ReduceOp.SUM, parallel_state.get_tensor_model_parallel_group())
        return total
