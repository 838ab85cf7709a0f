"""Micro-batches: lay them out as rows, run them through Megatron's schedules, divide the loss once.

Every sequence gets a segment, its length rounded up. In a packed layout the segments lie end to end
in one row. In a padded layout each segment is as long as the longest, and is a row. With context
parallelism of C ranks a segment is cut into 2 C equal chunks, and rank r takes chunks r and
2 C - 1 - r, which balances the work of the causal mask.

Only `Runner` scales the loss. Let N be the number of loss tokens of the whole mini-batch (all
ranks, all micro-batches). Each micro-batch contributes sum(loss) / N. The schedule adds
micro-batches (calculate_per_token_loss), data- and context-parallel ranks add (gradient scaling
factor 1), and nothing else divides. So the gradient is that of

    1/N * sum over all loss tokens   (arXiv 2503.14476 eq. 8 with one global token mean)

for any layout and any split.

Shape letters: B rows, L tokens of a row on this rank, n scored tokens of a micro-batch, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from dapo_megatron.plan.rows import round_up
from dapo_megatron.policy import fp8, pipeline
from dapo_megatron.policy.attention import PackedRow
from dapo_megatron.policy.device import to_device, to_host
from dapo_megatron.policy.routes import Recorded, RouteShape, local_routes, router_inputs
from dapo_megatron.policy.vocab_parallel import Head, linear_logprobs
from dapo_megatron.protocols import LossFn
from dapo_megatron.types import MicroTokens, TokenBatch


@dataclass(frozen=True, slots=True)
class RowShape:
    """Shape of rows. dapo_megatron/plan/rows.py explains the multiples."""

    packed: bool
    sequence_multiple: int
    row_multiple: int
    cp_rank: int
    cp_size: int
    preferred_multiple: int = 1
    """A row is padded to a multiple of it, if `max_tokens` has room."""
    max_tokens: int = 0
    """Maximum tokens of a micro-batch, over all context-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The tokens of a micro-batch whose log-probs this rank computes; all [n].

    They are chosen on the host. Choosing them on the GPU would make the host wait for their number.

    hidden_rows  int64  row of the flattened hidden states [L * B, H] that predicts the token
    targets      int64  the token
    indices      int64  index of the token in the batch's flat [T] tensors
    loss_inputs         inputs of the loss; None in a pass for log-probs
    """

    hidden_rows: Tensor
    targets: Tensor
    indices: Tensor
    loss_inputs: MicroTokens | None


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch on this rank; all [B, L].

    tokens      int64  input tokens, 0 on padding
    positions   int64  position in the sequence, from 0
    sequences   int64  number of the sequence in the micro-batch, -1 on padding
    indices     int64  index of the token in the batch's flat [T] tensors, -1 on padding; in host
                       memory
    packed             cumulative lengths of the segments; None if padded
    scored             the tokens whose log-probs are computed
    routes             int16 [B, L, layers, k]: given experts in this rank's layers, -1 if the
                       router chooses; None if it chooses for all tokens
    """

    tokens: Tensor
    positions: Tensor
    sequences: Tensor
    indices: Tensor
    packed: PackedRow | None
    scored: Scored
    routes: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences; 1 if there is only padding."""
        return len(self.tokens) if self.packed is None else len(self.packed.bounds) - 1


def make_rows(
    batch: TokenBatch,
    sequences: Sequence[int],
    shape: RowShape,
    device: torch.device,
    *,
    with_loss: bool = False,
    route_shape: RouteShape | None = None,
) -> Rows:
    """Lay out sequences of a batch as rows, and choose the tokens whose log-probs are computed:
    those in the loss, or without `with_loss` all that have a predecessor. `route_shape` is
    needed if the batch has routes.

    Without sequences, return a row of padding, so that this rank takes part in every collective of
    the forward and backward pass. Otherwise the other ranks would hang.
    """
    lengths = batch.lengths[list(sequences)] if sequences else torch.tensor([0])
    starts = batch.starts[list(sequences)] if sequences else lengths
    segments = _segments(lengths, shape)
    sequence = torch.arange(len(segments)).repeat_interleave(segments)
    bounds = torch.nn.functional.pad(segments.cumsum(0), (1, 0))
    position = torch.arange(int(bounds[-1])) - bounds[sequence]
    is_local = _on_this_rank(position, segments[sequence], shape)
    sequence, position = sequence[is_local], position[is_local]
    real = position < lengths[sequence]
    source = starts[sequence] + position
    tokens = torch.zeros_like(position)
    tokens[real] = batch.tokens[source[real]].long()
    predicting = (position < lengths[sequence] - 1).nonzero().squeeze(1)
    if with_loss:
        # Prompts need no log-prob. The head is the costliest layer of small models.
        predicting = predicting[batch.loss_mask[source[predicting] + 1]]
    indices = source[predicting] + 1
    num_rows = 1 if shape.packed else len(segments)
    row_length = len(position) // num_rows
    flat = (tokens, position, torch.where(real, sequence, -1))
    on_host = [values.view(num_rows, row_length) for values in flat]
    token_indices = torch.where(real, source, -1)
    given = []
    if batch.routes is not None:
        assert route_shape is not None
        numbers = torch.tensor(list(sequences) or [0])[sequence]
        values = local_routes(batch, token_indices, numbers, route_shape)
        given = [values.view(num_rows, row_length, *values.shape[1:])]
    on_host += [
        bounds.to(torch.int32),
        predicting % row_length * num_rows + predicting // row_length,
        batch.tokens[indices].long(),
        indices,
        *((*_loss_inputs(batch, indices), sequence[predicting]) if with_loss else ()),
        *given,
    ]
    tokens, position, sequence, cumulative, hidden_rows, targets, indices, *rest = to_device(
        on_host, device
    )
    given_routes = rest.pop() if given else None
    return Rows(
        tokens=tokens,
        positions=position,
        sequences=sequence,
        indices=token_indices.view(num_rows, row_length),
        packed=_packed(bounds, cumulative) if shape.packed else None,
        scored=Scored(
            hidden_rows=hidden_rows,
            targets=targets,
            indices=indices,
            loss_inputs=_micro_tokens(rest, len(segments)) if with_loss else None,
        ),
        routes=given_routes,
    )


def _segments(lengths: Tensor, shape: RowShape) -> Tensor:
    """Return the length of each segment in tokens, padding included."""
    if not shape.packed:
        longest = max(int(lengths.max()), 1)
        return torch.full_like(lengths, _row_length(longest, len(lengths), shape))
    segments = -(-lengths.clamp(min=1) // shape.sequence_multiple) * shape.sequence_multiple
    total = int(segments.sum())
    segments[-1] += _row_length(total, 1, shape) - total
    return segments


def _row_length(num_tokens: int, num_rows: int, shape: RowShape) -> int:
    """Return the length of the rows of a micro-batch whose longest has `num_tokens` tokens."""
    least = round_up(num_tokens, shape.row_multiple)
    most = shape.max_tokens // num_rows // shape.row_multiple * shape.row_multiple
    return max(least, min(round_up(num_tokens, shape.preferred_multiple), most))


def _on_this_rank(position: Tensor, segment: Tensor, shape: RowShape) -> Tensor:
    """Return a mask of the tokens in this rank's chunks, given positions and segment lengths."""
    if shape.cp_size == 1:
        return torch.ones_like(position, dtype=torch.bool)
    chunk = position // (segment // (2 * shape.cp_size))
    return (chunk == shape.cp_rank) | (chunk == 2 * shape.cp_size - 1 - shape.cp_rank)


