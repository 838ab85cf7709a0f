"""Transformer Engine's permutation of tokens by expert (`pytorch/triton/permutation.py`) in torch.

Without padding and scales. A row map [tokens, 2 x experts + 1] has the permuted row of each pair of
token and expert, or -1.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the row map: rows are ordered by expert, then by token."""
    chosen = routing_map.bool().t().reshape(-1)
    rows = torch.where(chosen, chosen.int().cumsum(0) - 1, -1)
    row_map = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    row_map[:, :num_experts] = rows.view(num_experts, num_tokens).t()
    return row_map


def _pairs(row_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, expert and row of each chosen pair."""
    rows = row_map[:, :num_experts]
    token, expert = (rows >= 0).nonzero(as_tuple=True)
    return token, expert, rows[token, expert].long()


def permute_with_mask_map(
    inp: Tensor,
    row_map: Tensor,
    probs: Tensor | None,
    scale: Any,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """Return the permuted tokens, nothing, and the permuted probabilities."""
    assert scale is None and pad_offsets is None
    token, expert, row = _pairs(row_map, num_experts)
    out = inp.new_zeros(num_out_tokens, hidden_size)
    out[row] = inp[token]
    if probs is None:
        return out, None, None
    permuted = probs.new_zeros(num_out_tokens)
    permuted[row] = probs[token, expert]
    return out, None, permuted


def unpermute_with_mask_map(
    inp: Tensor,
    row_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of each token's rows, and the probabilities by token and expert."""
    token, expert, row = _pairs(row_map, num_experts)
    values = inp[row].float()
    if merging_probs is not None:
        values = values * merging_probs[token, expert].float()[:, None]
    out = torch.zeros(num_tokens, hidden_size).index_add_(0, token, values).to(inp.dtype)
    if permuted_probs is None:
        return out, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[token, expert] = permuted_probs[row]
    return out, probs


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """Return the new row of each row, if chunks of these sizes are put in this order."""
    sizes = split_sizes.tolist()
    starts = list(accumulate(sizes, initial=0))
    row_map, place = torch.empty(num_tokens, dtype=torch.int32), 0
    for chunk in sorted_indices.tolist():
        rows = slice(starts[chunk], starts[chunk + 1])
        row_map[rows] = torch.arange(place, place + sizes[chunk], dtype=torch.int32)
        place += sizes[chunk]
    return row_map


def sort_chunks_by_map(
    inp: Tensor,
    row_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return rows and probabilities in the new order, or back in the old one."""
    at = row_map.long()

    def moved(values: Tensor) -> Tensor:
        return torch.empty_like(values).index_copy_(0, at, values) if is_forward else values[at]

    return moved(inp), None if probs is None else moved(probs)
