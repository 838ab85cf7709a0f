"""Log-probs and entropy from hidden states, with the vocabulary sharded over tensor-parallel ranks.

One function computes the old log-probs and those in the loss, so both have the same arithmetic. The
whole matrix of logits is never in memory: a tile is computed, reduced, and overwritten by the next.
The backward pass computes each tile again. The outer loop runs over the vocabulary, so the gradient
of a weight row is one matmul and is rounded once. On a GPU the inner loop runs over blocks of
tokens, so that a tile is still in the cache when it is reduced.

On a GPU bfloat16 matmuls return their float32 sums unrounded. On a CPU torch has no such matmul, so
logits and partial gradients of the hidden states are rounded to bfloat16 first.

The `head` reduces tiles: torch's operations (below) or Triton kernels (head_kernels.py).

Shape letters: T tokens, H hidden size, V vocabulary entries of this rank, E entries and B tokens of
one tile, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.cluster.collectives import all_reduce

Head = Literal["torch", "triton"]

TILE_BYTES = 32 * 2**20
"""Size of a tile's logits in float32. It fits in the last-level cache of a CPU or an H100 (50 MB),
and is large enough for an efficient matmul on both."""
MIN_TILE_ENTRIES = 256
"""Minimum width of a tile. Matmuls of narrower tiles are slow, and with so many tokens the hidden
states take more memory than the tile."""
WIDE_TILE_ENTRIES = 4096
"""Preferred width on a GPU. Each tile is added to the float32 gradient of all hidden states. With
narrower tiles this pass over memory would take longer than the matmul."""
ERROR_BYTES = 256 * 2**20
"""Maximum size of the errors of one vocabulary tile for all tokens (bfloat16), which a GPU keeps
for the matmuls of the backward pass. Above 32,768 tokens, tiles are narrower because of it."""


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    first_entry: int,
    num_entries: int,
    group: dist.ProcessGroup | None,
    head: Head = "torch",
    gradient_accumulation_fusion: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, in nats.

    The logits are `hidden @ weight.T / temperature`. `targets` are entries, int64 [T] or [T, K].
    Log-probs have their shape, the entropy is [T]; both are float32 (float64 for float64 hidden
    states).

    `weight_VH` are this rank's rows of the output layer, in the dtype of `hidden_TH`. Row 0 is
    entry `first_entry` of the vocabulary. The first `num_entries` rows are real (none if it is not
    positive). The others pad the vocabulary and have probability 0. `group`: the tensor-parallel
    ranks or None. All of them have the same hidden states and targets. T may be 0.

    Gradients flow through the log-probs, and with `entropy_gradient` also through the entropy. The
    gradient of the hidden states is this rank's summand: the caller adds all ranks' summands. The
    gradient of a padding row is 0.

    With `gradient_accumulation_fusion` the gradient of the weight is added to `weight_VH.main_grad`
    in the precision of that buffer, as in Megatron's layers: `grad_added_to_main_grad` is then set,
    and the values of the gradient that autograd receives are undefined.
    """
    targets_TK = targets if targets.dim() == 2 else targets[:, None]
    logp_KT, entropy_T = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_TH,
        weight_VH,
        targets_TK - first_entry,
        temperature,
        max(num_entries, 0),
        group,
        reductions(head),
        gradient_accumulation_fusion,
        entropy_gradient,
    )
    return logp_KT.t() if targets.dim() == 2 else logp_KT[0], entropy_T


