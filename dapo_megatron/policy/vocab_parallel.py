"""Log-probs and entropy from hidden states, with the vocabulary sharded over tensor-parallel ranks.

One function serves the old log-probs and the loss, so both see the same arithmetic. The logits are
never whole: a tile of them is computed, reduced, and overwritten by the next; the backward computes
each tile once more. The outer loop runs over the vocabulary, so the gradient of a weight row is one
matmul and is rounded once, whatever the dtype; the inner one, on a GPU, over blocks of tokens, so
that a tile is read from the cache that the matmul has just written it to.

On a GPU bfloat16 matmuls put out their float32 sums as they are; on CPU, where torch has no such
matmul, logits and the parts of the hidden states' gradient are rounded to bfloat16 first.

What reduces a tile is the `head`: torch's operations (below) or Triton kernels (head_kernels.py).

Shape letters: T tokens, H hidden size, V vocabulary entries of this rank, E entries and B tokens of
one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.cluster.collectives import all_reduce

Head = Literal["torch", "triton"]

TILE_BYTES = 32 * 2**20
"""Of a tile's logits in float32: small enough for the last cache of a CPU or an H100 (50 MB), large
enough for a matmul to fill either."""
MIN_TILE_ENTRIES = 256
"""A narrower tile would starve its matmuls; where T is so large, hidden states are larger still."""
WIDE_TILE_ENTRIES = 4096
"""On a GPU: each tile adds to the gradient of all hidden states, in float32; with fewer entries
that pass over memory would take longer than the matmul it ends."""
ERROR_BYTES = 256 * 2**20
"""Bound of what a GPU keeps of one vocabulary tile for all tokens, in bfloat16, for the backward's
matmuls: narrower tiles beyond 32,768 tokens."""


class Reductions(Protocol):
    """What a head does with a tile. `targets_B` count from the rank's first entry, as `start` does,
    the tile's; one outside the tile belongs to another. Logits are float32 (float64 for torch's),
    not yet divided by the temperature, and may be overwritten."""

    def fold(
        self, logits_BE: Tensor, targets_B: Tensor, start: int, temperature: float, sums_4B: Tensor
    ) -> None:
        """Take the tile into the running sums: highest logit so far, sum of exp(x - highest), sum
        of exp(x - highest) * (x - highest), and the target's logit x."""
        ...

    def error(
        self,
        logits_BE: Tensor,
        targets_B: Tensor,
        start: int,
        temperature: float,
        log_z_B: Tensor,
        error_BE: Tensor,
    ) -> None:
        """exp(x - log_z) - [target], in the dtype of `error_BE`, which may be the logits."""
        ...


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    first_entry: int,
    num_entries: int,
    group: dist.ProcessGroup | None,
    head: Head | Reductions = "torch",
) -> tuple[Tensor, Tensor]:
    """Natural log-prob of each target, and the entropy of each distribution, of the logits
    `hidden @ weight.T / temperature`; both [T], float32 (float64 for float64 hidden states).

    `weight_VH` are this rank's rows of the output layer, in the dtype of `hidden_TH`. The first
    `num_entries` are real (none if it is not positive), the rest pads the vocabulary and has
    probability 0; row 0 is entry `first_entry` of the vocabulary. Every rank of `group`, the
    tensor-parallel ranks or None, has the same hidden states and targets; T may be 0.

    Gradients flow through the log-probs alone. That of the hidden states is this rank's part: the
    caller adds the parts of all ranks. That of a padding row is 0.
    """
    logp_T, entropy_T = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_TH,
        weight_VH,
        targets_T - first_entry,
        temperature,
        max(num_entries, 0),
        group,
        reductions(head) if isinstance(head, str) else head,
    )
    return logp_T, entropy_T


