"""Log-probs and entropy from hidden states, with the vocabulary sharded over tensor-parallel ranks.

One function serves the old log-probs and the loss, so both see the same arithmetic. The logits are
never whole: a tile of vocabulary entries is computed for all tokens, reduced, and overwritten by
the next; the backward computes each tile once more. Tiles run over the vocabulary and not over the
tokens, so the gradient of a weight row is one matmul and is rounded once, whatever the dtype.

Shape letters: T tokens, H hidden size, V vocabulary entries of this rank, E entries of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.policy.collectives import all_reduce

TILE_BYTES = 32 * 2**20
"""Of a tile's logits in float32: small enough for a CPU's last cache, large enough for a GPU."""
MIN_TILE_ENTRIES = 256
"""A narrower tile would starve its matmuls; where T is so large, hidden states are larger still."""


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    first_entry: int,
    num_entries: int,
    group: dist.ProcessGroup | None,
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
        hidden_TH, weight_VH, targets_T - first_entry, temperature, max(num_entries, 0), group
    )
    return logp_T, entropy_T


class _LinearLogProbs(torch.autograd.Function):
    """Targets count from this rank's row 0; one outside its real rows belongs to another rank."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        local_T: Tensor,
        temperature: float,
        num_entries: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(hidden_TH)
        # Finite, so that (top - new top) * 0 is 0 before the first tile and on ranks without one.
        top_T = torch.full_like(local_T, torch.finfo(dtype).min, dtype=dtype)
        # Of exp(x - top), of exp(x - top) * (x - top), and of the target's logit x.
        sums_3T = torch.zeros(3, len(local_T), dtype=dtype, device=hidden_TH.device)
        total_T, weighted_T, target_T = sums_3T.unbind()
        exp_TE = torch.empty(0, dtype=dtype, device=hidden_TH.device)
        for start, logits_TE in _tiles(hidden_TH, weight_VH[:num_entries], temperature):
            index_T1, is_mine_T1 = _find(local_T, start, logits_TE)
            target_T += (logits_TE.gather(1, index_T1) * is_mine_T1).squeeze(1)
            top_T = _rescale(sums_3T, top_T, torch.maximum(top_T, logits_TE.amax(1)))
            logits_TE -= top_T[:, None]
            torch.exp(logits_TE, out=exp_TE.resize_(logits_TE.shape))
            total_T += exp_TE.sum(1)
            weighted_T += torch.linalg.vecdot(exp_TE, logits_TE)

        highest_T = top_T.clone()
        all_reduce(highest_T, dist.ReduceOp.MAX, group)
        _rescale(sums_3T, top_T, highest_T)
        all_reduce(sums_3T, dist.ReduceOp.SUM, group)

        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T
        ctx.save_for_backward(hidden_TH, weight_VH, local_T, highest_T + log_total_T)
        ctx.temperature, ctx.num_entries = temperature, num_entries
        ctx.mark_non_differentiable(entropy_T)
        return (target_T - highest_T) - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, local_T, log_z_T = ctx.saved_tensors
        real_VH = weight_VH[: ctx.num_entries]
        # d log-prob / d logit = ([target] - p) / temperature. The token's own factor is applied to
        # what has H columns; the tiles hold p - [target].
        factor_T1 = (-grad_T / ctx.temperature)[:, None]
        scaled_TH = (hidden_TH * factor_T1).to(hidden_TH.dtype)
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=_wide(hidden_TH))
        grad_weight_VH = torch.empty_like(weight_VH)
        grad_weight_VH[ctx.num_entries :] = 0.0
        memory, part_TH = hidden_TH.new_empty(0), torch.empty_like(hidden_TH)
        for start, logits_TE in _tiles(hidden_TH, real_VH, ctx.temperature):
            rows = slice(start, start + logits_TE.shape[1])
            error_TE = logits_TE.sub_(log_z_T[:, None]).exp_()
            index_T1, is_mine_T1 = _find(local_T, start, logits_TE)
            error_TE.scatter_add_(1, index_T1, -is_mine_T1.to(error_TE.dtype))
            error_TE = _converted(error_TE, memory)
            if error_TE.dtype == grad_hidden_TH.dtype:
                grad_hidden_TH.addmm_(error_TE, real_VH[rows])
            else:
                grad_hidden_TH += torch.mm(error_TE, real_VH[rows], out=part_TH)
            torch.mm(error_TE.t(), scaled_TH, out=grad_weight_VH[rows])
        grad_hidden_TH *= factor_T1
        return grad_hidden_TH.to(hidden_TH.dtype), grad_weight_VH, None, None, None, None


def _wide(hidden_TH: Tensor) -> torch.dtype:
    """The dtype of everything but the matmuls."""
    return torch.promote_types(hidden_TH.dtype, torch.float32)


def _tile_entries(num_tokens: int) -> int:
    return max(TILE_BYTES // (4 * max(num_tokens, 1)), MIN_TILE_ENTRIES)


def _tiles(
    hidden_TH: Tensor, weight_VH: Tensor, temperature: float
) -> Iterator[tuple[int, Tensor]]:
    """(first row, logits_TE over temperature) of each tile; it may be written to, and the next
    tile overwrites it: pages that are touched for the first time cost more than the softmax."""
    width = _tile_entries(len(hidden_TH))
    product_TE = hidden_TH.new_empty(0)
    memory = torch.empty(0, dtype=_wide(hidden_TH), device=hidden_TH.device)
    for start in range(0, len(weight_VH), width):
        rows_EH = weight_VH[start : start + width]
        product_TE.resize_(len(hidden_TH), len(rows_EH))
        torch.mm(hidden_TH, rows_EH.t(), out=product_TE)
        logits_TE = _converted(product_TE, memory)
        if temperature != 1.0:
            logits_TE /= temperature
        yield start, logits_TE


def _converted(value: Tensor, memory: Tensor) -> Tensor:
    """`value` in the dtype of `memory`, which holds it; or `value` itself if it has that dtype."""
    if value.dtype == memory.dtype:
        return value
    return memory.resize_(value.shape).copy_(value)


def _find(local_T: Tensor, start: int, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's column in a tile, and whether it is there at all; both [T, 1]."""
    index_T1 = (local_T - start)[:, None]
    width = logits_TE.shape[1]
    return index_T1.clamp(0, width - 1), (index_T1 >= 0) & (index_T1 < width)


def _rescale(sums_3T: Tensor, top_T: Tensor, new_top_T: Tensor) -> Tensor:
    """Move the first two sums from `top_T` to `new_top_T`, in place; gives `new_top_T`."""
    total_T, weighted_T, _ = sums_3T
    shift_T = top_T - new_top_T
    weighted_T += shift_T * total_T
    sums_3T[:2] *= shift_T.exp()
    return new_top_T
