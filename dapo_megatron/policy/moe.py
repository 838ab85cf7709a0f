"""Mixture of experts: the router, in float32 at least, and its load-balancing loss.

The loss is the sequence-wise one (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), averaged over the
sequences of the mini-batch: what one sequence contributes does not depend on the micro-batch it is
in, so any layout and any split gives the same gradient. Megatron's own losses are per micro-batch,
and scaled by a token count that the loss mask of DAPO does not share.

Shape letters: T tokens of this rank, H hidden size, E experts, S sequences of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dapo_megatron.cluster.collectives import all_reduce
from dapo_megatron.model import GroupedRouting


class Router(MegatronModule):
    """Softmax over all experts, the best k taken (Qwen3-MoE, Mixtral).

    `normalize_topk`: the k weights are divided by their sum. `sequences` [T] is set before each
    forward: which sequence of the micro-batch a token belongs to, -1 for padding.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: Any, *, normalize_topk: bool, **_: Any
    ) -> None:
        super().__init__(config=config)
        shape = (config.num_moe_experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape))
        # Each tensor-parallel rank then sees some tokens alone: their gradients are to be added.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.normalize_topk = normalize_topk
        self.scale = 1.0
        self.balance_scale = 0.0
        """Coefficient of the loss over the sequences of the mini-batch; see `set_balance_scale`."""
        self.sequences: Tensor | None = None
        self._group = pg_collection.tp_cp if config.sequence_parallel else pg_collection.cp

    def forward(self, hidden: Tensor, _: Any = None) -> tuple[Tensor, Tensor]:
        """(weight of each expert, 0 where it is not taken; which are taken), each [T, E]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        logits_TE = torch.nn.functional.linear(hidden_TH.to(dtype), self.weight.to(dtype))
        scores_TE, probs_TE = self._scores(logits_TE)
        experts = self._choose(scores_TE.detach())
        top = scores_TE.gather(1, experts)
        if self.normalize_topk:
            top = top / top.sum(-1, keepdim=True)
        weights_TE = torch.zeros_like(scores_TE).scatter(1, experts, top * self.scale)
        taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, experts, True)
        if self.balance_scale and self.sequences is not None and torch.is_grad_enabled():
            loss = self._balance_loss(probs_TE, taken_TE, self.sequences)
            weights_TE = _AddLoss.apply(weights_TE, loss * self.balance_scale)  # type: ignore[no-untyped-call]
        return weights_TE, taken_TE

    def _scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """What an expert's output is multiplied by if it is taken; its probability, for balance."""
        probs_TE = logits_TE.softmax(-1)
        return probs_TE, probs_TE

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """The experts of each token, [T, k]."""
        return scores_TE.topk(self.config.moe_router_topk, dim=-1).indices

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron numbers its layers; nothing here depends on it."""

    def _balance_loss(self, probs_TE: Tensor, taken_TE: Tensor, sequences_T: Tensor) -> Tensor:
        """This rank's part of the sum over sequences of  sum_e f_e P_e,  where f_e = E / (k n) x
        (tokens that took e) and P_e = 1 / n x (probability of e over all n tokens)."""
        num_sequences = sequences_T.max() + 1
        all_reduce(num_sequences, dist.ReduceOp.MAX, self._group)
        # Padding (-1) is counted as one more sequence, which is then left out.
        where_T = torch.where(sequences_T < 0, num_sequences, sequences_T)
        zeros_SE = probs_TE.new_zeros(int(num_sequences) + 1, probs_TE.shape[-1])
        taken_SE = zeros_SE.index_add(0, where_T, taken_TE.to(zeros_SE.dtype))[:-1]
        probs_SE = zeros_SE.index_add(0, where_T, probs_TE)[:-1]
        # The counts are everybody's; the probabilities this rank's, whose gradient is its own.
        all_reduce(taken_SE, dist.ReduceOp.SUM, self._group)
        topk = self.config.moe_router_topk
        lengths_S = (taken_SE.sum(-1) / topk).clamp(min=1)
        scale_S = probs_TE.shape[-1] / (topk * lengths_S**2)
        return (taken_SE * probs_SE).sum(-1) @ scale_S


class BiasedRouter(Router):
    """Sigmoid of each expert, ranked with a bias and within the best groups (`GroupedRouting`).

    No gradient reaches the bias: it is as the checkpoint has it, in float32 at least. A group is as
    good as its two best experts together.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: Any,
        *,
        normalize_topk: bool,
        scoring: GroupedRouting,
        **_: Any,
    ) -> None:
        super().__init__(config, pg_collection, normalize_topk=normalize_topk)
        self.scoring = scoring
        self.scale = scoring.scale
        bias = torch.zeros(config.num_moe_experts)
        self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.to(device, dtype)` calls."""
        super()._apply(*args, **kwargs)
        bias = self.expert_bias
        bias.data = bias.data.to(torch.promote_types(bias.dtype, torch.float32))
        return self

    def _scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = logits_TE.sigmoid()
        return scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        ranks_TE = scores_TE + self.expert_bias
        groups = ranks_TE.unflatten(-1, (self.scoring.n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1)
        chosen = best.topk(self.scoring.topk_group, dim=-1).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
        ranks_TE = groups.masked_fill(is_left_out[..., None], -torch.inf).flatten(1)
        return super()._choose(ranks_TE)


class ExpertLayer(MoELayer):
    """Megatron's layer; it hands the router the sequence of each token.

    They come where Megatron passes a padding mask down, the one per-token input that reaches the
    layers, also when they are recomputed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for weight in self.experts.parameters():
            # Whose gradients are added over the ranks that hold the same experts. Megatron marks
            # them so with expert parallelism alone; without, tensor-parallel ranks, each of which
            # sent the experts other tokens, would keep their gradients to themselves.
            weight.allreduce = False

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> Any:
        """As MoELayer.forward; `padding_mask` [rows, length] are sequence numbers."""
        if padding_mask is not None:
            sequences = padding_mask.transpose(0, 1)
            # The first stage splits it by tokens under sequence parallelism, later ones do not.
            if sequences.shape[0] != hidden_states.shape[0]:
                sequences = scatter_to_sequence_parallel_region(sequences.contiguous())
            self.router.sequences = sequences.reshape(-1)
        return super().forward(hidden_states, intermediate_tensors)


def set_balance_scale(chunks: Iterable[torch.nn.Module], scale: float) -> None:
    """Weight, in the mini-batch's loss, of what each sequence adds to the balance loss."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                module.balance_scale = scale


class _AddLoss(torch.autograd.Function):
    """Its first argument unchanged; in backward the second takes part with gradient 1."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)
