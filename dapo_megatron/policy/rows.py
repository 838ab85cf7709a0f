"""Sequences laid out as the rows of a micro-batch: packed or padded, and this rank's part of them.

Every sequence gets a segment, its length rounded up. Packed, the segments lie end to end in one
row; padded, each is as long as the longest and is a row. With context parallelism of C ranks a
segment is cut into 2 C equal chunks, of which rank r takes chunks r and 2 C - 1 - r (the work of a
causal mask is then equal).

Shape letters: B rows, L tokens of a row on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from dapo_megatron.plan.layout import round_up
from dapo_megatron.types import TokenBatch


@dataclass(frozen=True, slots=True)
class RowShape:
    """How rows are made: see `dapo_megatron.plan.layout` for the two multiples."""

    packed: bool
    sequence_multiple: int
    row_multiple: int
    cp_rank: int
    cp_size: int


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch on this rank; all [B, L].

    tokens      int64  input tokens, 0 on padding
    positions   int64  position in the sequence, from 0
    targets     int64  the next token of the sequence
    predicts    int64  where that next token lies in the batch's flat [T] tensors; -1 if there is
                       none (last tokens and padding)
    sequences   int64  number of the sequence in the micro-batch, -1 on padding
    packed             cumulative lengths of the segments; None if padded
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    predicts: Tensor
    sequences: Tensor
    packed: PackedSeqParams | None


def make_rows(
    batch: TokenBatch, sequences: Sequence[int], shape: RowShape, device: torch.device
) -> Rows:
    """Lay out sequences. No sequences: a row of padding, so that this rank enters every collective
    of the forward and backward (or the others would wait for ever)."""
    lengths = batch.lengths[list(sequences)] if sequences else torch.tensor([0])
    starts = (batch.lengths.cumsum(0) - batch.lengths)[list(sequences)] if sequences else lengths
    segments = _segments(lengths, shape)
    number = torch.arange(len(segments)).repeat_interleave(segments)
    bounds = torch.nn.functional.pad(segments.cumsum(0), (1, 0))
    position = torch.arange(int(bounds[-1])) - bounds[number]
    mine = _on_this_rank(position, segments[number], shape)
    number, position = number[mine], position[mine]
    real = position < lengths[number]
    last = position >= lengths[number] - 1
    source = starts[number] + position
    predicts = torch.where(real & ~last, source + 1, -1)
    tokens = torch.where(real, batch.tokens[torch.where(real, source, 0)], 0)
    targets = batch.tokens[predicts.clamp(min=0)]
    rows = 1 if shape.packed else len(segments)

    def as_rows(flat: Tensor) -> Tensor:
        return flat.view(rows, -1).to(device)

    return Rows(
        tokens=as_rows(tokens),
        positions=as_rows(position),
        targets=as_rows(targets),
        predicts=as_rows(predicts),
        sequences=as_rows(torch.where(real, number, -1)),
        packed=_packed(bounds, device) if shape.packed else None,
    )


def _segments(lengths: Tensor, shape: RowShape) -> Tensor:
    """Tokens of each segment, padding included."""
    if not shape.packed:
        longest = round_up(max(int(lengths.max()), 1), shape.row_multiple)
        return torch.full_like(lengths, longest)
    segments = -(-lengths.clamp(min=1) // shape.sequence_multiple) * shape.sequence_multiple
    total = int(segments.sum())
    segments[-1] += round_up(total, shape.row_multiple) - total
    return segments


def _on_this_rank(position: Tensor, segment: Tensor, shape: RowShape) -> Tensor:
    if shape.cp_size == 1:
        return torch.ones_like(position, dtype=torch.bool)
    chunk = position // (segment // (2 * shape.cp_size))
    return (chunk == shape.cp_rank) | (chunk == 2 * shape.cp_size - 1 - shape.cp_rank)


def _packed(bounds: Tensor, device: torch.device) -> PackedSeqParams:
    longest = int(bounds.diff().max())
    cumulative = bounds.to(torch.int32).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        # Transformer Engine asks for these under context parallelism. To it our segments have no
        # padding in between, which it sees from the tensor being the same: their own padding comes
        # last, where no real token sees it.
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