@torch.no_grad()
def top_entries(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    k: int,
    *,
    first_entry: int,
    num_entries: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the `k` most likely entries of each token's distribution, int64 [T, k].

    The other arguments are those of `linear_logprobs`. All ranks together need `k` real entries.
    """
    dtype = _wide(hidden_TH)
    top_Tk = torch.full((len(hidden_TH), k), -torch.inf, dtype=dtype, device=hidden_TH.device)
    ids_Tk = torch.zeros_like(top_Tk, dtype=torch.int64)
    product, wide = _Memory(hidden_TH), _Memory(hidden_TH, dtype)
    block, width = _tile_shape(hidden_TH)
    for entries in _slices(max(num_entries, 0), width):
        for tokens in _slices(len(hidden_TH), block):
            logits_BE = _logits(hidden_TH[tokens], weight_VH[entries], product, wide)
            tile_Bk, columns_Bk = logits_BE.topk(min(k, logits_BE.shape[1]))
            ids_Bk = columns_Bk + first_entry + entries.start
            top_Tk[tokens], ids_Tk[tokens] = _highest(
                k, (top_Tk[tokens], tile_Bk), (ids_Tk[tokens], ids_Bk)
            )
    if group is not None and dist.get_world_size(group) > 1:
        of_ranks = []
        for values in (top_Tk, ids_Tk):
            of_ranks.append([torch.empty_like(values) for _ in range(dist.get_world_size(group))])
            dist.all_gather(of_ranks[-1], values, group)
        _, ids_Tk = _highest(k, *of_ranks)
    return ids_Tk


def _highest(k: int, values: Sequence[Tensor], ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the `k` highest of all values of each row, and their ids."""
    top, places = torch.cat([*values], 1).topk(k)
    return top, torch.cat([*ids], 1).gather(1, places)


def reductions(head: Head) -> Reductions:
    """Return the reductions of policy.logprob_head. plan/compatibility has refused heads that
    cannot run."""
    if head == "torch":
        return Reductions()
    kernels: Reductions = import_module("dapo_megatron.policy.head_kernels").WithTriton()
    return kernels


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        local_TK: Tensor,
        temperature: float,
        num_entries: int,
        group: dist.ProcessGroup | None,
        reduce: Reductions,
        fuses: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(hidden_TH)
        sums_ST = torch.zeros(
            3 + local_TK.shape[1], len(hidden_TH), dtype=dtype, device=hidden_TH.device
        )
        # Finite, so that (top - new top) * 0 is 0 before the first tile and on ranks without tiles.
        sums_ST[0] = torch.finfo(dtype).min
        product, wide = _Memory(hidden_TH), _Memory(hidden_TH, dtype)
        block, width = _tile_shape(hidden_TH)
        for entries in _slices(num_entries, width):
            for tokens in _slices(len(hidden_TH), block):
                logits_BE = _logits(hidden_TH[tokens], weight_VH[entries], product, wide)
                sums_SB = sums_ST[:, tokens]
                reduce.fold(logits_BE, local_TK[tokens], entries.start, temperature, sums_SB)

        highest_T = sums_ST[0].clone()
        all_reduce(highest_T, dist.ReduceOp.MAX, group)
        _rescale(sums_ST, highest_T)
        all_reduce(sums_ST[1:], dist.ReduceOp.SUM, group)

        _, total_T, weighted_T = sums_ST[:3]
        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T
        saved = [hidden_TH, weight_VH, local_TK, highest_T + log_total_T]
        has_terms = entropy_gradient or local_TK.shape[1] > 1
        ctx.save_for_backward(*saved, *([entropy_T] if has_terms else []))
        ctx.temperature, ctx.num_entries, ctx.reduce = temperature, num_entries, reduce
        ctx.fuses = fuses
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return (sums_ST[3:] - highest_T) - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_KT: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, local_TK, log_z_T, *entropy = ctx.saved_tensors
        # d log-prob / d logit = ([target] - p) / temperature. Tiles hold p - [target]. The factor
        # -grad / temperature of each token is applied to matrices of H columns, which are smaller.
        # d entropy / d logit = -p (log p + entropy) / temperature. With it, or several targets, the
        # gradients of a token have no common factor, so tiles hold their sum.
        terms_ST = torch.stack([grad_entropy_T, entropy[0], *grad_KT]) if entropy else None
        grad_T = torch.ones_like(grad_KT[0]) if entropy else grad_KT[0]
        factor_T1 = (-grad_T / ctx.temperature)[:, None]
        scaled_TH = (hidden_TH * factor_T1).to(hidden_TH.dtype)
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=_wide(hidden_TH))
        is_trained = ctx.needs_input_grad[1]
        if ctx.fuses:
            sum_VH = weight_VH.main_grad
        elif is_trained:
            sum_VH = torch.empty_like(weight_VH)
            sum_VH[ctx.num_entries :] = 0.0
        errors, wide = _Memory(hidden_TH), _Memory(hidden_TH, _wide(hidden_TH))
        partial = _Memory(hidden_TH)
        block, width = _tile_shape(hidden_TH)
        for entries in _slices(ctx.num_entries, width):
            rows_EH = weight_VH[entries]
            error_TE = errors.of(len(hidden_TH), len(rows_EH))
            for tokens in _slices(len(hidden_TH), block):
                error_BE = error_TE[tokens]
                # The memory of the errors holds the product of the matmul first.
                logits_BE = _logits(hidden_TH[tokens], rows_EH, error_BE, wide)
                tile = (logits_BE, local_TK[tokens], entries.start, ctx.temperature)
                terms_SB = None if terms_ST is None else terms_ST[:, tokens]
                ctx.reduce.error(*tile, log_z_T[tokens], terms_SB, error_BE)
            _add_product(grad_hidden_TH, error_TE, rows_EH, partial)
            if not is_trained:
                continue
            if not ctx.fuses:
                torch.mm(error_TE.t(), scaled_TH, out=sum_VH[entries])
            elif sum_VH.is_cuda:
                _add_product(sum_VH[entries], error_TE.t(), scaled_TH, partial)
            else:
                # The product is rounded before it is added, as without fusion.
                sum_VH[entries] += torch.mm(error_TE.t(), scaled_TH, out=partial.of(*rows_EH.shape))
        grad_hidden_TH *= factor_T1
        if ctx.fuses:
            weight_VH.grad_added_to_main_grad = True
            # Megatron's hook, which starts the reduction over ranks, requires some gradient.
            sum_VH = torch.empty_like(weight_VH)
        weight_gradient = sum_VH if is_trained else None
        return grad_hidden_TH.to(hidden_TH.dtype), weight_gradient, *[None] * 7


