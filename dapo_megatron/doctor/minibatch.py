"""The mini-batch that every layout trains on: short and long sequences, both sides of the clip.

Shape letters: T tokens (all sequences end to end), S sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dapo_megatron.algo.loss import Aggregation, aggregation_weights
from dapo_megatron.types import TokenBatch

LENGTHS = (120, 17, 3, 300, 60, 9, 5, 200, 33, 90)
"""Prompt and response, in tokens: from 3 to 300, 1 : 100."""
PROMPT = 2
"""Tokens of each prompt."""
NO_LOSS = 5
"""A sequence all of whose tokens are left out of the loss, as a truncated one can be."""
GROUP = 2
"""Sequences per prompt."""
NOISE = 0.3
"""Standard deviation of old log-probs about the model's; the usual clip is at 0.2."""


def random_minibatch(vocab: int, aggregation: Aggregation, seed: int = 0) -> TokenBatch:
    """Random tokens and advantages, weights by `aggregation`; the old log-probs are yet to come."""
    generator = torch.Generator().manual_seed(seed)
    lengths_S = torch.tensor(LENGTHS)
    group_ids_S = torch.arange(len(LENGTHS)) // GROUP
    number_T = torch.arange(len(LENGTHS)).repeat_interleave(lengths_S)
    start_T = (lengths_S.cumsum(0) - lengths_S)[number_T]
    mask_T = (torch.arange(len(number_T)) - start_T >= PROMPT) & (number_T != NO_LOSS)
    advantages_S = torch.randn(len(LENGTHS), generator=generator)
    return TokenBatch(
        tokens=torch.randint(0, vocab, number_T.shape, generator=generator),
        lengths=lengths_S,
        loss_mask=mask_T,
        advantages=torch.where(mask_T, advantages_S[number_T], 0.0),
        weights=aggregation_weights(
            aggregation, mask=mask_T, lengths=lengths_S, group_ids=group_ids_S
        ),
        engine_logprobs=torch.zeros(number_T.shape),
        group_ids=group_ids_S,
    )


def with_old_logprobs(mini: TokenBatch, logprobs_T: Tensor, seed: int = 1) -> TokenBatch:
    """Old log-probs about `logprobs_T`, the model's own, so that some ratios are clipped above,
    some below and most not; the engine's close to them."""
    generator = torch.Generator().manual_seed(seed)

    def near(center_T: Tensor, distance: float) -> Tensor:
        noise_T = distance * torch.randn(center_T.shape, generator=generator)
        return torch.where(mini.loss_mask, center_T + noise_T, 0.0).float()

    old_T = near(logprobs_T.float(), NOISE)
    return replace(mini, old_logprobs=old_T, engine_logprobs=near(old_T, NOISE / 10))
