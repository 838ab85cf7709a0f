"""Mixture of experts: the router, in float32 or float64, and its load-balancing loss.

The loss is the sequence-wise one (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), averaged over the
sequences of the mini-batch. The contribution of a sequence does not depend on its micro-batch, so
any layout and any split gives the same gradient. Megatron's own losses are computed per
micro-batch, and scaled by a token count that ignores DAPO's loss mask.

Shape letters: T tokens of this rank, H hidden size, E experts, S sequences of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dapo_megatron.cluster.collectives import all_reduce
from dapo_megatron.model import GroupedRouting
from dapo_megatron.policy.attention import widened


class Router(MegatronModule):
    """Top-k router with a softmax over all experts (Qwen3-MoE, Mixtral).

    `normalize_topk`: divide the k weights by their sum. Set before each forward pass:

    sequences  [T]     number of each token's sequence in the micro-batch, -1 for padding
    routes     [T, k]  experts to use, -1 where the router chooses; None if it always chooses. In a
                       pass for log-probs the router writes the experts that it used here

    Weights, and so gradients, are always computed from the router's own scores. The balance loss
    counts the experts that are used.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: Any, *, normalize_topk: bool, **_: Any
    ) -> None:
        super().__init__(config=config)
        shape = (config.num_moe_experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape))
        # Under sequence parallelism each rank sees only some tokens. The mark makes Megatron sum
        # the weight's gradients over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.normalize_topk = normalize_topk
        self.scale = 1.0
        self.balance_scale = 0.0
        """Coefficient of the balance loss per sequence; see `start_minibatch`."""
        self.max_sequences = 0
        """Maximum sequences of a micro-batch."""
        self.sequences: Tensor | None = None
        self.routes: Tensor | None = None
        self.slot = 0
        """Index among the routers of its chunk."""
        self.replayed: Tensor | None = None
        """Tokens of the mini-batch so far whose experts were given, and those among them for which
        the router would have chosen others, int64 [2]."""
        self._group = pg_collection.tp_cp if config.sequence_parallel else pg_collection.cp

    def forward(self, hidden: Tensor, _: Any = None) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert (0 if it is not chosen) and the mask of chosen experts,
        each [T, E]."""
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        logits_TE = torch.nn.functional.linear(widened(hidden_TH), widened(self.weight))
        scores_TE, probs_TE = self._scores(logits_TE)
        chosen_Tk = experts_Tk = self._choose(scores_TE.detach())
        if self.routes is not None:
            experts_Tk = self._replay(chosen_Tk, self.routes)
        top = scores_TE.gather(1, experts_Tk)
        if self.normalize_topk:
            top = top / top.sum(-1, keepdim=True)
        weights_TE = torch.zeros_like(scores_TE).scatter(1, experts_Tk, top * self.scale)
        used_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, experts_Tk, True)
        if self.routes is not None:
            self._count_changes(self.routes, used_TE.gather(1, chosen_Tk))
        if self.balance_scale and self.sequences is not None and torch.is_grad_enabled():
            loss = self._balance_loss(probs_TE, used_TE, self.sequences)
            weights_TE = _AddLoss.apply(weights_TE, loss * self.balance_scale)  # type: ignore[no-untyped-call]
        return weights_TE, used_TE

    def _scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert's output if it is chosen, and its probability for the
        balance loss; both [T, E]."""
        probs_TE = logits_TE.softmax(-1)
        return probs_TE, probs_TE

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the indices of each token's experts, [T, k]."""
        return scores_TE.topk(self.config.moe_router_topk, dim=-1).indices

    def _replay(self, chosen_Tk: Tensor, routes_Tk: Tensor) -> Tensor:
        """Return the given experts, and the router's choice where none are given."""
        is_given_T = routes_Tk[:, 0] >= 0
        experts_Tk = torch.where(is_given_T[:, None], routes_Tk, chosen_Tk)
        if not self.training:
            routes_Tk.copy_(experts_Tk)
        return experts_Tk

    def _count_changes(self, routes_Tk: Tensor, is_used_Tk: Tensor) -> None:
        """Count tokens with given experts, and those for which the router would have chosen others.

        `is_used_Tk` tells which of its choices are used. Counts only where there is a gradient:
        each token once, also if its layer is recomputed.
        """
        if self.training and torch.is_grad_enabled():
            counts = torch.stack([(routes_Tk[:, 0] >= 0).sum(), (~is_used_Tk.all(-1)).sum()])
            self.replayed = counts if self.replayed is None else self.replayed + counts

    def set_layer_number(self, layer_number: int) -> None:
        """Do nothing. Megatron calls this on every router."""

    def _balance_loss(self, probs_TE: Tensor, chosen_TE: Tensor, sequences_T: Tensor) -> Tensor:
        """Return this rank's summand of the balance loss: the sum over sequences of sum_e f_e P_e.

        For a sequence of n tokens, f_e = E / (k n) x (tokens that chose e), and P_e = 1 / n x (sum
        of the tokens' probabilities of e).
        """
        # Sequences that this micro-batch lacks add 0. Padding (-1) is counted as an extra sequence,
        # which [:-1] drops.
        row_T = torch.where(sequences_T < 0, self.max_sequences, sequences_T)
        zeros_SE = probs_TE.new_zeros(self.max_sequences + 1, probs_TE.shape[-1])
        chosen_SE = zeros_SE.index_add(0, row_T, chosen_TE.to(zeros_SE.dtype))[:-1]
        probs_SE = zeros_SE.index_add(0, row_T, probs_TE)[:-1]
        # Counts are summed over all ranks. Probabilities are only of this rank's tokens, so the
        # gradient of each token is computed on its own rank.
        all_reduce(chosen_SE, dist.ReduceOp.SUM, self._group)
        topk = self.config.moe_router_topk
        lengths_S = (chosen_SE.sum(-1) / topk).clamp(min=1)
        scale_S = probs_TE.shape[-1] / (topk * lengths_S**2)
        return (chosen_SE * probs_SE).sum(-1) @ scale_S


