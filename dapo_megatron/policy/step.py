"""Passes over micro-batches: run rows through Megatron's schedules, divide the loss once.

Only `Runner` scales the loss. Let N be the number of loss tokens of the whole mini-batch (all
ranks, all micro-batches). Each micro-batch contributes sum(loss) / N. The schedule adds
micro-batches (calculate_per_token_loss), data- and context-parallel ranks add (gradient scaling
factor 1), and nothing else divides. So this is the gradient of

    1/N * sum over all loss tokens   (arXiv 2503.14476 eq. 8 with one global token mean)

for any layout and any split.

Shape letters: B rows, L tokens of a row on this rank, n scored tokens of a micro-batch, H hidden
size. rows.py lays out rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from dapo_megatron.policy import fp8, pipeline
from dapo_megatron.policy.device import to_host
from dapo_megatron.policy.routes import Recorded, RouteShape, router_inputs
from dapo_megatron.policy.rows import Microbatches, Rows, Scored
from dapo_megatron.policy.vocab_parallel import Head, linear_logprobs, top_entries
from dapo_megatron.protocols import LossFn
from dapo_megatron.types import MicroTokens


class TokenValues(NamedTuple):
    """Values of a micro-batch's scored tokens, each [n]: index in the batch, log-prob and entropy;
    from a teacher with `top_k` also the most likely tokens at the place and their log-probs, each
    [n, k] in host memory, complete when the device's stream is."""

    indices: Tensor
    logprobs: Tensor
    entropy: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


Output = Callable[[Rows, Any, Tensor], tuple[Tensor, Any]]
"""(rows, model, hidden states) -> (loss, results)."""