class Reductions:
    """Operations of a head on a tile, by torch. head_kernels.py has them as Triton kernels.

    `targets_BK` and the tile's first entry `start` count from the rank's first vocabulary entry.
    Targets may lie outside the tile. Logits are float32 (or float64, for torch's operations only),
    not yet divided by the temperature, and may be overwritten. The Triton kernels have only K = 1.
    """

    def __init__(self) -> None:
        self._exp: _Memory | None = None

    def fold(
        self, logits_BE: Tensor, targets_BK: Tensor, start: int, temperature: float, sums_SB: Tensor
    ) -> None:
        """Update the S = 3 + K running sums, where x = logit / temperature: highest x so far, sum
        of exp(x - highest), sum of exp(x - highest) * (x - highest), and x of each target."""
        _divide(logits_BE, temperature)
        top_B, total_B, weighted_B = sums_SB[:3]
        index_BK, is_in_tile_BK = _target_columns(targets_BK, start, logits_BE)
        sums_SB[3:] += (logits_BE.gather(1, index_BK) * is_in_tile_BK).t()
        _rescale(sums_SB, torch.maximum(top_B, logits_BE.amax(1)))
        logits_BE -= top_B[:, None]
        self._exp = self._exp or _Memory(logits_BE)
        exp_BE = torch.exp(logits_BE, out=self._exp.of(*logits_BE.shape))
        total_B += exp_BE.sum(1)
        weighted_B += torch.linalg.vecdot(exp_BE, logits_BE)

    def error(
        self,
        logits_BE: Tensor,
        targets_BK: Tensor,
        start: int,
        temperature: float,
        log_z_B: Tensor,
        terms_SB: Tensor | None,
        error_BE: Tensor,
    ) -> None:
        """Write p - [target] to `error_BE`, in its dtype, where log p = x - log_z. It may alias the
        logits. K is 1.

        With `terms_SB`, which has h, the entropy and g_1 to g_K, write
        sum_k g_k (p - [target_k]) + h p (log p + entropy). The Triton kernels do not have this.
        """
        _divide(logits_BE, temperature)
        logits_BE -= log_z_B[:, None]
        index_BK, is_in_tile_BK = _target_columns(targets_BK, start, logits_BE)
        if terms_SB is None:
            logits_BE.exp_().scatter_add_(1, index_BK, -is_in_tile_BK.to(logits_BE.dtype))
        else:
            self._exp = self._exp or _Memory(logits_BE)
            prob_BE = torch.exp(logits_BE, out=self._exp.of(*logits_BE.shape))
            grad_entropy_B1, entropy_B1 = terms_SB[:2, :, None]
            grad_BK = terms_SB[2:].t()
            total_B1 = grad_BK.sum(1, keepdim=True)
            logits_BE.add_(entropy_B1).mul_(grad_entropy_B1).add_(total_B1).mul_(prob_BE)
            logits_BE.scatter_add_(1, index_BK, -grad_BK * is_in_tile_BK)
        if logits_BE.data_ptr() != error_BE.data_ptr():
            error_BE.copy_(logits_BE)