class BiasedRouter(Router):
    """Router of DeepSeek-V3: sigmoid scores, a bias for ranking, grouped routing.

    Experts are ranked by score plus bias, within the best groups (`GroupedRouting`). The score of a
    group is the sum of its two best experts. The bias is not trained: it is the checkpoint's, in
    float32 or float64.
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
        """Keep the bias in float32 or more. `model.to(device, dtype)` calls this."""
        super()._apply(*args, **kwargs)
        self.expert_bias.data = widened(self.expert_bias.data)
        return self

    def _scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = logits_TE.sigmoid()
        return scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        ranks_TE = scores_TE + self.expert_bias
        groups = ranks_TE.unflatten(-1, (self.scoring.n_group, -1))
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        best_groups = group_scores.topk(self.scoring.topk_group, dim=-1).indices
        is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best_groups, False)
        ranks_TE = groups.masked_fill(is_excluded[..., None], -torch.inf).flatten(1)
        return super()._choose(ranks_TE)


class ExpertLayer(MoELayer):
    """Megatron's expert layer, which also gives the router the sequence number of each token, and
    its experts if they are given.

    They are passed as Megatron's `padding_mask` (policy/routes.py). It is the only per-token input
    that reaches the layers, also when they are recomputed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for weight in self.experts.parameters():
            # Sum gradients over all ranks that hold the same experts. Megatron sets this mark only
            # with expert parallelism. Without the mark, gradients are not summed over
            # tensor-parallel ranks, although each of them sends other tokens to the experts.
            weight.allreduce = False

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> Any:
        """Run MoELayer.forward. `padding_mask` [length, rows, columns] is as in routes.py."""
        if padding_mask is not None:
            # A view, because the router may write to it.
            columns = padding_mask.view(-1, padding_mask.shape[-1])
            topk = self.config.moe_router_topk
            self.router.sequences, routes = columns[:, 0], columns[:, 1:]
            first = self.router.slot * topk
            self.router.routes = routes[:, first : first + topk] if routes.shape[1] else None
        output = super().forward(hidden_states, intermediate_tensors)
        # The dispatcher would keep these until the layer's next pass, and with the probabilities
        # the graph, the layer's input and its gradient.
        dispatcher = self.token_dispatcher
        dispatcher.probs = dispatcher.routing_map = None
        dispatcher.reversed_local_input_permutation_mapping = None
        return output


def routers(chunk: torch.nn.Module) -> list[Router]:
    """Return the routers of a chunk, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, Router)]


def start_minibatch(chunks: Iterable[torch.nn.Module], scale: float, max_sequences: int) -> None:
    """Set the weight of each sequence's balance loss in the loss of the mini-batch, and the maximum
    number of sequences in its micro-batches. Clear the counts of replayed tokens."""
    for router in chain(*map(routers, chunks)):
        router.balance_scale, router.max_sequences = scale, max_sequences
        router.replayed = None


class _AddLoss(torch.autograd.Function):
    """Return `value` unchanged, and give `loss` a gradient of 1 in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)