class Runner:
    """Runs micro-batches through this rank's model chunks, with Megatron's schedule for the layout.

    Each chunk is a Decoder inside Megatron's data-parallel wrapper.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        temperature: float,
        vocab: int,
        head: Head = "torch",
        entropy_gradient: bool = False,
        route_shape: RouteShape | None = None,
        top_k: int | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._route_shape = route_shape
        self._temperature = temperature
        self._vocab = vocab
        self._head_name = head
        self._entropy_gradient = entropy_gradient
        self.top_k = top_k
        config = self._chunks[0].config
        self._needs_scales = bool(config.fp8) and config.fp8_recipe == "delayed"
        self._needs_gradient_scales = self._needs_scales
        config.finalize_model_grads_func = _finalize_without_division

    def logprobs(
        self,
        micro: Microbatches,
        temperature: float | None = None,
        recorded: list[Recorded] | None = None,
    ) -> list[TokenValues]:
        """Return the values of each micro-batch's tokens.

        The list is empty except on the last pipeline stage. Temperature None: as in rollouts.
        The routes of all tokens in this rank's layers are appended to `recorded`.
        """
        temperature = temperature or self._temperature

        def output(rows: Rows, model: Any, hidden: Tensor) -> tuple[Tensor, Any]:
            scored_nH = _scored_rows(hidden, rows.scored, model)
            targets, top_ids = rows.scored.targets, None
            if self.top_k is not None:
                part = self._vocabulary_part(model)
                top_ids = top_entries(scored_nH, model.head_weight, self.top_k, **part)
                targets = torch.cat([targets[:, None], top_ids], 1)
            logp, entropy = self._head(scored_nH, targets, model, temperature)
            values = TokenValues(rows.scored.indices, logp[:, 0], entropy)
            if top_ids is not None:
                values = values._replace(
                    top_ids=to_host(top_ids.int()), top_logprobs=to_host(logp[:, 1:])
                )
            return torch.zeros((), device=hidden.device), values

        with torch.no_grad():
            if self._needs_scales:
                # Scales of delayed scaling start at 1. A first pass gives rough scales, and a
                # second pass, computed with these, gives good ones.
                for _ in range(2):
                    self._run(micro, output, forward_only=True)
                    fp8.update_scales()
                self._needs_scales = False
            return self._run(micro, output, forward_only=True, recorded=recorded)

    def gradients(
        self, micro: Microbatches, loss: LossFn, num_tokens: int
    ) -> list[tuple[dict[str, Tensor], TokenValues]]:
        """Accumulate the gradient of the mini-batch's mean loss. Rows were made `with_loss`.

        Old log-probs that are not given are those of this pass, so that every ratio is 1. Returns
        the sums of each micro-batch's statistics and the values of its scored tokens on the last
        pipeline stage, an empty list on others.
        """

        def output(rows: Rows, model: Any, hidden: Tensor) -> tuple[Tensor, Any]:
            scored = rows.scored
            assert scored.loss_inputs is not None
            scored_nH = _scored_rows(hidden, scored, model)
            logp, entropy = self._head(scored_nH, scored.targets, model, self._temperature)
            values = TokenValues(scored.indices, logp[:, 0].detach(), entropy.detach())
            if scored.in_loss is not None:
                logp, entropy = (part.index_select(0, scored.in_loss) for part in (logp, entropy))
            logp, top_logp = logp[:, 0], logp[:, 1:]
            own = {"old_logprobs": logp.detach(), "entropy": entropy, "top_logprobs": top_logp}
            result = loss(logp, MicroTokens(**{**own, **scored.loss_inputs}))
            sums = {name: value.detach() for name, value in result.sums.items()}
            sums["loss"] = result.total.detach()
            sums["entropy"] = entropy.detach().sum()
            sums["mean_prob"] = logp.detach().exp().sum()
            return result.total / num_tokens, (sums, values)

        if self._needs_gradient_scales:
            fp8.set_gradient_scales(num_tokens)
            self._needs_gradient_scales = False
        return self._run(micro, output, forward_only=False)

    def _head(
        self, scored_nH: Tensor, targets: Tensor, model: Any, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs [n, K] of the targets, [n] or [n, K], and the entropy [n]."""
        weight = model.head_weight
        return linear_logprobs(
            scored_nH,
            weight,
            targets if targets.dim() == 2 else targets[:, None],
            temperature=temperature,
            head=self._head_name,
            **self._vocabulary_part(model),
            # A tied weight also has the embedding's gradient, which Megatron's hook adds.
            gradient_accumulation_fusion=weight.requires_grad
            and not model.share_embeddings_and_output_weights,
            entropy_gradient=self._entropy_gradient,
        )

    def _vocabulary_part(self, model: Any) -> dict[str, Any]:
        """Return which entries of the vocabulary this rank has, as `linear_logprobs` takes them."""
        num_rows = len(model.head_weight)
        first = parallel_state.get_tensor_model_parallel_rank() * num_rows
        return {
            "first_entry": first,
            "num_entries": min(num_rows, self._vocab - first),
            "group": parallel_state.get_tensor_model_parallel_group(),
        }

    def _run(
        self,
        micro: Microbatches,
        output: Output,
        *,
        forward_only: bool,
        recorded: list[Recorded] | None = None,
    ) -> list[Any]:
        def forward(iterator: Iterator[Rows], chunk: Any) -> tuple[Tensor, Any]:
            rows = next(iterator)
            columns = self._router_inputs(rows, chunk, with_routes=recorded is not None)
            hidden = chunk(
                rows.tokens,
                rows.positions,
                attention_mask=None,
                packed_seq_params=rows.packed,
                padding_mask=columns,  # not a mask: policy/routes.py
            )
            if recorded is not None:
                assert columns is not None and self._route_shape is not None
                indices = self._own_part(rows.indices.T)
                experts = to_host(columns[..., 1:].to(self._route_shape.dtype))
                recorded.append(Recorded(indices, self._layers_of(chunk), experts))
            return hidden, partial(finish, rows, chunk.module)

        def finish(rows: Rows, model: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, results = output(rows, model, hidden)
            # Megatron sums the second value as a token count. `_finalize_without_division`
            # ignores it.
            return value, torch.zeros((), dtype=torch.int, device=hidden.device), results

        schedule = get_forward_backward_func()
        every: Iterable[Rows] = micro
        shapes: list[torch.Size] = []
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            every = list(micro)  # stages know all shapes in advance, and chunks share the rows
            shapes = [rows.tokens.shape for rows in every]
        iterators = [iter(every) for _ in self._chunks]
        return schedule(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micro),
            # Ignored: pipeline stages receive the shapes of KnownShapes.
            seq_length=shapes[0][1] if shapes else 1,
            micro_batch_size=shapes[0][0] if shapes else 1,
            forward_only=forward_only,
            **pipeline.communication(self._chunks, shapes),
        )

    def _router_inputs(self, rows: Rows, chunk: Any, *, with_routes: bool) -> Tensor | None:
        """Return what the routers of a chunk read, and with `with_routes` also write; None for a
        dense model."""
        if self._route_shape is None:
            return None
        layers = self._layers_of(chunk)
        routes = rows.routes
        if routes is not None:
            start = self._route_shape.local.index(layers[0]) if layers else 0
            routes = routes[:, :, start : start + len(layers)]
        elif with_routes:
            routes = rows.sequences.new_full((1, 1, len(layers), self._route_shape.topk), -1)
            routes = routes.expand(*rows.sequences.shape, -1, -1)
        return self._own_part(router_inputs(rows.sequences, routes))

    def _own_part(self, values: Tensor) -> Tensor:
        """Return the part of `values` [L, ...] of this rank's tokens under sequence parallelism."""
        if not self._chunks[0].config.sequence_parallel:
            return values
        size = parallel_state.get_tensor_model_parallel_world_size()
        return values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]

    def _layers_of(self, chunk: Any) -> tuple[int, ...]:
        """Return the layers with experts of a chunk, as indices in RouteShape.layers."""
        assert self._route_shape is not None
        return self._route_shape.chunks[self._chunks.index(chunk)]


def _scored_rows(hidden: Tensor, scored: Scored, model: Any) -> Tensor:
    """Return the hidden states that predict the scored tokens, [n, H]. `hidden` is [L, B, H], or
    with sequence parallelism this rank's part of L."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        # Megatron's backward sums a contiguous copy of the gradient. If the gradient is not
        # contiguous, the sum is lost. That of `index_select` is contiguous.
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden.flatten(0, 1).index_select(0, scored.hidden_rows)


def _finalize_without_division(model: list[Any], _num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over ranks as Megatron does, without its division by tokens."""
    finalize_model_grads(model, None, **kwargs)
