"""Make token batches: of random tokens, ready for an update, and of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.batch import assemble, describe, valid_completions
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.types import Completion, Group, SequenceTokens, TokenBatch, TrainingSequence

ONE_INDEX = DataParallelRanks(
    Ranks(0, 1, 0), (0,), partial(plan_microbatches, max_tokens=4096), num_updates=4
)
"""The data-parallel ranks of a run on one rank."""


def random_batch(
    lengths: Sequence[int], *, vocab: int, prompt: int = 2, seed: int = 0
) -> TokenBatch:
    """Make sequences of these lengths. All tokens after the first `prompt` are response tokens.

    Old log-probs are close to those of a random model, so that some ratios are clipped from below
    and some from above.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    mask = torch.cat([torch.arange(length) >= prompt for length in lengths])
    old = -4.6 + 0.3 * torch.randn(num_tokens, generator=generator)
    return TokenBatch(
        lengths=torch.tensor(lengths),
        loss_tokens=(torch.tensor(lengths) - prompt).clamp(min=0),
        group_ids=torch.arange(len(lengths)),
        tokens=torch.randint(4, vocab, (num_tokens,), generator=generator).int(),
        loss_mask=mask,
        advantages=torch.where(mask, torch.randn(num_tokens, generator=generator), 0.0),
        weights=torch.ones(num_tokens),
        engine_logprobs=torch.where(mask, old, 0.0),
        old_logprobs=torch.where(mask, old, 0.0),
    )


def assemble_groups(
    groups: Sequence[Group], overlong: OverlongConfig, *, eps: float = 1e-6
) -> TokenBatch:
    """Assemble the sequences of `groups`. This rank holds all of them."""
    return assemble(described(groups, overlong, eps=eps), tokens_of(groups, overlong))


def described(
    groups: Sequence[Group], overlong: OverlongConfig, *, eps: float = 1e-6
) -> list[TrainingSequence]:
    """Describe the sequences of groups."""
    return describe(groups, overlong=overlong, eps=eps)


def tokens_of(groups: Sequence[Group], overlong: OverlongConfig) -> dict[int, SequenceTokens]:
    """Return the tokens of the sequences that `described` describes, by their index."""
    pairs = [
        (np.array(group.prompt.tokens, np.int32), completion)
        for group in groups
        for completion in valid_completions(group, overlong)
    ]
    tokens = {}
    for index, (prompt, completion) in enumerate(pairs):
        assert isinstance(completion, Completion)
        response, logprobs = np.asarray(completion.tokens), np.asarray(completion.logprobs)
        tokens[index] = SequenceTokens(prompt, response, logprobs)
    return tokens


def hold(batch: TokenBatch, owners: Sequence[int], index: int) -> TokenBatch:
    """Return `batch` with only the tokens of the sequences that data-parallel `index` owns."""
    held = [number for number, owner in enumerate(owners) if owner == index]
    is_held = torch.tensor([owner == index for owner in owners]).repeat_interleave(batch.lengths)
    per_token = ("tokens", "loss_mask", "advantages", "weights", "engine_logprobs", "old_logprobs")
    optional = ("routes",) if batch.routes is not None else ()
    return replace(
        batch,
        **{name: getattr(batch, name)[is_held] for name in (*per_token, *optional)},
        owners=torch.tensor(owners),
        held=torch.tensor(held, dtype=torch.int64),
    )
