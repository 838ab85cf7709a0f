"""Micro-batches through Megatron's schedules: rows in, sums out, one division.

The one place where a rank, a micro-batch count or a data-parallel size could scale the loss.
With N the loss tokens of the whole mini-batch (all ranks, all micro-batches), each micro-batch
contributes  sum(loss) / N ; the schedule adds (calculate_per_token_loss), data-parallel ranks add
(gradient scaling factor 1), and nothing else divides. So the gradient is that of

    1/N * sum over all loss tokens   (arXiv 2503.14476 eq. 8 with one global token mean)

for any layout and any split.

Shape letters: B rows, L tokens per row (padded), V vocabulary entries of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dapo_megatron.policy.vocab_parallel import logprobs_and_entropy
from dapo_megatron.protocols import LossFn
from dapo_megatron.types import MicroTokens, TokenBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch: sequences padded on the right to one length. `place` [B, L] is each
    token's position in the batch's flat [T] tensors, -1 on padding."""

    tokens: Tensor
    positions: Tensor
    place: Tensor

    @property
    def is_token(self) -> Tensor:
        """bool [B, L]: False on padding and on first tokens, which have no log-prob."""
        return (self.place >= 0) & (self.positions > 0)


def make_rows(batch: TokenBatch, sequences: Sequence[int], device: torch.device) -> Rows:
    """Lay out sequences as rows. No sequences: one row of two padding tokens, so that this rank
    enters every collective of the forward and backward (or the others would wait for ever)."""
    lengths = batch.lengths[list(sequences)] if sequences else torch.tensor([0])
    starts = (batch.lengths.cumsum(0) - batch.lengths)[list(sequences)] if sequences else lengths
    longest = max(int(lengths.max()), 2)
    positions = torch.arange(longest).expand(len(lengths), longest)
    real = positions < lengths[:, None]
    place = torch.where(real, starts[:, None] + positions, -1)
    tokens = torch.where(real, batch.tokens[place.clamp(min=0)], 0)
    return Rows(tokens.to(device), positions.contiguous().to(device), place.to(device))


def loss_inputs(batch: TokenBatch, rows: Rows) -> MicroTokens:
    """The loss's per-token inputs for these rows, each [B, L]; masked off outside the loss."""
    assert batch.old_logprobs is not None
    device = rows.place.device
    place = rows.place.clamp(min=0).cpu()

    def pick(flat: Tensor) -> Tensor:
        return flat[place].to(device)

    return MicroTokens(
        old_logprobs=pick(batch.old_logprobs),
        advantages=pick(batch.advantages),
        weights=pick(batch.weights),
        engine_logprobs=pick(batch.engine_logprobs),
        mask=pick(batch.loss_mask) & rows.is_token,
    )


class Runner:
    """Runs micro-batches of one model through the schedule that fits its layout."""

    def __init__(self, model: Any, *, temperature: float, vocab: int) -> None:
        self._model = model
        self._temperature = temperature
        self._vocab = vocab
        model.config.finalize_model_grads_func = _finalize_without_division

    def logprobs(self, micro: Sequence[Rows]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(place, log-prob, entropy) of each micro-batch's tokens, each [B, L]; on the last
        pipeline stage, an empty list elsewhere."""

        def output(rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            logp, entropy = self._head(rows, logits)
            zero = torch.zeros((), device=logits.device)
            return zero, zero.int(), (rows.place, logp, entropy)

        with torch.no_grad():
            return self._run(micro, output, forward_only=True)

    def gradients(
        self, batch: TokenBatch, micro: Sequence[Rows], loss: LossFn, num_tokens: int
    ) -> list[dict[str, Tensor]]:
        """Accumulate the gradient of the mini-batch's mean loss; sums of each micro-batch's
        statistics on the last pipeline stage."""

        def output(rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            logp, entropy = self._head(rows, logits)
            inputs = loss_inputs(batch, rows)
            result = loss(logp, inputs)
            sums = {name: value.detach() for name, value in result.sums.items()}
            sums["loss"] = result.total.detach()
            sums["entropy"] = entropy[inputs.mask].sum()
            sums["mean_prob"] = logp.detach()[inputs.mask].exp().sum()
            return result.total / num_tokens, inputs.mask.sum().int(), sums

        return self._run(micro, output, forward_only=False)

    def _head(self, rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy [B, L] of each token; 0 where there is none to predict it from."""
        width = logits.shape[-1]
        first = parallel_state.get_tensor_model_parallel_rank() * width
        logp, entropy = logprobs_and_entropy(
            logits[:, :-1].reshape(-1, width),
            rows.tokens[:, 1:].reshape(-1),
            temperature=self._temperature,
            first_entry=first,
            num_entries=min(width, self._vocab - first),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        shape = (rows.tokens.shape[0], rows.tokens.shape[1] - 1)
        pad = partial(torch.nn.functional.pad, pad=(1, 0))
        return pad(logp.view(shape)), pad(entropy.view(shape))

    def _run(
        self,
        micro: Sequence[Rows],
        output: Callable[[Rows, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        def forward(rows: Iterator[Rows], model: Any) -> tuple[Tensor, Any]:
            one = next(rows)
            logits = model(one.tokens, one.positions, attention_mask=None)
            return logits, partial(output, one)

        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward,
            data_iterator=iter(micro),
            model=[self._model],
            num_microbatches=len(micro),
            seq_length=micro[0].tokens.shape[1],
            micro_batch_size=micro[0].tokens.shape[0],
            forward_only=forward_only,
        )


def _finalize_without_division(model: list[Any], _num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over ranks, without its own division by tokens."""
    finalize_model_grads(model, None, **kwargs)
