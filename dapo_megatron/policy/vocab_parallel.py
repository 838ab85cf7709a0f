"""Log-probs and entropy when the vocabulary is sharded over tensor-parallel ranks.

One function serves the old log-probs and the loss, so both see the same arithmetic.

Shape letters: T tokens, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def logprobs_and_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    first_entry: int,
    num_entries: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Natural log-prob of each target, and the entropy of each distribution; float32 [T].

    `logits_TV` are this rank's columns, of which the first `num_entries` are real (the rest pads
    the vocabulary and has probability 0); column 0 is entry `first_entry` of the vocabulary.
    Logits are divided by `temperature` first. Gradients flow through the log-probs alone.
    """
    logp_T, entropy_T = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, temperature, first_entry, num_entries, group
    )
    return logp_T, entropy_T


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        first_entry: int,
        num_entries: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        scaled_TV = logits_TV[:, :num_entries].float()
        if temperature != 1.0:
            scaled_TV = scaled_TV / temperature
        top_T = scaled_TV.amax(dim=-1)
        _all_reduce(top_T, dist.ReduceOp.MAX, group)
        shifted_TV = scaled_TV - top_T[:, None]
        exp_TV = shifted_TV.exp()

        local_T = targets_T - first_entry
        mine_T = (local_T >= 0) & (local_T < num_entries)
        local_T = local_T.clamp(0, num_entries - 1)
        target_T = shifted_TV.gather(-1, local_T[:, None]).squeeze(-1).masked_fill(~mine_T, 0.0)

        sums = torch.stack([exp_TV.sum(-1), (exp_TV * shifted_TV).sum(-1), target_T])
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total_T, weighted_T, target_T = sums.unbind(0)

        log_total_T = total_T.log()
        ctx.save_for_backward(exp_TV.div_(total_T[:, None]), local_T, mine_T)
        ctx.temperature, ctx.width, ctx.dtype = temperature, logits_TV.shape[-1], logits_TV.dtype
        entropy_T = log_total_T - weighted_T / total_T
        ctx.mark_non_differentiable(entropy_T)
        return target_T - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        probs_TV, local_T, mine_T = ctx.saved_tensors
        # d logp / d logit = [target] - p, over the temperature; padded entries get 0.
        grad_TV = probs_TV * (-grad_T)[:, None]
        grad_TV.scatter_add_(-1, local_T[:, None], (grad_T * mine_T)[:, None])
        if ctx.temperature != 1.0:
            grad_TV /= ctx.temperature
        padding = ctx.width - grad_TV.shape[-1]
        if padding:
            grad_TV = torch.nn.functional.pad(grad_TV, (0, padding))
        return grad_TV.to(ctx.dtype), None, None, None, None, None


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