def reductions(head: Head) -> Reductions:
    """Return what `policy.logprob_head` names. plan/compatibility has refused what cannot run."""
    if head == "torch":
        return _WithTorch()
    kernels: Reductions = import_module("dapo_megatron.policy.head_kernels").WithTriton()
    return kernels


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        local_T: Tensor,
        temperature: float,
        num_entries: int,
        group: dist.ProcessGroup | None,
        reduce: Reductions,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(hidden_TH)
        sums_4T = torch.zeros(4, len(local_T), dtype=dtype, device=hidden_TH.device)
        # Finite, so that (top - new top) * 0 is 0 before the first tile and on ranks without one.
        sums_4T[0] = torch.finfo(dtype).min
        product, wide = _Memory(hidden_TH), _Memory(hidden_TH, dtype)
        block, width = _tile_shape(hidden_TH)
        for entries in _slices(num_entries, width):
            for tokens in _slices(len(local_T), block):
                logits_BE = _logits(hidden_TH[tokens], weight_VH[entries], product, wide)
                sums_4B = sums_4T[:, tokens]
                reduce.fold(logits_BE, local_T[tokens], entries.start, temperature, sums_4B)

        highest_T = sums_4T[0].clone()
        all_reduce(highest_T, dist.ReduceOp.MAX, group)
        _rescale(sums_4T, highest_T)
        all_reduce(sums_4T[1:], dist.ReduceOp.SUM, group)

        _, total_T, weighted_T, target_T = sums_4T
        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T
        ctx.save_for_backward(hidden_TH, weight_VH, local_T, highest_T + log_total_T)
        ctx.temperature, ctx.num_entries, ctx.reduce = temperature, num_entries, reduce
        ctx.mark_non_differentiable(entropy_T)
        return (target_T - highest_T) - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, local_T, log_z_T = ctx.saved_tensors
        # d log-prob / d logit = ([target] - p) / temperature. The token's own factor is applied to
        # what has H columns; the tiles hold p - [target].
        factor_T1 = (-grad_T / ctx.temperature)[:, None]
        scaled_TH = (hidden_TH * factor_T1).to(hidden_TH.dtype)
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=_wide(hidden_TH))
        grad_weight_VH = torch.empty_like(weight_VH)
        grad_weight_VH[ctx.num_entries :] = 0.0
        errors, wide = _Memory(hidden_TH), _Memory(hidden_TH, _wide(hidden_TH))
        part = _Memory(hidden_TH)
        block, width = _tile_shape(hidden_TH)
        for entries in _slices(ctx.num_entries, width):
            rows_EH = weight_VH[entries]
            error_TE = errors.of(len(local_T), len(rows_EH))
            for tokens in _slices(len(local_T), block):
                error_BE = error_TE[tokens]
                # Its place takes the product first.
                logits_BE = _logits(hidden_TH[tokens], rows_EH, error_BE, wide)
                tile = (logits_BE, local_T[tokens], entries.start, ctx.temperature)
                ctx.reduce.error(*tile, log_z_T[tokens], error_BE)
            _add_product(grad_hidden_TH, error_TE, rows_EH, part)
            torch.mm(error_TE.t(), scaled_TH, out=grad_weight_VH[entries])
        grad_hidden_TH *= factor_T1
        return grad_hidden_TH.to(hidden_TH.dtype), grad_weight_VH, *[None] * 5


class _WithTorch:
    """Reductions in torch's operations."""

    def __init__(self) -> None:
        self._exp: _Memory | None = None

    def fold(
        self, logits_BE: Tensor, targets_B: Tensor, start: int, temperature: float, sums_4B: Tensor
    ) -> None:
        """See Reductions."""
        _divide(logits_BE, temperature)
        top_B, total_B, weighted_B, target_B = sums_4B
        index_B1, is_mine_B1 = _find(targets_B, start, logits_BE)
        target_B += (logits_BE.gather(1, index_B1) * is_mine_B1).squeeze(1)
        _rescale(sums_4B, torch.maximum(top_B, logits_BE.amax(1)))
        logits_BE -= top_B[:, None]
        self._exp = self._exp or _Memory(logits_BE)
        exp_BE = torch.exp(logits_BE, out=self._exp.of(*logits_BE.shape))
        total_B += exp_BE.sum(1)
        weighted_B += torch.linalg.vecdot(exp_BE, logits_BE)

    def error(
        self,
        logits_BE: Tensor,
        targets_B: Tensor,
        start: int,
        temperature: float,
        log_z_B: Tensor,
        error_BE: Tensor,
    ) -> None:
        """See Reductions."""
        _divide(logits_BE, temperature)
        logits_BE.sub_(log_z_B[:, None]).exp_()
        index_B1, is_mine_B1 = _find(targets_B, start, logits_BE)
        logits_BE.scatter_add_(1, index_B1, -is_mine_B1.to(logits_BE.dtype))
        if logits_BE.data_ptr() != error_BE.data_ptr():
            error_BE.copy_(logits_BE)