# ---------------------------------------------------------------------------- tiles


def _wide(hidden_TH: Tensor) -> torch.dtype:
    """Return the dtype of sums and results: float32, or float64 for float64 hidden states. Only the
    factors of matmuls have the dtype of the hidden states."""
    return torch.promote_types(hidden_TH.dtype, torch.float32)


def _tile_shape(hidden_TH: Tensor) -> tuple[int, int]:
    """Return the maximum (tokens, entries) of a tile, both positive."""
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
    """Memory that is reused for all tiles. Touching new pages costs more time than the softmax."""

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None) -> None:
        self._memory = like.new_empty(0, dtype=dtype or like.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that `of` returns."""
        return self._memory.dtype

    def of(self, num_rows: int, num_columns: int) -> Tensor:
        """Return a tensor of this shape. It overwrites the one returned before."""
        return self._memory.resize_(num_rows, num_columns)


def _logits(hidden_BH: Tensor, rows_EH: Tensor, product: _Memory | Tensor, wide: _Memory) -> Tensor:
    """Return `hidden @ rows.T` in the dtype of `wide`.

    The result is in the memory of `product` if the factors have the same dtype, else in `wide`. In
    the second case `product` is overwritten on CPU by the rounded product.
    """
    shape = len(hidden_BH), len(rows_EH)
    if hidden_BH.is_cuda and wide.dtype != hidden_BH.dtype:
        wide_BE = wide.of(*shape)
        return torch.mm(hidden_BH, rows_EH.t(), out_dtype=wide.dtype, out=wide_BE)
    product_BE = product.of(*shape) if isinstance(product, _Memory) else product
    torch.mm(hidden_BH, rows_EH.t(), out=product_BE)
    return product_BE if wide.dtype == product_BE.dtype else wide.of(*shape).copy_(product_BE)


def _add_product(total: Tensor, left: Tensor, right: Tensor, partial: _Memory) -> None:
    """Add `left @ right` to `total`, in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right, out=partial.of(*total.shape))


# ---------------------------------------------------------------------------- torch's operations


def _divide(logits_BE: Tensor, temperature: float) -> None:
    if temperature != 1.0:
        logits_BE /= temperature


def _target_columns(targets_BK: Tensor, start: int, logits_BE: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's column, clamped to the tile, and whether it is inside; both [B, K]."""
    index_BK = targets_BK - start
    width = logits_BE.shape[1]
    return index_BK.clamp(0, width - 1), (index_BK >= 0) & (index_BK < width)


def _rescale(sums_SB: Tensor, new_top_B: Tensor) -> None:
    """Rescale the first three sums to another highest logit, in place."""
    top_B, total_B, weighted_B = sums_SB[:3]
    shift_B = top_B - new_top_B
    weighted_B += shift_B * total_B
    sums_SB[1:3] *= shift_B.exp()
    top_B.copy_(new_top_B)
