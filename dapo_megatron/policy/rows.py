"""Micro-batches as rows: where each token lies, and which tokens are scored.

Every sequence gets a segment, its length rounded up. In a packed layout the segments lie end to end
in one row. In a padded layout each segment is as long as the longest, and is a row. With context
parallelism of C ranks a segment is cut into 2 C equal chunks, and rank r takes chunks r and
2 C - 1 - r, which balances the work of the causal mask.

Shape letters: B rows, L tokens of a row on this rank, n scored tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dapo_megatron.plan.rows import round_up
from dapo_megatron.policy.attention import PackedRow
from dapo_megatron.policy.device import to_device
from dapo_megatron.policy.routes import RouteShape, local_routes
from dapo_megatron.types import TokenBatch


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
    targets      int64  the token; [n, 1 + k] if the loss also needs the batch's `top_ids`
    indices      int64  index of the token in the batch's flat [T] tensors
    loss_inputs         arguments of MicroTokens for the tokens in the loss, without entropy, and
                        without old_logprobs if the batch has none; None in a pass for log-probs
    in_loss      int64  positions of the tokens in the loss among the scored ones; None: all
    """

    hidden_rows: Tensor
    targets: Tensor
    indices: Tensor
    loss_inputs: Mapping[str, Any] | None
    in_loss: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The rows of micro-batches. Each is made when a pass comes to it, while the device still
    computes the one before, and is then forgotten."""

    batch: TokenBatch
    plan: Sequence[Sequence[int]]
    """Sequences of each micro-batch."""
    shape: RowShape
    device: torch.device
    with_loss: bool
    route_shape: RouteShape | None

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Rows]:
        for sequences in self.plan:
            yield make_rows(
                self.batch,
                sequences,
                self.shape,
                self.device,
                with_loss=self.with_loss,
                route_shape=self.route_shape,
            )


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
    all with a predecessor, or `with_loss` those in the loss, if their old log-probs are known.
    Routes need `route_shape`.

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
    given: dict[str, Tensor] = {}
    if with_loss:
        predicting, given = _loss_inputs(batch, source, sequence, predicting)
    indices = source[predicting] + 1
    num_rows = 1 if shape.packed else len(segments)
    row_length = len(position) // num_rows
    flat = (tokens, position, torch.where(real, sequence, -1))
    on_host = [values.view(num_rows, row_length) for values in flat]
    places = torch.where(real, source, -1)
    routes = _routes(batch, sequences, sequence, places, route_shape)
    on_host += [
        bounds.to(torch.int32),
        predicting % row_length * num_rows + predicting // row_length,
        _targets(batch, indices, with_top=with_loss),
        indices,
        *given.values(),
        *routes,
    ]
    on_device = to_device(on_host, device)
    tokens, position, sequence, cumulative, hidden_rows, targets, indices, *rest = on_device
    given_routes = rest.pop().unflatten(0, (num_rows, row_length)) if routes else None
    inputs = dict(zip(given, rest, strict=True))
    return Rows(
        tokens=tokens,
        positions=position,
        sequences=sequence,
        indices=places.view(num_rows, row_length),
        packed=_packed(bounds, cumulative) if shape.packed else None,
        scored=_scored(hidden_rows, targets, indices, inputs, len(segments)),
        routes=given_routes,
    )


def _routes(
    batch: TokenBatch,
    sequences: Sequence[int],
    sequence_n: Tensor,
    index_n: Tensor,
    shape: RouteShape | None,
) -> list[Tensor]:
    """Return the given routes of a micro-batch as `local_routes` does, if there are any."""
    if batch.routes is None:
        return []
    assert shape is not None
    numbers = torch.tensor(list(sequences) or [0])[sequence_n]
    return [local_routes(batch, index_n, numbers, shape)]


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


def _loss_inputs(
    batch: TokenBatch, source: Tensor, sequence: Tensor, predicting: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Choose among the places `predicting` those whose next token is scored. Return them, and for
    the next tokens in the loss the arguments of MicroTokens, each [n], with the sequence of each
    token as `sequence_sum`, and their positions as `in_loss` if they are not all that is scored.

    source    [L] index in the batch of the token at each place
    sequence  [L] its sequence
    """
    in_loss = batch.loss_mask[source[predicting] + 1].nonzero().squeeze(1)
    trained = predicting[in_loss]
    fields = {
        "old_logprobs": batch.old_logprobs,
        "advantages": batch.advantages,
        "weights": batch.weights,
        "engine_logprobs": batch.engine_logprobs,
        "mask": batch.loss_mask,
        "reference_logprobs": batch.reference_logprobs,
        "teacher_logprobs": batch.teacher_logprobs,
        "teacher_top_logprobs": batch.teacher_top_logprobs,
    }
    indices = source[trained] + 1
    given = {name: values[indices] for name, values in fields.items() if values is not None}
    given["sequence_sum"] = sequence[trained]
    if batch.old_logprobs is None:
        return predicting, {**given, "in_loss": in_loss}
    # Prompts need no log-prob. The head is the costliest layer of small models.
    return trained, given


def _targets(batch: TokenBatch, indices: Tensor, *, with_top: bool) -> Tensor:
    """Return the targets of the scored tokens `indices`; see Scored."""
    targets = batch.tokens[indices].long()
    if batch.top_ids is None or not with_top:
        return targets
    return torch.cat([targets[:, None], batch.top_ids[indices].long()], 1)


def _scored(
    hidden_rows: Tensor,
    targets: Tensor,
    indices: Tensor,
    inputs: dict[str, Any],
    num_sequences: int,
) -> Scored:
    """Return the scored tokens, with the `inputs` that `_loss_inputs` chose, if any."""
    if not inputs:
        return Scored(hidden_rows, targets, indices, None)
    in_loss = inputs.pop("in_loss", None)
    inputs["sequence_sum"] = SequenceSum(inputs["sequence_sum"], num_sequences)
    return Scored(hidden_rows, targets, indices, inputs, in_loss)