def _packed(bounds: Tensor, cumulative: Tensor) -> PackedRow:
    longest = int(bounds.diff().max())
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        # Transformer Engine requires these under context parallelism. Equal tensors declare that
        # there is no padding between segments. Padding at the end of a segment is harmless, because
        # no real token attends to it.
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=tuple(bounds.tolist()),
    )


class SequenceSum:
    """Sums over the sequences of a micro-batch, for a loss; see MicroTokens.

    sequences      int64 [n]: number of each scored token's sequence in the micro-batch
    num_sequences  number of sequences, the same on all context-parallel ranks
    """

    def __init__(self, sequences: Tensor, num_sequences: int) -> None:
        self._sequences, self._num_sequences = sequences, num_sequences

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sum over each token's sequence. Collective over context-parallel ranks."""
        sums = values.new_zeros(self._num_sequences).index_add(0, self._sequences, values)
        if parallel_state.get_context_parallel_world_size() > 1:
            sums = _SumOverContextRanks.apply(sums)  # type: ignore[no-untyped-call]
        return sums.index_select(0, self._sequences)


class _SumOverContextRanks(torch.autograd.Function):
    """Sum over context-parallel ranks. Each rank's loss depends on the inputs of all ranks, so the
    gradient is summed over ranks too."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        result = values.clone()
        dist.all_reduce(result, group=parallel_state.get_context_parallel_group())
        return result

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        result = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=parallel_state.get_context_parallel_group())
        return result


def _loss_inputs(batch: TokenBatch, indices: Tensor) -> list[Tensor]:
    """Return the tensors of MicroTokens for the tokens at these indices of the batch, each [n]."""
    assert batch.old_logprobs is not None
    fields = (
        batch.old_logprobs,
        batch.advantages,
        batch.weights,
        batch.engine_logprobs,
        batch.loss_mask,
    )
    return [values[indices] for values in fields]


def _micro_tokens(tensors: Sequence[Tensor], num_sequences: int) -> MicroTokens:
    """Return the inputs of the loss, from those of `_loss_inputs` and the sequence numbers."""
    old_logprobs, advantages, weights, engine_logprobs, mask, sequences = tensors
    return MicroTokens(
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        engine_logprobs=engine_logprobs,
        mask=mask,
        sequence_sum=SequenceSum(sequences, num_sequences),
    )


TokenValues = tuple[Tensor, Tensor, Tensor]
"""Index in the batch, log-prob and entropy of a micro-batch's scored tokens, each [n]."""
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
        route_shape: RouteShape | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._route_shape = route_shape
        self._temperature = temperature
        self._vocab = vocab
        self._head_name = head
        config = self._chunks[0].config
        self._needs_scales = bool(config.fp8) and config.fp8_recipe == "delayed"
        config.finalize_model_grads_func = _finalize_without_division

    def logprobs(
        self,
        micro: Sequence[Rows],
        temperature: float | None = None,
        recorded: list[Recorded] | None = None,
    ) -> list[TokenValues]:
        """Return the values of each micro-batch's tokens.

        The list is empty except on the last pipeline stage. Temperature None: that of rollouts.
        The routes of all tokens in this rank's layers are appended to `recorded`.
        """
        temperature = temperature or self._temperature

        def output(rows: Rows, model: Any, hidden: Tensor) -> tuple[Tensor, Any]:
            logp, entropy = self._head(hidden, rows.scored, model, temperature)
            return torch.zeros((), device=hidden.device), (rows.scored.indices, logp, entropy)

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
        self, micro: Sequence[Rows], loss: LossFn, num_tokens: int
    ) -> list[tuple[dict[str, Tensor], TokenValues]]:
        """Accumulate the gradient of the mini-batch's mean loss. Rows were made `with_loss`.

        Returns the sums of each micro-batch's statistics and the values of its loss tokens on the
        last pipeline stage, an empty list on others.
        """

        def output(rows: Rows, model: Any, hidden: Tensor) -> tuple[Tensor, Any]:
            assert rows.scored.loss_inputs is not None
            logp, entropy = self._head(hidden, rows.scored, model, self._temperature)
            result = loss(logp, rows.scored.loss_inputs)
            sums = {name: value.detach() for name, value in result.sums.items()}
            sums["loss"] = result.total.detach()
            logp = logp.detach()
            sums["entropy"] = entropy.sum()
            sums["mean_prob"] = logp.exp().sum()
            return result.total / num_tokens, (sums, (rows.scored.indices, logp, entropy))

        return self._run(micro, output, forward_only=False)

    def _head(
        self, hidden: Tensor, scored: Scored, model: Any, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of the scored tokens, each [n].

        `hidden` is [L, B, H], or with sequence parallelism this rank's part of L.
        """
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            # Megatron's backward sums a contiguous copy of the gradient. If the gradient is not
            # contiguous, the sum is lost. That of `index_select` is contiguous.
            hidden = copy_to_tensor_model_parallel_region(hidden)
        weight = model.head_weight
        first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
        return linear_logprobs(
            hidden.flatten(0, 1).index_select(0, scored.hidden_rows),
            weight,
            scored.targets,
            temperature=temperature,
            first_entry=first,
            num_entries=min(weight.shape[0], self._vocab - first),
            group=parallel_state.get_tensor_model_parallel_group(),
            head=self._head_name,
            # A tied weight also has the embedding's gradient, which Megatron's hook adds.
            gradient_accumulation_fusion=weight.requires_grad
            and not model.share_embeddings_and_output_weights,
        )

    def _run(
        self,
        micro: Sequence[Rows],
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
        iterators = [iter(micro) for _ in self._chunks]
        return schedule(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micro),
            # Ignored: pipeline stages receive the shapes of KnownShapes.
            seq_length=micro[0].tokens.shape[1],
            micro_batch_size=micro[0].tokens.shape[0],
            forward_only=forward_only,
            **pipeline.communication(self._chunks, [rows.tokens.shape for rows in micro]),
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


def _finalize_without_division(model: list[Any], _num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over ranks as Megatron does, without its division by tokens."""
    finalize_model_grads(model, None, **kwargs)