# ---------------------------------------------------------------------------- tiles


def _wide(hidden_TH: Tensor) -> torch.dtype:
    """The dtype of everything but the matmuls' factors."""
    return torch.promote_types(hidden_TH.dtype, torch.float32)


def _tile_shape(hidden_TH: Tensor) -> tuple[int, int]:
    """(tokens, entries) of a tile, at most; both positive."""
    num_tokens = max(len(hidden_TH), 1)
    entries = TILE_BYTES // (4 * num_tokens)
    if not hidden_TH.is_cuda:
        return num_tokens, max(entries, MIN_TILE_ENTRIES)
    wide = min(WIDE_TILE_ENTRIES, ERROR_BYTES // (2 * num_tokens))
    entries = max(entries, wide, MIN_TILE_ENTRIES)
    return max(TILE_BYTES // (4 * entries), 1), entries


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class _Memory:
    """Room for one tile after the other: pages that are touched for the first time cost more than
    the softmax."""

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None) -> None:
        self._memory = like.new_empty(0, dtype=dtype or like.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of what it gives."""
        return self._memory.dtype

    def of(self, num_rows: int, num_columns: int) -> Tensor:
        """A tensor of this shape; it takes the place of the one before."""
        return self._memory.resize_(num_rows, num_columns)


def _logits(hidden_BH: Tensor, rows_EH: Tensor, product: _Memory | Tensor, wide: _Memory) -> Tensor:
    """`hidden @ rows.T` in the dtype of `wide`. Where that is the factors' too, it is in `product`,
    else in `wide`, and `product`, on CPU, has it in the dtype of the factors."""
    shape = len(hidden_BH), len(rows_EH)
    if hidden_BH.is_cuda and wide.dtype != hidden_BH.dtype:
        wide_BE = wide.of(*shape)
        return torch.mm(hidden_BH, rows_EH.t(), out_dtype=wide.dtype, out=wide_BE)
    product_BE = product.of(*shape) if isinstance(product, _Memory) else product
    torch.mm(hidden_BH, rows_EH.t(), out=product_BE)
    return product_BE if wide.dtype == product_BE.dtype else wide.of(*shape).copy_(product_BE)


def _add_product(sum_TH: Tensor, error_TE: Tensor, rows_EH: Tensor, part: _Memory) -> None:
    """`sum += error @ rows`, in the dtype of the sum."""
    if error_TE.dtype == sum_TH.dtype:
        sum_TH.addmm_(error_TE, rows_EH)
    elif error_TE.is_cuda:
        torch.addmm(sum_TH, error_TE, rows_EH, out_dtype=sum_TH.dtype, out=sum_TH)
    else:
        sum_TH += torch.mm(error_TE, rows_EH, out=part.of(*sum_TH.shape))


# ---------------------------------------------------------------------------- torch's operations


def _divide(logits_BE: Tensor, temperature: float) -> None:
    if temperature != 1.0:
        logits_BE /= temperature


def _find(targets_B: Tensor, start: int, logits_BE: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's column in a tile, and whether it is there at all; both [B, 1]."""
    index_B1 = (targets_B - start)[:, None]
    width = logits_BE.shape[1]
    return index_B1.clamp(0, width - 1), (index_B1 >= 0) & (index_B1 < width)


def _rescale(sums_4B: Tensor, new_top_B: Tensor) -> None:
    """Move the first three sums to another highest logit, in place."""
    top_B, total_B, weighted_B, _ = sums_4B
    shift_B = top_B - new_top_B
    weighted_B += shift_B * total_B
    sums_4B[1:3] *= shift_B.exp()
    top_B.copy_(new_top_B)
